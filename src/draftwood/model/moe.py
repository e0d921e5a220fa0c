"""Mixture of experts: sigmoid routing with a choice bias, and three ways to compute the chosen experts on a CPU.

Experts are expanded from INT4 once, at construction. That is right for a CPU reference and for nano; the CUDA path
keeps them packed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.model import costs
from draftwood.model.config import ModelConfig
from draftwood.model.layers import Dense, swiglu
from draftwood.model.weights import DenseWeights, ExpertWeights, MoEWeights, unpack_int4

WIDE_FROM, WIDE_UNTIL = 2, 80
"""Tokens for which one product over all held experts may replace products per chosen expert. Measured on the experts of
nano's 7 layers, two idle cores, per expert against wide: 4.4 and 4.0 ms at 2 tokens, 9.3 and 4.0 at 9, 10.9 and 5.3 at
17, 12.5 and 8.4 at 33, 15.2 and 13.2 at 65, 19.8 and 23.8 at 129. One core alone would change over at about 32."""


class Router:
    """Chooses experts: DeepSeek's noaux_tc with one group (arXiv 2412.19437 section 2.1.2)."""

    def __init__(self, weights: MoEWeights, config: ModelConfig) -> None:
        self.weight, self.bias = weights.router.float(), weights.bias.float()
        self.k, self.scale = config.experts_per_token, config.routed_scaling_factor

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (experts [T, k] long, weights [T, k] float32).

        All in float32. The bias only helps to choose; ties go to the lowest id; weights sum to the scaling factor.
        """
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        # A stable sort, because topk promises nothing about ties and ranks must agree.
        chosen = (scores + self.bias).sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        weights = scores.gather(1, chosen)
        return chosen, weights.mul_(self.scale / (weights.sum(-1, keepdim=True) + 1e-20))


class Experts:
    """Routed experts first .. first + count - 1, or a rank's columns of them, and the shared expert beside them.

    A token's experts are summed in a fixed order in float32, whatever other tokens chose. Memory: one expanded copy by
    expert, in float16 where that holds every code times scale exactly (it holds 11 bits, they need 11) and in `dtype`
    otherwise; and, where experts are few for the number chosen, a second one in `dtype` as one wide matrix
    (`costs.expanded_expert_bytes`).
    """

    def __init__(self, weights: ExpertWeights, shared: DenseWeights, k: int, total: int, dtype: torch.dtype) -> None:
        gate = unpack_int4(weights.gate_packed, weights.gate_scale, dtype)
        up = unpack_int4(weights.up_packed, weights.up_scale, dtype)
        down = unpack_int4(weights.down_packed, weights.down_scale, dtype)
        self.first, self.count, self.total = weights.first, gate.shape[0], total
        self.width, self.shared_width = gate.shape[1], shared.gate.shape[0]
        self.shared = Dense(shared)
        self.wide: Dense | None = None
        if total <= costs.WIDE_WASTE * k:
            joint = DenseWeights(
                torch.cat((gate.flatten(0, 1), shared.gate)),
                torch.cat((up.flatten(0, 1), shared.up)),
                torch.cat((down.transpose(0, 1).flatten(1), shared.down), 1),
            )
            self.wide = Dense(joint)
        # Views made once: indexing a tensor costs as much as a small product.
        self._gate_up, self._down = list(_narrow(torch.cat((gate, up), 1))), list(_narrow(down))

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], chosen and weights [T, k] -> [T, H]: held experts by weight, plus the shared expert."""
        if x.shape[0] == 1:
            return self._one(x, chosen[0].tolist(), weights).add_(self.shared(x))
        if self.wide is not None and WIDE_FROM <= x.shape[0] <= WIDE_UNTIL:
            return self._all(x, chosen, weights)
        return self._each(x, chosen, weights).add_(self.shared(x))

    def _one(self, x: Tensor, chosen: list[int], weights: Tensor) -> Tensor:
        held = [(k, e - self.first) for k, e in enumerate(chosen) if 0 <= e - self.first < self.count]
        if not held:
            return torch.zeros_like(x)
        hidden = swiglu(torch.cat([F.linear(x, self._gate_up[e].to(x.dtype)) for _, e in held]))
        parts = zip(hidden.unsqueeze(1).unbind(), held, strict=True)
        out = torch.cat([F.linear(row, self._down[e].to(x.dtype)) for row, (_, e) in parts])
        if len(held) < len(chosen):
            weights = weights[:, [k for k, _ in held]]
        return _combine(out.unsqueeze(0), weights)

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every held expert for every token in two products; an expert that was not chosen has weight 0."""
        assert self.wide is not None
        factor = weights.new_zeros(x.shape[0], self.total).scatter_(1, chosen, weights)
        factor = factor[:, self.first : self.first + self.count].to(x.dtype)
        hidden = swiglu(self.wide.gate_up(x))
        routed = hidden[:, : self.count * self.width].unflatten(1, (self.count, self.width))
        routed.mul_(factor.unsqueeze(2))
        return self.wide.down(hidden)

    def _each(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Two products per chosen expert, over its tokens."""
        flat = chosen.flatten()
        if self.count < self.total:
            flat = flat - self.first
            # Experts of other ranks sort behind all held ones and are cut off there.
            flat = torch.where((flat < 0) | (flat >= self.count), self.count, flat)
        counts = torch.bincount(flat, minlength=self.count).tolist()[: self.count]
        pairs = sum(counts)
        if pairs == 0:
            return torch.zeros_like(x)
        order = flat.argsort(stable=True)[:pairs]
        used = [e for e, n in enumerate(counts) if n]
        sizes = [counts[e] for e in used]
        rows = x.index_select(0, order // chosen.shape[1]).split(sizes)
        hidden = swiglu(torch.cat([F.linear(r, self._gate_up[e].to(x.dtype)) for r, e in zip(rows, used, strict=True)]))
        rows = hidden.split(sizes)
        out = torch.cat([F.linear(r, self._down[e].to(x.dtype)) for r, e in zip(rows, used, strict=True)])
        places = x.new_zeros(len(flat), x.shape[1]) if pairs < len(flat) else torch.empty_like(out)
        return _combine(places.index_copy_(0, order, out).view(*chosen.shape, -1), weights)


def _narrow(weight: Tensor) -> Tensor:
    """Return `weight` in float16 when that is exact: half the bytes to read, and reading is what small products cost."""
    half = weight.half()
    return half if weight.dtype == torch.float32 and torch.equal(half.float(), weight) else weight


def _combine(parts: Tensor, weights: Tensor) -> Tensor:
    """Sum of parts [T, k, H] by weights [T, k], in float32, in the type of the parts [T, H]."""
    return torch.bmm(weights.unsqueeze(1), parts.float()).squeeze(1).to(parts.dtype)


class MoE:
    """Router and experts; a partial sum where a rank holds a part."""

    def __init__(self, weights: MoEWeights, config: ModelConfig, dtype: torch.dtype) -> None:
        self.router = Router(weights, config)
        self.experts = Experts(weights.experts, weights.shared, config.experts_per_token, config.num_experts, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: routed experts by weight, plus the shared expert."""
        return self.experts(x, *self.router(x))
