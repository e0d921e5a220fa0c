"""`--tree-budget auto` on a GPU: the device cuts each tree, the host decides one step later how much to grow, and whether at all.

What steps cost is measured at the start, before there are requests, on pages that nobody has yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.engine.scheduler import StepPlan
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes.ref import ONE, Costs
from draftwood.model.cuda.keys import Sizes
from draftwood.spec.policy import AutoSize, CostTable

NODES = (2, 5, 9, 17, 33, 65)
"""Nodes of a row, the root included, at which a drafted step is timed."""
Time = Callable[[int, int], tuple[float, int]]
"""(rows, nodes of each) -> (seconds of a step, its nodes in all); one node: without a draft."""


class AutoTrees:
    """Costs and calibration on the device, and the policy of the host."""

    def __init__(self, sizes: Sizes, rows: int, max_budget: int, device: torch.device) -> None:
        self._sizes, self._rows, self._budget = sizes, rows, max_budget
        self.nodes = tuple(n for n in NODES if n <= max_budget + 1) or (2,)
        self.calibration = sizes_op.allocate(device)
        self.costs = {r: self._flat(r, device) for r in sizes.rows}
        """By rows of a graph."""
        self.policy: AutoSize | None = None

    def _flat(self, rows: int, device: torch.device) -> Costs:
        totals = torch.tensor([rows * n for n in self.nodes], dtype=torch.int32, device=device)
        return Costs(totals, torch.ones(len(self.nodes), device=device))

    def measure(self, time: Time) -> None:
        """Time steps of every number of rows that has graphs of its own. What was accepted in them, after texts of nobody, is
        forgotten."""
        counts = [min(r, self._rows) for r in self._sizes.rows]
        plain, drafted = [], []
        for rows, count in zip(self._sizes.rows, counts, strict=True):
            plain.append(time(count, 1)[0])
            found = [time(count, n) for n in self.nodes]
            drafted.append([seconds for seconds, _ in found])
            self._tell(rows, [total for _, total in found], drafted[-1])
        self.policy = AutoSize(CostTable.of(counts, self.nodes, drafted, plain), self._budget)
        self.calibration.predicted.zero_()
        self.calibration.observed.zero_()
        self.calibration.ratio.fill_(1)

    def _tell(self, rows: int, totals: Sequence[int], seconds: Sequence[float]) -> None:
        """Give the device what was measured. More nodes never cost less, and never stand at the same place twice."""
        order = np.arange(len(totals))
        rising = np.maximum.accumulate(np.array(totals) - order) + order
        least = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
        costs = self.costs[rows]
        costs.totals.copy_(torch.from_numpy(rising.astype(np.int32)))
        costs.seconds.copy_(torch.from_numpy(least.astype(np.float32)))

    def sized(self, plan: StepPlan) -> StepPlan:
        """Set how much the automatic rows of a step grow; 0 where trees do not pay at this load."""
        if self.policy is None or not any(plan.auto):
            return plan
        most = self.policy.budget(len(plan.rows))
        budgets = tuple(min(b, most) if auto else b for b, auto in zip(plan.budgets, plan.auto, strict=True))
        return dataclasses.replace(plan, budgets=budgets, auto=tuple(auto and most > 0 for auto in plan.auto))

    def learn(self, plan: StepPlan, nodes: NDArray[np.int64], expected: int) -> None:
        """Learn from a step's live nodes [rows] and its expected tokens, as `sizes.fit` counts them."""
        if self.policy is not None and any(plan.auto) and not any(plan.chunks):
            largest = int(nodes[np.array(plan.auto)].max()) - 1
            self.policy.learn(len(plan.rows), largest, int(nodes.sum()), expected / ONE)
