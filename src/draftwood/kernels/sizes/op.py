"""Buffers, checks and launches of tree sizes on the device: `fit` and `learn`. Nothing waits for the host."""

from __future__ import annotations

import functools
from pathlib import Path as File

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.accept.ref import Path
from draftwood.kernels.check import Variant
from draftwood.kernels.sizes.ref import CAPS, CLASSES, KINDS, MEMORY, PRIOR, Calibration, Costs, Fitted
from draftwood.kernels.tree.ref import Trees

_FILE = File(__file__).parent / "sizes.cu"
_THREADS = {"fit_sizes": 512, "learn_accepts": 256}
MOST_ROWS, MOST_NODES, MOST_POINTS = 256, 64, 32


def _source(entry: str) -> jit.Source:
    return jit.Source(_FILE, entry)


def variants() -> list[Variant]:
    """The kernels, one form each."""
    return [Variant(_source(entry), threads) for entry, threads in _THREADS.items()]


@functools.cache
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.Kernel(_source(entry), device)


def allocate(device: torch.device | str) -> Calibration:
    """A calibration that knows nothing."""
    counts = torch.zeros(2, KINDS, CLASSES, dtype=torch.int64, device=device)
    return Calibration(counts[0], counts[1], torch.ones(KINDS, CLASSES, device=device))


def allocate_fitted(device: torch.device | str) -> Fitted:
    """Make the output of `fit`."""
    return Fitted(*(torch.zeros(len(CAPS), dtype=torch.int64, device=device) for _ in range(2)))


def _fits(name: str, x: Tensor, dtype: torch.dtype, least: int) -> None:
    if x.dtype != dtype or x.numel() < least or not x.is_contiguous():
        raise ValueError(f"{name} must be {dtype} [{least}] contiguous; it is {x.dtype} {tuple(x.shape)}")


def _lines_fit(name: str, x: Tensor, dtype: torch.dtype, rows: int, widest: int) -> None:
    if x.dim() != 2 or x.dtype != dtype or len(x) < rows or not 1 <= x.shape[1] <= widest or not x.is_contiguous():
        raise ValueError(f"{name} must be {dtype} [{rows}, 1..{widest}] contiguous; it is {x.dtype} {tuple(x.shape)}")


def fit(
    live: Tensor,
    free: Tensor,
    automatic: Tensor,
    trees: Trees,
    heat: Tensor,
    calibration: Calibration,
    costs: Costs,
    own: int,
    out: Fitted,
) -> None:
    """Cut the trees of R = len(trees.counts) places to the sizes that pay most; see ref.fit. Raises ValueError."""
    r, points = len(trees.counts), costs.totals.shape[-1]
    for name, x, dtype, least in (
        ("live", live, torch.int32, 1), ("free", free, torch.int32, 1), ("automatic", automatic, torch.uint8, r),
        ("heat", heat, torch.float32, r), ("counts", trees.counts, torch.int64, r),
        ("ratio", calibration.ratio, torch.float32, KINDS * CLASSES),
        ("totals", costs.totals, torch.int32, len(CAPS) * points), ("seconds", costs.seconds, torch.float32, len(CAPS) * points),
        ("expected", out.expected, torch.int64, len(CAPS)), ("sized", out.sized, torch.int64, len(CAPS)),
    ):  # fmt: skip
        _fits(name, x, dtype, least)
    _lines_fit("logprob", trees.logprob, torch.float32, r, 1 + MOST_NODES)
    if not (1 <= r <= MOST_ROWS and 1 <= points <= MOST_POINTS and 0 <= own < len(CAPS)):
        raise ValueError(
            f"1 to {MOST_ROWS} places, 1 to {MOST_POINTS} points of a cost table and one of {len(CAPS)} caps; "
            f"not {r}, {points}, {own}"
        )
    width = np.int32(trees.logprob.shape[1])
    _kernel("fit_sizes", trees.counts.device.index or 0)(
        1, _THREADS["fit_sizes"],
        (live, free, np.int32(r), width, automatic, trees.logprob, heat, calibration.ratio, costs.totals, costs.seconds,
         np.int32(points), np.int32(own), trees.counts, out.expected, out.sized),
        pdl=True,
    )  # fmt: skip


def learn(free: Tensor, trees: Trees, heat: Tensor, path: Path, calibration: Calibration) -> None:
    """Learn from what R = len(trees.counts) places accepted; see ref.learn. Raises ValueError."""
    r = len(trees.counts)
    size = KINDS * CLASSES
    for name, x, dtype, least in (
        ("free", free, torch.int32, 1), ("heat", heat, torch.float32, r), ("counts", trees.counts, torch.int64, r),
        ("accepted", path.counts, torch.int64, r), ("predicted", calibration.predicted, torch.int64, size),
        ("observed", calibration.observed, torch.int64, size), ("ratio", calibration.ratio, torch.float32, size),
    ):  # fmt: skip
        _fits(name, x, dtype, least)
    _lines_fit("logprob", trees.logprob, torch.float32, r, 1 + MOST_NODES)
    _lines_fit("path", path.nodes, torch.int64, r, MOST_ROWS)
    _kernel("learn_accepts", trees.counts.device.index or 0)(
        1, _THREADS["learn_accepts"],
        (free, np.int32(r), np.int32(trees.logprob.shape[1]), np.int32(path.nodes.shape[1]), trees.counts, trees.logprob, heat,
         path.nodes, path.counts, np.float32(MEMORY), np.float32(PRIOR), calibration.predicted, calibration.observed,
         calibration.ratio),
        pdl=True,
    )  # fmt: skip
