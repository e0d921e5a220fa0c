"""The tensors behind the pages: latents of the target, context keys and values of the drafter.

Both are plain storage. Which page belongs to whom is decided in `pages`; what is written is decided by the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scratch:
    """The slots of one step, as attention wants them (the model's `Slots`).

    Node i of a row lives in the slot of position `length + i` of the row's own pages: the root is already in its final
    place, a chain moves nothing on commit, and nothing beyond `lengths` is read as a committed token.
    """

    cache: Tensor
    """[layers, slots, width]"""
    prefix: Tensor
    """[R, L] slot of each committed position; padding points into the sink page."""
    lengths: Tensor
    """[R] committed tokens."""
    nodes: Tensor
    """[R, N] slot of each node; padding nodes point into the sink page."""


class LatentStore:
    """Latents of every layer in pages, and one page more, the sink, that nobody reads: padding is written there."""

    def __init__(
        self, layers: int, num_pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.sink = num_pages
        """Id of the sink page; tables are padded with it."""
        self.cache = torch.zeros(layers, (num_pages + 1) * page_size, width, dtype=dtype, device=device)
        self._offsets = torch.arange(page_size, device=device)

    @staticmethod
    def nbytes(layers: int, num_pages: int, page_size: int, width: int, itemsize: int) -> int:
        """Bytes that a store of this shape allocates, sink included."""
        return layers * (num_pages + 1) * page_size * width * itemsize

    def scratch(self, tables: Tensor, lengths: Tensor, counts: Tensor, nodes: int, longest: int) -> Scratch:
        """Return the slots of `nodes` nodes for each row.

        tables [R, pages] page ids in position order padded with the sink; lengths, counts [R] committed tokens and live
        nodes; longest >= every length (the width of `prefix`).
        """
        table = tables[:, : -(-(longest + nodes) // self.page_size)]
        slots = (table.unsqueeze(-1) * self.page_size + self._offsets).flatten(1)
        ahead = torch.arange(nodes, device=lengths.device)
        positions = lengths.unsqueeze(-1) + ahead
        short = positions.shape[1] + longest - slots.shape[1]
        if short > 0:  # a table narrower than the padding nodes reach
            slots = torch.nn.functional.pad(slots, (0, short), value=self.sink * self.page_size)
        places = slots.gather(1, positions)
        places = places.masked_fill(ahead >= counts.unsqueeze(-1), self.sink * self.page_size)
        return Scratch(self.cache, slots[:, :longest], lengths, places)

    def commit(self, scratch: Scratch, path: Tensor, counts: Tensor) -> None:
        """Move the latents of the accepted nodes to consecutive slots, all layers at once.

        path [R, P] node of each accepted place, root first; counts [R] how many are real. All are read before any is
        written, so a path may overlap the places it moves to.
        """
        if path.shape[1] == 1:
            return  # roots alone are in place already
        target = scratch.nodes[:, : path.shape[1]]
        source = scratch.nodes.gather(1, path.clamp(min=0))
        live = torch.arange(path.shape[1], device=path.device) < counts.unsqueeze(-1)
        moved = (live & (source != target)).flatten().nonzero().squeeze(-1)
        if moved.numel():
            rows = self.cache.index_select(1, source.flatten()[moved])
            self.cache.index_copy_(1, target.flatten()[moved], rows)


@dataclass(frozen=True)
class DraftRows:
    """The drafter's context of the rows of one step (the model's `DraftWindow`): position p lives at p % capacity."""

    keys: Tensor
    """[layers, rows_total, capacity, kv_heads, head_dim]"""
    values: Tensor
    row_ids: Tensor
    """[R]"""
    lengths: Tensor
    """[R] committed tokens before the step."""


class DraftStore:
    """Ring windows of the drafter's keys and values, one per persistent row."""

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (layers, rows, capacity, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def nbytes(layers: int, rows: int, capacity: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Bytes that a store of this shape allocates."""
        return 2 * layers * rows * capacity * kv_heads * head_dim * itemsize

    def rows(self, row_ids: Tensor, lengths: Tensor) -> DraftRows:
        """Return the windows of the rows `row_ids` [R], whose committed tokens are `lengths` [R]."""
        return DraftRows(self.keys, self.values, row_ids, lengths)
