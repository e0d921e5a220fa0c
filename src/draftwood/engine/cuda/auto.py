"""`--tree-budget auto` on a GPU: the device cuts each tree, the host decides one step later how much to grow, and whether at all.

What steps cost is measured at the start, before there are requests, on pages that nobody has yet: by rows, by graph (of plain steps
and of trees up to each size) and by nodes in it. No step costs less than it takes the host (`pace`), which is seen as steps run.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.engine.cuda.budgets import Budgets
from draftwood.engine.cuda.pace import Pace
from draftwood.engine.cuda.state import pinned
from draftwood.engine.scheduler import StepPlan
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes.ref import CAPS, ONE, Costs
from draftwood.model.cuda.keys import Key, Sizes

NEAR = 256
"""Committed tokens of the rows whose steps are timed."""
NODES = (1, 2, 3, 5, 9, 17, 33, 65)
"""Nodes of a row, the root included, at which steps of each graph are timed that has room for them: the same for all graphs, for
times bend, and what is between two points must be as wrong in one graph as in another. One node: a draft for nothing."""
FAR = 16384
"""Committed tokens, at most, at which steps are timed a second time, where rows may be long: attention is no small part there."""
MOVED = 1.25
"""Costs are told anew when the longest row, or what a step takes the host, has grown or shrunk by this factor."""
FADES, SURE = 0.98, 16.0
"""Of the running sums of tokens that were expected and that came: what is left of them a step later, and what stands beside them
while they are small."""
Time = Callable[[int, int, int, int], tuple[float, int]]
"""(rows, nodes of each, committed tokens of each, largest trees of the graph) -> (seconds of a step, its nodes in all); trees of 0:
without a draft."""


@dataclass
class _Curve:
    """Times of steps of one graph: nodes in all, ascending, and seconds near and far [points]."""

    totals: NDArray[np.int64]
    near: NDArray[np.float64]
    far: NDArray[np.float64]

    @staticmethod
    def of(points: Sequence[tuple[float, int]], added: tuple[float, float]) -> _Curve:
        """points: (seconds, nodes in all); added: what the first and the last take longer far away."""
        totals, near = np.array([n for _, n in points], np.int64), np.array([s for s, _ in points])
        for i in range(1, len(totals)):  # no two stand at one place
            totals[i] = max(totals[i], totals[i - 1] + 1)
        # Costs never fall as nodes grow: one above a larger size's was disturbed.
        near = np.minimum.accumulate(near[::-1])[::-1]
        part = (totals - totals[0]) / (totals[-1] - totals[0])
        curve = _Curve(totals, near, near + added[0] + (added[1] - added[0]) * part)
        while len(curve.totals) < len(NODES):
            curve = curve._longer()
        return curve

    def _longer(self) -> _Curve:
        """One point more, along the last segment."""
        more = (np.append(x, 2 * x[-1] - x[-2]) for x in (self.totals, self.near, self.far))
        return _Curve(*more)

    def seconds(self, part: float) -> NDArray[np.float64]:
        """Times where rows are `part` of the way from near to far, or beyond."""
        return np.maximum.accumulate(np.maximum(self.near + (self.far - self.near) * part, self.near / 2))


def _decoding(plan: StepPlan) -> int:
    """Rows of a step that have no piece of a prompt."""
    return plan.chunks.count(())


@functools.lru_cache(64)
def _limited(budgets: tuple[int, ...], auto: tuple[bool, ...], most: int) -> tuple[int, ...]:
    """Budgets, those of automatic rows at most `most`. Kept, for steps are alike: 13 us for 64 rows otherwise, in every one."""
    return tuple([min(budget, most) if chosen else budget for budget, chosen in zip(budgets, auto, strict=True)])


def _linear(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The value at a place: linear between the points, x ascending, and along the outermost segments."""
    high = min(max(bisect_left(x, at), 1), len(x) - 1)
    slope = (y[high] - y[high - 1]) / (x[high] - x[high - 1])
    return y[high - 1] + slope * (at - x[high - 1])


@dataclass(frozen=True)
class _Told:
    """What the device was told of steps of one number of rows, where rows have `context` tokens: by size totals and seconds, none
    below what it takes the host alone or beside prompts, which is not in `seconds`. Lists, since a step asks for single numbers."""

    context: float
    totals: list[list[int]]
    seconds: list[list[float]]
    hosts: tuple[float, float]
    plain: dict[int, float] = field(default_factory=dict)
    """Of plain steps, by rows, as far as it has been asked for."""

    def drafted(self, size: int, nodes: int) -> float:
        """Seconds of a step of so many nodes in all."""
        return max(_linear(self.totals[size], self.seconds[size], nodes), 1e-9)


class AutoTrees:
    """Costs and calibration on the device, and the choice of the host."""

    def __init__(self, sizes: Sizes, rows: int, context: int, device: torch.device) -> None:
        """rows: most of a step; context: most committed tokens of a row."""
        self._sizes, self._device = sizes, device
        self.caps = sizes.budgets[1:]
        near = min(NEAR, max(context // 2, 1))
        self.contexts = (near, min(FAR, context // 2)) if context >= 4 * near else (near,)
        self.counts = [min(r, rows) for r in sizes.rows]
        self.calibration = sizes_op.allocate(device)
        self.costs = {(r, prompts): costs for r in sizes.rows for prompts, costs in zip((False, True), self._empty(), strict=True)}
        """By rows of a graph, and by whether it has pieces of prompts: the host takes longer then. Both have the same totals."""
        self.budgets: Budgets | None = None
        """None until costs are known."""
        self.pace = Pace()
        """Of the host, by rows of a graph and whether there are prompts."""
        self._plain: list[list[float]] = []
        self._curves: list[list[_Curve]] = []
        """By number of rows and size, as far as sizes may pay."""
        self._told: dict[int, _Told] = {}
        self._expected = self._came = 0.0
        """Running sums of tokens of steps that drafted."""

    def _empty(self) -> tuple[Costs, Costs]:
        totals = torch.arange(1, 1 + len(NODES), dtype=torch.int32, device=self._device).repeat(len(CAPS), 1)
        alone, beside = torch.ones(2, len(CAPS), len(NODES), device=self._device)
        return Costs(totals, alone), Costs(totals, beside)

    # ------------------------------------------------------------------------------------------------- what steps cost

    def measure(self, time: Time) -> None:
        """Time steps of every number of rows that has graphs of its own. What was accepted in them, after texts of nobody, is
        forgotten."""
        self._plain, self._curves = [], []
        for count in self.counts:
            self._plain.append([time(count, 1, context, 0)[0] for context in self.contexts])
            self._curves.append(self._measured(time, count, self._plain[-1][0]))
        self.calibration.predicted.zero_()
        self.calibration.observed.zero_()
        self.calibration.ratio.fill_(1)
        self.budgets, self._expected, self._came = Budgets(self.caps), 0.0, 0.0
        for rows, curves in zip(self._sizes.rows, self._curves, strict=True):
            self._send(self.costs[rows, False].totals, np.array(self._filled([c.totals for c in curves]), np.int32))
            self._tell(rows, self.contexts[0])

    def keep(self, rows: int, total: int) -> None:
        """Have steps of the graphs with so many rows keep as many nodes as they can up to `total`, while they are timed."""
        totals = np.arange(total - 1, total - 1 + len(NODES), dtype=np.int32)
        seconds = np.maximum(1.0, 1e3 * (totals - total)).astype(np.float32)
        costs = self.costs[rows, False]
        self._send(costs.totals, np.tile(totals, (len(CAPS), 1)))
        self._send(costs.seconds, np.tile(seconds, (len(CAPS), 1)))

    def _measured(self, time: Time, count: int, plain: float) -> list[_Curve]:
        """Curves of the sizes that may pay: a step that takes longer than plain steps for all tokens that it can return never does,
        and nor do larger ones."""
        curves, longest = list[_Curve](), self._sizes.path * plain
        for cap in self.caps:
            points = list[tuple[float, int]]()
            nodes = [n for n in NODES if n <= 1 + cap]
            for n in nodes:
                points.append(time(count, n, self.contexts[0], cap))
                if len(points) > 1 and points[-1][0] > longest:
                    break
            if curves and points[0][0] > longest:
                break
            ends = (nodes[0], nodes[len(points) - 1])
            added = (0.0, 0.0)
            if len(self.contexts) > 1:
                far = [time(count, n, self.contexts[1], cap)[0] for n in ends]
                added = (far[0] - points[0][0], far[1] - points[-1][0])
            curves.append(_Curve.of(points, added))
            if points[0][0] > longest or len(points) < len(nodes):
                break
        return curves

    def _part(self, context: float) -> float:
        """How far a context is on the way from near to far."""
        if len(self.contexts) == 1:
            return 0.0
        return max((context - self.contexts[0]) / (self.contexts[1] - self.contexts[0]), 0.0)

    def _tell(self, rows: int, context: float) -> None:
        """Give the device and the host's choice what steps of the graphs with so many rows cost, where these have `context` tokens;
        nothing costs less than it takes the host. A step of another load tells its own."""
        curves, part = self._curves[self._sizes.rows.index(rows)], self._part(context)
        seconds = [c.seconds(part).tolist() for c in curves]
        found = _Told(context, [c.totals.tolist() for c in curves], seconds, self._hosts(rows))
        filled = np.array(self._filled(seconds), np.float32)
        for prompts, host in zip((False, True), found.hosts, strict=True):
            self._send(self.costs[rows, prompts].seconds, np.maximum(filled, np.float32(host)))
        self._told[rows] = found

    def _hosts(self, rows: int) -> tuple[float, float]:
        """What a step of the graphs with so many rows takes the host, alone and beside prompts."""
        return self.pace.seconds((rows, False)), self.pace.seconds((rows, True))

    @staticmethod
    def _filled(by_size: list[Any]) -> list[Any]:
        """One for each size; what stands in place of sizes that do not pay is not read."""
        return [by_size[min(c, len(by_size) - 1)] for c in range(len(CAPS))]

    def _keep_told(self, rows: int, longest: int) -> None:
        """Tell the costs of a load anew, if contexts have grown or shrunk, or if the host has become faster or slower and that
        matters: the device is done before it."""
        found, context = self._told[rows], max(longest, self.contexts[0])
        moved = len(self.contexts) > 1 and not found.context / MOVED <= context <= found.context * MOVED
        paced = any(
            max(now, told) > found.seconds[0][0] and not told / MOVED <= now <= told * MOVED
            for now, told in zip(self._hosts(rows), found.hosts, strict=True)
        )
        if moved or paced:
            self._tell(rows, context)

    def _send(self, to: Tensor, values: NDArray[Any]) -> None:
        staged = pinned(4 * values.size, self._device).view(to.dtype).view(values.shape)
        staged.copy_(torch.from_numpy(values))
        to.copy_(staged, non_blocking=True)

    def plain_seconds(self, rows: int) -> float:
        """What a step of so many rows takes the device, between the numbers that were timed, at the context that was told."""
        told = self._told[self._load(rows)[0]]
        if rows not in told.plain:
            part = self._part(told.context)
            plain = [max(times[0] + (times[-1] - times[0]) * part, times[0] / 2) for times in self._plain]
            least, most = self.counts[0], self.counts[-1]
            told.plain[rows] = plain[0] if len(plain) == 1 else _linear(self.counts, plain, min(max(rows, least), most))
        return told.plain[rows]

    # --------------------------------------------------------------------------------------------------- how much to grow

    def _load(self, rows: int) -> tuple[int, int]:
        """The load of a step of so many decoding rows, and the largest size there, by place."""
        place = bisect_left(self._sizes.rows, rows)
        return self._sizes.rows[place], len(self._curves[place]) - 1

    def begins(self, plan: StepPlan, now: float) -> None:
        """A step is about to be launched, at `now` seconds of a clock."""
        free = _decoding(plan)
        load = (self._load(free)[0], free < len(plan.rows)) if free and self.budgets is not None else None
        self.pace.launched(load, now)

    def sized(self, plan: StepPlan) -> StepPlan:
        """Set how much the automatic rows of a step grow; 0 where trees do not pay at this load."""
        if self.budgets is None or not any(plan.auto):
            return plan
        load = self._load(_decoding(plan))
        self._keep_told(load[0], plan.longest)
        most = self.budgets.beside(*load) if any(plan.chunks) else self.budgets.next(*load)
        budgets = _limited(plan.budgets, plan.auto, most)
        return dataclasses.replace(plan, budgets=budgets, auto=plan.auto if most else (False,) * len(plan.auto))

    def learn(self, plan: StepPlan, key: Key, expected: Sequence[int], sized: Sequence[int], came: int) -> None:
        """Learn from a step: what `sizes.fit` has told by size (expected tokens times 2^18, nodes), and the tokens that came.
        Steps with prompts, and those in which not all trees were grown to their graph's size, teach nothing."""
        if self.budgets is None or key.budget == 0 or any(plan.chunks):
            return
        if not {0, key.budget}.issuperset(plan.budgets):
            return
        if not all(plan.auto) and any(b and not auto for b, auto in zip(plan.budgets, plan.auto, strict=True)):
            return
        rows, tried = len(plan.rows), self.caps.index(key.budget)
        load, most = self._load(rows)
        if tried > most or not self.budgets.wants(load, most, tried):
            return
        self._expected = FADES * self._expected + expected[tried] / ONE
        self._came = FADES * self._came + came
        told, host = self._told[key.rows], self._hosts(key.rows)[0]
        plain = max(self.plain_seconds(rows), host)
        bias = (self._came + SURE) / (self._expected + SURE)
        lasted = [max(told.drafted(c, sized[c]), host) / plain for c in range(tried + 1)]
        over_plain = [bias * expected[c] / ONE / rows / lasted[c] for c in range(tried + 1)]
        self.budgets.learn(load, most, over_plain, lasted[-1])
