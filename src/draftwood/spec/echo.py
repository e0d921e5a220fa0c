"""What a row's own text says comes next: where the last tokens of a path stood in it before, and what followed.

Code repeats itself, and so do loops: names, calls and lines come again. While a tree grows, the tokens that followed an earlier
place with the same last 2, 3 or 4 tokens get a bonus. Like the previous-token table it only ranks candidates: whatever it
says, the committed tokens are the same.

Tokens a step of nano, 64 tokens each, budget 7, on the 36 built-in prompts and on 36 pieces of installed packages (100 tokens
each), by BONUS 0, 1, 1.5, 2, 2.5: greedy 3.733, 3.908, 3.908, 3.879, 3.872 and 3.845, 4.069, 4.172, 4.172, 4.150. By what is
added before the temperature divides it, 0, .3, .6, 1: at T = .6 3.226, 3.231, 3.260, 3.275 and 2.997, 3.013, 3.088, 3.109; at
T = 1 2.800, 2.800, 2.803, 2.792 and 2.410, 2.421, 2.421, 2.413. Ends of 2 tokens alone gain three quarters as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 4
"""Most tokens of a path that are compared."""
BONUS = 1.5
"""Added to log q of a greedy row for each compared token beyond the first, in nats."""
MOST = 4
"""Followers that are remembered of a place, the newest first."""
WINDOW = 4096
"""Tokens of a prompt that are read, the last ones. A token costs about a kilobyte."""

Tail = tuple[int, ...]
"""The last tokens of a path, at most LONGEST."""


def loudness(temperature: float) -> float:
    """Return what a bonus is multiplied by in z (`spec.tree`): less the hotter a row, which repeats itself less. 0 = greedy."""
    return 1.0 if temperature == 0 else max(0.0, 1 - temperature / 2) / temperature


class Echo:
    """The text of one row, by the ends of all its beginnings."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: the known text, the root included."""
        self.tail: Tail = ()
        """The last tokens of the text."""
        self._followers: dict[Tail, tuple[int, ...]] = {}
        self.extend(tokens[-WINDOW:])

    def extend(self, tokens: Iterable[int]) -> None:
        """Take note of committed tokens."""
        tail, followers = self.tail, self._followers
        for token in tokens:
            for length in range(2, len(tail) + 1):
                key = tail[-length:]
                known = followers.get(key, ())
                if known[:1] != (token,):
                    followers[key] = (token, *(other for other in known if other != token))[:MOST]
            tail = (*tail, token)[-LONGEST:]
        self.tail = tail

    def after(self, tail: Tail) -> tuple[tuple[int, ...], float]:
        """Return what followed the longest known end of `tail`, and their bonus; nothing where no pair is known."""
        for length in range(len(tail), 1, -1):
            known = self._followers.get(tail[-length:])
            if known is not None:
                return known, BONUS * (length - 1)
        return (), 0.0
