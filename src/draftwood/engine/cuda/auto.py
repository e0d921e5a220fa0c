"""`--tree-budget auto` on a GPU: the device cuts each tree, the host decides one step later how much to grow, and whether at all.

What steps cost is measured at the start, before there are requests, on pages that nobody has yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.engine.cuda.state import pinned
from draftwood.engine.scheduler import StepPlan
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes.ref import ONE, Costs
from draftwood.model.cuda.keys import Sizes
from draftwood.spec.policy import AutoSize, CostTable

NEAR = 1024
"""Committed tokens of the rows whose steps are timed."""
NODES = (2, 5, 9, 17, 33, 65)
"""Nodes of a row, the root included, at which a drafted step is timed."""
FAR = 16384
"""Committed tokens at which steps are timed a second time, where rows may be that long: attention is no small part there."""
MOVED = 1.25
"""Costs are told anew when the longest row has grown or shrunk by this factor."""
Time = Callable[[int, int, int], tuple[float, int]]
"""(rows, nodes of each, committed tokens of each) -> (seconds of a step, its nodes in all); one node: without a draft."""


class AutoTrees:
    """Costs and calibration on the device, and the policy of the host."""

    def __init__(self, sizes: Sizes, rows: int, max_budget: int, context: int, device: torch.device) -> None:
        """context: most committed tokens of a row."""
        self._sizes, self._budget, self._device = sizes, max_budget, device
        self.nodes = tuple(n for n in NODES if n <= max_budget + 1) or (2,)
        near = min(NEAR, max(context // 2, 1))
        self.contexts = (near, min(FAR, context // 2)) if context >= 8 * near else (near,)
        self.counts = [min(r, rows) for r in sizes.rows]
        self.calibration = sizes_op.allocate(device)
        self.costs = {r: self._empty(r) for r in sizes.rows}
        """By rows of a graph."""
        self.policy: AutoSize | None = None
        self._plain = np.ones((len(self.contexts), len(self.counts)))
        self._drafted = np.ones((len(self.contexts), len(self.counts), len(self.nodes)))
        self._totals = np.array([[r * n for n in self.nodes] for r in sizes.rows], np.int64)
        self._told = 0.0

    def _empty(self, rows: int) -> Costs:
        totals = torch.tensor([rows * n for n in self.nodes], dtype=torch.int32, device=self._device)
        return Costs(totals, torch.ones(len(self.nodes), device=self._device))

    def measure(self, time: Time) -> None:
        """Time steps of every number of rows that has graphs of its own. What was accepted in them, after texts of nobody, is
        forgotten."""
        for c, context in enumerate(self.contexts):
            for r, count in enumerate(self.counts):
                self._plain[c, r] = time(count, 1, context)[0]
                found = [time(count, n, context) for n in self.nodes]
                self._drafted[c, r] = [seconds for seconds, _ in found]
                self._totals[r] = [total for _, total in found]
        # Costs never fall as nodes grow: one above a larger size's was disturbed. And no two stand at one place.
        self._drafted = np.minimum.accumulate(self._drafted[..., ::-1], axis=-1)[..., ::-1]
        for totals in self._totals:
            for i in range(1, len(totals)):
                totals[i] = max(totals[i], totals[i - 1] + 1)
        self.calibration.predicted.zero_()
        self.calibration.observed.zero_()
        self.calibration.ratio.fill_(1)
        self._tell(self.contexts[0])

    def _tell(self, context: float) -> None:
        """Give the device and the policy what steps cost where rows have `context` tokens."""
        self._told = context
        part = 0.0
        if len(self.contexts) > 1:
            part = max((context - self.contexts[0]) / (self.contexts[1] - self.contexts[0]), 0.0)
        plain = np.maximum(self._plain[0] + (self._plain[-1] - self._plain[0]) * part, self._plain[0] / 2)
        drafted = np.maximum(self._drafted[0] + (self._drafted[-1] - self._drafted[0]) * part, self._drafted[0] / 2)
        drafted = np.maximum.accumulate(drafted, axis=-1)
        table = CostTable.of(self.counts, self.nodes, drafted.tolist(), plain.tolist())
        if self.policy is None:
            self.policy = AutoSize(table, self._budget)
        self.policy.costs = table
        for r, rows in enumerate(self._sizes.rows):
            self._send(self.costs[rows].totals, self._totals[r].astype(np.int32))
            self._send(self.costs[rows].seconds, drafted[r].astype(np.float32))

    def _send(self, to: Tensor, values: NDArray[Any]) -> None:
        staged = pinned(4 * len(values), self._device).view(to.dtype)
        staged.copy_(torch.from_numpy(values))
        to.copy_(staged, non_blocking=True)

    def sized(self, plan: StepPlan) -> StepPlan:
        """Set how much the automatic rows of a step grow; 0 where trees do not pay at this load."""
        if self.policy is None or not any(plan.auto):
            return plan
        if len(self.contexts) > 1 and not self._told / MOVED <= max(plan.longest, self.contexts[0]) <= self._told * MOVED:
            self._tell(max(plan.longest, self.contexts[0]))
        most = self.policy.budget(len(plan.rows))
        budgets = tuple(min(b, most) if auto else b for b, auto in zip(plan.budgets, plan.auto, strict=True))
        return dataclasses.replace(plan, budgets=budgets, auto=tuple(auto and most > 0 for auto in plan.auto))

    def learn(self, plan: StepPlan, nodes: NDArray[np.int64], expected: int) -> None:
        """Learn from a step's live nodes [rows] and its expected tokens, as `sizes.fit` counts them."""
        if self.policy is not None and any(plan.auto) and not any(plan.chunks):
            largest = int(nodes[np.array(plan.auto)].max()) - 1
            self.policy.learn(len(plan.rows), largest, int(nodes.sum()), expected / ONE)
