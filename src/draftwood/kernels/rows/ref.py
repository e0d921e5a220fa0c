"""What the kernels of this folder mean, in torch and Python. They write into the same outputs as the kernels.

A *place* is a row of a step. Decoding rows come first (places before `free`), then pieces of prompts (places before `live`): chains
of known tokens. Several pieces may belong to one row. What a row is beyond a step, its length and its root, lives in `State`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.accept.ref import Path
from draftwood.kernels.tree.ref import Flat, Trees

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Places:
    """What the host says about R places. live, free int32 [1]; ids int64 [R]: row of a place; of pieces: bases int64 [R] committed
    tokens before, chunks int32 [R] tokens at prompt[offsets[r]] (int32 each), emits uint8 [R] ends its prompt. floor_ends int32
    [R]: tokens of prompt and answer from which on end tokens may be chosen."""

    live: Tensor
    free: Tensor
    ids: Tensor
    bases: Tensor
    chunks: Tensor
    offsets: Tensor
    emits: Tensor
    prompt: Tensor
    floor_ends: Tensor


@dataclass(frozen=True)
class State:
    """Of persistent rows: lengths, roots int64 [rows]; history int32 [lines, V] as accept.ref.Params has it, or None."""

    lengths: Tensor
    roots: Tensor
    history: Tensor | None = None


@dataclass(frozen=True)
class Verified:
    """index (of a flat node), rows, nodes int64 [M]; live int32 [1]: how many of the M."""

    index: Tensor
    rows: Tensor
    nodes: Tensor
    live: Tensor


def begin(places: Places, state: State, lengths: Tensor, roots: Tensor, floor_left: Tensor, trees: Trees) -> None:
    """Fill lengths, roots [R] and trees: roots alone where a row decodes, chains where a prompt goes on. floor_left int32 [R]: as
    accept.ref.Params has it."""
    live, free = int(places.live), int(places.free)
    for r in range(min(live, len(lengths))):
        row, forced = int(places.ids[r]), r >= free
        length, root = (int(places.bases[r]), 0) if forced else (int(state.lengths[row]), int(state.roots[row]))
        n = min(int(places.chunks[r]), trees.tokens.shape[1]) if forced else 1
        first = int(places.offsets[r])
        chain = torch.arange(n, device=lengths.device)
        lengths[r], roots[r], trees.counts[r] = length, root, n
        floor_left[r] = places.floor_ends[r] - (length + n)
        trees.tokens[r, :n] = places.prompt[first : first + n].long() if forced else root
        trees.parents[r, :n], trees.depths[r, :n], trees.positions[r, :n] = chain - 1, chain, length + chain
        trees.logprob[r, :n] = 0.0
        for i in range(n):
            bits = (2 << i) - 1
            words = [bits >> 64 * w & _WORD for w in range(2)]
            trees.ancestors[r, i] = torch.tensor([w - (1 << 64) if w >> 63 else w for w in words])


def select(places: Places, counts: Tensor, flat: Flat, out: Verified) -> Verified:
    """List the verified nodes of places with counts [R] live nodes: all where a row decodes, the last where a prompt ends."""
    live, free = min(int(places.live), len(counts)), int(places.free)
    found = [
        (r, i)
        for r in range(live)
        for i in (range(int(counts[r])) if r < free else [int(counts[r]) - 1] if bool(places.emits[r]) else [])
    ]
    for m, (r, i) in enumerate(found):
        out.index[m], out.rows[m], out.nodes[m] = flat.starts[r] + i, r, i
    out.live[0] = len(found)
    return out


def advance(places: Places, state: State, lengths: Tensor, path: Path, history_rows: Tensor | None = None) -> None:
    """Move the rows of R = len(lengths) places on by what was accepted; history_rows int32 [R]: lines of history (-1: none)."""
    live, free = min(int(places.live), len(lengths)), int(places.free)
    for r in range(live):
        if r >= free and not bool(places.emits[r]):
            continue
        state.lengths[places.ids[r]] = lengths[r] + path.counts[r]
        state.roots[places.ids[r]] = path.final[r]
        if state.history is not None and history_rows is not None and int(history_rows[r]) >= 0:
            new = path.tokens[r, : min(int(path.emitted[r]), path.tokens.shape[1])]
            inside = new[(new >= 0) & (new < state.history.shape[1])]
            two = torch.full(inside.shape, 2, dtype=torch.int32, device=inside.device)
            state.history[int(history_rows[r])].index_add_(0, inside, two)


NEVER = -30.0
"""Log-probability of what does not happen."""


def log_part(mean: float) -> tuple[int, float]:
    """Nodes that a synthetic walk of `mean` tokens passes for sure, and the log-probability that it passes one more."""
    whole = int(mean - 1)
    part = mean - 1 - whole
    return whole, max(math.log(part), NEVER) if part > 0 else NEVER


def guesses(free: Tensor, seeds: Tensor, lengths: Tensor, trees: Trees, vocab: int, mean: float) -> None:
    """Make the nodes of decoding places' trees guesses of synthetic walks of `mean` tokens: tokens that all differ, and the
    log-probabilities that a walk passes, which is sure for the first node of each depth."""
    whole, last = log_part(mean)
    step = vocab // trees.tokens.shape[1]
    for r in range(min(int(free), len(trees.counts))):
        first, deepest = _hash(int(seeds[r]) + (int(trees.tokens[r, 0]) << 32), int(lengths[r])) % vocab, 0
        for i in range(1, int(trees.counts[r])):
            depth = int(trees.depths[r, i])
            found = NEVER if depth <= deepest or depth > whole + 1 else last if depth > whole else 0.0
            trees.tokens[r, i], trees.logprob[r, i] = (first + i * step) % vocab, found
            deepest = max(deepest, depth)


def wanted(seed: int, length: int, mean: float) -> int:
    """How many nodes beyond the root a synthetic walk should accept so that it returns `mean` tokens on average."""
    whole = int(mean - 1)
    part = float(torch.tensor(mean - 1 - whole, dtype=torch.float32))
    return whole + ((_hash(seed, length) >> 40) / 16777216 < part)


def _hash(seed: int, length: int) -> int:
    h = (seed * 0x9E3779B97F4A7C15 + length) & _WORD
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    h = (h ^ h >> 27) * 0x94D049BB133111EB & _WORD
    return h ^ h >> 31


def synthetic(
    free: Tensor, seeds: Tensor, lengths: Tensor, trees: Trees, where: Tensor, choices: Tensor, vocab: int, mean: float
) -> None:
    """Change the choices of decoding places so that their walks return `mean` tokens on average, as far as trees are deep."""
    for r in range(min(int(free), len(lengths))):
        want, n = wanted(int(seeds[r]), int(lengths[r]), mean), int(trees.counts[r])
        depths, parents, tokens = trees.depths[r].tolist(), trees.parents[r].tolist(), trees.tokens[r].tolist()
        node = max((i for i in range(n) if depths[i] <= want), key=lambda i: (depths[i], -i))
        children = {tokens[i] for i in range(n) if parents[i] == node}
        last = int(choices[int(where[r, node])])
        while last in children:
            last = last + 1 if last + 1 < vocab else 0
        choices[int(where[r, node])] = last
        while node > 0:
            choices[int(where[r, parents[node]])] = tokens[node]
            node = parents[node]
