"""The target: a Kimi K2 text model, one forward for prompt chunks, single tokens and draft trees alike."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.model.config import ModelConfig
from draftwood.model.layers import Dense, Norm, linear, rope_table
from draftwood.model.mla import Attention, Slots, StepPlan, plan_step
from draftwood.model.moe import MoE
from draftwood.model.weights import LayerWeights, MoEWeights, TargetWeights
from draftwood.parallel.comm import Comm
from draftwood.parallel.layout import Layout


class Layer:
    """Attention and MLP with their norms; on several ranks each half is a partial sum, added once."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, comm: Comm, dtype: torch.dtype) -> None:
        self.input_norm = Norm(weights.input_norm, config.rms_norm_eps)
        self.post_norm = Norm(weights.post_norm, config.rms_norm_eps)
        self.attention = Attention(weights, config)
        self.mlp = MoE(weights.mlp, config, dtype) if isinstance(weights.mlp, MoEWeights) else Dense(weights.mlp)
        self.comm = comm

    def __call__(self, x: Tensor, turns: Tensor, cache: Tensor, plan: StepPlan) -> Tensor:
        """x [T, H] residual stream -> [T, H]; writes this layer's latents into `cache`."""
        x = x + self.comm.all_reduce(self.attention(self.input_norm(x), turns, cache, plan))
        return x + self.comm.all_reduce(self.mlp(self.post_norm(x)))


class Target:
    """A rank's part of the target. `lm_head` may be shared with the drafter (`layers.linear`)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,
        layout: Layout,
        comm: Comm,
        taps: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """taps: layers (0-based) whose output is kept for the drafter, in the order it wants them."""
        if layout.world != comm.world:
            raise ValueError(f"a layout of {layout.world} ranks does not fit {comm.world} connected ranks")
        self.config, self.comm, self.taps, self.dtype = config, comm, taps, dtype
        self.embed = weights.embed
        self.lm_head = linear(weights.lm_head)
        self.norm = Norm(weights.norm, config.rms_norm_eps)
        self.layers = [Layer(layer, config, comm, dtype) for layer in weights.layers]
        self.turns = rope_table(config.rope, config.qk_rope_head_dim, config.max_position, config.rope.amplitude, self.embed.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Slots,
        ancestors: Tensor,
        counts: Tensor,
        verified: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run every live node of every row; write their latents into `slots.cache` at `slots.nodes`.

        tokens, positions [R, N] long; ancestors [R, N, W] int64, bit j of word j // 64 set = node j is an ancestor or
        the node itself; counts [R] live nodes (what stands after them does not matter); verified = (rows [M], nodes
        [M]) long: the nodes whose logits are wanted. Returns (logits [M, V] float32, taps [R, N, taps * H], zero or
        unset at padding): taps are the residual stream after the chosen layers, without norm.
        """
        plan = plan_step(slots, ancestors, counts, self.dtype)
        tokens, positions, shape = tokens.flatten(), positions.flatten(), tokens.shape
        if plan.flat is not None:
            tokens, positions = tokens.index_select(0, plan.flat), positions.index_select(0, plan.flat)
        x = self.embed.index_select(0, tokens)
        turns = self.turns.index_select(0, positions)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, slots.cache[index], plan)
            if index in self.taps:
                kept[index] = x
        rows, nodes = verified
        starts = torch.tensor(plan.starts, device=rows.device)
        chosen = x.index_select(0, starts.index_select(0, rows) + nodes)
        logits = self.lm_head(self.norm(chosen))
        features = self._features([kept[tap] for tap in self.taps], plan, shape)
        return self.comm.all_gather(logits, -1).float(), features

    def _features(self, kept: list[Tensor], plan: StepPlan, shape: torch.Size) -> Tensor:
        """Put the taps [T, H] of the live nodes back into [R, N, taps * H]."""
        if not kept:
            return self.embed.new_empty(*shape, 0)
        joint = torch.cat(kept, -1)
        if plan.flat is None:
            return joint.view(*shape, -1)
        return joint.new_zeros(shape.numel(), joint.shape[-1]).index_copy_(0, plan.flat, joint).view(*shape, -1)
