"""How large each tree should be: a cost table, calibrated path probabilities, and nothing about taste.

A step with trees is worth (sum of expected accept lengths) / (seconds of the step). Nodes stand in pop order, so a
smaller tree is a prefix, and the best sizes are found by taking nodes of all rows in order of their gain and looking
up the cost of every total. Everything is a function of its inputs: ranks that see the same numbers decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.config import MAX_BUDGET
from draftwood.errors import ConfigError
from draftwood.spec.accept import Path
from draftwood.spec.noise import COLD
from draftwood.spec.rank import host
from draftwood.spec.tree import Tree

FIRST_BUDGET = 16
"""Nodes to grow before anything is known."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 64
"""Plain steps between two tries of drafting that did not pay."""
CONTROL = 64
"""One drafted step in so many is a plain one instead, so that the time of plain steps stays known."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step, measured or predicted.

    rows [A] and nodes [B] ascend; nodes counts a row's nodes, root included; drafted [A, B]: a step that drafts and
    verifies that many nodes in each row; plain [A]: a step that does not draft and verifies the roots alone.
    Times never fall as nodes grow: one above a larger size's was disturbed, and is lowered to it.
    """

    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    drafted: NDArray[np.float64]
    plain: NDArray[np.float64]

    @staticmethod
    def of(rows: Sequence[int], nodes: Sequence[int], drafted: Sequence[Sequence[float]], plain: Sequence[float]) -> CostTable:
        """Check and build. Raises ConfigError when sizes do not match or a time is not a positive number."""
        table, single = np.array(drafted, np.float64), np.array(plain, np.float64)
        if table.shape != (len(rows), len(nodes)) or single.shape != (len(rows),):
            raise ConfigError(
                f"cost table of shape {table.shape} with {single.shape} plain steps does not fit "
                f"{len(rows)} row counts x {len(nodes)} node counts; measure it again"
            )
        if list(rows) != sorted(set(rows)) or list(nodes) != sorted(set(nodes)) or min(*rows, *nodes) < 1:
            raise ConfigError(f"row counts {list(rows)} and node counts {list(nodes)} of a cost table must ascend from 1")
        if not (np.isfinite(table).all() and np.isfinite(single).all() and (table > 0).all() and (single > 0).all()):
            raise ConfigError("a time in the cost table is not a positive number; measure it again")
        return CostTable(tuple(rows), tuple(nodes), np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1], single)

    def seconds(self, rows: int, total: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of drafted steps of `rows` rows with `total` nodes together (any shape), linear between the
        table's points and along its last segment beyond them."""
        per_row = np.asarray(total, np.float64) / max(rows, 1)
        low, high, part = _bracket(self.rows, rows)
        a, b = _line(self.nodes, self.drafted[low], per_row), _line(self.nodes, self.drafted[high], per_row)
        return np.maximum(a + (b - a) * part, 1e-12)

    def plain_seconds(self, rows: int) -> float:
        """Return the time of a plain step of `rows` rows."""
        low, high, part = _bracket(self.rows, rows)
        return max(float(self.plain[low] + (self.plain[high] - self.plain[low]) * part), 1e-12)


def _bracket(points: tuple[int, ...], at: float) -> tuple[int, int, float]:
    """Return the two points around `at` (or the outermost two) and how far between, or beyond, them it lies."""
    if len(points) == 1:
        return 0, 0, 0.0
    high = min(max(int(np.searchsorted(points, at)), 1), len(points) - 1)
    return high - 1, high, (at - points[high - 1]) / (points[high] - points[high - 1])


def _line(points: tuple[int, ...], values: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate `values` at `points` linearly; outside, follow the outermost segment."""
    if len(points) == 1:
        return np.full(at.shape, values[0])
    x = np.array(points, np.float64)
    high = np.clip(np.searchsorted(x, at), 1, len(x) - 1)
    part = (at - x[high - 1]) / (x[high] - x[high - 1])
    return values[high - 1] + (values[high] - values[high - 1]) * part


class Calibration:
    """Predicted against observed acceptance, kept online, by temperature class and size of the prediction.

    A node's predicted probability is exp(its cumulative draft log-probability). Its correction is observed / predicted
    acceptances of its bin, pulled to 1 by PRIOR acceptances; a bin forgets half of what it knows after MEMORY of them.
    """

    EDGES = np.array([-8.0, -6.0, -5.0, -4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.7, -0.4, -0.2, -0.1, -0.05])
    WARM = 0.8
    PRIOR, MEMORY = 4.0, 64.0

    def __init__(self) -> None:
        shape = (3, len(self.EDGES) + 1)
        self.predicted, self.observed = np.zeros(shape), np.zeros(shape)

    def kinds(self, temperature: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the class of each temperature: 0 greedy, 1 up to WARM, 2 above."""
        return (temperature > COLD).astype(np.int64) + (temperature > self.WARM)

    def probability(self, logprob: NDArray[np.float32], temperature: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the corrected probability [R, N] that a node is accepted; temperature [R]."""
        ratio = (self.observed + self.PRIOR) / (self.predicted + self.PRIOR)
        bins = np.searchsorted(self.EDGES, logprob)
        return np.minimum(np.exp(logprob.astype(np.float64)) * ratio[self.kinds(temperature)[:, None], bins], 1.0)

    def observe(self, tree: Tree, path: Path, temperature: NDArray[np.float32]) -> None:
        """Count the verified nodes of free rows of one step."""
        counts, forced, nodes = host(tree.counts), host(tree.forced), host(path.nodes)
        logprob = host(tree.logprob)
        rows, width = logprob.shape
        accepted = np.zeros((rows, width), bool)
        row, place = np.nonzero(nodes > 0)
        accepted[row, nodes[row, place]] = True
        r, n = np.nonzero((np.arange(width) < counts[:, None]) & ~forced[:, None])
        r, n = r[n > 0], n[n > 0]
        kind, bins = self.kinds(temperature)[r], np.searchsorted(self.EDGES, logprob[r, n])
        np.add.at(self.predicted, (kind, bins), np.exp(logprob[r, n].astype(np.float64)).clip(max=1.0))
        np.add.at(self.observed, (kind, bins), accepted[r, n].astype(np.float64))
        full = np.maximum(self.predicted, self.observed) > self.MEMORY
        self.predicted[full] /= 2
        self.observed[full] /= 2


@dataclass(frozen=True)
class Fit:
    """Sizes [R] (nodes to keep beyond each root), the expected accept length of all free rows together, and the
    seconds of the drafted step with these sizes."""

    sizes: NDArray[np.int64]
    tokens: float
    seconds: float


def fit_sizes(tree: Tree, costs: CostTable, probability: NDArray[np.float64]) -> Fit:
    """Choose the sizes that maximise expected tokens per second of this step, drafting already paid for.

    probability [R, N]: chance that each node is accepted. Nodes are taken in order of the running minimum of their
    gain along the row, which keeps every choice a prefix; among equals the lower row, then the lower node. The first of
    equally good totals wins, so the smallest trees.
    """
    counts, forced = host(tree.counts), host(tree.forced)
    rows, width = probability.shape
    live = (np.arange(width) < counts[:, None]) & ~forced[:, None]
    live[:, 0] = False
    order_by = np.minimum.accumulate(np.where(live, probability, np.where(np.arange(width) == 0, np.inf, -1.0)), axis=1)
    r, n = np.nonzero(live)
    order = np.argsort(-order_by[r, n], kind="stable")
    gain = np.concatenate([[0.0], np.cumsum(probability[r, n][order])])
    free = int((~forced).sum())
    fixed = int(counts[forced].sum()) + free
    seconds = costs.seconds(rows, fixed + np.arange(len(gain)))
    best = int(np.argmax((free + gain) / seconds))
    sizes = np.where(forced, counts - 1, np.bincount(r[order[:best]], minlength=rows))
    return Fit(sizes, float(free + gain[best]), float(seconds[best]))


@dataclass
class _Load:
    """What is known about drafting at one load (rows, to a power of two)."""

    budget: int = FIRST_BUDGET
    advantage: float | None = None
    pause: int = SHORTEST_PAUSE
    waiting: int = 0
    drafted: int = 0
    """Steps that drafted, in a row."""


@dataclass
class AutoSize:
    """The `auto` tree budget: before a step `budget` says how much to draft, after growth `fit` cuts, and after the
    step `observe` learns. The best trees cannot be worse than plain decoding if the cost table is right: where
    drafting does not pay it is tried once in every 8 to 64 steps, ever more rarely, and where it pays one step in 64 is
    plain, so that whoever keeps the table sees both."""

    costs: CostTable
    max_budget: int = MAX_BUDGET
    calibration: Calibration = field(default_factory=Calibration)
    loads: dict[int, _Load] = field(default_factory=dict)

    def _load(self, rows: int) -> _Load:
        return self.loads.setdefault(max(rows, 1).bit_length(), _Load())

    def budget(self, rows: int) -> int:
        """Return the nodes to grow per row in the next step of `rows` rows; 0: do not draft. Call once per step."""
        load = self._load(rows)
        if load.waiting > 0:
            load.waiting -= 1
            return 0
        load.drafted += 1
        if load.drafted >= CONTROL:
            load.drafted = 0
            return 0
        return min(load.budget, self.max_budget)

    def fit(self, tree: Tree, temperature: NDArray[np.float32]) -> Tensor:
        """Return sizes [R] int64 for `tree.cut`, for a drafted step; temperature [R]."""
        rows = len(temperature)
        found = fit_sizes(tree, self.costs, self.calibration.probability(host(tree.logprob), temperature))
        forced = host(tree.forced)
        free = int((~forced).sum())
        if free:
            load = self._load(rows)
            largest = int(found.sizes[~forced].max())
            load.budget = min(max(2 * largest, 4), self.max_budget)
            if free == rows:  # prompt chunks make a step's time say little about drafting
                self._judge(load, found.tokens / found.seconds * self.costs.plain_seconds(rows) / rows)
        return torch.from_numpy(found.sizes)

    def _judge(self, load: _Load, advantage: float) -> None:
        """Update the running advantage over plain decoding; stop drafting for a while where there is none."""
        trying = load.advantage is not None and load.advantage < 1
        load.advantage = advantage if load.advantage is None or trying else 0.8 * load.advantage + 0.2 * advantage
        if load.advantage >= 1:
            load.pause = SHORTEST_PAUSE
            return
        load.waiting = load.pause
        load.pause = min(2 * load.pause, LONGEST_PAUSE)
        load.budget = max(load.budget, min(FIRST_BUDGET, self.max_budget))

    def observe(self, tree: Tree, path: Path, temperature: NDArray[np.float32]) -> None:
        """Learn from a finished step; `tree` as verified (after `cut`). Plain steps teach nothing."""
        if tree.tokens.shape[1] > 1:
            self.calibration.observe(tree, path, temperature)
