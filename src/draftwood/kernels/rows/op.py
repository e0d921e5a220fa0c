"""Checks and launches of what begins and ends a step: `begin`, `select`, `advance`, and for measuring `guesses` and `synthetic`.

Nothing waits for the host.
"""

from __future__ import annotations

import functools
from pathlib import Path as File

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.accept.ref import Path
from draftwood.kernels.check import Variant
from draftwood.kernels.rows.ref import NEVER, Places, State, Verified, log_part
from draftwood.kernels.tree.ref import Flat, Trees

_FOLDER = File(__file__).parent
_NULL = np.uint64(0)
_THREADS = {"begin_step": 64, "list_verified": 64, "advance_rows": 32, "synthetic_choices": 32, "synthetic_guesses": 32}
_FILES = {name: "begin.cu" if name in ("begin_step", "list_verified") else "advance.cu" for name in _THREADS}
WIDEST = 128
"""Most nodes of a row: two words of ancestors."""
_COUNT, _LONGS, _INTS, _BYTES = (torch.int32, 1), (torch.int64, None), (torch.int32, None), (torch.uint8, None)


def _source(entry: str) -> jit.Source:
    return jit.Source(_FOLDER / _FILES[entry], entry)


def variants() -> list[Variant]:
    """The kernels, one form each."""
    return [Variant(_source(entry), threads, blocks=16) for entry, threads in _THREADS.items()]


@functools.cache
def _kernel(entry: str, device: int) -> jit.Kernel:
    return jit.Kernel(_source(entry), device)


def _fit(least: int, **given: tuple[Tensor, tuple[torch.dtype, int | None]]) -> None:
    """Refuse a vector of another type or place, or with fewer than `least` numbers (or another length where one is given)."""
    for name, (x, (dtype, size)) in given.items():
        wrong = len(x) < least if size is None else x.numel() != size
        if x.dtype != dtype or wrong or not x.is_contiguous():
            raise ValueError(f"{name} must be {dtype} [{least if size is None else size}]; it is {x.dtype} {tuple(x.shape)}")


def _fit_trees(trees: Trees, rows: int) -> int:
    """Refuse trees of fewer than `rows` rows, of other types, or not contiguous; return the nodes that a row has room for."""
    width = trees.tokens.shape[-1]
    longs = ("tokens", "parents", "depths", "positions")
    each = dict.fromkeys(longs, (torch.int64, (width,))) | {"logprob": (torch.float32, (width,))}
    for name, (dtype, line) in (each | {"ancestors": (torch.int64, (width, 2))}).items():
        x = getattr(trees, name)
        if x.dtype != dtype or len(x) < rows or tuple(x.shape[1:]) != line or not x.is_contiguous() or not 1 <= width <= WIDEST:
            raise ValueError(f"{name} of trees must be {dtype} [{rows}, {line}] contiguous; it is {x.dtype} {tuple(x.shape)}")
    _fit(rows, counts=(trees.counts, _LONGS))
    return width


def _fit_places(places: Places, rows: int) -> None:
    p = places
    _fit(rows, live=(p.live, _COUNT), free=(p.free, _COUNT), ids=(p.ids, _LONGS), bases=(p.bases, _LONGS), chunks=(p.chunks, _INTS),
         offsets=(p.offsets, _INTS), emits=(p.emits, _BYTES), floor_ends=(p.floor_ends, _INTS))  # fmt: skip
    if p.prompt.dtype != torch.int32:
        raise ValueError(f"tokens of prompts must be int32; they are {p.prompt.dtype}")


def begin(places: Places, state: State, lengths: Tensor, roots: Tensor, floor_left: Tensor, trees: Trees) -> None:
    """Begin a step of up to R = len(lengths) places on torch's current stream; see ref.begin. Raises ValueError."""
    r = len(lengths)
    _fit_places(places, r)
    _fit(r, lengths=(lengths, _LONGS), roots=(roots, _LONGS), floor_left=(floor_left, _INTS))
    _fit(1, row_lengths=(state.lengths, _LONGS), row_roots=(state.roots, _LONGS))
    p, t, width = places, trees, _fit_trees(trees, r)
    _kernel("begin_step", lengths.device.index or 0)(
        r, _THREADS["begin_step"],
        (p.live, p.free, p.ids, p.bases, p.chunks, p.offsets, p.prompt, p.floor_ends, state.lengths, state.roots,
         np.int32(width), lengths, roots, floor_left, t.tokens, t.parents, t.depths, t.positions, t.counts, t.logprob,
         t.ancestors),
        pdl=True,
    )  # fmt: skip


def select(places: Places, counts: Tensor, flat: Flat, out: Verified) -> Verified:
    """List the verified nodes of R = len(counts) places; see ref.select. `out` has room for them. Raises ValueError."""
    r = len(counts)
    _fit_places(places, r)
    _fit(r, counts=(counts, _LONGS), starts=(flat.starts, _LONGS))
    _fit(1, index=(out.index, _LONGS), rows=(out.rows, _LONGS), nodes=(out.nodes, _LONGS), live=(out.live, _COUNT))
    p = places
    outputs = (out.index, out.rows, out.nodes, out.live)
    _kernel("list_verified", counts.device.index or 0)(
        r, _THREADS["list_verified"], (p.live, p.free, p.emits, counts, flat.starts, *outputs), pdl=True
    )
    return out


def advance(places: Places, state: State, lengths: Tensor, path: Path, history_rows: Tensor | None = None) -> None:
    """Move rows on by what R = len(lengths) places accepted; see ref.advance. Raises ValueError."""
    r = len(lengths)
    _fit_places(places, r)
    _fit(r, lengths=(lengths, _LONGS), accepted=(path.counts, _LONGS), emitted=(path.emitted, _LONGS), final=(path.final, _LONGS))
    _fit(1, row_lengths=(state.lengths, _LONGS), row_roots=(state.roots, _LONGS))
    found = path.tokens
    if found.dim() != 2 or found.dtype != torch.int64 or len(found) < r or not found.is_contiguous():
        raise ValueError(f"tokens of paths must be int64 [{r}, P] contiguous; they are {found.dtype} {tuple(found.shape)}")
    lines = state.history
    if lines is not None and history_rows is not None:
        _fit(r, history_rows=(history_rows, _INTS))
    counted = lines is not None and history_rows is not None
    p = places
    _kernel("advance_rows", lengths.device.index or 0)(
        r, _THREADS["advance_rows"],
        (p.live, p.free, p.ids, p.emits, lengths, path.counts, path.emitted, path.final, path.tokens,
         np.int32(path.tokens.shape[1]), history_rows if counted else _NULL, lines if counted else _NULL,
         np.int32(0 if lines is None else lines.shape[1]),
         state.lengths, state.roots),
        pdl=True,
    )  # fmt: skip


def guesses(free: Tensor, seeds: Tensor, lengths: Tensor, trees: Trees, vocab: int, mean: float) -> None:
    """Make the trees of R = len(lengths) places those of synthetic walks; see ref.guesses. Raises ValueError."""
    r = len(lengths)
    width = _fit_trees(trees, r)
    _fit(r, free=(free, _COUNT), seeds=(seeds, _LONGS), lengths=(lengths, _LONGS))
    if mean < 1 or vocab < width:
        raise ValueError(f"walks return at least 1 token on average, not {mean}; a tree needs {width} tokens, not {vocab}")
    whole, last = log_part(mean)
    _kernel("synthetic_guesses", lengths.device.index or 0)(
        r, _THREADS["synthetic_guesses"],
        (free, seeds, lengths, trees.counts, trees.depths, np.int32(width), np.int32(vocab), np.int32(whole), np.float32(last),
         np.float32(NEVER), trees.tokens, trees.logprob),
        pdl=True,
    )  # fmt: skip


def synthetic(
    free: Tensor, seeds: Tensor, lengths: Tensor, trees: Trees, where: Tensor, choices: Tensor, vocab: int, mean: float
) -> None:
    """Change choices so that walks return `mean` tokens on average; see ref.synthetic. Raises ValueError."""
    r = len(lengths)
    width = _fit_trees(trees, r)
    _fit(r, free=(free, _COUNT), seeds=(seeds, _LONGS), lengths=(lengths, _LONGS))
    _fit(1, choices=(choices, _LONGS))
    if where.dtype != torch.int32 or where.shape[0] < r or where.shape[1] != width or not where.is_contiguous() or mean < 1:
        raise ValueError(f"where {where.dtype} {tuple(where.shape)}, trees {tuple(trees.tokens.shape)}, mean {mean} (at least 1)")
    whole = int(mean - 1)
    _kernel("synthetic_choices", lengths.device.index or 0)(
        r, _THREADS["synthetic_choices"],
        (free, seeds, lengths, trees.counts, trees.tokens, trees.parents, trees.depths, where, np.int32(width),
         np.int32(vocab), np.int32(whole), np.float32(mean - 1 - whole), choices),
        pdl=True,
    )  # fmt: skip
