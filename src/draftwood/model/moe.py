"""Mixture of experts: sigmoid routing with a choice bias, and the chosen experts of a CPU.

Experts are expanded from INT4 once, at construction. That is right for a CPU reference and for nano; the CUDA path
keeps them packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.model import costs
from draftwood.model.config import ModelConfig
from draftwood.model.layers import Dense, Linear, swiglu
from draftwood.model.weights import DenseWeights, ExpertWeights, MoEWeights, unpack_int4

WIDE_UNTIL = 16
"""Tokens up to which one product over all held experts replaces products per chosen expert. Measured on the layers of nano
with two cores, microseconds, wide and per expert: 1 token 137 and 128, 2: 166 and 177, 5: 275 and 328, 9: 400 and 457,
17: 639 and 588, 33: 1103 and 936. The more cores, the longer wide products win; with one thread they never do."""


class Router:
    """Chooses experts: DeepSeek's noaux_tc with one group (arXiv 2412.19437 section 2.1.2)."""

    def __init__(self, weights: MoEWeights, config: ModelConfig) -> None:
        self.score, self.bias = Linear(weights.router.float()), weights.bias.float()
        self.k, device = config.experts_per_token, weights.bias.device
        self.scale = torch.tensor(config.routed_scaling_factor, dtype=torch.float32, device=device)
        self.least = torch.tensor(1e-20, device=device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (experts [T, k] long, weights [T, k] float32).

        All in float32. The bias only helps to choose; ties go to the lowest id; weights sum to the scaling factor.
        """
        scores = torch.sigmoid(self.score(x.float()))
        # A stable sort, because topk promises nothing about ties and ranks must agree.
        chosen = (scores + self.bias).sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        weights = scores.gather(1, chosen)
        return chosen, weights.mul_(self.scale / weights.sum(-1, keepdim=True).add_(self.least))


class Experts:
    """Routed experts first .. first + count - 1, or a rank's columns of them, and the shared expert beside them.

    Few tokens of a model with few experts are multiplied by all of them at once, each expert that a token did not choose
    having weight 0: large products are what many threads do well. Otherwise each chosen expert is multiplied by the
    tokens that chose it. Either way a token's sum is float32 and does not depend on what other tokens chose.
    Memory: `costs.expanded_expert_bytes`.
    """

    def __init__(self, weights: ExpertWeights, shared: DenseWeights, k: int, total: int, dtype: torch.dtype) -> None:
        gate = unpack_int4(weights.gate_packed, weights.gate_scale, dtype)
        up = unpack_int4(weights.up_packed, weights.up_scale, dtype)
        down = unpack_int4(weights.down_packed, weights.down_scale, dtype)
        self.first, (self.count, self.width, _), self.total = weights.first, gate.shape, total
        self.shared = Dense(shared)
        self._gate_up = [Linear(matrix) for matrix in torch.cat((gate, up), 1)]
        self._down = [Linear(matrix) for matrix in down]
        self.wide: Dense | None = None
        if total <= costs.WIDE_WASTE * k:
            joint = DenseWeights(
                torch.cat((gate.flatten(0, 1), shared.gate)),
                torch.cat((up.flatten(0, 1), shared.up)),
                torch.cat((down.transpose(0, 1).flatten(1), shared.down), 1),
            )
            self.wide = Dense(joint)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], chosen and weights [T, k] -> [T, H]: held experts by weight, plus the shared expert."""
        if self.wide is not None and x.shape[0] <= WIDE_UNTIL and torch.get_num_threads() > 1:
            return self._all(self.wide, x, chosen, weights)
        return self._each(x, chosen, weights).add_(self.shared(x))

    def _all(self, wide: Dense, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every held expert for every token in two products, the shared one among them."""
        factor = weights.new_zeros(x.shape[0], self.total).scatter_(1, chosen, weights)
        if self.count < self.total:
            factor = factor[:, self.first : self.first + self.count]
        hidden = swiglu(wide.gate_up(x))
        routed = hidden[:, : self.count * self.width].unflatten(1, (self.count, self.width))
        routed.mul_(factor.unsqueeze(2))
        return wide.down(hidden)

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
        hidden = swiglu(torch.cat([self._gate_up[e](r) for r, e in zip(rows, used, strict=True)]))
        out = torch.cat([self._down[e](r) for r, e in zip(hidden.split(sizes), used, strict=True)])
        places = x.new_zeros(len(flat), x.shape[1]) if pairs < len(flat) else torch.empty_like(out)
        places = places.index_copy_(0, order, out).view(*chosen.shape, -1)
        return torch.bmm(weights.unsqueeze(1), places.float()).squeeze(1).to(x.dtype)


class MoE:
    """Router and experts; a partial sum where a rank holds a part."""

    def __init__(self, weights: MoEWeights, config: ModelConfig, dtype: torch.dtype) -> None:
        self.router = Router(weights, config)
        self.experts = Experts(weights.experts, weights.shared, config.experts_per_token, config.num_experts, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]: routed experts by weight, plus the shared expert."""
        return self.experts(x, *self.router(x))
