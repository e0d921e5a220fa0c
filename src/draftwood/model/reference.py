"""The model in its plainest words: whole sequences, no cache, keys and values written out, every expert in a loop.

This is the meaning that the fast modules and training are tested against. It takes whole weights (one rank) and keeps
gradients where the weights have them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.model.config import DrafterConfig, ModelConfig, RopeConfig
from draftwood.model.layers import rms_norm, rope_frequencies, rotate_half
from draftwood.model.weights import (
    DenseWeights,
    DrafterWeights,
    LayerWeights,
    MoEWeights,
    TargetWeights,
    unpack_int4,
)  # fmt: skip


def turns_at(positions: Tensor, rope: RopeConfig, dim: int, amplitude: float) -> Tensor:
    """Return the rotations of `positions` [...]: complex64 [..., dim / 2]."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(rope, dim).to(positions.device)
    return torch.polar(torch.full_like(angles, amplitude), angles)


def interleaved(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs (2i, 2i + 1) as DeepSeek does: sort them into halves, then rotate halves."""
    return rotate_half(torch.cat((x[..., 0::2], x[..., 1::2]), -1), turns)


def mlp(x: Tensor, w: DenseWeights) -> Tensor:
    """SwiGLU. x [..., H] -> [..., H]."""
    return F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)


def route(x: Tensor, w: MoEWeights, config: ModelConfig) -> Tensor:
    """Return the weight of every expert for every token: x [T, H] -> [T, E] float32, zero where not chosen."""
    scores = torch.sigmoid(F.linear(x.float(), w.router))
    biased = scores + w.bias
    order = torch.arange(biased.shape[1], device=x.device)
    # Expert i's rank is the number of experts ahead of it: higher, or equal with a lower id.
    above, here = biased.unsqueeze(1), biased.unsqueeze(2)
    ahead = (above > here) | ((above == here) & (order < order.unsqueeze(1)))
    weights = scores * (ahead.sum(-1) < config.experts_per_token)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def moe(x: Tensor, w: MoEWeights, config: ModelConfig) -> Tensor:
    """Routed experts by weight, plus the shared expert. x [T, H] -> [T, H]."""
    weights, e = route(x, w, config), w.experts
    total = torch.zeros_like(x, dtype=torch.float32)
    for i in range(config.num_experts):
        expert = DenseWeights(
            unpack_int4(e.gate_packed[i], e.gate_scale[i], x.dtype),
            unpack_int4(e.up_packed[i], e.up_scale[i], x.dtype),
            unpack_int4(e.down_packed[i], e.down_scale[i], x.dtype),
        )
        total = total + weights[:, i, None] * mlp(x, expert)
    return total.to(x.dtype) + mlp(x, w.shared)


def attention(x: Tensor, w: LayerWeights, config: ModelConfig, turns: Tensor, mask: Tensor) -> Tensor:
    """Multi-head latent attention with keys and values written out. x [L, H], mask [L, L] bool -> [L, H]."""
    c, length = config, x.shape[0]
    q = F.linear(rms_norm(F.linear(x, w.q_a), w.q_a_norm, c.latent_norm_eps), w.q_b)
    q_nope, q_rope = q.view(length, c.num_heads, -1).split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
    latent, k_rope = F.linear(x, w.kv_a).split((c.kv_lora_rank, c.qk_rope_head_dim), -1)
    kv = F.linear(rms_norm(latent, w.kv_a_norm, c.latent_norm_eps), w.kv_b)
    k_nope, v = kv.view(length, c.num_heads, -1).split((c.qk_nope_head_dim, c.v_head_dim), -1)
    q = torch.cat((q_nope, interleaved(q_rope, turns.unsqueeze(1))), -1)
    k_rope = interleaved(k_rope, turns).unsqueeze(1).expand(-1, c.num_heads, -1)
    k = torch.cat((k_nope, k_rope), -1)
    logits = torch.einsum("qhd,khd->hqk", q, k).float() * c.softmax_scale
    weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1).to(x.dtype)
    return F.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), w.o)


def target(
    config: ModelConfig,
    weights: TargetWeights,
    tokens: Tensor,
    taps: tuple[int, ...] = (),
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the target over one sequence (or a tree: give positions and mask).

    tokens [L] long; positions [L] (default 0 .. L - 1); mask [L, L] bool, who sees whom (default causal).
    Returns (logits [L, V] float32, taps [L, taps * H]).
    """
    length = tokens.shape[0]
    if positions is None:
        positions = torch.arange(length, device=tokens.device)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    turns = turns_at(positions, config.rope, config.qk_rope_head_dim, config.rope.amplitude)
    x, kept = F.embedding(tokens, weights.embed), {}
    for index, w in enumerate(weights.layers):
        x = x + attention(rms_norm(x, w.input_norm, config.rms_norm_eps), w, config, turns, mask)
        inner = rms_norm(x, w.post_norm, config.rms_norm_eps)
        x = x + (moe(inner, w.mlp, config) if isinstance(w.mlp, MoEWeights) else mlp(inner, w.mlp))
        kept[index] = x
    logits = F.linear(rms_norm(x, weights.norm, config.rms_norm_eps), weights.lm_head).float()
    return logits, torch.cat([kept[tap] for tap in taps], -1) if taps else x.new_empty(length, 0)


def drafter(
    config: DrafterConfig,
    weights: DrafterWeights,
    embed: Tensor,
    lm_head: Tensor,
    features: Tensor,
    root: int,
    block: int,
    window: int | None = None,
) -> Tensor:
    """Guess the tokens after `root`, which follows a sequence with tapped features [L, taps * H].

    Returns logits [block - 1, V] float32; place i is about position L + 1 + i. `window`: newest features that are seen.
    """
    length = features.shape[0]
    first = 0 if window is None else max(0, length - window)
    ids = torch.tensor([root] + [config.mask_token_id] * (block - 1), device=embed.device)
    x = F.embedding(ids, embed)
    context = rms_norm(F.linear(features[first:], weights.fc), weights.hidden_norm, config.rms_norm_eps)
    positions = torch.arange(first, length + block, device=embed.device)
    turns = turns_at(positions, config.rope, config.head_dim, config.amplitude).unsqueeze(1)
    share = config.num_heads // config.num_kv_heads
    for w in weights.layers:
        inner = rms_norm(x, w.input_norm, config.rms_norm_eps)
        seen = torch.cat((context, inner))
        q = F.linear(inner, w.q).view(block, -1, config.head_dim)
        k, v = (F.linear(seen, m).view(len(seen), -1, config.head_dim) for m in (w.k, w.v))
        q = rotate_half(rms_norm(q, w.q_norm, config.rms_norm_eps), turns[-block:])
        k = rotate_half(rms_norm(k, w.k_norm, config.rms_norm_eps), turns)
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k).float() * config.head_dim**-0.5
        out = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1).to(v.dtype), v).flatten(1)
        x = x + F.linear(out, w.o)
        x = x + mlp(rms_norm(x, w.post_norm, config.rms_norm_eps), w.mlp)
    return F.linear(rms_norm(x[1:], weights.norm, config.rms_norm_eps), lm_head).float()
