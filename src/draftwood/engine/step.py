"""One step: draft, tree, verify, accept, commit. A prompt chunk is a forced chain, plain decoding a tree of one node.

Nothing is decided here about who runs, and nothing here knows what a request is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftwood.config import STAGES
from draftwood.engine.rows import Rows, View
from draftwood.engine.scheduler import StepPlan
from draftwood.kv.store import DraftRows, DraftStore, LatentStore, Scratch
from draftwood.parallel.comm import Comm
from draftwood.spec.accept import Path, accept
from draftwood.spec.bigram import Bigram
from draftwood.spec.grammar import Constraint, Grammars, Permits, permits
from draftwood.spec.noise import COLD, gumbel
from draftwood.spec.policy import AutoSize, CostTable
from draftwood.spec.sampling import choose, filter_logits, top_logprobs
from draftwood.spec.tree import GrowOptions, Tree, chain, grow, join, roots

_OWN_NOISE = 0x5DEECE66D
"""Flips bits of a seed where the drafter is asked for noise of its own."""


class TargetModel(Protocol):
    """What a step needs of the target; see model.kimi.Target."""

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Scratch, ancestors: Tensor, counts: Tensor,
        verified: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


class DraftModel(Protocol):
    """What a step needs of the drafter; see model.drafter.Drafter."""

    def propose(self, roots: Tensor, window: DraftRows, block: int) -> Tensor: ...

    def observe(self, taps: Tensor, positions: Tensor, path: Tensor, window: DraftRows) -> None: ...


@dataclass(kw_only=True)
class Common:
    """What an engine knows of its parts wherever they run."""

    comm: Comm
    vocab: int
    positions: int
    """Positions the target knows."""
    grammars: Grammars | None = None
    """For requests whose answers have a form; None without a vocabulary."""


@dataclass(kw_only=True)
class Parts(Common):
    """What an engine on a CPU is made of. Without a drafter every tree is its root."""

    target: TargetModel
    kv: LatentStore
    drafter: DraftModel | None = None
    draft_kv: DraftStore | None = None
    block: int = 0
    options: GrowOptions = GrowOptions()
    bigram: Bigram | None = None
    noise: str = "shared"
    auto: AutoSize | None = None
    """Sizes of the trees whose budget is `auto`; None until they are wanted."""
    costs: dict[bool, CostTable] = field(default_factory=dict)
    """What `auto` reckons with, for steps without noise and with it."""
    device: torch.device | str = "cpu"


@dataclass(frozen=True)
class StepResult:
    """What a step accepted, in the plan's order of rows. Tensors, so that a device may be read one step later."""

    tree: Tree
    path: Path
    seconds: dict[str, float]
    """By stage."""
    gaps: Tensor | None
    """[R, P] how far, in logits, each committed token was ahead of the next best; None unless asked for."""
    top: tuple[Tensor, Tensor] | None
    """ids, log-probabilities [R, P, K] of the likeliest tokens at each committed one; None unless asked for."""
    prints: Tensor | None = None
    """[R, P] a 64-bit sum over the bits of all logits behind each committed token; None unless a GPU was asked for it."""


class Clock:
    """Seconds since the last lap, added to a stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


def step(parts: Parts, rows: Rows, plan: StepPlan, trace: bool = False) -> StepResult:
    """Advance every row of `plan` by one target forward. No decisions about who runs."""
    view = rows.view(plan)
    begin(parts, plan)
    result = run(parts, view, trace)
    rows.advance(view, result.path)
    return result


def begin(parts: Parts, plan: StepPlan) -> None:
    """Bring the drafter's context of the shared pages that rows begin on into their windows."""
    for start in plan.starts:
        if start.cached and parts.draft_kv is not None:
            parts.draft_kv.restore(start.row, parts.kv.slots(start.pages, start.cached))


@torch.inference_mode()
def run(parts: Parts, view: View, trace: bool = False) -> StepResult:
    """Draft, grow, verify, accept and commit for the rows of `view`, whose state is not touched."""
    clock, device = Clock(), parts.device
    guesses = propose(parts, view)
    clock.lap("draft")
    noise = view.noise(parts.vocab)
    tree = plant(parts, view, guesses, noise)
    clock.lap("tree")
    counts, verified = tree.counts.to(device), tree.verified()
    slots = parts.kv.scratch(view.tables, view.lengths, counts, tree.tokens.shape[1], view.plan.longest)
    # A nearly finished row may draft beyond the last position; nothing there can be committed.
    positions = tree.positions(view.lengths).clamp_(max=parts.positions - 1)
    at = (verified[0].to(device), verified[1].to(device))
    logits, taps = parts.target.forward(tree.tokens.to(device), positions, slots, tree.ancestors().to(device), counts, at)
    clock.lap("verify")
    allowed = permits(view.constraints, view.plan.emits, tree, verified)
    choices, logprobs = choose(logits, *verified, tree, view.sampling, noise, allowed, scored=view.logprobs is not None)
    path = accept(tree, choices, verified, logprobs)
    if parts.auto is not None:
        parts.auto.observe(tree, path, view.sampling.temperature)
    clock.lap("accept")
    parts.kv.commit(slots, path.nodes.to(device), path.counts.to(device))
    observe(parts, view, taps, positions, path, slots)
    clock.lap("commit")
    gaps = _gaps(logits, verified, tree, view, noise, path, allowed) if trace else None
    return StepResult(tree, path, clock.seconds, gaps, _top(logits, view, path))


def propose(parts: Parts, view: View) -> Tensor | None:
    """Return the drafter's logits [drafting rows, D, V] for the rows with a budget; None when there are none."""
    places = _drafting(view.plan)
    if not places or parts.drafter is None or parts.draft_kv is None:
        return None
    if len(places) == len(view.plan.rows):
        window, known = parts.draft_kv.rows(view.ids, view.lengths), view.roots
    else:
        window, known = parts.draft_kv.rows(view.ids[places], view.lengths[places]), view.roots[places]
    return parts.drafter.propose(known, window, parts.block)[:, : view.plan.depth]


def _drafting(plan: StepPlan) -> list[int]:
    return [place for place, budget in enumerate(plan.budgets) if budget > 0]


def plant(parts: Parts, view: View, guesses: Tensor | None, noise: Tensor | None) -> Tree:
    """Return the step's trees: chains where a chunk is forced, grown trees where there are guesses, else roots."""
    plan = view.plan
    grown = _drafting(plan) if guesses is not None else []
    forced = [place for place, chunk in enumerate(plan.chunks) if chunk]
    free = sorted(set(range(len(plan.rows))) - set(grown) - set(forced))
    trees = []
    if guesses is not None:
        trees.append(_grown(parts, view, guesses, noise, grown))
    if forced:
        trees.append(chain([plan.chunks[place] for place in forced]))
    if free:
        trees.append(roots(view.roots[free]))
    tree = trees[0]
    if len(trees) > 1:
        stacked = grown + forced + free
        tree = join(trees, sorted(range(len(stacked)), key=stacked.__getitem__))
    if guesses is not None and parts.auto is not None and any(plan.auto):
        parts.auto.costs = parts.costs[bool(view.sampling.sampled.any())]
        sizes = parts.auto.fit(tree, view.sampling.temperature)
        tree = tree.cut(torch.where(torch.tensor(plan.auto), sizes, tree.counts - 1))
    return tree


def _grown(parts: Parts, view: View, guesses: Tensor, noise: Tensor | None, places: list[int]) -> Tree:
    sampling, plan = view.sampling, view.plan
    shared = noise
    if noise is not None and parts.noise == "own":
        first = view.lengths + 1
        places_ahead = first.cpu()[:, None] + torch.arange(plan.depth)
        shared = gumbel(torch.from_numpy(sampling.seed ^ _OWN_NOISE), places_ahead, parts.vocab)
    if noise is None or parts.noise == "none":
        shared = None
    if shared is not None and len(places) < len(plan.rows):
        shared = shared[places]
    budgets = [plan.budgets[place] for place in places]
    heat = sampling.temperature[places].tolist()
    if view.constraints:
        guesses = guide([view.constraints[place] for place in places], guesses, shared, heat)
    echoes = [view.echoes[place] for place in places] if view.echoes else ()
    return grow(guesses, view.roots[places], budgets, heat, shared, parts.options, parts.bigram, echoes)


def guide(constraints: Sequence[Constraint | None], guesses: Tensor, noise: Tensor | None, heat: Sequence[float]) -> Tensor:
    """Return the guesses [R, D, V] without what the rows' grammars refuse along each row's likeliest path."""
    out = guesses.clone()
    for row, constraint in enumerate(constraints):
        if constraint is None or not constraint.following:
            continue
        scores = guesses[row].float().cpu()
        if noise is not None and heat[row] > COLD:
            scores = scores / heat[row] + noise[row, : len(scores)].cpu()
        allowed = torch.from_numpy(constraint.lead(scores.numpy()))
        out[row].masked_fill_(~allowed.to(out.device), -torch.inf)
    return out


def observe(parts: Parts, view: View, taps: Tensor, positions: Tensor, path: Path, slots: Scratch) -> None:
    """Give the drafter the context of the accepted nodes of every row that may still draft, or whose pages are kept."""
    if parts.drafter is None or parts.draft_kv is None:
        return
    nodes, ids, lengths, places = path.nodes.to(parts.device), view.ids, view.lengths, slots.nodes
    if view.warm is not None:
        if not len(view.warm):
            return
        taps, positions, nodes = taps[view.warm], positions[view.warm], nodes[view.warm]
        ids, lengths, places = ids[view.warm], lengths[view.warm], places[view.warm]
    if not parts.draft_kv.slots:
        parts.drafter.observe(taps, positions, nodes, parts.draft_kv.rows(ids, lengths))
        return
    # A chunk may be longer than a window: what the window would lose is kept first.
    most, sink = parts.draft_kv.keys.shape[2], parts.kv.sink * parts.kv.page_size
    for first in range(0, nodes.shape[1], most):
        part, window = nodes[:, first : first + most], parts.draft_kv.rows(ids, lengths + first)
        parts.drafter.observe(taps, positions, part, window)
        parts.draft_kv.keep(window, places[:, first : first + part.shape[1]].masked_fill(part < 0, sink))


def _top(logits: Tensor, view: View, path: Path) -> tuple[Tensor, Tensor] | None:
    """Return the likeliest tokens at each committed one, when a row asks for them."""
    if not view.logprobs:
        return None
    ids, values = top_logprobs(logits, view.logprobs)
    chosen = path.chosen.clamp(min=0)
    return ids[chosen], values[chosen]


def _gaps(
    logits: Tensor,
    verified: tuple[Tensor, Tensor],
    tree: Tree,
    view: View,
    noise: Tensor | None,
    path: Path,
    allowed: Permits | None,
) -> Tensor:
    """Return [R, P] the lead of each chosen token over the next best in what was compared, in units of logits."""
    rows, nodes = verified
    scored = filter_logits(logits, rows, nodes, tree, view.sampling, allowed)
    scale = torch.ones(len(rows))
    if noise is not None:
        hot = torch.from_numpy(view.sampling.sampled)[rows]
        place = torch.where(tree.forced[rows], 0, tree.depths[rows, nodes])
        scored = torch.where(hot[:, None], scored + noise[rows, place], scored)
        scale = torch.where(hot, torch.from_numpy(view.sampling.temperature)[rows], 1.0)
    best = scored.topk(2, -1).values
    return ((best[:, 0] - best[:, 1]) * scale)[path.chosen.clamp(min=0)]
