"""How much automatic trees grow in the next step on a GPU, and whether at all: one of the sizes that have graphs. No torch.

A step that may hold larger trees is another graph and takes longer, whatever it holds. Trees are nested, so a step tells what it
would have returned with every smaller size, at the cost of that size's graph (`kernels/sizes`): sizes are compared within the same
step, not across steps that differ by much more. A larger size has to be tried to be known, now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST = 16
"""Nodes to grow before anything is known."""
SHORTEST, LONGEST = 8, 64
"""Steps between two looks at sizes above the best known one."""
PAUSE = 128
"""Most plain steps between two tries of drafting that does not pay."""
SHARE = 0.01
"""Of all time: what tries of drafting that does not pay may cost."""
SAMPLED, CLEAR, ENOUGH = 4, 1.1, 64
"""Of steps with the best size one in so many is learned from, where it gives so much more than plain steps and so many have been
learned from: what a step tells takes the host 15 us."""
DOUBT = 1.02
"""How much more tokens per second a larger size must promise: what its graph costs is not known better."""
PULL = 0.05
"""Weight of a step beside what many have told: steps differ by a half, and what drafting gains may be a tenth."""


@dataclass
class _Load:
    """What is known at one number of rows. advantage: tokens per second with the smallest size over plain decoding's; ratios: with
    each size over the one below it, of the steps that told both (the first is not used)."""

    best: int
    advantage: float = 1.0
    steps: int = 0
    """Learned from; of those that drafted."""
    drafted: int = 0
    ratios: list[float] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    """Steps that told each ratio."""
    waiting: int = 0
    look: int = SHORTEST
    since: int = 0
    looks: int = -1
    """Looks at larger sizes so far, less one: at each in turn, for one may pay where the next does not."""

    def over_plain(self, size: int) -> float:
        """Tokens per second with a size over plain decoding's."""
        found = self.advantage
        for ratio in self.ratios[1 : size + 1]:
            found *= ratio
        return found


class Budgets:
    """The choice among sizes, by load: any number that names one, such as the rows of a graph."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: most nodes of a row beyond its root, ascending."""
        self.sizes = tuple(sizes)
        self._loads: dict[int, _Load] = {}

    def _load(self, load: int, most: int) -> _Load:
        if load not in self._loads:
            first = max(i for i, size in enumerate(self.sizes[: most + 1]) if size <= max(FIRST, self.sizes[0]))
            count = len(self.sizes)
            self._loads[load] = _Load(first, ratios=[1.0] * count, known=[0] * count)
        return self._loads[load]

    def beside(self, load: int, most: int) -> int:
        """Nodes to grow in a step that teaches nothing, as beside prompts."""
        state = self._load(load, most)
        return 0 if state.waiting else self.sizes[state.best]

    def next(self, load: int, most: int) -> int:
        """Nodes to grow in the next step, 0 where drafting does not pay. most: the largest size, by place, that is to be had. Call
        once a step."""
        state = self._load(load, most)
        if state.waiting:
            state.waiting -= 1
            return 0
        state.since += 1
        if state.since > state.look and state.best < most:
            state.since, state.looks = 0, state.looks + 1
            return self.sizes[state.best + 1 + state.looks % (most - state.best)]
        return self.sizes[state.best]

    def wants(self, load: int, most: int, size: int) -> bool:
        """Is a step with a size, by place, to be learned from? Call once a step that drafted."""
        state = self._load(load, most)
        state.drafted += 1
        unclear = size != state.best or state.steps < ENOUGH or state.over_plain(size) < CLEAR
        return unclear or not state.drafted % SAMPLED

    def learn(self, load: int, most: int, over_plain: Sequence[float], lasted: float) -> None:
        """Take note of a step that drafted: tokens per second over plain decoding's, with each size up to the one that it had, and
        how many plain steps it took as long as."""
        state, tried = self._load(load, most), len(over_plain) - 1
        state.steps += 1
        state.advantage += (over_plain[0] - state.advantage) * max(1 / state.steps, PULL)
        for size in range(1, tried + 1):
            state.known[size] += 1
            pull = max(1 / state.known[size], PULL)
            state.ratios[size] += (over_plain[size] / over_plain[size - 1] - state.ratios[size]) * pull
        told = [size for size in range(most + 1) if size == 0 or state.known[size]]
        most_over = max(map(state.over_plain, told))
        best = next(size for size in told if state.over_plain(size) * DOUBT >= most_over)
        if best != state.best:
            state.look = SHORTEST
        elif tried > best:
            state.look = min(2 * state.look, LONGEST)
        state.best = best
        found = state.over_plain(best)
        if found < 1:
            # A step against all that is known is asked again at once: loads and texts change.
            pause = 1.0 if over_plain[min(best, tried)] >= 1 else (1 - found) * lasted / SHARE
            state.waiting = round(min(max(pause, 1), PAUSE))
