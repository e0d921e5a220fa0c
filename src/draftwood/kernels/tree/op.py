"""Buffers, checks and launches of the tree kernels: `candidates` (pick, merge), `grow` (rank_children, grow), `flatten`.

Nothing waits for the host."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant
from draftwood.kernels.tree.numbers import SEGMENT
from draftwood.kernels.tree.ref import NODES, TOP, Candidates, Flat, Options, Table, Trees

_FOLDER = Path(__file__).parent
_NULL = np.uint64(0)
MOST_ROWS, MOST_DEPTH, MOST_VOCAB = 65535, 15, 32 * SEGMENT
_THREADS = {"pick": 512, "merge": 512, "rank_children": 256, "grow": 128, "flatten": 128}
_GROW_TABLE_THREADS = 512
_BLOCK_COST = 4.0
"""What a block of `pick` costs beyond its segments, in segments: until it has a good bound, many tokens come into its list."""
_NOISE_COST, _MERGE_COST = 1.6, 1.0
"""In segments where little noise is found: one whose noise is found for every token; the launch that merges blocks' results."""
_GROW_HELD = 16
"""Children of a node that growth with a table has at hand; more of them take another form (SPECIAL in grow.cu)."""
_GROW_SHARED = (25_088, 89_088)
"""Bytes of a row's growth without and with a previous-token table; grow.cu asserts them."""


@dataclass(frozen=True)
class Knobs:
    """Options as the kernels read them, on the device: beta [depth], caps int32 [steps, 2]; made once."""

    options: Options
    beta: Tensor
    caps: Tensor
    correction: Tensor | None


@dataclass(frozen=True)
class Lists:
    """Ranked children, for growth with a table: scores float32 and places uint8 [rows, depth - 1, 64, 64]."""

    scores: Tensor
    places: Tensor


@dataclass(frozen=True)
class Buffers:
    """What candidates and growth need for up to `rows` rows, fixed addresses.

    keys int64 [rows, depth, 64, S]: of each block; sums float32 [rows, depth, S, 2]: of each segment.
    """

    keys: Tensor
    sums: Tensor
    found: Candidates
    lists: Lists


def knobs(options: Options, depth: int, device: torch.device | str) -> Knobs:
    """Put options on the device. Raises ValueError for what growth cannot do."""
    caps = [(n, min(c, TOP)) for n, c in options.caps]
    if not caps or any(n < 0 or c < 1 for n, c in caps) or sorted(caps) != caps:
        raise ValueError(f"caps are (nodes, cap) steps, ascending, caps of at least 1; not {options.caps}")
    if not options.beta or min(options.beta) < 0 or not 1 <= options.candidates <= TOP or not 1 <= depth <= MOST_DEPTH:
        raise ValueError(
            f"1 to {TOP} candidates and 1 to {MOST_DEPTH} depths; not {options.candidates}, {depth}, beta {options.beta}"
        )
    beta = [options.beta[min(d, len(options.beta) - 1)] for d in range(depth)]
    extra = options.correction
    if extra is not None and (extra.dim() != 3 or extra.shape[0] != 2 or not extra.numel()):
        raise ValueError(f"a correction is [2, depths, ranks]; it is {tuple(extra.shape)}")
    return Knobs(
        options,
        torch.tensor(beta, dtype=torch.float32, device=device),
        torch.tensor(caps, dtype=torch.int32, device=device),
        None if extra is None else extra.to(device, torch.float32).contiguous(),
    )


def allocate(rows: int, depth: int, vocab: int, device: torch.device | str) -> Buffers:
    """Make the buffers. Raises ValueError for sizes beyond the kernels'."""
    if not (1 <= rows <= MOST_ROWS and 1 <= depth <= MOST_DEPTH) or vocab % 8 or not 8 <= vocab <= MOST_VOCAB:
        raise ValueError(
            f"1 to {MOST_ROWS} rows, 1 to {MOST_DEPTH} depths and a vocabulary of 8 to {MOST_VOCAB} in steps of 8; "
            f"not {rows}, {depth} and {vocab}"
        )
    make = functools.partial(torch.empty, device=device)
    segments, top = -(-vocab // SEGMENT), (rows, depth, TOP)
    found = Candidates(
        make(top, dtype=torch.int32), make(top, dtype=torch.float32), make(top, dtype=torch.int32),
        make(top[:2], dtype=torch.float32),
    )  # fmt: skip
    keys, sums = make((rows, depth, TOP, segments), dtype=torch.int64), make((rows, depth, segments, 2))
    return Buffers(keys, sums, found, allocate_lists(rows, depth, device))


def allocate_lists(rows: int, depth: int, device: torch.device | str) -> Lists:
    """Make room for the ranked children of up to `rows` rows."""
    size = (rows, depth - 1, TOP, TOP)
    return Lists(torch.empty(size, device=device), torch.empty(size, dtype=torch.uint8, device=device))


def allocate_trees(rows: int, device: torch.device | str) -> Trees:
    """Make the output of `grow` for up to `rows` rows."""
    make = functools.partial(torch.zeros, device=device, dtype=torch.int64)
    each = (rows, NODES)
    return Trees(make(each), make(each), make(each), make(each), make(rows), make(each, dtype=torch.float32), make((*each, 2)))


def allocate_flat(rows: int, most: int, device: torch.device | str) -> Flat:
    """Make the output of `flatten` for up to `rows` rows with `most` live nodes in all (rows * 65 always suffice)."""
    make = functools.partial(torch.zeros, device=device, dtype=torch.int64)
    one = functools.partial(make, most)
    return Flat(make(rows), make(1, dtype=torch.int32), make((rows, NODES)), one(), one(), one(), one(), one(), make((most, 2)))


def _source(entry: str, flag: int, special: int = 0) -> jit.Source:
    if entry in ("flatten", "rank_children"):
        return jit.Source(_FOLDER / {"flatten": "flatten.cu", "rank_children": "children.cu"}[entry], entry)
    if entry == "grow":
        return jit.Source(_FOLDER / "grow.cu", entry, {"TABLE": flag, "SPECIAL": special, "ROOM": _GROW_SHARED[flag]})
    macros = {entry.upper(): 1, "WIDE": flag} if entry == "pick" else {entry.upper(): 1}
    return jit.Source(_FOLDER / "candidates.cu", entry, macros)


def _shared(entry: str, flag: int) -> int:
    return _GROW_SHARED[flag] if entry == "grow" else 0


def _threads(entry: str, flag: int) -> int:
    return _GROW_TABLE_THREADS if entry == "grow" and flag else _THREADS[entry]


def variants() -> list[Variant]:
    """Everything the launchers choose."""
    forms = [("pick", 0, 2), ("pick", 1, 2), ("merge", 0, 2), ("rank_children", 0, 4), ("flatten", 0, 8)]
    forms += [("grow", 0, 8), ("grow", 1, 2)]
    found = [Variant(_source(entry, flag), _threads(entry, flag), _shared(entry, flag), blocks) for entry, flag, blocks in forms]
    return found + [Variant(_source("grow", flag, 1), _threads("grow", flag), _shared("grow", flag), 2 - flag) for flag in (0, 1)]


@functools.cache
def _kernel(entry: str, flag: int, device: int, special: int = 0) -> jit.Kernel:
    return jit.Kernel(_source(entry, flag, special), device, _shared(entry, flag))


def candidates(
    logits: Tensor,
    temperature: Tensor,
    budgets: Tensor,
    given: Knobs,
    buffers: Buffers,
    seeds: Tensor | None = None,
    lengths: Tensor | None = None,
    rows: Tensor | None = None,
    norms: int | None = None,
    pdl: bool = True,
) -> Candidates:
    """Find the candidates of logits [R, D, V] (bf16 or float32) on torch's current stream; the first R rows of buffers.found.

    temperature float32, budgets int32, seeds and lengths int64 [R]; seeds None: no noise. rows int32 [1] on the device: how many of
    the R rows are real; those beyond, and those with budget 0, are left alone. norms: how many depths need the log of the sum
    (all by default; 1 is enough for growth with a table). Raises ValueError for tensors that do not fit.
    """
    r, d, v = logits.shape
    norms = d if norms is None else norms
    _check_logits(logits, given, buffers)
    _vectors_fit(r, torch.float32, temperature=temperature)
    _vectors_fit(r, torch.int32, budgets=budgets)
    if seeds is not None:
        _vectors_fit(r, torch.int64, seeds=seeds, lengths=lengths)
    _count_fits(rows)
    if r == 0:
        return buffers.found
    found, arg, device = buffers.found, np.int32, logits.device.index or 0
    segments = -(-v // SEGMENT)
    parts, live = blocks_of_a_list(segments, r, d, norms, seeds is not None, slots(logits.device)), _NULL if rows is None else rows
    _kernel("pick", int(logits.dtype == torch.float32), device)(
        (parts, r, d), _THREADS["pick"],
        (logits, np.int64(logits.stride(0)), np.int64(logits.stride(1)), temperature, given.beta,
         _NULL if seeds is None else seeds, _NULL if lengths is None else lengths, budgets, live, buffers.keys, buffers.sums,
         found.ids, found.z, found.places, found.norm, arg(v), arg(segments), arg(norms)),
        pdl=pdl,
    )  # fmt: skip
    if parts > 1:
        _kernel("merge", 0, device)(
            (d, r), _THREADS["merge"],
            (buffers.keys, buffers.sums, budgets, live, found.ids, found.z, found.places, found.norm, arg(parts), arg(segments),
             arg(norms)),
            pdl=pdl,
        )  # fmt: skip
    return found


@functools.cache
def slots(device: torch.device) -> int:
    """How many blocks of 512 threads a device runs at once: two on a multiprocessor (on a CPU, for tests: an H200's)."""
    return 2 * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132)


def blocks_of_a_list(segments: int, rows: int, depth: int, norms: int, noisy: bool, at_once: int) -> int:
    """How many blocks of `pick` share a list of logits, of which `norms` of each row's `depth` need all their noise."""
    usual, longest = (_NOISE_COST if noisy and norms >= least else 1.0 for least in (depth, 1))
    return shares(segments, rows * depth, at_once, _BLOCK_COST, usual, longest, _MERGE_COST)


@functools.cache
def shares(
    segments: int, lists: int, at_once: int, block_cost: float, usual: float = 1.0, longest: float = 1.0, merge_cost: float = 0.0
) -> int:
    """How many blocks share the segments of each of so many lists of logits, of which `at_once` run at a time.

    A block costs `block_cost` beyond its segments, and several of a list `merge_cost` in all. A few rounds of blocks end together;
    many blur. usual, longest: what a segment costs, and one of the few lists that take longest, which begin first.
    """

    def cost(blocks: int) -> float:
        rounds, each = blocks * lists / at_once, -(-segments // blocks)
        alike = (math.ceil(rounds) if rounds <= 3 else rounds) * (usual * each + block_cost)
        return max(alike, longest * each + block_cost) + merge_cost * (blocks > 1)

    return min(sorted({-(-segments // most) for most in range(1, segments + 1)}), key=cost)


def grow(
    found: Candidates,
    roots: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    temperature: Tensor,
    given: Knobs,
    out: Trees,
    table: Table | None = None,
    rows: Tensor | None = None,
    lists: Lists | None = None,
    pdl: bool = True,
) -> Trees:
    """Grow the trees of R = len(roots) rows into the first R rows of `out`; see ref.grow.

    roots, lengths int64, budgets int32 (0..64), temperature float32 [R]; table: int32 row_ptr and cols, float32 vals and base;
    lists: room for the children it ranks, made if absent. Raises ValueError for tensors that do not fit.
    """
    r, d = len(roots), found.ids.shape[1]
    _vectors_fit(r, torch.int64, roots=roots, lengths=lengths)
    _vectors_fit(r, torch.int32, budgets=budgets)
    _vectors_fit(r, torch.float32, temperature=temperature)
    _count_fits(rows)
    if found.ids.shape[0] < r or out.tokens.shape[0] < r or d != len(given.beta):
        raise ValueError(
            f"{r} rows, candidates of {found.ids.shape[0]}, trees for {out.tokens.shape[0]}; {d} depths, {len(given.beta)} known"
        )
    _check_table(table)
    if lists is not None and (lists.scores.shape[0] < r or tuple(lists.scores.shape[1:]) != (d - 1, TOP, TOP)):
        raise ValueError(f"{r} rows of {d} depths do not fit lists {tuple(lists.scores.shape)}")
    if r == 0:
        return out
    arg, options, extra, device = np.int32, given.options, given.correction, roots.device.index or 0
    live, most = _NULL if rows is None else rows, min(max(cap for _, cap in options.caps), TOP)
    ranked: tuple[Tensor | np.uint64, ...] = (_NULL, _NULL)
    if table is not None:
        lists = allocate_lists(r, d, roots.device) if lists is None else lists
        ranked = (lists.scores, lists.places)
    if table is not None and d > 1:
        _kernel("rank_children", 0, device)(
            (TOP * 32 // _THREADS["rank_children"], d - 1, r), _THREADS["rank_children"],
            (found.ids, found.z, found.places, budgets, temperature, live, table.row_ptr, table.cols, table.vals, table.base,
             arg(len(table.base)), arg(d), arg(options.candidates), np.float64(options.alpha), arg(most), *ranked),
            pdl=pdl,
        )  # fmt: skip
    shape = (0, 0) if extra is None else extra.shape[1:]
    flag, width = int(table is not None), most if table is None else min(most, options.candidates)
    special = options.spine or extra is not None or (table is not None and width > _GROW_HELD)
    _kernel("grow", flag, device, int(special))(
        r, _threads("grow", flag),
        (found.ids, found.z, found.places, found.norm, roots, lengths, budgets, live, *ranked, _NULL if extra is None else extra,
         arg(shape[0]), arg(shape[1]), arg(d), arg(width), arg(options.spine), given.caps, arg(len(given.caps)),
         out.tokens, out.parents, out.depths, out.positions, out.counts, out.logprob, out.ancestors),
        pdl=pdl,
    )  # fmt: skip
    return out


def flatten(
    trees: Trees, lengths: Tensor, table: Tensor, page: int, out: Flat, rows: Tensor | None = None, pdl: bool = True
) -> Flat:
    """Lay the live nodes of R = len(lengths) rows one after another; see ref.flatten. Counts of rows beyond `rows` become 0.

    table int32 [R, pages], lengths int64 [R]; out has room for all live nodes (the caller knows the budgets). Raises ValueError.
    """
    r = len(lengths)
    _vectors_fit(r, torch.int64, lengths=lengths)
    _count_fits(rows)
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != r or not table.is_contiguous():
        raise ValueError(f"a page table is int32 [{r}, pages]; it is {table.dtype} {tuple(table.shape)}")
    if trees.counts.shape[0] < r or out.starts.shape[0] < r or page < 1:
        raise ValueError(f"{r} rows, trees for {trees.counts.shape[0]}, starts for {out.starts.shape[0]}, pages of {page}")
    if r == 0:
        return out
    arg = np.int32
    _kernel("flatten", 0, lengths.device.index or 0)(
        r, _THREADS["flatten"],
        (trees.tokens, trees.positions, trees.ancestors, trees.counts, lengths, table, _NULL if rows is None else rows, arg(NODES),
         arg(table.shape[1]), arg(page), out.starts, out.total, out.slots, out.tokens, out.positions, out.places, out.rows,
         out.nodes, out.ancestors),
        pdl=pdl,
    )  # fmt: skip
    return out


def _check_logits(logits: Tensor, given: Knobs, buffers: Buffers) -> None:
    r, d, v = logits.shape
    if logits.dtype not in (torch.bfloat16, torch.float32) or logits.stride(2) != 1 or logits.data_ptr() % 16:
        raise ValueError(
            f"logits must be bf16 or float32 with contiguous tokens; they are {logits.dtype}, strides {logits.stride()}"
        )
    if v % 8 or any(s % 8 for s in logits.stride()[:2]):
        raise ValueError(f"logits of {v} tokens, strides {logits.stride()}: all must be multiples of 8")
    if buffers.keys.shape[0] < r or tuple(buffers.keys.shape[1:]) != (d, TOP, -(-v // SEGMENT)) or len(given.beta) != d:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit buffers {tuple(buffers.keys.shape)}, knobs for {len(given.beta)}"
        )


def _check_table(table: Table | None) -> None:
    if table is None:
        return
    types = (table.row_ptr.dtype, table.cols.dtype, table.vals.dtype, table.base.dtype)
    if types != (torch.int32, torch.int32, torch.float32, torch.float32) or len(table.row_ptr) != len(table.base) + 1:
        raise ValueError(f"a table is int32 row_ptr [V + 1] and cols, float32 vals and base [V]; it is {types}")


def _vectors_fit(r: int, dtype: torch.dtype, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is None or x.dtype != dtype or x.shape != (r,) or not x.is_contiguous():
            raise ValueError(f"{name} must be {dtype} [{r}]; it is {None if x is None else (x.dtype, tuple(x.shape))}")


def _count_fits(rows: Tensor | None) -> None:
    if rows is not None and (rows.dtype != torch.int32 or rows.numel() != 1):
        raise ValueError(f"rows must be one int32 on the device; it is {rows.dtype} {tuple(rows.shape)}")


def bytes_moved(rows: int, depth: int, vocab: int, itemsize: int = 2) -> int:
    """Bytes that must move: the logits once, and the trees."""
    return rows * (depth * vocab * itemsize + NODES * (5 * 8 + 16 + 4))
