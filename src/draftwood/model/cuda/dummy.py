"""Random packed weights, made on the device in the kernels' order: a full-width model in seconds and without a host copy.

Tokens stay apart, as bytes and times of steps want it: every token begins with an embedding of its own, of variance 1, to which
each layer adds little, and no direction is one that all weights like. (Codes of mean -1/2 made sums of a whole row count 9 times
as much as any other at K2.6's width, until all tokens were the same vector and chose the same experts.) The same token under two
parents does choose nearly alike.

Seeded by name, so a rank's replicated tensors are every rank's. Cut ones differ by rank and layout: the ranks of two layouts are
not the same model, as those of `model.weights.dummy_target` are.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear.op import Weight
from draftwood.kernels.linear.plan import Shape
from draftwood.kernels.moe_int4 import repack
from draftwood.kernels.moe_int4.repack import Packed
from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.cuda import pack
from draftwood.model.cuda.pack import (
    PackedDense,
    PackedDrafter,
    PackedDraftLayer,
    PackedLayer,
    PackedMoE,
    PackedTarget,
)
from draftwood.model.cuda.work import DraftSizes, Sizes
from draftwood.parallel.layout import Layout

_MEAN_SQUARE = 17.5
"""Of INT4 codes -7..7, of which 0 is twice as frequent: scales of (17.5 x inputs)^-1/2 keep an output's variance at the input's."""
_ADDED = 0.02
"""Scale of what attention and MLP add to the residual stream: 122 times that is a variance of 0.05."""


class _Maker:
    """Makes tensors of one rank."""

    def __init__(self, layout: Layout, device: torch.device | str, seed: int) -> None:
        self.rank, self.device, self.seed = layout.rank, torch.device(device), seed

    def generator(self, name: str, whole: bool) -> torch.Generator:
        key = f"{self.seed}:{name}" if whole else f"{self.seed}:{self.rank}:{name}"
        return torch.Generator(self.device).manual_seed(zlib.crc32(key.encode()))

    def normal(self, name: str, shape: tuple[int, ...], scale: float, whole: bool = True) -> Tensor:
        """Normal numbers with this standard deviation, bf16."""
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0, scale, generator=self.generator(name, whole))

    def linear(self, name: str, shape: Shape, whole: bool = False, scale: float = 1.0) -> Weight:
        """A packed weight of variance scale^2 / inputs: a random one in any order is a random one."""
        scale *= shape.inputs**-0.5
        if shape.inputs % 64:  # the rest of the last step must be zeros
            dense = self.normal(name, (shape.heads, shape.outputs, shape.inputs), scale, whole)
            return Weight(linear_op.pack(dense).data, shape)
        packed = (shape.heads, shape.outputs // 16, shape.steps, 1024)
        return Weight(self.normal(name, packed, scale, whole), shape)

    def ones(self, *shape: int) -> Tensor:
        """Weights of a norm."""
        return torch.ones(shape, dtype=torch.bfloat16, device=self.device)

    def experts(self, name: str, count: int, hidden: int, columns: int) -> Packed:
        """Random codes; one scale for all gates and ups, which keeps variances, and one for what goes out. Padded columns are as
        random as the others."""
        made = repack.empty(count, hidden, columns, self.device)
        generator = self.generator(name, False)
        for words in (made.gate_up, made.down):
            _even(words.view(torch.int64).random_(-(1 << 63), None, generator=generator))
        for scale, inputs, size in ((made.gate_up_scale, hidden, 1.0), (made.down_scale, made.width, _ADDED)):
            scale.fill_(size * (_MEAN_SQUARE * inputs) ** -0.5)
        return made


def _even(words: Tensor) -> None:
    """Make codes 0 of -8, in place, a part at a time: then their mean is 0. words int64, 16 codes with 8 added in each."""
    ones = 0x1111111111111111
    for part in words.flatten().split(1 << 25):
        some = part >> 1
        some |= part
        some |= some >> 2
        part |= (~some & ones) << 3


def dummy_target(config: ModelConfig, layout: Layout, device: torch.device | str, seed: int = 0) -> PackedTarget:
    """Return a rank's target of random weights: norms of ones, everything else of variance 1 / inputs but for what adds to the
    residual stream."""
    make, sizes = _Maker(layout, device, seed), Sizes(config, layout, 0)
    shapes, h = sizes.linears(), config.hidden_size
    layers = [_layer(make, sizes, shapes, index) for index in range(config.num_layers)]
    embed = make.normal("embed", (config.vocab_size, h), 1.0)
    return PackedTarget(embed, make.linear("lm_head", shapes["lm_head"]), make.ones(h), layers)


def _layer(make: _Maker, sizes: Sizes, shapes: dict[str, Shape], index: int) -> PackedLayer:
    c, h = sizes.config, sizes.config.hidden_size
    cut = {name: make.linear(f"{index} {name}", shapes[name]) for name in ("q_b", "absorb_k", "absorb_v")}
    cut["o"] = make.linear(f"{index} o", shapes["o"], scale=_ADDED)
    if index < c.first_k_dense:
        mlp: PackedDense | PackedMoE = _dense(make, f"{index}", shapes["dense gate_up"], shapes["dense down"], _ADDED)
    else:
        # A router's values are bfloat16, as a checkpoint's are: one part.
        router = make.normal(f"{index} router", (c.num_experts, h), h**-0.5)
        bias = make.normal(f"{index} bias", (c.num_experts,), 0.002)
        mlp = PackedMoE(
            router=pack.router(c, router, bias),
            shared=_dense(make, f"{index} shared", shapes["shared gate_up"], shapes["shared down"], _ADDED),
            experts=make.experts(f"{index} experts", len(sizes.experts), h, sizes.columns),
            first=sizes.experts.start,
        )
    return PackedLayer(
        input_norm=make.ones(h), post_norm=make.ones(h),
        down=make.linear(f"{index} down", shapes["q_a+kv_a"], whole=True),
        q_norm=make.ones(c.q_lora_rank), kv_norm=make.ones(c.kv_lora_rank),
        mlp=mlp, **cut,
    )  # fmt: skip


def _dense(make: _Maker, name: str, gate_up: Shape, down: Shape, added: float) -> PackedDense:
    return PackedDense(make.linear(f"{name} gate_up", gate_up), make.linear(f"{name} mlp down", down, scale=added))


def dummy_drafter(config: DrafterConfig, layout: Layout, device: torch.device | str, seed: int = 0) -> PackedDrafter:
    """Return a rank's drafter of random weights, all of variance 1 / inputs: its masks begin alike, and what layers add tells
    them apart."""
    make, sizes = _Maker(layout, device, seed), DraftSizes(config, layout, 0)
    shapes, h, d = sizes.linears(), config.hidden_size, config.head_dim
    layers = []
    for index in range(config.num_layers):
        name = f"draft {index}"
        layers.append(
            PackedDraftLayer(
                input_norm=make.ones(h),
                post_norm=make.ones(h),
                qkv=make.linear(f"{name} qkv", shapes["qkv"]),
                q_norm=make.ones(d),
                k_norm=make.ones(d),
                o=make.linear(f"{name} o", shapes["o"]),
                mlp=_dense(make, name, shapes["gate_up"], shapes["down"], 1.0),
            )  # fmt: skip
        )
    return PackedDrafter(
        fc=make.linear("draft fc", shapes["fc"], whole=True),
        hidden_norm=make.ones(h),
        context_kv=make.linear("draft context kv", shapes["context kv"]),
        k_norms=make.ones(config.num_layers, d),
        norm=make.ones(h),
        layers=layers,
    )
