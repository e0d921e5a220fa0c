"""What a step takes the host: plans, results, requests' outputs and whatever the caller does between steps. No torch.

While a step flies the host works on the next; a GPU that is done sooner waits. So no step is faster than its host, and a drafted
node that only fills this wait costs nothing: small models with many rows are there.
"""

from __future__ import annotations

from collections.abc import Hashable

PULL = 0.05
"""Weight of an interval beside those before."""
MOST = 4.0
"""Times the average that one interval may count for: a pause of the caller says nothing about steps."""


class Pace:
    """Running averages of the host's seconds a step, by load: anything that names one, such as the rows of a graph."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._load: Hashable | None = None
        """Of the last step that was launched."""
        self._began = self._waited = 0.0
        self._flying = self._read = 0

    def launched(self, load: Hashable | None, now: float) -> None:
        """A step is about to be launched at `now` seconds of a clock. What passed since the launch before, but for waiting, is that
        step's, if a step has been read meanwhile and another flew. load None: not of any load, as where no row decodes."""
        before = self._load
        if before is not None and load is not None and self._flying and self._read:
            took = max(now - self._began - self._waited, 0.0) / self._read
            known = self._seconds.get(before)
            self._seconds[before] = took if known is None else known + PULL * (min(took, MOST * known) - known)
        self._flying += 1
        self._load, self._began, self._waited, self._read = load, now, 0.0, 0

    def waited(self, seconds: float) -> None:
        """The host has waited for the device."""
        self._waited += seconds

    def read(self) -> None:
        """A step's results are here."""
        self._flying -= 1
        self._read += 1

    def seconds(self, load: Hashable) -> float:
        """What a step takes the host at this load; 0 while nothing is known."""
        return self._seconds.get(load, 0.0)
