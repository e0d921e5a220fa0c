"""The DFlash drafter: a small non-causal transformer that guesses a whole block from the target's tapped features.

Published in z-lab/dflash (`dflash/model.py`). Here the features' keys and values are computed once, when their tokens
are committed, and kept in a ring window; a proposal then only runs the block.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwood.model.config import DrafterConfig
from draftwood.model.layers import Dense, Linear, Norm, guesses, halves_to_pairs, linear, rope_table, rotate_pairs_
from draftwood.model.weights import DrafterLayerWeights, DrafterWeights
from draftwood.parallel.comm import Comm
from draftwood.parallel.layout import Layout


class DraftWindow(Protocol):
    """The rows' context keys and values; position p lives at p % capacity. `kv.store.DraftRows` is one."""

    @property
    def keys(self) -> Tensor:
        """[layers, rows_total, capacity, kv_heads', head_dim], normed and rotated."""

    @property
    def values(self) -> Tensor:
        """The same shape."""

    @property
    def row_ids(self) -> Tensor:
        """[R] which of rows_total each row is."""

    @property
    def lengths(self) -> Tensor:
        """[R] committed tokens before the root; the last min(length, capacity) of them are in the window."""


class Context:
    """What a block sees of a window: which places are real, the same for every layer."""

    def __init__(self, window: DraftWindow) -> None:
        _, _, capacity, self.kv_heads, self.head_dim = window.keys.shape
        held = [min(n, capacity) for n in window.lengths.tolist()]
        self.window, self.rows, self.size = window, len(held), max(held)
        self.mask: Tensor | None = None
        """[R, 1, 1, size] 0 or -inf; None when every place is real."""
        self._places: Tensor | None = None
        if self.rows == 1:
            # One row is a view, made for all layers at once: views one by one cost as much as a small product.
            row, stores = int(window.row_ids[0]), (window.keys, window.values)
            self._keys, self._values = (store[:, row, : self.size].transpose(1, 2).unbind() for store in stores)
        if self.rows == 1 or self.size == 0:
            return
        device = window.keys.device
        place, real = torch.arange(self.size, device=device), torch.tensor(held, device=device).unsqueeze(1)
        rows = window.row_ids.unsqueeze(1)
        if min(held) < self.size:
            # A place nobody wrote may hold anything, even NaN: read a written one instead and mask it.
            valid = place < real
            longest = int(window.row_ids[held.index(self.size)])
            rows, place = torch.where(valid, rows, longest), torch.where(valid, place, 0)
            self.mask = torch.zeros(self.rows, 1, 1, self.size, device=device)
            self.mask.masked_fill_(~valid[:, None, None], -torch.inf)
        heads = torch.arange(self.kv_heads, device=device)[:, None]
        self._places = ((rows * capacity + place).unsqueeze(1) * self.kv_heads + heads).flatten()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, both [R * kv_heads, size, head_dim]."""
        if self.rows == 1:
            return self._keys[index], self._values[index]
        return self._read(self.window.keys[index]), self._read(self.window.values[index])

    def _read(self, store: Tensor) -> Tensor:
        """Gather several rows of store [rows_total, capacity, kv_heads, head_dim] in one copy."""
        if self._places is None:
            return store.new_empty(self.rows * self.kv_heads, 0, self.head_dim)
        found = store.view(-1, self.head_dim).index_select(0, self._places)
        return found.view(self.rows * self.kv_heads, self.size, -1)


class DraftLayer:
    """One layer over the block, or a rank's heads and columns of it."""

    def __init__(self, weights: DrafterLayerWeights, config: DrafterConfig, comm: Comm, coarse: bool) -> None:
        """coarse: products by 8-bit weights wherever accept length does not suffer; `down` needs all its bits."""
        product = guesses if coarse else Linear
        d = self.head_dim = config.head_dim
        self.comm = comm
        self.q_heads, self.kv_heads = weights.q.shape[0] // d, weights.k.shape[0] // d
        # Rows reordered so that a rotation is one complex product (`layers.halves_to_pairs`).
        q, k = halves_to_pairs(weights.q, d), halves_to_pairs(weights.k, d)
        self.qkv, self.o = product(torch.cat((q, k, weights.v))), product(weights.o)
        q_norm, k_norm = halves_to_pairs(weights.q_norm, d), halves_to_pairs(weights.k_norm, d)
        # Attention's scale is in the queries' gain: one call less, and call by call is what a small block costs.
        per_head = torch.cat(((q_norm * d**-0.5).expand(self.q_heads, d), k_norm.expand(self.kv_heads, d)))
        self.qk_norm = Norm(per_head.unsqueeze(1), config.rms_norm_eps)
        self.input_norm = Norm(weights.input_norm, config.rms_norm_eps)
        self.post_norm = Norm(weights.post_norm, config.rms_norm_eps)
        self.mlp = Dense(weights.mlp, product)

    def __call__(self, x: Tensor, turns: Tensor, context: Context, index: int) -> Tensor:
        """x [R * B, H] residual stream of the blocks, turns [R, 1, B, d / 2] -> [R * B, H]."""
        inner = self.input_norm(x)
        x = x + self.comm.all_reduce(self._attend(inner, turns, *context.layer(index), context))
        return x + self.comm.all_reduce(self.mlp(self.post_norm(x)))

    def _attend(self, x: Tensor, turns: Tensor, past_k: Tensor, past_v: Tensor, context: Context) -> Tensor:
        r, g, c = context.rows, self.kv_heads, context.size
        share, b = self.q_heads // g, x.shape[0] // r
        # Heads first, in one copy: what follows are views where there is one row.
        heads = self.qkv(x).view(r, b, -1, self.head_dim).transpose(1, 2).contiguous()
        qk, v = heads.split((self.q_heads + g, g), 1)
        qk = rotate_pairs_(self.qk_norm(qk), turns)
        # Query heads that share a key head are its rows: [r * g, share * b, d].
        q, k = (part.reshape(r * g, -1, self.head_dim) for part in qk.split((self.q_heads, g), 1))
        v = v.reshape(r * g, b, -1)
        # Two products instead of copying the context beside the block.
        logits = torch.cat((torch.bmm(q, past_k.transpose(1, 2).to(q.dtype)), torch.bmm(q, k.transpose(1, 2))), -1)
        if context.mask is not None:
            logits.view(r, g, share * b, -1)[..., :c].add_(context.mask)
        weights = torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype)
        seen = torch.baddbmm(torch.bmm(weights[..., :c], past_v.to(q.dtype)), weights[..., c:], v)
        return self.o(seen.view(r, self.q_heads, b, -1).transpose(1, 2).reshape(r * b, -1))


class Drafter:
    """A rank's part of the drafter. Embedding and head are the target's."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        layout: Layout,
        comm: Comm,
        embed: Tensor,
        lm_head: Tensor | Linear,
        dtype: torch.dtype = torch.float32,
        coarse: bool = False,
    ) -> None:
        """embed [V, H] whole; lm_head this rank's rows of the head, best the target's own Linear (not stored twice).

        coarse: faster products by 8-bit weights in the layers, where the processor has them.
        """
        if layout.world != comm.world:
            raise ValueError(f"a layout of {layout.world} ranks does not fit {comm.world} connected ranks")
        self.config, self.comm, self.dtype = config, comm, dtype
        self.embed, self.lm_head = embed, linear(lm_head)
        self.fc = Linear(weights.fc)
        self.hidden_norm = Norm(weights.hidden_norm, config.rms_norm_eps)
        self.norm = Norm(weights.norm, config.rms_norm_eps)
        self.layers = [DraftLayer(layer, config, comm, coarse) for layer in weights.layers]
        # Masked places may reach beyond the last position; what is guessed there is never committed.
        places = config.max_position + config.block_size
        self.turns = rope_table(config.rope, config.head_dim, places, config.amplitude, embed.device)
        self.ahead = torch.arange(config.block_size, device=embed.device)
        self.masked = embed[config.mask_token_id].repeat(config.block_size - 1, 1)
        """[block - 1, H] what a block holds beside its root."""
        # Context keys and values of all layers in one product: [layers * kv_heads' * d, H] keys, then values.
        keys = [halves_to_pairs(layer.k, config.head_dim) for layer in weights.layers]
        self.context_kv = Linear(torch.cat(keys + [layer.v for layer in weights.layers]))
        norms = [halves_to_pairs(layer.k_norm, config.head_dim) for layer in weights.layers]
        self.k_norm = Norm(torch.stack(norms).unsqueeze(1), config.rms_norm_eps)

    @torch.inference_mode()
    def propose(self, roots: Tensor, window: DraftWindow, block: int) -> Tensor:
        """Guess the tokens after `roots` [R] long, which stand at positions `window.lengths`.

        Returns logits [R, block - 1, V] float32; place i is about position length + 1 + i. Nothing is stored.
        Raises ValueError for a block beyond 2 .. block_size.
        """
        if not 2 <= block <= self.config.block_size:
            raise ValueError(f"block {block} is outside 2..{self.config.block_size}")
        r = roots.shape[0]
        known = self.embed.index_select(0, roots).unsqueeze(1)
        x = torch.cat((known, self.masked[: block - 1].expand(r, -1, -1)), 1).flatten(0, 1)
        positions = window.lengths.unsqueeze(1) + self.ahead[:block]
        turns = self.turns.index_select(0, positions.flatten()).view(r, 1, block, -1)
        context = Context(window)
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, context, index)
        x = x.view(r, block, -1)[:, 1:]
        logits = self.lm_head(self.norm(x.reshape(r * (block - 1), -1)))
        return self.comm.all_gather(logits, -1).float().view(r, block - 1, -1)

    @torch.inference_mode()
    def observe(self, taps: Tensor, positions: Tensor, path: Tensor, window: DraftWindow) -> None:
        """Store the context keys and values of accepted nodes.

        taps [R, N, F], positions [R, N] long; path [R, P] accepted nodes in order, -1 padding. Only the newest
        `capacity` of a row are stored: older ones would be overwritten.
        """
        layers, _, capacity, kv_heads, d = window.keys.shape
        if path.shape[0] == 1 and path.shape[1] <= capacity and int(path[0, -1]) >= 0:
            nodes, ids = path[0], window.row_ids  # one whole row: no place has to be looked for
        else:
            nodes, ids = self._accepted(path, positions.shape[1], window)
        at = positions.flatten().index_select(0, nodes)
        features = self.fc(taps.flatten(0, 1).index_select(0, nodes))
        kv = self.context_kv(self.hidden_norm(features))
        keys, values = kv.view(-1, 2, layers, kv_heads, d).unbind(1)
        keys = self.k_norm(keys)
        keys = rotate_pairs_(keys, self.turns.index_select(0, at)[:, None, None])
        places = ids * capacity + at % capacity
        for store, new in ((window.keys, keys), (window.values, values)):
            store.view(layers, -1, kv_heads, d).index_copy_(1, places, new.transpose(0, 1).to(store.dtype))

    def _accepted(self, path: Tensor, nodes: int, window: DraftWindow) -> tuple[Tensor, Tensor]:
        """Return the places in R * nodes of the accepted nodes that fit a window, and the persistent row of each."""
        width, capacity = path.shape[1], window.keys.shape[2]
        live = path.flatten() >= 0
        if width > capacity:
            ahead, last = torch.arange(width, device=path.device), (path >= 0).sum(1, keepdim=True)
            live &= (ahead >= last - capacity).flatten()
        live = live.nonzero().squeeze(1)
        row = live // width
        return path.flatten().index_select(0, live) + row * nodes, window.row_ids.index_select(0, row)
