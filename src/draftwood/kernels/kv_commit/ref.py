"""What `compact` means: place i of a row takes what node path[i] holds; all are read before any is written."""

from __future__ import annotations

from torch import Tensor


def compact(data: Tensor, slots: Tensor, path: Tensor, counts: Tensor) -> Tensor:
    """Return a copy of data [layers, slots, width] with the accepted path of every row compacted.

    slots [R, N]: where node i of row r lies; path [R, P]: accepted nodes, root first, ascending; counts [R]: how many.
    """
    out = data.clone()
    for r, n in enumerate(counts.tolist()):
        nodes = path[r, :n]
        out[:, slots[r, :n]] = data[:, slots[r][nodes]]
    return out
