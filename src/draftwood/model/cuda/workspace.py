"""Memory between the kernels of a target's forward: allocated once, for the largest bucket; smaller ones use its first rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.mla_attention.op import Scratch
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.moe_route.op import Lists
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.work import Sizes, chunks


@dataclass(frozen=True)
class Workspace:
    """Buffers of T tokens, M verified nodes. bf16 unless said otherwise; never read before it is written.

    x: residual stream. normed, delta, shared [T, H]; low: the fused down projection; q_low [T, q_lora]; q [T, h, nope + rope];
    q_latent, seen [T, h, latent]; values [T, h, v]; hidden: of a SwiGLU; ordered: the input of one product of many rows
    as its tensor cores want it; taps [T, F]; chosen [M, H]; logits float32 [M, V'].
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
    ordered: Tensor
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
            **parts, ordered=self.ordered, chosen=self.chosen[:m], logits=self.logits[:m],
            attention=self.attention, lists=self.lists, experts=self.experts,
        )  # fmt: skip


def expert_shape(sizes: Sizes) -> moe_op.Shape:
    """This rank's routed experts, as the kernels see them."""
    c = sizes.config
    return moe_op.shape_of(c.hidden_size, sizes.columns, c.experts_per_token, len(sizes.experts))


def allocate(sizes: Sizes, buckets: Sequence[Bucket], device: torch.device) -> Workspace:
    """Return one workspace for all `buckets` (`work.workspace_bytes`). Raises ConfigError for attention that no kernel serves."""
    c, heads = sizes.config, sizes.heads
    tokens, verified = max(b.tokens for b in buckets), max(b.verified for b in buckets)
    arch = attention_op.arch(device)
    needed = sizes.attention(buckets, arch)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    lists, experts = None, None
    if c.num_moe_layers:
        rows = max(len(part) for b in buckets for part in chunks(b.tokens, len(sizes.experts)))
        shape = route_op.Shape(c.hidden_size, c.num_experts, c.experts_per_token)
        lists = route_op.allocate(shape, rows, sizes.experts.start, len(sizes.experts), device)
        experts = moe_op.workspace(expert_shape(sizes), rows, device)
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
        ordered=make(sizes.ordered(buckets, arch)),
        taps=make(tokens, sizes.taps * c.hidden_size),
        chosen=make(verified, c.hidden_size),
        logits=make(verified, sizes.vocab, dtype=torch.float32),
        attention=attention_op.allocate(needed, heads, c.kv_lora_rank, device),
        lists=lists,
        experts=experts,
    )
