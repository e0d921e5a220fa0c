"""The invariants of this folder's kernels, for an emulated device and a real one."""

from __future__ import annotations

import copy

import torch

from draftwood.kernels.accept.ref import Nodes, walk
from draftwood.kernels.rows import op, ref, scenario
from draftwood.kernels.tree import op as tree_op
from draftwood.kernels.tree.ref import NODES

CASES = ((1, 0, 1), (0, 3, 4), (5, 8, 13), (3, 2, 9), (128, 8, 136), (0, 0, 2))
"""(decoding rows, pieces of prompts, room)"""


def begin_and_select(free: int, pieces: int, room: int, device: str) -> None:
    """Lengths, roots, trees and verified nodes are the reference's; nothing else is written."""
    places, state = scenario.places(free, pieces, room, device), scenario.state(room, device)
    lengths, roots = torch.full((room,), -3, device=device), torch.full((room,), -3, device=device)
    floors, trees = torch.full((room,), -3, dtype=torch.int32, device=device), tree_op.allocate_trees(room, device)
    want = copy.deepcopy((lengths, roots, floors, trees))
    op.begin(places, state, lengths, roots, floors, trees)
    ref.begin(places, state, *want)
    assert torch.equal(lengths, want[0]) and torch.equal(roots, want[1]) and torch.equal(floors, want[2])
    assert scenario.same(trees, want[3])
    grown = scenario.trees(room, device, 3)
    counts = torch.where(torch.arange(room, device=device) < free, grown.counts, trees.counts)
    counts[free + pieces :] = 0
    flat = tree_op.allocate_flat(room, room * NODES, device)
    flat.starts.copy_(counts.cumsum(0) - counts)
    ours, theirs = scenario.verified(room * NODES, device), scenario.verified(room * NODES, device)
    op.select(places, counts, flat, ours)
    ref.select(places, counts, flat, theirs)
    assert scenario.same(ours, theirs)


def advance(free: int, pieces: int, room: int, device: str, history: bool) -> None:
    """Rows that return tokens move on, their tokens are counted, others stay."""
    places, state = scenario.places(free, pieces, room, device), scenario.state(room, device)
    if not history:
        state = ref.State(state.lengths, state.roots)
    lines = (torch.arange(room, dtype=torch.int32, device=device) % (scenario.LINES + 1)) - 1
    lengths, path = torch.randint(0, 500, (room,), device=device), scenario.path(room, 8, device)
    want = copy.deepcopy(state)
    op.advance(places, state, lengths, path, lines)
    ref.advance(places, want, lengths, path, lines)
    assert scenario.same(state, want)


def guesses(mean: float, device: str) -> float:
    """Guesses are the reference's, of decoding places only, and all of a tree differ; return what their log-probabilities say a
    row returns on average."""
    rows = 64
    trees = scenario.trees(rows, device, 5)
    want = copy.deepcopy(trees)
    free = torch.tensor([rows - 3], dtype=torch.int32, device=device)
    before = copy.deepcopy(trees)
    given = (torch.arange(rows, device=device) * 12345 - 77, torch.arange(rows, device=device) + 40)
    op.guesses(free, *given, trees, scenario.VOCAB, mean)
    ref.guesses(free, *given, want, scenario.VOCAB, mean)
    assert scenario.same(trees, want)
    for name in ("tokens", "logprob"):
        assert torch.equal(getattr(trees, name)[rows - 3 :], getattr(before, name)[rows - 3 :])
    assert torch.equal(trees.tokens[:, 0], before.tokens[:, 0])
    for r in range(rows - 3):
        guessed = trees.tokens[r, 1 : int(trees.counts[r])]
        assert len(guessed.unique()) == len(guessed) and bool(((guessed >= 0) & (guessed < scenario.VOCAB)).all())
    live = (torch.arange(NODES, device=device) < trees.counts[:, None])[: rows - 3, 1:]
    deep = torch.stack([trees.depths[r, : int(trees.counts[r])].max() for r in range(rows - 3)]) >= mean - 1
    return float(1 + (trees.logprob[: rows - 3, 1:].exp() * live).sum(1)[deep].mean())


def synthetic(mean: float, device: str) -> float:
    """Choices are the reference's, walks accept what was wanted or all that the tree is deep; return the mean accept length."""
    rows = 64
    trees = scenario.trees(rows, device, 5)
    at, nodes = (torch.arange(NODES, device=device) < trees.counts[:, None]).nonzero(as_tuple=True)
    where = torch.zeros(rows, NODES, dtype=torch.int32, device=device)
    where[at, nodes] = torch.arange(len(at), dtype=torch.int32, device=device)
    choices = torch.randint(0, scenario.VOCAB, (len(at),), device=device)
    theirs = choices.clone()
    seeds, lengths = torch.arange(rows, device=device) * 12345 - 77, torch.arange(rows, device=device) + 40
    free = torch.tensor([rows], dtype=torch.int32, device=device)
    given = (free, seeds, lengths, trees, where)
    op.synthetic(*given, choices, scenario.VOCAB, mean)
    ref.synthetic(*given, theirs, scenario.VOCAB, mean)
    assert torch.equal(choices, theirs)
    where_all = Nodes(trees.tokens, trees.parents, trees.depths, lengths, at, nodes)
    path = walk(where_all, trees.counts, choices, torch.zeros(len(at)), 66)
    deepest = trees.depths.where(torch.arange(NODES, device=device) < trees.counts[:, None], 0).amax(1)
    for r in range(rows):
        want = ref.wanted(int(seeds[r]), int(lengths[r]), mean)
        assert int(path.counts[r]) - 1 == min(want, int(deepest[r]))
    return float(path.counts.double().mean())
