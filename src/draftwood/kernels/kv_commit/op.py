"""Checks and launch of the compaction of accepted paths, in place: `commit_latents`.

Taps are not compacted: the drafter gathers them by the path (`model/cuda/drafter.py`), and needs them only once.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant

_FOLDER = Path(__file__).parent
_NULL = np.uint64(0)
_THREADS = 256
LONGEST = 65
"""Places of a path that can move: a tree's. Longer paths are prompt chunks, whose nodes all are in place."""


def _source() -> jit.Source:
    return jit.Source(_FOLDER / "commit.cu", "compact", {"LONGEST": LONGEST})


def variants() -> list[Variant]:
    """The one form of the kernel."""
    return [Variant(_source(), _THREADS, blocks=4)]


@functools.cache
def _kernel(device: int) -> jit.Kernel:
    return jit.Kernel(_source(), device)


def commit_latents(
    cache: Tensor, slots: Tensor, path: Tensor, counts: Tensor, rows: Tensor | None = None, pdl: bool = True
) -> Tensor:
    """Compact the accepted latents of every layer of cache [layers, slots, width], in place, in one launch.

    slots int64 [R, N]: the slot of each node, different ones for different nodes; path int64 [R, P]: accepted nodes, root first,
    ascending; counts int64 [R]: how many of them. rows int32 [1] on the device: how many of the R rows are real.
    Raises ValueError for tensors that do not fit.
    """
    if cache.dim() != 3 or cache.stride(2) != 1:
        raise ValueError(f"a cache is [layers, slots, width] with contiguous slots; it is {tuple(cache.shape)}, {cache.stride()}")
    if slots.dim() != 2 or slots.dtype != torch.int64 or not slots.is_contiguous() or slots.shape[0] != path.shape[0]:
        raise ValueError(f"slots must be int64 [{path.shape[0]}, nodes]; they are {slots.dtype} {tuple(slots.shape)}")
    r, width = path.shape
    for name, x, shape in (("path", path, (r, width)), ("counts", counts, (r,))):
        if x.dtype != torch.int64 or tuple(x.shape) != shape or not x.is_contiguous():
            raise ValueError(f"{name} must be int64 {shape} contiguous; it is {x.dtype} {tuple(x.shape)}")
    if rows is not None and (rows.dtype != torch.int32 or rows.numel() != 1):
        raise ValueError(f"rows must be one int32 on the device; it is {rows.dtype} {tuple(rows.shape)}")
    size = cache.element_size()
    layers, _, wide = cache.shape
    strides = (cache.stride(0) * size, cache.stride(1) * size)
    if wide * size % 16 or cache.data_ptr() % 16 or any(s % 16 for s in strides):
        raise ValueError(f"slots of {wide * size} bytes, strides {strides}, must be in whole pieces of 16 bytes")
    if r == 0:
        return cache
    columns = wide * size // 16
    _kernel(cache.device.index or 0)(
        (-(-layers * columns // _THREADS), r), _THREADS,
        (cache, slots, path, counts, _NULL if rows is None else rows, np.int32(slots.shape[1]), np.int32(width), np.int32(layers),
         np.int32(columns), np.int64(strides[0]), np.int64(strides[1])),
        pdl=pdl,
    )  # fmt: skip
    return cache


def bytes_moved(moves: int, layers: int, slot_bytes: int) -> int:
    """Bytes that must move: every moved slot of every layer read and written."""
    return 2 * moves * layers * slot_bytes
