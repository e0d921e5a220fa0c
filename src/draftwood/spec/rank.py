"""The k highest of each row, in an order that nobody can argue about: value descending, then id ascending."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NONE = -1
"""Id that fills a row with fewer than k values above -inf; its value is -inf."""
_GROUPS = 512


def maxima(scores: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return the highest score [M, groups] of each of many equal groups of a row of scores [M, V], NaN where one is; or None
    where V cannot be divided so."""
    rows, width = scores.shape
    if width % _GROUPS:
        return None
    found: NDArray[np.float32] = np.maximum.reduce(scores.reshape(rows, width // _GROUPS, _GROUPS), axis=1)
    return found


def top(
    scores: NDArray[np.float32], k: int, best: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return ids [M, k] and values [M, k] of the k highest scores of each row of scores [M, V] (contiguous float32).

    Equal values stand in ascending id order, also across the boundary at k. -inf and NaN are never returned.
    k may exceed V; the result is then V wide. best: the `maxima` of scores without NaN, where they are known.
    """
    rows, width = scores.shape
    k = min(k, width)
    ids = np.full((rows, k), NONE, np.int64)
    values = np.full((rows, k), -np.inf, np.float32)
    if rows == 0 or k == 0:
        return ids, values
    flat = np.flatnonzero(scores >= _bound(scores, k, best)[:, None])
    if not len(flat):
        return ids, values
    row, token = np.divmod(flat, width)
    value = scores.reshape(-1).take(flat)
    order = np.lexsort((-value, row))  # stable: ties keep ascending ids, and rows their order
    ends = row.searchsorted(np.arange(rows + 1))
    place = ends[:-1, None] + np.arange(k)
    inside = place < ends[1:, None]
    np.copyto(ids, token.take(order).take(place, mode="clip"), where=inside)
    np.copyto(values, value.take(order).take(place, mode="clip"), where=inside)
    return ids, values


def _bound(scores: NDArray[np.float32], k: int, best: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return [M]: a value that at least k entries of the row reach, and few more; the lowest finite float if fewer than k do.

    The k-th highest of the maxima of many groups cannot exceed the k-th highest entry, and costs one cheap pass.
    """
    rows, width = scores.shape
    groups = min(_GROUPS, width)
    depth = width // groups
    if k * 2 > groups:
        groups, depth, best = width, 1, None
    if best is None:
        head = scores[:, : groups * depth].reshape(rows, depth, groups)
        best = np.fmax.reduce(head, axis=1) if depth > 1 else head[:, 0]
    best = np.where(best > -np.inf, best, np.finfo(np.float32).min)  # NaN too
    return np.partition(best, groups - k, axis=1)[:, groups - k]


def host(x: Any) -> NDArray[Any]:
    """Return a tensor's values as a contiguous numpy array, without a copy when it is one already on the CPU."""
    array: NDArray[Any] = x.detach().cpu().contiguous().numpy()
    return array
