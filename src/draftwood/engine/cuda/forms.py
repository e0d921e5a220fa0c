"""Answers with a form on a GPU: what a grammar allows at every verified node, found by the host while the target runs.

Grammars live on the host, so steps with such rows cannot be a graph from end to end: trees are copied away when they have grown,
the target's graph starts, and before the choice the masks arrive. And a next step has to wait for what this one commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.engine.cuda.state import pinned
from draftwood.engine.scheduler import Start, StepPlan
from draftwood.model.cuda.keys import LINES
from draftwood.spec.grammar import Constraint, Grammars

WORD = 32


class Forms:
    """The grammars of running rows, and the masks of a step: bits int32 [LINES, words], lines int32 [verified] (-1: no mask)."""

    def __init__(self, verified: int, vocab: int, device: torch.device, grammars: Grammars | None) -> None:
        self._grammars, self._device = grammars, device
        self.bits = torch.zeros(LINES, -(-vocab // WORD), dtype=torch.int32, device=device)
        self.lines = torch.full((verified,), -1, dtype=torch.int32, device=device)
        self._running: dict[int, Constraint] = {}

    def begin(self, start: Start) -> None:
        """Take note of a row that begins, with or without a grammar."""
        self._running.pop(start.row, None)
        if start.params.grammar is not None and self._grammars is not None:
            self._running[start.row] = self._grammars.start(start.params.grammar)
            self._running[start.row].commit(start.generated)

    def of(self, plan: StepPlan) -> dict[int, Constraint]:
        """The grammars of a plan's rows that emit, by place in the plan."""
        if not self._running:
            return {}
        found = {i: self._running.get(row) for i, row in enumerate(plan.rows) if plan.emits[i]}
        return {i: constraint for i, constraint in found.items() if constraint is not None}

    @staticmethod
    def fitted(plan: StepPlan, formed: Sequence[int]) -> StepPlan:
        """The plan with trees of formed rows small enough for the masks there is room for."""
        most = LINES // max(len(formed), 1) - 1
        budgets = tuple(min(b, most) if i in formed else b for i, b in enumerate(plan.budgets))
        return dataclasses.replace(plan, budgets=budgets)

    def tell(self, formed: dict[int, Constraint], trees: HostTrees, firsts: NDArray[np.int64], results: Sequence[int]) -> None:
        """Send the masks of a step. firsts [places]: where a place's verified nodes begin; results: place of each plan row."""
        places: list[NDArray[np.int64]] = []
        parts: list[NDArray[np.int32]] = []
        for i, constraint in formed.items():
            at = results[i]
            if trees.forced[at]:
                nodes, bits = constraint.masks([0], [-1])
            else:
                count = int(trees.counts[at])
                nodes, bits = constraint.masks(trees.tokens[at, :count].tolist(), trees.parents[at, :count].tolist())
            places.append(firsts[at] + np.array(nodes, np.int64))
            parts.append(bits)
        lines = np.full(len(self.lines), -1, np.int32)
        every = np.concatenate(places)
        lines[every] = np.arange(len(every))
        self._send(self.lines, lines)
        self._send(self.bits[: len(every)], np.concatenate(parts)[:, : self.bits.shape[1]])

    def _send(self, to: Tensor, values: NDArray[np.int32]) -> None:
        staged = pinned(4 * values.size, self._device).view(torch.int32).view(values.shape)
        staged.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        to.copy_(staged, non_blocking=True)


@dataclass(frozen=True)
class HostTrees:
    """A step's trees on the host, by place: tokens, parents [places, N]; counts, forced [places]."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    counts: NDArray[np.int64]
    forced: NDArray[np.bool_]
