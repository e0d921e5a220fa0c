"""How long steps take, measured with real forwards that leave no trace, for the `auto` tree budget.

A load (number of rows) is measured when it first occurs. Probes read and write the sink page only, so they can run
between the steps of live requests; rank 0 decides them and all ranks run them. From then on real steps correct the
table: contexts grow, and a machine that others use was perhaps disturbed while a probe ran.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftwood.engine.request import SamplingParams
from draftwood.engine.rows import View
from draftwood.engine.scheduler import StepPlan
from draftwood.engine.step import Parts, run
from draftwood.spec.policy import CostTable
from draftwood.spec.sampling import Sampling

NODES = (2, 5, 9, 17, 33, 65)
"""Nodes of a row, the root included, at which a drafted step is timed."""
REPEATS = 3
"""Of which the fastest counts; the first warms up."""
PULL = 0.1
"""How far a real step pulls what the table says of it: ten steps move it by two thirds of the difference."""
OUTLIER = 4.0
"""A real step counts as at most this many times slower or faster than the table says."""
SHIFT = 0.05
"""Ranks are told a corrected table when a time has moved by more than this share."""


@dataclass(frozen=True)
class Probe:
    """A step of `rows` equal rows after `context` tokens: `nodes` of them each, drafted, or the root alone."""

    rows: int
    nodes: int
    depth: int
    """Of the tree; 0 does not draft."""
    context: int
    sampled: bool
    """With noise; it costs time of its own for every depth."""


@dataclass(frozen=True)
class Costs:
    """The table that rank 0 has measured, for steps with noise or without."""

    sampled: bool
    table: CostTable


def measure(parts: Parts, probe: Probe) -> float:
    """Return the seconds of the fastest of a few such steps. Rows' state, pages and windows stay as they are."""
    alone = dataclasses.replace(parts, auto=None)
    # A view of its own for each: one that ran keeps its noise, and the next step would get that for nothing.
    return min(sum(run(alone, _view(parts, probe)).seconds.values()) for _ in range(REPEATS))


def _view(parts: Parts, probe: Probe) -> View:
    rows, device = probe.rows, parts.device
    context = min(probe.context, parts.positions - 1)
    pages = -(-(context + probe.nodes) // parts.kv.page_size)
    plan = StepPlan(
        starts=(),
        rows=tuple(range(rows)),
        chunks=((),) * rows,
        emits=(True,) * rows,
        budgets=(probe.nodes - 1,) * rows,
        auto=(False,) * rows,
        depth=probe.depth,
        longest=context,
    )
    return View(
        plan=plan,
        ids=torch.arange(rows, device=device),
        lengths=torch.full((rows,), context, device=device),
        roots=torch.zeros(rows, dtype=torch.long, device=device),
        tables=torch.full((rows, pages), parts.kv.sink, device=device),
        sampling=Sampling.build([SamplingParams(temperature=float(probe.sampled))] * rows, [0] * rows),
        warm=torch.empty(0, dtype=torch.long),  # nothing is observed
        logprobs=None,
    )


@dataclass
class _Load:
    """Seconds of a plain step and of drafted steps by nodes; `told`: the same as the ranks know them."""

    plain: float
    drafted: list[float]
    told: tuple[float, ...] = ()

    def times(self) -> tuple[float, ...]:
        return (self.plain, *self.drafted)


class Timing:
    """What steps cost at the loads that occurred. Loads are rounded up to a power of two, at most `max_rows`."""

    def __init__(self, max_rows: int, max_budget: int, block: int) -> None:
        self._max_rows, self._block = max_rows, block
        self._nodes = tuple(n for n in NODES if n <= max_budget + 1) or (2,)
        self._known: dict[bool, dict[int, _Load]] = {False: {}, True: {}}

    def _bucket(self, rows: int) -> int:
        return min(1 << max(rows - 1, 0).bit_length(), self._max_rows)

    def missing(self, rows: int, sampled: bool) -> bool:
        """True when a load like `rows` rows, with noise or without, was never measured."""
        return self._bucket(rows) not in self._known[sampled]

    def learn(self, rows: int, context: int, sampled: bool, time: Callable[[Probe], float]) -> Costs:
        """Measure the load of `rows` rows by `time` and return the table of all known loads.

        A drafted step is timed against a plain one right beside it, because the policy lives by their ratio and a
        machine that others use may be twice as slow a second later. Sizes beyond those that a tree is likely to repay
        (half a block per row) are extrapolated instead.
        """
        bucket = self._bucket(rows)
        plain: list[float] = []
        ratios: list[float] = []
        for nodes in self._nodes:
            if len(ratios) >= 2 and ratios[-1] > self._block / 2:
                a, b = self._nodes[len(ratios) - 2], self._nodes[len(ratios) - 1]
                slope = max(ratios[-1] - ratios[-2], 0.0) / (b - a)
                ratios.append(ratios[-1] + slope * (nodes - b))
            else:
                plain.append(time(Probe(bucket, 1, 0, context, sampled)))
                ratios.append(time(Probe(bucket, nodes, self._block - 1, context, sampled)) / plain[-1])
        self._known[sampled][bucket] = _Load(min(plain), [ratio * min(plain) for ratio in ratios])
        return self._table(sampled)

    def correct(self, rows: int, nodes: float, drafted: bool, sampled: bool, seconds: float) -> Costs | None:
        """Learn from a real step of `rows` rows with `nodes` nodes each on average; return the new table when it has
        moved enough to tell, else None. Loads that were not measured themselves (3 rows, say) teach nothing."""
        load = self._known[sampled].get(rows)
        if load is None or seconds <= 0:
            return None
        if not drafted:
            load.plain *= _pull(seconds, load.plain)
        else:
            high = min(max(bisect_left(self._nodes, nodes), 1), len(self._nodes) - 1)
            low = max(high - 1, 0)
            span = self._nodes[high] - self._nodes[low]
            part = min(max((nodes - self._nodes[low]) / span, 0.0), 1.0) if span else 1.0
            pull = _pull(seconds, load.drafted[low] + (load.drafted[high] - load.drafted[low]) * part)
            load.drafted[low] *= pull ** (1 - part)
            load.drafted[high] *= pull**part
            # What really happens is believed before a probe: no smaller size costs more, no larger one less.
            load.drafted[:low] = [min(old, load.drafted[low]) for old in load.drafted[:low]]
            load.drafted[high + 1 :] = [max(old, load.drafted[high]) for old in load.drafted[high + 1 :]]
        moved = max(abs(math.log(now / then)) for now, then in zip(load.times(), load.told, strict=True))
        return self._table(sampled) if moved > SHIFT else None

    def _table(self, sampled: bool) -> Costs:
        known = self._known[sampled]
        loads = sorted(known)
        for load in known.values():
            load.told = load.times()
        table = CostTable.of(loads, self._nodes, [known[n].drafted for n in loads], [known[n].plain for n in loads])
        return Costs(sampled, table)


def _pull(seconds: float, said: float) -> float:
    """The factor by which one real time moves what was said of it."""
    return float(min(max(seconds / said, 1 / OUTLIER), OUTLIER) ** PULL)
