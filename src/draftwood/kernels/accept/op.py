"""Buffers, checks and launches of the accept kernels: `choose` (start, scan, decide, settle) and `walk`.

Nothing waits for the host."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path as File

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.accept.ref import Nodes, Params, Path
from draftwood.kernels.check import Variant
from draftwood.kernels.tree.numbers import SEGMENT
from draftwood.kernels.tree.op import shares, slots
from draftwood.kernels.tree.ref import TOP

_FOLDER = File(__file__).parent
_NULL = np.uint64(0)
_THREADS = {"start": 1024, "scan": 512, "decide": 512, "settle": 1024, "walk": 32}
_BLOCKS = {"start": 1, "scan": 2, "decide": 2, "settle": 1, "walk": 16}
_SETTLE_BLOCKS = 264
"""Nodes left open are few: two blocks for each multiprocessor look for them."""
_DECIDED_AT_ONCE = 4
"""Nodes of a block of `decide` where no row has a filter: a warp has one; decide.cu has the number too."""
_BLOCK_COST = 1.0
"""What a block of `scan` costs beyond its segments, in segments: it looks a node's parameters up."""
FEW_NODES = 40
"""Verified nodes for each level of a walk up to which all are chosen at once: a level is two launches, some 8 microseconds, in
which that many nodes are read."""
MOST_NODES, MOST_VOCAB = 65535, 32 * SEGMENT


@dataclass(frozen=True)
class Buffers:
    """Fixed addresses for up to M verified nodes of R trees of N nodes. Results: choices int64 [M], scores float32 [M] (log-
    probabilities); where int32 [R, N]: m of a verified node. Between kernels: raw, heat, best, lists, by node and segment; front
    int32 [2, R]: how far each row's walk has come."""

    choices: Tensor
    scores: Tensor
    where: Tensor
    raw: Tensor
    heat: Tensor
    best: Tensor
    lists: Tensor
    front: Tensor


def allocate(most: int, rows: int, nodes: int, vocab: int, device: torch.device | str) -> Buffers:
    """Make the buffers. Raises ValueError for sizes beyond the kernels'."""
    if not 1 <= most <= MOST_NODES or vocab % 8 or not 8 <= vocab <= MOST_VOCAB or rows < 1 or nodes < 1:
        raise ValueError(
            f"1 to {MOST_NODES} verified nodes, a vocabulary of 8 to {MOST_VOCAB} in steps of 8, rows and nodes; "
            f"not {most}, {vocab}, {rows} and {nodes}"
        )
    make = functools.partial(torch.zeros, device=device)
    segments = -(-vocab // SEGMENT)
    return Buffers(
        choices=make(most, dtype=torch.int64), scores=make(most), where=make((rows, nodes), dtype=torch.int32),
        raw=make((most, segments, 2)), heat=make((most, segments, 2)), best=make((most, segments), dtype=torch.int64),
        lists=make((most, TOP, segments), dtype=torch.int64), front=make((2, rows), dtype=torch.int32),
    )  # fmt: skip


def allocate_path(rows: int, width: int, device: torch.device | str) -> Path:
    """Make the output of `walk`."""
    make = functools.partial(torch.zeros, dtype=torch.int64, device=device)
    each = (rows, width)
    return Path(make(each), make(rows), make(each), make(rows), make(rows), make(each, dtype=torch.float32), make(each))


def _source(entry: str, wide: int = 1, filters: int = 1) -> jit.Source:
    if entry in ("start", "walk"):
        return jit.Source(_FOLDER / "walk.cu", entry)
    return jit.Source(_FOLDER / f"{entry}.cu", entry, {"WIDE": wide} | ({} if entry == "settle" else {"FILTERS": filters}))


def variants() -> list[Variant]:
    """Everything the launchers choose."""
    forms = [(entry, wide, 1) for entry in ("scan", "decide", "settle") for wide in (0, 1)]
    forms += [("start", 1, 1), ("walk", 1, 1)]
    found = [Variant(_source(*form), _THREADS[form[0]], blocks=_BLOCKS[form[0]]) for form in forms]
    found += [Variant(_source("scan", wide, 0), _THREADS["scan"], blocks=_BLOCKS["scan"]) for wide in (0, 1)]
    return found + [Variant(_source("decide", wide, 0), 32 * _DECIDED_AT_ONCE, blocks=8) for wide in (0, 1)]


@functools.cache
def _kernel(entry: str, wide: int, device: int, filters: int = 1) -> jit.Kernel:
    return jit.Kernel(_source(entry, wide, filters), device)


def choose(
    logits: Tensor,
    at: Nodes,
    params: Params,
    buffers: Buffers,
    live: Tensor | None = None,
    logprobs: bool = True,
    filters: bool = True,
    levels: int | None = None,
    few_nodes: int = FEW_NODES,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose at verified nodes on torch's current stream; see ref.choose. Returns buffers.choices and buffers.scores.

    logits [M, V] float32 or bf16; live int32 [1] on the device: how many of the M nodes are real. logprobs: whether scores are
    wanted. filters: False only if no row of the batch has min-p, top-k or top-p, which then are not looked at: one launch less, and
    a faster one. levels: None for a choice at every node; n if only nodes matter that a walk of at most n nodes meets: above
    n * few_nodes of them (to be given by tests and benchmarks only) choices go down the trees level by level, and logits of the
    others are not read (their choices stay as they were). Raises ValueError for tensors that do not fit.
    """
    m, v = logits.shape
    _check(logits, at, params, buffers, live)
    if levels is not None and levels < 1:
        raise ValueError(f"a walk has at least one level, not {levels}")
    if m == 0:
        return buffers.choices, buffers.scores
    segments, wide, device = -(-v // SEGMENT), int(logits.dtype == torch.float32), logits.device.index or 0
    step = (
        logits, at.rows, at.nodes, _or_null(live), params.numbers, params.top_k, params.seeds, at.lengths, at.tokens, at.parents,
        at.depths, _or_null(at.forced), _or_null(params.bias_ptr), _or_null(params.bias_ids), _or_null(params.bias_values),
        _or_null(params.history), _or_null(params.history_rows), _or_null(params.floor_left), _or_null(params.floor_ptr),
        _or_null(params.floor_ids), _or_null(at.mask), _or_null(at.mask_lines), np.int64(logits.stride(0)),
        np.int32(0 if at.mask is None else at.mask.shape[1]), np.int32(at.tokens.shape[1]), np.int32(v), np.int32(segments),
        np.int32(logprobs),
    )  # fmt: skip
    b, (r, n) = buffers, at.tokens.shape
    fronts: list[tuple[Tensor | np.uint64, Tensor | np.uint64]] = [(_NULL, _NULL)]
    nodes, grid = m, (shares(segments, m, slots(logits.device), _BLOCK_COST), m)
    if levels is not None and levels > 1 and m > few_nodes * levels:
        nodes, grid = r, (max(r, slots(logits.device)), 1)  # one round: the nodes that walks have come to share the blocks
        fronts = [(b.front[i % 2], b.front[(i + 1) % 2]) for i in range(levels)]
        _kernel("start", 1, device)(
            1, _THREADS["start"],
            (at.rows, at.nodes, _or_null(at.forced), _or_null(live), np.int32(m), np.int32(r), np.int32(n), b.where, b.front[0]),
            pdl=pdl,
        )  # fmt: skip
    decided = (b.choices, b.scores)
    for front, after in fronts:
        _kernel("scan", wide, device, int(filters))(
            grid, _THREADS["scan"], (*step, front, np.int32(r), b.raw, b.heat, b.best, b.lists), pdl=pdl
        )
        _kernel("decide", wide, device, int(filters))(
            nodes if filters else -(-nodes // _DECIDED_AT_ONCE), _THREADS["decide"] if filters else 32 * _DECIDED_AT_ONCE,
            (*step, b.raw, b.heat, b.best, b.lists, *decided, b.where, front, after, np.int32(nodes)), pdl=pdl,
        )  # fmt: skip
        if filters:
            _kernel("settle", wide, device)(
                min(nodes, _SETTLE_BLOCKS), _THREADS["settle"],
                (*step, b.raw, b.heat, b.lists, *decided, b.where, front, after, np.int32(nodes)), pdl=pdl,
            )  # fmt: skip
    return decided


def walk(
    at: Nodes, counts: Tensor, buffers: Buffers, out: Path, rows: Tensor | None = None, logprobs: bool = True, pdl: bool = True
) -> Path:
    """Walk R = len(counts) rows along what `choose` left in the buffers, into the first R rows of `out`; see ref.walk.

    counts int64 [R]: live nodes; rows int32 [1] on the device: how many of the R are real. Raises ValueError.
    """
    r, n = len(counts), at.tokens.shape[1]
    _fits("counts", counts, torch.int64, (r,))
    _fits("rows", rows, torch.int32, (1,))
    for name, x in (("tokens", at.tokens), ("parents", at.parents)):
        _fits(name, x[:r], torch.int64, (r, n))
    _fits("forced", None if at.forced is None else at.forced[:r], torch.uint8, (r,))
    width = out.nodes.shape[1]
    if out.nodes.shape[0] < r or width < 1 or buffers.where.shape[0] < r or buffers.where.shape[1] != n:
        raise ValueError(f"{r} trees of {n} nodes, paths for {tuple(out.nodes.shape)}, buffers for {tuple(buffers.where.shape)}")
    if r == 0:
        return out
    _kernel("walk", 1, counts.device.index or 0)(
        r, _THREADS["walk"],
        (at.tokens, at.parents, counts, _or_null(at.forced), _or_null(rows), buffers.where, buffers.choices,
         buffers.scores if logprobs else _NULL, np.int32(n), np.int32(width), out.nodes, out.counts, out.tokens, out.emitted,
         out.final, out.logprobs, out.chosen),
        pdl=pdl,
    )  # fmt: skip
    return out


def _or_null(x: Tensor | None) -> Tensor | np.uint64:
    return _NULL if x is None else x


def _fits(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x is not None and (x.dtype != dtype or tuple(x.shape) != shape or not x.is_contiguous()):
        raise ValueError(f"{name} must be {dtype} {shape} contiguous; it is {x.dtype} {tuple(x.shape)}, strides {x.stride()}")


def _check(logits: Tensor, at: Nodes, params: Params, buffers: Buffers, live: Tensor | None) -> None:
    m, v = logits.shape
    if (
        logits.dtype not in (torch.bfloat16, torch.float32)
        or logits.stride(1) != 1
        or logits.stride(0) % 8
        or logits.data_ptr() % 16
    ):
        raise ValueError(f"logits must be float32 or bf16 in rows on 16 bytes; they are {logits.dtype}, strides {logits.stride()}")
    r, n = at.tokens.shape
    for name, x in (("tokens", at.tokens), ("parents", at.parents), ("depths", at.depths)):
        _fits(name, x, torch.int64, (r, n))
    for name, x, size in (("rows", at.rows, m), ("nodes", at.nodes, m), ("lengths", at.lengths, r), ("seeds", params.seeds, r)):
        _fits(name, x, torch.int64, (size,))
    _fits("forced", at.forced, torch.uint8, (r,))
    _fits("live", live, torch.int32, (1,))
    _fits("numbers", params.numbers, torch.float32, (r, 8))
    _fits("top_k", params.top_k, torch.int32, (r,))
    _fits("bias_ptr", params.bias_ptr, torch.int32, (r + 1,))
    _fits("history_rows", params.history_rows, torch.int32, (r,))
    _fits("floor_left", params.floor_left, torch.int32, (r,))
    _fits("floor_ptr", params.floor_ptr, torch.int32, (r + 1,))
    _fits("mask_lines", at.mask_lines, torch.int32, (m,))
    if at.mask is not None:
        words = -(-v // 32)
        if at.mask.dtype != torch.int32 or at.mask.dim() != 2 or at.mask.shape[1] < words or not at.mask.is_contiguous():
            raise ValueError(f"mask must be int32 [lines, {words}] contiguous; it is {at.mask.dtype} {tuple(at.mask.shape)}")
    if params.history is not None:
        _fits("history", params.history, torch.int32, (params.history.shape[0], v))
    if (params.history is None) != (params.history_rows is None) or (params.bias_ptr is None) != (params.bias_ids is None):
        raise ValueError("history goes with history_rows, and bias_ptr with bias_ids and bias_values")
    floor = (params.floor_left, params.floor_ptr, params.floor_ids)
    if (at.mask is None) != (at.mask_lines is None) or len({x is None for x in floor}) > 1:
        raise ValueError("mask goes with mask_lines, and floor_left with floor_ptr and floor_ids")
    sizes = (len(buffers.choices), *buffers.where.shape, buffers.raw.shape[1])
    if sizes[0] < m or sizes[1] < r or sizes[2] != n or sizes[3] != -(-v // SEGMENT) or buffers.front.shape[1] < r:
        raise ValueError(f"{m} choices in {r} trees of {n} nodes over {v} tokens do not fit buffers for {sizes}")


def bytes_moved(nodes: int, vocab: int, itemsize: int = 4) -> int:
    """Bytes that must move: the logits once, the choices out."""
    return nodes * (vocab * itemsize + 12)
