"""The drafter as a sequence of kernels: propose a block per row, and observe what the target accepted.

Capturable as the target is: nothing is allocated after `bind`, nothing waits for the device. Keys, queries and rings are in
pairs order, as `model.drafter` keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.draft_attention import op as attention_op
from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.mla_attention import op as latent_op
from draftwood.kernels.norm_rope import op as norm_op
from draftwood.model.config import DrafterConfig
from draftwood.model.cuda.bucket import DraftBucket
from draftwood.model.cuda.pack import PackedDrafter, PackedDraftLayer
from draftwood.model.cuda.target import CudaTarget
from draftwood.model.cuda.work import DraftSizes
from draftwood.model.layers import rope_table
from draftwood.parallel.comm import Comm
from draftwood.parallel.layout import Layout


@dataclass(frozen=True)
class DraftWork:
    """Buffers of B = rows x block tokens, G = rows x (block - 1) guesses, P = rows x path places; bf16 unless said otherwise.

    x, normed, delta [B, H]; qkv [B, heads x d]; seen [B, q_heads x d]; hidden [B, I]; guessed [G, H]; logits float32 [G, V'];
    parts float32: partial attention; ordered: as the target's; taps [P, F], features, context [P, H], kv [P, 2 x layers x
    kv_heads x d].
    """

    x: Tensor
    normed: Tensor
    delta: Tensor
    qkv: Tensor
    seen: Tensor
    hidden: Tensor
    guessed: Tensor
    logits: Tensor
    parts: Tensor
    ordered: Tensor
    taps: Tensor
    features: Tensor
    context: Tensor
    kv: Tensor

    def at(self, bucket: DraftBucket) -> DraftWork:
        """The part that `bucket` uses. Raises ValueError for one that it does not fit."""
        b, g, p = bucket.rows * bucket.block, bucket.rows * (bucket.block - 1), bucket.rows * bucket.path
        if b > len(self.x) or g > len(self.logits) or p > len(self.taps):
            sizes = (len(self.x), len(self.logits), len(self.taps))
            raise ValueError(f"{bucket} is beyond the workspace for {sizes} tokens, guesses and places of paths")
        by_token = {name: getattr(self, name)[:b] for name in ("x", "normed", "delta", "qkv", "seen", "hidden")}
        by_place = {name: getattr(self, name)[:p] for name in ("taps", "features", "context", "kv")}
        rest = {"guessed": self.guessed[:g], "logits": self.logits[:g], "parts": self.parts, "ordered": self.ordered}
        return DraftWork(**by_token, **by_place, **rest)


class CudaDrafter:
    """A rank's part of the drafter on its GPU. Embedding and head are the target's. Its buffers are ordinary tensors, whichever
    mode of autograd the caller is in."""

    @torch.inference_mode(False)
    def __init__(
        self,
        config: DrafterConfig,
        packed: PackedDrafter,
        layout: Layout,
        comm: Comm,
        target: CudaTarget,
        positions: int | None = None,
    ) -> None:
        """positions: of the table of rotations, as the target's. Raises ValueError for a layout that does not fit `comm`."""
        if layout.world != comm.world:
            raise ValueError(f"a layout of {layout.world} ranks does not fit {comm.world} connected ranks")
        self.config, self.packed, self.comm = config, packed, comm
        self.embed, self.lm_head, self.device = target.packed.embed, target.packed.lm_head, target.device
        self.sizes = DraftSizes(config, layout, self.lm_head.shape.outputs)
        self.q_heads, self.kv_heads = self.sizes.q_heads, self.sizes.kv_heads
        known = config.max_position if positions is None else min(positions, config.max_position)
        table = rope_table(config.rope, config.head_dim, known, config.amplitude, self.device)
        self.turns = torch.view_as_real(table).contiguous()
        self.work: DraftWork | None = None

    @torch.inference_mode(False)
    def reserve(self, buckets: Sequence[DraftBucket]) -> None:
        """Allocate one workspace for all `buckets` (`work.draft_workspace_bytes`); drafts bound before lose theirs. Raises
        ValueError for a block that the drafter was not trained for."""
        c, d = self.config, self.config.head_dim
        for bucket in buckets:
            if not 2 <= bucket.block <= c.block_size:
                raise ValueError(f"block {bucket.block} is outside 2..{c.block_size}")
        tokens = max(b.rows * b.block for b in buckets)
        guesses = max(b.rows * (b.block - 1) for b in buckets)
        places = max(b.rows * b.path for b in buckets)

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.work = None  # its memory first
        self.work = DraftWork(
            x=make(tokens, c.hidden_size),
            normed=make(tokens, c.hidden_size),
            delta=make(tokens, c.hidden_size),
            qkv=make(tokens, (self.q_heads + 2 * self.kv_heads) * d),
            seen=make(tokens, self.q_heads * d),
            hidden=make(tokens, self.sizes.columns),
            guessed=make(guesses, c.hidden_size),
            logits=make(guesses, self.sizes.vocab, dtype=torch.float32),
            parts=make(max(self.sizes.partial_floats(b) for b in buckets), dtype=torch.float32),
            ordered=make(self.sizes.ordered(buckets, latent_op.arch(self.device))),
            taps=make(places, len(c.taps) * c.hidden_size),
            features=make(places, c.hidden_size),
            context=make(places, c.hidden_size),
            kv=make(places, self.sizes.context_width),
        )

    def bind(self, bucket: DraftBucket) -> Draft:
        """Return the draft of a bucket. Drafts share the workspace: results of one last until the next runs. Raises ValueError
        for a bucket beyond what `reserve` made room for."""
        if self.work is None:
            raise ValueError("reserve() comes before bind()")
        return Draft(self, bucket, self.work.at(bucket))


class Draft:
    """The drafter at one bucket."""

    @torch.inference_mode(False)
    def __init__(self, drafter: CudaDrafter, bucket: DraftBucket, work: DraftWork) -> None:
        c, device, block = drafter.config, drafter.device, bucket.block
        self.drafter, self.bucket, self.work, self.config = drafter, bucket, work, c
        self.alone = drafter.comm.world == 1
        self.tokens = torch.full((bucket.rows, block), c.mask_token_id, device=device)
        """Ids of the block: the root, then masks."""
        places = torch.arange(bucket.rows * block, device=device).view(bucket.rows, block)
        self.masked = places[:, 1:].flatten()
        """Places in rows x block whose guesses are wanted."""
        self.per_row = torch.tensor([block, block - 1, bucket.path], dtype=torch.int32, device=device)
        self.lives = torch.zeros(3, dtype=torch.int32, device=device)
        """Live tokens, guesses and places of paths."""
        self.index = torch.zeros(bucket.rows, bucket.path, dtype=torch.int64, device=device)
        """Flat node of each place of a path."""

    def propose(self, roots: Tensor, lengths: Tensor, ids: Tensor, keys: Tensor, values: Tensor, live: Tensor) -> Tensor:
        """Guess the tokens after `roots`, which stand at positions `lengths`.

        roots, lengths, ids int64 [R]: last known token, committed tokens and ring of each row; keys, values bf16 [layers,
        rings, capacity, kv_heads', d]; live int32 [1]: how many of the rows are real. Returns logits float32 [R, block - 1, V],
        of real rows only; place i is about position length + 1 + i. Nothing is stored.
        """
        w, packed, eps = self.work, self.drafter.packed, self.config.rms_norm_eps
        torch.mul(live, self.per_row, out=self.lives)
        torch.add(roots, 0, out=self.tokens[:, 0])
        tokens, guesses = self.lives[0:1], self.lives[1:2]
        pending: Tensor | None = None
        for index, layer in enumerate(packed.layers):
            if index == 0:
                index_of = self.tokens.view(-1)
                norm_op.add_norm(self.drafter.embed, layer.input_norm, eps, index=index_of, residual=w.x, out=w.normed, rows=tokens)
            else:
                self._norm(layer.input_norm, pending, tokens)
            pending = self._attend(layer, lengths, ids, keys[index], values[index], live)
            self._norm(layer.post_norm, pending, tokens)
            pending = self._dense(layer, tokens)
        if pending is not None:
            self._norm(packed.norm, pending, tokens)
        norm_op.add_norm(w.x, packed.norm, eps, index=self.masked, out=w.guessed, rows=guesses)
        linear_op.linear(w.guessed, self.drafter.lm_head, w.logits, rows=guesses, scratch=w.ordered)
        logits = self.drafter.comm.all_gather(w.logits, -1)
        return logits.view(self.bucket.rows, self.bucket.block - 1, -1)

    def _norm(self, weight: Tensor, pending: Tensor | None, tokens: Tensor) -> None:
        w = self.work
        residual = None if pending is None else w.x
        norm_op.add_norm(w.x, weight, self.config.rms_norm_eps, delta=pending, residual=residual, out=w.normed, rows=tokens)

    def _attend(
        self, layer: PackedDraftLayer, lengths: Tensor, ids: Tensor, keys: Tensor, values: Tensor, live: Tensor
    ) -> Tensor | None:
        """Attention of the normed block. Returns what is still to be added to the residual stream."""
        w, b, d, eps, tokens = self.work, self.bucket, self.config.head_dim, self.config.rms_norm_eps, self.lives[0:1]
        q_heads, kv_heads = self.drafter.q_heads, self.drafter.kv_heads
        linear_op.linear(w.normed, layer.qkv, w.qkv, rows=tokens, scratch=w.ordered)
        qkv = w.qkv.view(b.rows, b.block, q_heads + 2 * kv_heads, d)
        norm_op.head_norm_rope(qkv, layer.q_norm, layer.k_norm, self.drafter.turns, lengths, kv_heads, eps, pairs=True, rows=live)
        seen = w.seen.view(b.rows, b.block, q_heads, d)
        attention_op.draft_attention(qkv, keys, values, lengths, ids, out=seen, workspace=w.parts, rows=live)
        if self.alone:
            linear_op.linear(w.seen, layer.o, w.x, residual=w.x, rows=tokens, scratch=w.ordered)
            return None
        linear_op.linear(w.seen, layer.o, w.delta, rows=tokens, scratch=w.ordered)
        return self.drafter.comm.all_reduce(w.delta)

    def _dense(self, layer: PackedDraftLayer, tokens: Tensor) -> Tensor | None:
        w = self.work
        linear_op.linear(w.normed, layer.mlp.gate_up, w.hidden, rows=tokens, scratch=w.ordered)
        if self.alone:
            linear_op.linear(w.hidden, layer.mlp.down, w.x, residual=w.x, rows=tokens, scratch=w.ordered)
            return None
        linear_op.linear(w.hidden, layer.mlp.down, w.delta, rows=tokens, scratch=w.ordered)
        return self.drafter.comm.all_reduce(w.delta)

    def observe(
        self,
        taps: Tensor,
        path: Tensor,
        starts: Tensor,
        lengths: Tensor,
        counts: Tensor,
        ids: Tensor,
        keys: Tensor,
        values: Tensor,
        live: Tensor,
    ) -> None:
        """Store the context keys and values of accepted nodes; taps stay as they are.

        taps bf16 [T, F] of flat nodes as the target left them; path int64 [R, P] accepted nodes, root first (what stands after
        `counts` does not matter); starts, lengths, counts, ids int64 [R]: flat node of a row's node 0, committed tokens before
        the step, accepted nodes, ring. Of one row only the newest `capacity` are stored; pseudo-rows of one prompt that share a
        ring must not hold more than its capacity together.
        """
        w, packed, c, b = self.work, self.drafter.packed, self.config, self.bucket
        torch.mul(live, self.per_row, out=self.lives)
        places = self.lives[2:3]
        torch.add(path, starts.unsqueeze(1), out=self.index)
        torch.clamp(self.index, 0, len(taps) - 1, out=self.index)
        torch.index_select(taps, 0, self.index.view(-1), out=w.taps)
        linear_op.linear(w.taps, packed.fc, w.features, rows=places, scratch=w.ordered)
        norm_op.add_norm(w.features, packed.hidden_norm, c.rms_norm_eps, out=w.context, rows=places)
        linear_op.linear(w.context, packed.context_kv, w.kv, rows=places, scratch=w.ordered)
        kv = w.kv.view(b.rows, b.path, 2, c.num_layers, self.drafter.kv_heads, c.head_dim)
        norm_op.ring_write(
            kv, packed.k_norms, self.drafter.turns, lengths, counts, ids, keys, values, c.rms_norm_eps, pairs=True, rows=live
        )
