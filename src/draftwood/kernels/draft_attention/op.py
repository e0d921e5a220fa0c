"""Checking, choosing and launching the drafter's attention."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant

_FOLDER = Path(__file__).parent
_NULL = np.uint64(0)
HEAD_DIMS = (64, 128)
CHUNK, QUERIES, TILE = 128, 64, 64
"""As in attend.cu: places per chunk, query rows per block of threads, keys per tile."""
MAX_BLOCK = 16
SPLITS = ((8, 8), (24, 4), (32, 2))
"""(rows x kv heads x query groups, blocks of a cluster over which a row's chunks are then spread), as measured on an H200: such a
block fills a multiprocessor, and not all clusters of eight find room at once where there are sixteen of them."""
CLUSTERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Form:
    """How attend.cu is compiled: blocks of a cluster, groups of four warps with chunks of their own, stages of a group's ring."""

    d: int
    cluster: int
    groups: int
    stages: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups

    @property
    def shared(self) -> int:
        """Bytes: the rings, and for the whole form the queries."""
        return self.groups * self.stages * TILE * self.d * 4 + (0 if self.cluster > 1 else QUERIES * self.d * 2)

    def source(self) -> jit.Source:
        """What is compiled."""
        macros = {"D": self.d, "CLUSTER": self.cluster, "GROUPS": self.groups, "STAGES": self.stages}
        return jit.Source(_FOLDER / "attend.cu", "draft_attend", macros)


def form(d: int, cluster: int, limit: int) -> Form:
    """The form for an architecture whose blocks may have `limit` bytes of shared memory; it changes no bit."""
    wide = d == 128 and limit < 200_000
    split = cluster > 1
    return Form(d, cluster, 2 if split and not wide else 1, 2 if wide and not split else 3)


def variants() -> list[Variant]:
    """Everything the launcher chooses."""
    found: dict[Form, list[str]] = {}
    for arch, d, cluster in itertools.product(jit.ARCHS, HEAD_DIMS, CLUSTERS):
        found.setdefault(form(d, cluster, jit.SHARED_LIMIT[arch]), []).append(arch)
    return [
        Variant(f.source(), f.threads, f.shared, blocks=1 if f.cluster > 1 else 2, archs=tuple(archs)) for f, archs in found.items()
    ]


@functools.cache
def _kernel(device: int, d: int, cluster: int) -> tuple[Form, jit.Kernel]:
    chosen = form(d, cluster, jit.SHARED_LIMIT[jit.arch_of(torch.cuda.get_device_capability(device))])
    return chosen, jit.Kernel(chosen.source(), device, chosen.shared)


def cluster_of(rows: int, kv_heads: int, share: int, block: int, capacity: int) -> int:
    """Blocks over which a launch of this size spreads a row's chunks, 1 for none; the result's bits are the same in any case."""
    blocks = rows * kv_heads * -(-share * block // QUERIES)
    return next((cluster for most, cluster in SPLITS if capacity > CHUNK and blocks <= most), 1)


def workspace_numel(rows: int, kv_heads: int, share: int, block: int, capacity: int, d: int) -> int:
    """Floats of scratch that a launch of this size uses; 0 when it does not split."""
    if cluster_of(rows, kv_heads, share, block, capacity) == 1:
        return 0
    return rows * kv_heads * -(-capacity // CHUNK) * share * block * (d + 2)


def draft_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    rows: Tensor | None = None,
    cluster: int | None = None,
) -> Tensor:
    """Attend on torch's current stream; ref.py has the meaning and the shapes. Returns [R, block, q_heads, D] bf16.

    qkv, out contiguous; keys, values [rows_total, capacity, kv_heads, D] of one layer, contiguous; lengths, ids int64 [R].
    workspace: float32, at least `workspace_numel`; made if absent. rows: int32 [1] on the device, how many of the R rows
    are real. cluster: one of CLUSTERS, for tests. Raises ValueError for tensors that do not fit.
    """
    _check(qkv, keys, values, lengths, ids, rows)
    r, block, heads, d = qkv.shape
    capacity, kv_heads = keys.shape[1:3]
    share = heads // kv_heads - 2
    shape = (r, block, share * kv_heads, d)
    out = torch.empty(shape, dtype=torch.bfloat16, device=qkv.device) if out is None else out
    if tuple(out.shape) != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out must be bf16 {shape} contiguous; it is {out.dtype} {tuple(out.shape)}")
    if r == 0:
        return out
    cluster = cluster_of(r, kv_heads, share, block, capacity) if cluster is None else cluster
    chunks, queries = -(-capacity // CHUNK), share * block
    part_o, part_ml = _parts(workspace, r * kv_heads * chunks * queries, d, qkv.device) if cluster > 1 else (_NULL, _NULL)
    count = _NULL if rows is None else rows
    sizes = (np.int32(block), np.int32(share), np.int32(kv_heads), np.int32(capacity), np.int32(chunks))
    chosen, kernel = _kernel(qkv.device.index or 0, d, cluster)
    kernel(
        (cluster, kv_heads * -(-queries // QUERIES), r), chosen.threads,
        (qkv, keys, values, lengths, ids, count, out, part_o, part_ml, *sizes, np.float32(d**-0.5 * math.log2(math.e))),
        pdl=True,
    )  # fmt: skip
    return out


def _parts(workspace: Tensor | None, partials: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut the workspace into o [partials, d] and (m, l) [partials, 2]."""
    wanted = partials * (d + 2)
    if workspace is None:
        workspace = torch.empty(wanted, dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or not workspace.is_contiguous() or workspace.numel() < wanted:
        raise ValueError(f"the workspace must be {wanted} float32; it is {workspace.dtype} {tuple(workspace.shape)}")
    flat = workspace.view(-1)
    return flat[: partials * d], flat[partials * d : wanted]


def _check(qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ids: Tensor, rows: Tensor | None) -> None:
    if qkv.dim() != 4 or keys.dim() != 4 or keys.shape != values.shape or keys.shape[3] != qkv.shape[3]:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit keys {tuple(keys.shape)} and values {tuple(values.shape)}")
    r, block, heads, d = qkv.shape
    kv_heads = keys.shape[2]
    if heads % kv_heads or heads < 3 * kv_heads:
        raise ValueError(f"{heads} heads of queries, keys and values do not divide into {kv_heads} groups")
    if d not in HEAD_DIMS or not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"heads of {d} in blocks of {block} have no kernel; heads of 64 or 128, blocks of 1..{MAX_BLOCK}")
    for name, x in (("qkv", qkv), ("keys", keys), ("values", values)):
        if x.dtype != torch.bfloat16 or not x.is_contiguous() or x.data_ptr() % 16:
            raise ValueError(f"{name} must be bf16, contiguous, on 16 bytes; it is {x.dtype}, strides {x.stride()}")
    for name, x in (("lengths", lengths), ("ids", ids)):
        if x.dtype != torch.int64 or x.shape != (r,) or not x.is_contiguous():
            raise ValueError(f"{name} must be int64 [{r}]; it is {x.dtype} {tuple(x.shape)}")
    if rows is not None and (rows.dtype != torch.int32 or rows.numel() != 1):
        raise ValueError(f"rows must be one int32 on the device; it is {rows.dtype} {tuple(rows.shape)}")


def bytes_moved(lengths: list[int], capacity: int, kv_heads: int, share: int, block: int, d: int) -> int:
    """Bytes that must move: each row's valid context keys and values, the block's q, k and v, and the result."""
    context = sum(min(n, capacity) for n in lengths) * 2 * kv_heads * d
    return 2 * (context + len(lengths) * block * kv_heads * d * (2 * share + 2))


def flops(lengths: list[int], capacity: int, kv_heads: int, share: int, block: int, d: int) -> int:
    """Both products, multiply-adds count two."""
    keys = sum(min(n, capacity) + block for n in lengths)
    return 4 * keys * share * kv_heads * block * d
