"""Weights in the order in which the kernels read them: what a rank keeps on its device, and how it gets there.

Everything is bfloat16 but the routers' choice bias (float32) and the experts (INT4). Packing goes layer by layer and lets go of
each layer's source before the next, so the peak above the result is one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear.op import Weight
from draftwood.kernels.moe_int4 import repack as experts_order
from draftwood.kernels.moe_int4.repack import Packed
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.moe_route.op import Router
from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.layers import halves_to_pairs
from draftwood.model.weights import (
    DenseWeights,
    DrafterLayerWeights,
    DrafterWeights,
    LayerWeights,
    MoEWeights,
    TargetWeights,
)


@dataclass(frozen=True)
class PackedDense:
    """A SwiGLU MLP, or a rank's columns of one."""

    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class PackedMoE:
    """Router, shared expert and this rank's routed experts first .. first + experts.experts - 1."""

    router: Router
    shared: PackedDense
    experts: Packed
    first: int


@dataclass(frozen=True)
class PackedLayer:
    """One layer. down: q_a and kv_a as one product; absorb_k [heads', latent, nope] takes a query's part without position to
    the latent space, absorb_v [heads', v, latent] attended latents to values; norms are vectors."""

    input_norm: Tensor
    post_norm: Tensor
    down: Weight
    q_norm: Tensor
    kv_norm: Tensor
    q_b: Weight
    absorb_k: Weight
    absorb_v: Weight
    o: Weight
    mlp: PackedDense | PackedMoE


@dataclass(frozen=True)
class PackedTarget:
    """The target: embed [V, H] as rows, lm_head [V', H], norm [H]."""

    embed: Tensor
    lm_head: Weight
    norm: Tensor
    layers: list[PackedLayer]


@dataclass(frozen=True)
class PackedDraftLayer:
    """One drafter layer. Queries and keys are in pairs order (`layers.halves_to_pairs`), and so are q_norm and k_norm [d]."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    o: Weight
    mlp: PackedDense


@dataclass(frozen=True)
class PackedDrafter:
    """The drafter. context_kv: keys of all layers, then values; k_norms [layers, d]. Embedding and head are the target's."""

    fc: Weight
    hidden_norm: Tensor
    context_kv: Weight
    k_norms: Tensor
    norm: Tensor
    layers: list[PackedDraftLayer]


def tensors(packed: object) -> Iterator[Tensor]:
    """Every tensor of a packed record, however deep."""
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, list):
        for part in packed:
            yield from tensors(part)
    elif is_dataclass(packed):
        for part in fields(packed):
            yield from tensors(getattr(packed, part.name))


def nbytes(packed: PackedTarget | PackedDrafter) -> int:
    """Bytes that a packed model holds; `work.target_bytes` and `work.drafter_bytes` are the formulas."""
    return sum(t.nbytes for t in tensors(packed))


# ----------------------------------------------------------------------------------------------------------- the target


def pack_target(config: ModelConfig, weights: TargetWeights, device: torch.device | str) -> PackedTarget:
    """Pack a rank's target on `device`; `weights.layers` is emptied on the way.

    Raises ValueError for shapes that no kernel takes (odd widths, hidden sizes not in 128s).
    """
    layers = []
    while weights.layers:
        layers.append(_layer(config, weights.layers.pop(0), device))
    head = linear_op.pack(weights.lm_head.to(device))
    return PackedTarget(_plain(weights.embed, device), head, _plain(weights.norm, device), layers)


def _plain(x: Tensor, device: torch.device | str) -> Tensor:
    return x.to(device, torch.bfloat16).contiguous()


def _layer(config: ModelConfig, source: LayerWeights, device: torch.device | str) -> PackedLayer:
    def moved(x: Tensor) -> Tensor:
        return x.to(device)

    nope, v = config.qk_nope_head_dim, config.v_head_dim
    per_head = moved(source.kv_b).view(-1, nope + v, config.kv_lora_rank)
    mlp = source.mlp
    return PackedLayer(
        input_norm=_plain(source.input_norm, device),
        post_norm=_plain(source.post_norm, device),
        down=linear_op.pack(torch.cat((moved(source.q_a), moved(source.kv_a)))),
        q_norm=_plain(source.q_a_norm, device),
        kv_norm=_plain(source.kv_a_norm, device),
        q_b=linear_op.pack(moved(source.q_b)),
        absorb_k=linear_op.pack(per_head[:, :nope].transpose(1, 2)),
        absorb_v=linear_op.pack(per_head[:, nope:]),
        o=linear_op.pack(moved(source.o)),
        mlp=_moe(config, mlp, device) if isinstance(mlp, MoEWeights) else _dense(mlp, device),
    )


def _dense(source: DenseWeights, device: torch.device | str) -> PackedDense:
    gate_up = linear_op.pack_swiglu(source.gate.to(device), source.up.to(device))
    return PackedDense(gate_up, linear_op.pack(source.down.to(device)))


def _moe(config: ModelConfig, source: MoEWeights, device: torch.device | str) -> PackedMoE:
    e = source.experts
    parts = (e.gate_packed, e.gate_scale, e.up_packed, e.up_scale, e.down_packed, e.down_scale)
    return PackedMoE(
        router=router(config, source.router.to(device), source.bias.to(device)),
        shared=_dense(source.shared, device),
        experts=experts_order.repack(*(part.to(device) for part in parts)),
        first=e.first,
    )


def router(config: ModelConfig, weight: Tensor, bias: Tensor) -> Router:
    """Pack a router: weight [E, H], bias [E]."""
    shape = route_op.Shape(config.hidden_size, config.num_experts, config.experts_per_token)
    return Router(shape, route_op.repack(weight), bias.float().contiguous(), config.routed_scaling_factor)


# ---------------------------------------------------------------------------------------------------------- the drafter


def pack_drafter(config: DrafterConfig, weights: DrafterWeights, device: torch.device | str) -> PackedDrafter:
    """Pack a rank's drafter on `device`; `weights.layers` is emptied on the way. Raises ValueError as `pack_target`."""
    d = config.head_dim
    keys = [halves_to_pairs(layer.k, d) for layer in weights.layers]
    context = torch.cat(keys + [layer.v for layer in weights.layers]).to(device)
    norms = torch.stack([halves_to_pairs(layer.k_norm, d) for layer in weights.layers])
    layers = []
    while weights.layers:
        layers.append(_draft_layer(config, weights.layers.pop(0), device))
    return PackedDrafter(
        fc=linear_op.pack(weights.fc.to(device)),
        hidden_norm=_plain(weights.hidden_norm, device),
        context_kv=linear_op.pack(context),
        k_norms=_plain(norms, device),
        norm=_plain(weights.norm, device),
        layers=layers,
    )


def _draft_layer(config: DrafterConfig, source: DrafterLayerWeights, device: torch.device | str) -> PackedDraftLayer:
    d = config.head_dim
    qkv = torch.cat((halves_to_pairs(source.q, d), halves_to_pairs(source.k, d), source.v))
    return PackedDraftLayer(
        input_norm=_plain(source.input_norm, device),
        post_norm=_plain(source.post_norm, device),
        qkv=linear_op.pack(qkv.to(device)),
        q_norm=_plain(halves_to_pairs(source.q_norm, d), device),
        k_norm=_plain(halves_to_pairs(source.k_norm, d), device),
        o=linear_op.pack(source.o.to(device)),
        mlp=_dense(source.mlp, device),
    )
