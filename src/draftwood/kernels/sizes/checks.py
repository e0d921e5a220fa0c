"""The invariants of this folder's kernels, for an emulated device and a real one."""

from __future__ import annotations

import copy

import torch

from draftwood.kernels.rows import scenario
from draftwood.kernels.sizes import op, ref
from draftwood.kernels.tree.ref import NODES, Trees

CASES = ((1, 1), (3, 5), (64, 72), (128, 136), (0, 2))
"""(decoding rows, places)"""


def grown(rows: int, device: str, seed: int) -> Trees:
    """Random trees whose log-probabilities fall along every path, in pop order."""
    trees = scenario.trees(rows, "cpu", seed)
    g = torch.Generator().manual_seed(seed)
    for r in range(rows):
        drops = -torch.rand(NODES, generator=g) * 3
        for i in range(1, int(trees.counts[r])):
            trees.logprob[r, i] = trees.logprob[r, trees.parents[r, i]] + drops[i]
        n = int(trees.counts[r])
        trees.logprob[r, 1:n] = trees.logprob[r, 1:n].sort(descending=True).values
    return Trees(*(getattr(trees, name).to(device) for name in Trees.__dataclass_fields__))


def costs(kind: str, device: str) -> ref.Costs:
    """flat: nodes are free; steep: every node costs a step; mixed: between. Graphs of larger caps cost a twentieth more each."""
    totals = torch.tensor([1, 2, 9, 65, 520, 4160, 8320], dtype=torch.int32, device=device).repeat(len(ref.CAPS), 1)
    slope = {"flat": 0.0, "steep": 1.0, "mixed": 0.004}[kind]
    graph = 1 + torch.arange(len(ref.CAPS), device=device)[:, None] / 20
    return ref.Costs(totals, (0.01 * graph * (1 + slope * totals.float())).float().contiguous())


def fit(free: int, places: int, kind: str, device: str, own: int = 3) -> tuple[Trees, Trees, torch.Tensor, ref.Costs]:
    """Sizes are the reference's. Return trees before and after, chances' heat and the costs."""
    before = grown(places, device, 7)
    before.counts.clamp_(max=ref.CAPS[own] + 1)
    g = torch.Generator().manual_seed(1)
    automatic = (torch.rand(places, generator=g) < 0.8).to(device, torch.uint8)
    heat = torch.tensor([0.0, 0.6, 1.0], device=device).repeat(places)[:places].contiguous()
    known = op.allocate(device)
    known.ratio.copy_(torch.rand(known.ratio.shape, generator=g) + 0.5)
    live = torch.tensor([places - (places > free + 1)], dtype=torch.int32, device=device)
    decoding = torch.tensor([free], dtype=torch.int32, device=device)
    ours, theirs = copy.deepcopy(before), copy.deepcopy(before)
    found, want = op.allocate_fitted(device), op.allocate_fitted(device)
    found.expected.fill_(-5)
    op.fit(live, decoding, automatic, ours, heat, known, costs(kind, device), own, found)
    ref.fit(live, decoding, automatic, theirs, heat, known, costs(kind, device), own, want)
    assert scenario.same(ours, theirs) and scenario.same(found, want)
    assert bool((found.expected[: own + 1] >= free * ref.ONE).all()) and not bool(found.expected[own + 1 :].any())
    assert int(found.sized[own]) == int(ours.counts[: int(live)].sum())
    kept = ours.counts == before.counts
    assert bool((kept | (automatic > 0)).all()) and bool(kept[free:].all()) and bool((ours.counts >= 1).all())
    return before, ours, heat, costs(kind, device)


def learn(free: int, places: int, device: str) -> None:
    """What is known after many steps is the reference's, and stays bounded."""
    known = op.allocate(device)
    want = copy.deepcopy(known)
    for turn in range(12 if free < 64 else 4):
        trees, path = grown(places, device, turn), scenario.path(places, 8, device, turn)
        path.nodes.copy_((torch.arange(8, device=device) * (1 + turn % 3)).expand(places, 8))
        heat = torch.tensor([0.0, 0.6, 1.0], device=device).repeat(places)[:places].contiguous()
        decoding = torch.tensor([free], dtype=torch.int32, device=device)
        op.learn(decoding, trees, heat, path, known)
        ref.learn(decoding, trees, heat, path, want)
        assert scenario.same(known, want)
    assert float(known.ratio.max()) < 20 and (free == 0) == bool((known.predicted == 0).all())
