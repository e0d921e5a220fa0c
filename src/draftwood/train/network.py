"""The trained networks, in the form that trains fast: a K2-shaped target and a DFlash drafter.

They mean exactly what `draftwood.model` means; only the arrangement differs.
- Everything but attention works on flat tokens [T, hidden] in functions that take their weights as arguments, so that
  one compiled copy serves all layers and every split of T into rows x length.
- Every routed expert is computed for every token and masked by its routing weight: for narrow experts one wide SwiGLU
  is faster than sorting, and a weight of zero gives exactly the sparse result.
- Routed experts pass through INT4 fake quantisation, with the packer's own rounding, from the first step.

Sources: MLA and noaux_tc routing as in the published DeepSeek-V3 / Kimi-K2 modelling code; drafter as in z-lab's DFlash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.train.shapes import GROUP, DraftShape, Shape

REACH = 0.5  # share of a draft position's weight that counts only as far as the positions before it are right

# ---------------------------------------------------------------- parts
def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the dtype of x (weights are kept in fp32 while training)."""
    return F.linear(x, weight.to(x.dtype))


def yarn_angles(dim: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [max_position, dim/2] of YaRN (beta 32 / 1); amplitude 1 because mscale = mscale_all_dim."""
    base = shape.theta ** (torch.arange(0, dim, 2).double() / dim)

    def turns(beta: float) -> float:
        return dim * math.log(shape.original / (beta * 2 * math.pi)) / (2 * math.log(shape.theta))

    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dim - 1)
    ramp = ((torch.arange(dim // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
    inverse = (1 / base) * (1 - ramp) + ramp / (shape.factor * base)
    angles = torch.arange(shape.max_position).double()[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension (the drafter's layout)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (the target's layout): de-interleave, then rotate the halves."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def softmax_scale(shape: Shape) -> float:
    """1 / sqrt(head) x mscale^2, mscale = 0.1 ln(factor) + 1."""
    mscale = 0.1 * math.log(shape.factor) + 1 if shape.factor > 1 else 1.0
    return float((shape.nope + shape.rope) ** -0.5 * mscale * mscale)


def round_bf16(x: Tensor) -> Tensor:
    """fp32 rounded to the nearest bf16, ties to even, by its bits.

    The compiler removes a pair of casts to bf16 and back; it cannot remove this.
    """
    bits = x.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def int4_scale(groups: Tensor) -> Tensor:
    """Scale of each group [..., groups, 1]: largest magnitude / 7, in bf16. Codes are -7..7."""
    return round_bf16(groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12)


def fake_int4(weight: Tensor) -> Tensor:
    """Round to INT4 group 32 in the forward pass; the gradient passes straight through."""
    groups = weight.detach().unflatten(-1, (-1, GROUP))
    scale = int4_scale(groups)
    rounded = ((groups / scale).round().clamp(-7, 7) * scale).flatten(-2)
    return rounded + (weight - weight.detach())


def fake_bf16(weight: Tensor) -> Tensor:
    """Round to bf16 in the forward pass (the router is stored in bf16, computed in fp32)."""
    return round_bf16(weight.detach()) + (weight - weight.detach())


def route(x: Tensor, router: Tensor, bias: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> routing weights [T, experts] (zero where not chosen) and choice [T, experts], fp32.

    The bias only chooses; ties go to the lowest expert id. The top-k is found by counting who ranks ahead.
    """
    score = torch.sigmoid(F.linear(x.float(), router))
    biased = score.detach() + bias
    mine, other = biased.unsqueeze(-1), biased.unsqueeze(-2)
    ids = torch.arange(shape.experts, device=x.device)
    ahead = (other > mine) | ((other == mine) & (ids[None, :] < ids[:, None]))
    chosen = (ahead.sum(-1) < shape.topk).float()
    weight = score * chosen
    return weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.scaling, chosen


def widen(gate: Tensor, up: Tensor, down: Tensor, shared: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Routed experts [E,I,h], [E,I,h], [E,h,I] and the shared one -> [2(E+1)I, h] and [(E+1)I, h]."""
    s_gate, s_up, s_down = shared
    first = torch.cat([gate.flatten(0, 1), s_gate, up.flatten(0, 1), s_up])
    return first, torch.cat([down.transpose(1, 2).flatten(0, 1), s_down.t()])


def experts(x: Tensor, weight: Tensor, first: Tensor, second: Tensor, shape: Shape) -> Tensor:
    """x [T, hidden], routing weight [T, experts] -> sum of weighted experts plus the shared expert, [T, hidden]."""
    gate, up = F.linear(x, first).unflatten(-1, (2, shape.experts + 1, shape.moe_inter)).unbind(-3)
    scaled = torch.cat([weight, torch.ones_like(weight[:, :1])], -1).unsqueeze(-1)
    return (F.silu(gate.float()) * up.float() * scaled).to(x.dtype).flatten(-2) @ second


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def parameter(*size: int, std: float | None = None) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * (0.7 / math.sqrt(size[-1]) if std is None else std))


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


# ---------------------------------------------------------------- target
class Block(nn.Module):
    """Weights of one layer. `bias` is the router's selection bias, `load` counts how often each expert was chosen."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        s, h, H = shape, shape.hidden, shape.heads
        self.dense = dense
        self.baked: tuple[Tensor, Tensor] | None = None
        self.input_norm, self.post_norm = ones(h), ones(h)
        self.q_a_norm, self.kv_a_norm = ones(s.q_lora), ones(s.kv_lora)
        self.q_a, self.q_b = parameter(s.q_lora, h), parameter(H * (s.nope + s.rope), s.q_lora)
        self.kv_a, self.kv_b = parameter(s.latent, h), parameter(H * (s.nope + s.v), s.kv_lora)
        self.o = parameter(h, H * s.v, std=0.3 / math.sqrt(H * s.v))
        inter = s.dense_inter if dense else s.moe_inter
        self.gate, self.up = parameter(inter, h), parameter(inter, h)
        self.down = parameter(h, inter, std=0.3 / math.sqrt(inter))
        if not dense:
            E, I = s.experts, s.moe_inter
            self.router = parameter(E, h, std=0.02)
            self.register_buffer("bias", torch.zeros(E))
            self.register_buffer("load", torch.zeros(E))
            self.e_gate, self.e_up = parameter(E, I, h), parameter(E, I, h)
            self.e_down = parameter(E, h, I, std=0.3 / math.sqrt(I))

    def attention_weights(self) -> tuple[Tensor, ...]:
        return self.input_norm, self.q_a, self.q_a_norm, self.q_b, self.kv_a, self.kv_a_norm, self.kv_b


def queries(x: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """x [T, hidden] -> q_nope [T,H,nope], rotated q_rope [T,H,rope], latent [T,kv_lora], rotated key [T,rope]."""
    norm, q_a, q_a_norm, q_b, kv_a, kv_a_norm, _ = weights
    x = rms(x, norm, shape.eps)
    q = linear(rms(linear(x, q_a), q_a_norm, shape.latent_eps), q_b).unflatten(-1, (shape.heads, -1))
    q_nope, q_rope = q.split([shape.nope, shape.rope], -1)
    latent, key = linear(x, kv_a).split([shape.kv_lora, shape.rope], -1)
    latent = rms(latent, kv_a_norm, shape.latent_eps)
    return q_nope, rotate_pairs(q_rope, cos[:, None], sin[:, None]), latent, rotate_pairs(key, cos, sin)


class TargetNet(nn.Module):
    """The target. `compile()` before training on CUDA; `bake(dtype)` turns it into what the checkpoint stores."""

    cos: Tensor
    sin: Tensor
    blocks: Any  # nn.ModuleList of Block

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = parameter(shape.vocab, shape.hidden, std=0.5)
        self.head = parameter(shape.vocab, shape.hidden, std=0.02)
        self.norm = ones(shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, i == 0) for i in range(shape.layers))
        cos, sin = yarn_angles(shape.rope, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.scale = softmax_scale(shape)
        self._before: Callable[..., Any] = self.before
        self._after_dense: Callable[..., Any] = self.after_dense
        self._after_moe: Callable[..., Any] = self.after_moe

    def compile_parts(self) -> None:
        """Compile the three parts that all layers share (before attention, after it in a dense and in a MoE layer)."""
        self._before = torch.compile(self.before, dynamic=False)
        self._after_dense = torch.compile(self.after_dense, dynamic=False)
        self._after_moe = torch.compile(self.after_moe, dynamic=False)

    def plain_parts(self) -> None:
        """Undo `compile_parts`."""
        self._before, self._after_dense, self._after_moe = self.before, self.after_dense, self.after_moe

    def before(self, x: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden], cos/sin [T, rope/2] -> q, k, v [T, heads, nope+rope], v padded with zeros."""
        s = self.shape
        q_nope, q_rope, latent, key = queries(x, weights, cos, sin, s)
        kv = linear(latent, weights[-1]).unflatten(-1, (s.heads, -1))
        k_nope, v = kv.split([s.nope, s.v], -1)
        k = torch.cat([k_nope, key[:, None].expand(-1, s.heads, -1)], -1)
        return torch.cat([q_nope, q_rope], -1), k, F.pad(v, (0, s.nope + s.rope - s.v))

    def after_dense(self, x: Tensor, a: Tensor, o: Tensor, norm: Tensor, mlp: tuple[Tensor, ...]) -> Tensor:
        """x [T, hidden], attention output a [T, heads, nope+rope] -> [T, hidden]."""
        x = x + linear(a[..., : self.shape.v].flatten(1), o)
        return x + swiglu(rms(x, norm, self.shape.eps), *mlp)

    def after_moe(
        self, x: Tensor, a: Tensor, o: Tensor, norm: Tensor, router: Tensor, bias: Tensor,
        routed: tuple[Tensor, ...], shared: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As after_dense for a MoE layer; also how many tokens chose each expert [experts]."""
        gate, up, down = (fake_int4(w) for w in routed)
        first, second = widen(gate, up, down, shared)
        return self.after_wide(x, a, o, norm, fake_bf16(router), bias, first.to(x.dtype), second.to(x.dtype))

    def after_wide(
        self, x: Tensor, a: Tensor, o: Tensor, norm: Tensor, router: Tensor, bias: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """after_moe with the wide expert matrices at hand."""
        x = x + linear(a[..., : self.shape.v].flatten(1), o)
        h = rms(x, norm, self.shape.eps)
        weight, chosen = route(h, router, bias, self.shape)
        return x + experts(h, weight, first, second, self.shape), chosen.sum(0)

    def mix(self, block: Any, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Everything after attention in `block`: x [T, hidden], a [T, heads, >= v] -> x, expert load."""
        shared = (block.gate, block.up, block.down)
        if block.dense:
            return self._after_dense(x, a, block.o, block.post_norm, shared), None
        if block.baked is not None:
            return self.after_wide(x, a, block.o, block.post_norm, block.router, block.bias, *block.baked)
        routed = (block.e_gate, block.e_up, block.e_down)
        return self._after_moe(x, a, block.o, block.post_norm, block.router, block.bias, routed, shared)

    def forward(self, ids: Tensor, dtype: torch.dtype, count: bool = False) -> tuple[Tensor, list[Tensor]]:
        """ids [B, L] -> final normed hidden [B, L, hidden] and the tapped residual streams, each [B, L, hidden]."""
        B, L = ids.shape
        cos, sin = self.cos[:L].repeat(B, 1), self.sin[:L].repeat(B, 1)
        x = F.embedding(ids, self.embed).to(dtype).flatten(0, 1)
        taps = []
        for i, block in enumerate(self.blocks):
            qkv = self._before(x, block.attention_weights(), cos, sin)
            q, k, v = (t.unflatten(0, (B, L)).transpose(1, 2) for t in qkv)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            x, load = self.mix(block, x, a.transpose(1, 2).flatten(0, 1))
            if count and load is not None:
                block.load += load.detach()
            if i in self.shape.taps:
                taps.append(x.unflatten(0, (B, L)))
        return rms(x, self.norm, self.shape.eps).unflatten(0, (B, L)), taps

    @torch.no_grad()
    def bake(self, dtype: torch.dtype) -> TargetNet:
        """Round every weight to what the checkpoint stores (bf16, INT4 experts), frozen, ready to compute in `dtype`."""
        self.plain_parts()
        for name, p in self.named_parameters():
            p.requires_grad_(False)
            if ".e_" in name:
                p.copy_(fake_int4(p))
            elif "router" in name:
                p.copy_(fake_bf16(p))
            else:
                p.data = p.bfloat16().to(dtype)
        for block in self.blocks:
            if not block.dense:
                wide = widen(block.e_gate, block.e_up, block.e_down, (block.gate, block.up, block.down))
                block.baked = tuple(w.to(dtype).contiguous() for w in wide)
        return self

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Push the selection bias of busy experts down and of idle ones up, by `rate` (DeepSeek-V3's rule)."""
        for block in self.blocks:
            if not block.dense:
                block.bias += rate * torch.sign(block.load.mean() - block.load)
                block.load.zero_()


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token loss in nats: x [T, hidden], targets [T]."""
    return F.cross_entropy(linear(x, head).float(), targets)


# ---------------------------------------------------------------- drafter
class DraftBlock(nn.Module):
    def __init__(self, shape: Shape, draft: DraftShape) -> None:
        super().__init__()
        h, d = shape.hidden, draft.head_dim
        self.input_norm, self.post_norm, self.q_norm, self.k_norm = ones(h), ones(h), ones(d), ones(d)
        self.q, self.k, self.v = (parameter(n * d, h) for n in (draft.heads, draft.kv_heads, draft.kv_heads))
        self.o = parameter(h, draft.heads * d, std=0.3 / math.sqrt(draft.heads * d))
        self.gate, self.up = parameter(draft.inter, h), parameter(draft.inter, h)
        self.down = parameter(h, draft.inter, std=0.3 / math.sqrt(draft.inter))


class DrafterNet(nn.Module):
    """DFlash: blocks [root, mask, mask, ...] attend, without causality, to themselves and to the tapped past."""

    cos: Tensor
    sin: Tensor
    blocks: Any  # nn.ModuleList of DraftBlock

    def __init__(self, shape: Shape, draft: DraftShape) -> None:
        super().__init__()
        self.shape, self.draft = shape, draft
        self.fc = parameter(shape.hidden, shape.hidden * len(shape.taps))
        self.hidden_norm, self.norm = ones(shape.hidden), ones(shape.hidden)
        self.blocks = nn.ModuleList(DraftBlock(shape, draft) for _ in range(draft.layers))
        cos, sin = yarn_angles(draft.head_dim, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._context, self._before, self._after = self.context, self.before, self.after

    def compile_parts(self) -> None:
        """Compile the parts around attention, once for all layers."""
        self._context = torch.compile(self.context, dynamic=False)
        self._before = torch.compile(self.before, dynamic=False)
        self._after = torch.compile(self.after, dynamic=False)

    def plain_parts(self) -> None:
        """Undo `compile_parts`."""
        self._context, self._before, self._after = self.context, self.before, self.after

    def context(self, features: Tensor, fc: Tensor, norm: Tensor) -> Tensor:
        """Tapped features [T, taps * hidden] -> [T, hidden], one tensor for all layers."""
        return rms(linear(features, fc), norm, self.shape.eps)

    def keys(self, x: Tensor, k: Tensor, v: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> rotated keys and values [T, kv_heads, head_dim]."""
        key = rms(linear(x, k).unflatten(-1, (self.draft.kv_heads, -1)), norm, self.shape.eps)
        return rotate(key, cos[:, None], sin[:, None]), linear(x, v).unflatten(-1, (self.draft.kv_heads, -1))

    def before(
        self, x: Tensor, context: Tensor, weights: tuple[Tensor, ...], block_angles: tuple[Tensor, Tensor],
        context_angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Block x [T, hidden], context [C, hidden] -> q [T,heads,d], block k, v [T,kv,d], context k, v [C,kv,d]."""
        norm, q, k, v, q_norm, k_norm = weights
        n = rms(x, norm, self.shape.eps)
        query = rms(linear(n, q).unflatten(-1, (self.draft.heads, -1)), q_norm, self.shape.eps)
        query = rotate(query, block_angles[0][:, None], block_angles[1][:, None])
        return query, *self.keys(n, k, v, k_norm, *block_angles), *self.keys(context, k, v, k_norm, *context_angles)

    def after(self, x: Tensor, a: Tensor, o: Tensor, norm: Tensor, mlp: tuple[Tensor, ...]) -> Tensor:
        """x [T, hidden], attention output a [T, heads, d] -> [T, hidden]."""
        x = x + linear(a.flatten(1), o)
        return x + swiglu(rms(x, norm, self.shape.eps), *mlp)

    def forward(self, embed: Tensor, roots: Tensor, features: Tensor, anchors: Tensor, start: Tensor, width: int) -> Tensor:
        """All blocks of all rows at once -> normed hidden [B, A, width, hidden].

        embed: the target's embedding [V, hidden]. features [B, L, taps * hidden] of positions start .. start+L-1;
        start [1] long. anchors [B or 1, A]: position of each root. roots [B, A]: token there. A block sees the
        features of positions start .. anchor-1 and itself; positions beyond max_position are not allowed.
        """
        (B, A), L, W, dtype = roots.shape, features.shape[1], width, features.dtype
        x = embed[self.draft.mask_id].expand(B, A, W, -1).clone()
        x[:, :, 0] = F.embedding(roots, embed)
        x = x.to(dtype).flatten(0, 2)
        offsets = torch.arange(W, device=roots.device)
        where = (anchors.expand(B, A)[..., None] + offsets).flatten()
        seen = (start + torch.arange(L, device=roots.device)).repeat(B)
        block_angles, context_angles = (self.cos[where], self.sin[where]), (self.cos[seen], self.sin[seen])
        context = self._context(features.flatten(0, 1), self.fc, self.hidden_norm)
        mask = block_mask(anchors, start, L, W)
        for b in self.blocks:
            weights = (b.input_norm, b.q, b.k, b.v, b.q_norm, b.k_norm)
            q, k, v, ck, cv = self._before(x, context, weights, block_angles, context_angles)
            a = self.attend(q.view(B, A * W, *q.shape[1:]), k, v, ck, cv, mask)
            x = self._after(x, a, b.o, b.post_norm, (b.gate, b.up, b.down))
        return rms(x, self.norm, self.shape.eps).view(B, A, W, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ck: Tensor, cv: Tensor, mask: Tensor) -> Tensor:
        """q [B, Q, heads, d]; flat k, v of blocks and context; mask [B or 1, 1, Q, L+Q] -> [B*Q, heads, d]."""
        B, groups = q.shape[0], self.draft.heads // self.draft.kv_heads
        keys = torch.cat([ck.unflatten(0, (B, -1)), k.unflatten(0, (B, -1))], 1).repeat_interleave(groups, 2)
        values = torch.cat([cv.unflatten(0, (B, -1)), v.unflatten(0, (B, -1))], 1).repeat_interleave(groups, 2)
        q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
        a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.draft.head_dim**-0.5)
        return a.transpose(1, 2).flatten(0, 1)

    @torch.no_grad()
    def bake(self) -> DrafterNet:
        """Round to the stored bf16, frozen."""
        self.plain_parts()
        for p in self.parameters():
            p.requires_grad_(False)
            p.copy_(p.bfloat16().float())
        return self


def block_mask(anchors: Tensor, start: Tensor, length: int, width: int) -> Tensor:
    """anchors [B or 1, A] -> bool [B or 1, 1, A*W, L + A*W]: the past before the anchor, and the own block."""
    own = anchors.repeat_interleave(width, -1)
    past = (start + torch.arange(length, device=anchors.device))[None, None] < own[..., None]
    block = torch.arange(anchors.shape[-1], device=anchors.device).repeat_interleave(width)
    same = (block[:, None] == block).expand(anchors.shape[0], -1, -1)
    return torch.cat([past, same], -1)[:, None]


def distil(draft: Tensor, target: Tensor, head: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy of the drafter against the target's distribution, sharpened per position.

    draft, target: final hidden states [T, hidden]; sharpness [T]. Returns nats [T], and the mass that both distributions
    share [T] (no gradient): the chance that a draft sampled there is accepted.
    """
    head = head.to(draft.dtype)
    p = torch.softmax(F.linear(target, head).float() * sharpness[:, None], -1)
    log_q = torch.log_softmax(F.linear(draft, head).float(), -1)
    return -(p * log_q).sum(-1), torch.minimum(p, log_q.detach().exp()).sum(-1)


def weighted(losses: Tensor, agreement: Tensor, weight: Tensor, depth: int, share: float = REACH) -> Tensor:
    """Weighted mean of `losses` [T] of blocks of `depth` positions, T = blocks * depth, in nats.

    `share` of each position's weight is scaled by the chance that a chain reaches it: the product of the agreement of the
    positions before it in its block. What stands behind a draft that is refused is never used.
    """
    reach = agreement.detach().view(-1, depth).cumprod(-1)
    reach = torch.cat([torch.ones_like(reach[:, :1]), reach[:, :-1]], -1).flatten()
    weight = weight * (1 - share + share * reach)
    return (losses * weight).sum() / weight.sum().clamp_min(1e-6)
