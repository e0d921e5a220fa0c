"""Memory between the kernels of a target's forward: allocated once, for the largest bucket; smaller ones use its first rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.mla_attention.op import Scratch
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.moe_route.op import Lists
from draftwood.model.config import ModelConfig
from draftwood.model.cuda.bucket import Bucket
from draftwood.parallel.layout import Layout


@dataclass(frozen=True)
class Sizes:
    """What a forward of `config` needs on one rank, with `taps` layers tapped."""

    config: ModelConfig
    layout: Layout
    taps: int

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return len(self.layout.heads(self.config.num_heads))

    @property
    def hidden(self) -> int:
        """Widest SwiGLU of this rank that is not an expert's."""
        c = self.config
        shared = len(self.layout.columns(c.shared_intermediate_size)) if c.num_moe_layers else 0
        return max(shared, len(self.layout.columns(c.intermediate_size)) if c.first_k_dense else 0)

    @property
    def experts(self) -> moe_op.Shape:
        """This rank's routed experts, as the kernels see them."""
        columns = len(self.layout.expert_columns(self.config.moe_intermediate_size))
        return moe_op.Shape(self.config.hidden_size, -(-columns // 128) * 128, self.config.experts_per_token)


def chunks(tokens: int) -> list[range]:
    """Cut `tokens` rows into parts that the router takes, as even as multiples of 8 allow."""
    count = -(-tokens // route_op.MOST_ROWS)
    size = -(-tokens // count // 8) * 8
    size = min(size, route_op.MOST_ROWS)
    return [range(at, min(at + size, tokens)) for at in range(0, tokens, size)]


@dataclass(frozen=True)
class Workspace:
    """Buffers of T tokens, M verified nodes. bf16 unless said otherwise; never read before it is written.

    x: residual stream. normed, delta, shared [T, H]; low: the fused down projection; q_low [T, q_lora]; q [T, h, nope + rope];
    q_latent, seen [T, h, latent]; values [T, h, v]; hidden: of a SwiGLU; taps [T, F]; chosen [M, H]; logits float32 [M, V'].
    """

    x: Tensor
    normed: Tensor
    delta: Tensor
    shared: Tensor
    low: Tensor
    q_low: Tensor
    q: Tensor
    q_latent: Tensor
    seen: Tensor
    values: Tensor
    hidden: Tensor
    taps: Tensor
    chosen: Tensor
    logits: Tensor
    attention: Scratch
    lists: Lists | None
    experts: moe_op.Workspace | None

    def at(self, bucket: Bucket) -> Workspace:
        """The part that `bucket` uses. Raises ValueError for one that it does not fit."""
        t, m = bucket.tokens, bucket.verified
        if t > self.x.shape[0] or m > self.logits.shape[0]:
            raise ValueError(f"{bucket} is beyond the workspace for {self.x.shape[0]} tokens and {self.logits.shape[0]} logits")
        by_token = ("x", "normed", "delta", "shared", "low", "q_low", "q", "q_latent", "seen", "values", "hidden", "taps")
        parts = {name: getattr(self, name)[:t] for name in by_token}
        return Workspace(
            **parts, chosen=self.chosen[:m], logits=self.logits[:m],
            attention=self.attention, lists=self.lists, experts=self.experts,
        )  # fmt: skip


def attention_need(sizes: Sizes, buckets: Sequence[Bucket], device: torch.device) -> attention_op.Need:
    """Memory for the attention of any of `buckets`."""
    c = sizes.config
    needs = [attention_op.need(b.rows, b.nodes, b.tokens, sizes.heads, b.context, device, c.kv_lora_rank) for b in buckets]
    return reduce(attention_op.Need.with_room_for, needs)


def allocate(sizes: Sizes, buckets: Sequence[Bucket], device: torch.device) -> Workspace:
    """Return one workspace for all `buckets`. Raises ConfigError for attention that no kernel serves."""
    c, heads = sizes.config, sizes.heads
    tokens, verified = max(b.tokens for b in buckets), max(b.verified for b in buckets)
    vocab = len(sizes.layout.vocab(c.vocab_size))

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    lists, experts = None, None
    if c.num_moe_layers:
        rows = max(len(part) for b in buckets for part in chunks(b.tokens))
        mine = sizes.layout.experts(c.num_experts)
        shape = route_op.Shape(c.hidden_size, c.num_experts, c.experts_per_token)
        lists = route_op.allocate(shape, rows, mine.start, len(mine), device)
        experts = moe_op.workspace(sizes.experts, rows, device)
    return Workspace(
        x=make(tokens, c.hidden_size),
        normed=make(tokens, c.hidden_size),
        delta=make(tokens, c.hidden_size),
        shared=make(tokens, c.hidden_size),
        low=make(tokens, c.q_lora_rank + c.latent_width),
        q_low=make(tokens, c.q_lora_rank),
        q=make(tokens, heads, c.qk_head_dim),
        q_latent=make(tokens, heads, c.kv_lora_rank),
        seen=make(tokens, heads, c.kv_lora_rank),
        values=make(tokens, heads, c.v_head_dim),
        hidden=make(tokens, sizes.hidden),
        taps=make(tokens, sizes.taps * c.hidden_size),
        chosen=make(verified, c.hidden_size),
        logits=make(verified, vocab, dtype=torch.float32),
        attention=attention_op.allocate(attention_need(sizes, buckets, device), heads, c.kv_lora_rank, device),
        lists=lists,
        experts=experts,
    )
