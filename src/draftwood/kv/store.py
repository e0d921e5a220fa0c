"""The tensors behind the pages: latents of the target, context keys and values of the drafter.

Both are plain storage. Which page belongs to whom is decided in `pages`; what is written is decided by the model.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def slots(self, pages: Sequence[int], tokens: int) -> Tensor:
        """Return the slots [tokens] of the first `tokens` positions of a row with these pages."""
        table = torch.tensor(pages[: -(-tokens // self.page_size)], dtype=torch.long, device=self._offsets.device)
        return (table.unsqueeze(-1) * self.page_size + self._offsets).flatten()[:tokens]

    def commit(self, scratch: Scratch, path: Tensor, counts: Tensor) -> None:
        """Move the latents of the accepted nodes to consecutive slots, all layers at once.

        path [R, P] node of each accepted place, root first; counts [R] how many are real. All are read before any is
        written, so a path may overlap the places it moves to.
        """
        if path.shape[1] == 1:
            return  # roots alone are in place already
        # Node i sits where position `length + i` will: an accepted node moves unless its place is its number.
        if len(path) == 1:
            nodes = path[0, : int(counts[0])].tolist()
            moves = [(node, place) for place, node in enumerate(nodes) if node != place]
            if moves:
                old, new = scratch.nodes[0].index_select(0, torch.tensor(moves, device=path.device).T.flatten()).chunk(2)
                self.cache.index_copy_(1, new, self.cache.index_select(1, old))
            return
        place = torch.arange(path.shape[1], device=path.device)
        moved = ((path != place) & (place < counts.unsqueeze(-1))).nonzero()
        if len(moved):
            row, place = moved.unbind(1)
            slots = scratch.nodes.flatten()
            first = row * scratch.nodes.shape[1]
            latents = self.cache.index_select(1, slots.index_select(0, first + path[row, place]))
            self.cache.index_copy_(1, slots.index_select(0, first + place), latents)


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
    """Ring windows of the drafter's keys and values, one per persistent row.

    With `slots` it also keeps the context of every committed token in the slot that has the token's latents: what a
    prefix cache shares is complete for both models then, and a row that begins on shared pages drafts as if it had
    read the text itself.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        slots: int = 0,
    ) -> None:
        """`slots`: those of the latent store, its sink included; 0 keeps nothing beside the windows."""
        shape = (layers, rows, capacity, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = slots
        self.kept_keys = torch.zeros(layers, slots, kv_heads, head_dim, dtype=dtype, device=device)
        self.kept_values = torch.zeros_like(self.kept_keys)

    @staticmethod
    def nbytes(layers: int, rows: int, capacity: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Bytes that a store of this shape allocates."""
        return 2 * layers * rows * capacity * kv_heads * head_dim * itemsize

    def rows(self, row_ids: Tensor, lengths: Tensor) -> DraftRows:
        """Return the windows of the rows `row_ids` [R], whose committed tokens are `lengths` [R]."""
        return DraftRows(self.keys, self.values, row_ids, lengths)

    def keep(self, window: DraftRows, slots: Tensor, between: Tensor | None = None) -> None:
        """Copy what was observed last from the windows to the slots.

        slots [R, P], P at most the capacity: where position `window.lengths + j` of each row lives; a sink slot where
        nothing was accepted. Shapes alone decide what is launched; nothing is read by the host. between [layers, R * P,
        kv_heads, head_dim]: memory for keys and then for values on their way, where it is not to be allocated here.
        """
        capacity = self.keys.shape[2]
        ahead = torch.arange(slots.shape[1], device=slots.device)
        places = (window.row_ids[:, None] * capacity + (window.lengths[:, None] + ahead) % capacity).flatten()
        for ring, kept in ((self.keys, self.kept_keys), (self.values, self.kept_values)):
            kept.index_copy_(1, slots.flatten(), torch.index_select(ring.flatten(1, 2), 1, places, out=between))

    def restore(self, row: int, slots: Tensor) -> None:
        """Fill the window of a row from `slots` [length]: where each of its committed tokens lives, in order."""
        capacity, length = self.keys.shape[2], len(slots)
        places = torch.arange(max(0, length - capacity), length, device=slots.device) % capacity
        slots = slots[-capacity:]
        for ring, kept in ((self.keys, self.kept_keys), (self.values, self.kept_values)):
            ring[:, row].index_copy_(1, places, kept.index_select(1, slots))
