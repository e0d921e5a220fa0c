"""A checkpoint's tensors, as one rank holds them: what must be there, and how it is read.

Shapes in the records are those of one rank: a prime marks a dimension cut over the ranks (I' of I, V' of V), two primes
one cut by expert columns. Experts stay packed INT4; everything else is cast to the asked type, the router to float32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.int4 import GROUP, PER_WORD, pack_int4, unpack_int4
from draftwood.model.tensors import PACKED, SCALE, SHAPE, Expected, Files, Random, Source
from draftwood.parallel.layout import Layout

__all__ = [
    "DenseWeights", "DrafterLayerWeights", "DrafterWeights", "ExpertWeights", "LayerWeights", "MoEWeights",
    "TargetWeights", "dummy_drafter", "dummy_target", "expected_drafter", "expected_target", "load_drafter",
    "load_target", "pack_int4", "unpack_int4",
]  # fmt: skip

VISION = ("vision_tower.", "mm_projector.")
"""Tensors of the picture encoder, which this engine does not run."""
PROGRESS_AFTER = 2.0
"""Seconds before a load shows a progress bar."""


@dataclass
class DenseWeights:
    """A SwiGLU MLP: gate and up [I', H], down [H, I']."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass
class ExpertWeights:
    """This rank's part of routed experts first .. first + e - 1, packed INT4 with bfloat16 scales.

    gate_packed, up_packed [e, I'', H/8] int32, gate_scale, up_scale [e, I'', H/32] bfloat16,
    down_packed [e, H, I''/8] int32, down_scale [e, H, I''/32] bfloat16.
    """

    first: int
    gate_packed: Tensor
    gate_scale: Tensor
    up_packed: Tensor
    up_scale: Tensor
    down_packed: Tensor
    down_scale: Tensor


@dataclass
class MoEWeights:
    """Router [E, H] and its choice bias [E], both float32; the shared expert; the routed experts."""

    router: Tensor
    bias: Tensor
    shared: DenseWeights
    experts: ExpertWeights


@dataclass
class LayerWeights:
    """One layer. q_a [q_lora, H], q_b [heads' * (nope + rope), q_lora], kv_a [kv_lora + rope, H],
    kv_b [heads' * (nope + v), kv_lora], o [H, heads' * v]; norms are vectors."""

    input_norm: Tensor
    post_norm: Tensor
    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv_a: Tensor
    kv_a_norm: Tensor
    kv_b: Tensor
    o: Tensor
    mlp: DenseWeights | MoEWeights


@dataclass
class TargetWeights:
    """The target: embed [V, H] whole, lm_head [V', H], norm [H]."""

    embed: Tensor
    lm_head: Tensor
    norm: Tensor
    layers: list[LayerWeights]


@dataclass
class DrafterLayerWeights:
    """One drafter layer. q [heads' * d, H], k and v [kv_heads' * d, H], o [H, heads' * d], q_norm and k_norm [d]."""

    input_norm: Tensor
    post_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    mlp: DenseWeights


@dataclass
class DrafterWeights:
    """The drafter: fc [H, taps * H] whole, hidden_norm and norm [H]. Embedding and head are the target's."""

    fc: Tensor
    hidden_norm: Tensor
    norm: Tensor
    layers: list[DrafterLayerWeights]


# -------------------------------------------------------------------------------------------------- what must be there


def _expected_mlp(out: dict[str, Expected], name: str, hidden: int, width: int) -> None:
    out[f"{name}.gate_proj.weight"] = out[f"{name}.up_proj.weight"] = Expected((width, hidden))
    out[f"{name}.down_proj.weight"] = Expected((hidden, width))


def _expected_experts(out: dict[str, Expected], name: str, config: ModelConfig) -> None:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    for expert in range(config.num_experts):
        for part, rows, inputs in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            base = f"{name}.{expert}.{part}_proj.weight"
            out[f"{base}_packed"] = Expected((rows, inputs // PER_WORD), PACKED)
            out[f"{base}_scale"] = Expected((rows, inputs // GROUP), SCALE)
            out[f"{base}_shape"] = Expected((2,), SHAPE)


def expected_target(config: ModelConfig, prefix: str = "") -> dict[str, Expected]:
    """Return every tensor of the text model by its name in the file."""
    hidden, heads = config.hidden_size, config.num_heads
    out = {
        f"{prefix}model.embed_tokens.weight": Expected((config.vocab_size, hidden)),
        f"{prefix}lm_head.weight": Expected((config.vocab_size, hidden)),
        f"{prefix}model.norm.weight": Expected((hidden,)),
    }
    for index in range(config.num_layers):
        layer = f"{prefix}model.layers.{index}"
        attention = f"{layer}.self_attn"
        out[f"{layer}.input_layernorm.weight"] = out[f"{layer}.post_attention_layernorm.weight"] = Expected((hidden,))
        out[f"{attention}.q_a_proj.weight"] = Expected((config.q_lora_rank, hidden))
        out[f"{attention}.q_a_layernorm.weight"] = Expected((config.q_lora_rank,))
        out[f"{attention}.q_b_proj.weight"] = Expected((heads * config.qk_head_dim, config.q_lora_rank))
        out[f"{attention}.kv_a_proj_with_mqa.weight"] = Expected((config.latent_width, hidden))
        out[f"{attention}.kv_a_layernorm.weight"] = Expected((config.kv_lora_rank,))
        kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        out[f"{attention}.kv_b_proj.weight"] = Expected((kv_rows, config.kv_lora_rank))
        out[f"{attention}.o_proj.weight"] = Expected((hidden, heads * config.v_head_dim))
        if index < config.first_k_dense:
            _expected_mlp(out, f"{layer}.mlp", hidden, config.intermediate_size)
            continue
        out[f"{layer}.mlp.gate.weight"] = Expected((config.num_experts, hidden))
        out[f"{layer}.mlp.gate.e_score_correction_bias"] = Expected((config.num_experts,))
        _expected_mlp(out, f"{layer}.mlp.shared_experts", hidden, config.shared_intermediate_size)
        _expected_experts(out, f"{layer}.mlp.experts", config)
    return out


def expected_drafter(config: DrafterConfig, prefix: str = "") -> dict[str, Expected]:
    """Return every tensor of a DFlash drafter by its name in the file (z-lab format)."""
    hidden, d = config.hidden_size, config.head_dim
    out = {
        f"{prefix}fc.weight": Expected((hidden, len(config.taps) * hidden)),
        f"{prefix}hidden_norm.weight": Expected((hidden,)),
        f"{prefix}norm.weight": Expected((hidden,)),
    }
    for index in range(config.num_layers):
        layer = f"{prefix}layers.{index}"
        out[f"{layer}.input_layernorm.weight"] = out[f"{layer}.post_attention_layernorm.weight"] = Expected((hidden,))
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            out[f"{layer}.self_attn.{name}_proj.weight"] = Expected((heads * d, hidden))
        out[f"{layer}.self_attn.o_proj.weight"] = Expected((hidden, config.num_heads * d))
        out[f"{layer}.self_attn.q_norm.weight"] = out[f"{layer}.self_attn.k_norm.weight"] = Expected((d,))
        _expected_mlp(out, f"{layer}.mlp", hidden, config.intermediate_size)
    return out


# ------------------------------------------------------------------------------------------------------------ reading


def _times(heads: range, width: int) -> range:
    """Rows of a head-major matrix that belong to `heads` of `width` rows each."""
    return range(heads.start * width, heads.stop * width)


class _Reader:
    """Reads one rank's parts from a source; the only place that knows names and cuts at once."""

    def __init__(self, source: Source, layout: Layout, dtype: torch.dtype, device: torch.device | str) -> None:
        self.source, self.layout, self.dtype, self.device = source, layout, dtype, torch.device(device)

    def get(
        self, name: str, rows: range | None = None, columns: range | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a part of `name` on the device in `dtype` (default: the model's)."""
        part = self.source.read(name, rows, columns)
        # A copy even if nothing changes: a view would keep the file's mapping, or a whole random tensor, alive.
        return part.to(self.device, dtype or self.dtype, copy=True).contiguous()

    def mlp(self, name: str, width: int) -> DenseWeights:
        """Return an MLP cut by its intermediate columns over the world."""
        cut = self.layout.columns(width)
        return DenseWeights(
            self.get(f"{name}.gate_proj.weight", cut),
            self.get(f"{name}.up_proj.weight", cut),
            self.get(f"{name}.down_proj.weight", None, cut),
        )

    def experts(self, name: str, config: ModelConfig) -> ExpertWeights:
        """Return this rank's experts, stacked; they are read one by one into place."""
        mine, cut = self.layout.experts(config.num_experts), self.layout.expert_columns(config.moe_intermediate_size)
        count, hidden, width = len(mine), config.hidden_size, len(cut)
        words, groups = range(cut.start // PER_WORD, cut.stop // PER_WORD), range(cut.start // GROUP, cut.stop // GROUP)

        def empty(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
            packed = torch.empty(count, rows, inputs // PER_WORD, dtype=torch.int32, device=self.device)
            return packed, torch.empty(count, rows, inputs // GROUP, dtype=torch.bfloat16, device=self.device)

        parts = {"gate": empty(width, hidden), "up": empty(width, hidden), "down": empty(hidden, width)}
        for slot, expert in enumerate(mine):
            for part, (packed, scale) in parts.items():
                base = f"{name}.{expert}.{part}_proj.weight"
                down = part == "down"
                shape = [hidden, config.moe_intermediate_size] if down else [config.moe_intermediate_size, hidden]
                self.check_shape(f"{base}_shape", shape)
                rows = None if down else cut
                packed[slot].copy_(self.source.read(f"{base}_packed", rows, words if down else None))
                scale[slot].copy_(self.source.read(f"{base}_scale", rows, groups if down else None))
        return ExpertWeights(mine.start, *parts["gate"], *parts["up"], *parts["down"])

    def check_shape(self, name: str, shape: list[int]) -> None:
        """Check the stored original shape of a packed weight. Raises ConfigError when it says something else."""
        if isinstance(self.source, Files) and (found := self.source.read(name).tolist()) != shape:
            raise self.source.fail(name, f"says {found}, config.json makes it {shape}")

    def layer(self, name: str, index: int, config: ModelConfig) -> LayerWeights:
        """Return one layer of the target."""
        heads, attention = self.layout.heads(config.num_heads), f"{name}.self_attn"
        mlp: DenseWeights | MoEWeights
        if index < config.first_k_dense:
            mlp = self.mlp(f"{name}.mlp", config.intermediate_size)
        else:
            mlp = MoEWeights(
                self.get(f"{name}.mlp.gate.weight", dtype=torch.float32),
                self.get(f"{name}.mlp.gate.e_score_correction_bias", dtype=torch.float32),
                self.mlp(f"{name}.mlp.shared_experts", config.shared_intermediate_size),
                self.experts(f"{name}.mlp.experts", config),
            )
        return LayerWeights(
            input_norm=self.get(f"{name}.input_layernorm.weight"),
            post_norm=self.get(f"{name}.post_attention_layernorm.weight"),
            q_a=self.get(f"{attention}.q_a_proj.weight"),
            q_a_norm=self.get(f"{attention}.q_a_layernorm.weight"),
            q_b=self.get(f"{attention}.q_b_proj.weight", _times(heads, config.qk_head_dim)),
            kv_a=self.get(f"{attention}.kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.get(f"{attention}.kv_a_layernorm.weight"),
            kv_b=self.get(f"{attention}.kv_b_proj.weight", _times(heads, config.qk_nope_head_dim + config.v_head_dim)),
            o=self.get(f"{attention}.o_proj.weight", None, _times(heads, config.v_head_dim)),
            mlp=mlp,
        )

    def target(self, prefix: str, config: ModelConfig) -> TargetWeights:
        """Return the whole target, layer by layer, with a progress bar when it takes long.

        The large matrices come first, while the memory is still empty, so that reading costs little beyond what stays.
        """
        embed = self.get(f"{prefix}model.embed_tokens.weight")
        lm_head = self.get(f"{prefix}lm_head.weight", self.layout.vocab(config.vocab_size))
        bar = tqdm(
            range(config.num_layers), "weights", unit="layer", file=sys.stderr, leave=False,
            delay=PROGRESS_AFTER, disable=self.layout.rank > 0,
        )  # fmt: skip
        layers = [self.layer(f"{prefix}model.layers.{index}", index, config) for index in bar]
        return TargetWeights(embed, lm_head, self.get(f"{prefix}model.norm.weight"), layers)

    def drafter_layer(self, name: str, config: DrafterConfig) -> DrafterLayerWeights:
        """Return one layer of the drafter."""
        attention, d = f"{name}.self_attn", config.head_dim
        q = _times(self.layout.heads(config.num_heads), d)
        kv = _times(self.layout.kv_heads(config.num_heads, config.num_kv_heads), d)
        return DrafterLayerWeights(
            input_norm=self.get(f"{name}.input_layernorm.weight"),
            post_norm=self.get(f"{name}.post_attention_layernorm.weight"),
            q=self.get(f"{attention}.q_proj.weight", q),
            k=self.get(f"{attention}.k_proj.weight", kv),
            v=self.get(f"{attention}.v_proj.weight", kv),
            o=self.get(f"{attention}.o_proj.weight", None, q),
            q_norm=self.get(f"{attention}.q_norm.weight"),
            k_norm=self.get(f"{attention}.k_norm.weight"),
            mlp=self.mlp(f"{name}.mlp", config.intermediate_size),
        )

    def drafter(self, prefix: str, config: DrafterConfig) -> DrafterWeights:
        """Return the whole drafter."""
        return DrafterWeights(
            fc=self.get(f"{prefix}fc.weight"),
            hidden_norm=self.get(f"{prefix}hidden_norm.weight"),
            norm=self.get(f"{prefix}norm.weight"),
            layers=[self.drafter_layer(f"{prefix}layers.{index}", config) for index in range(config.num_layers)],
        )


def load_target(
    folder: Path | str, config: ModelConfig, layout: Layout, dtype: torch.dtype, device: torch.device | str
) -> TargetWeights:
    """Read this rank's part of a target from a checkpoint folder.

    All files are checked before any tensor is read. Peak memory of the rank is what it keeps and one tensor part in
    the file's type (`costs.peak_load_bytes`). Raises ConfigError, one line naming file and tensor: a missing or
    truncated file, a missing or left-over tensor, a wrong shape or type.
    """
    files = Files(folder)
    prefix = files.find_prefix((config.tensor_prefix, "language_model.", ""), "model.embed_tokens.weight")
    files.check(expected_target(config, prefix), skip=VISION)
    return _Reader(files, layout, dtype, device).target(prefix, config)


def load_drafter(
    folder: Path | str, config: DrafterConfig, layout: Layout, dtype: torch.dtype, device: torch.device | str
) -> DrafterWeights:
    """Read this rank's part of a drafter from its folder. Raises ConfigError as `load_target` does."""
    files = Files(folder)
    prefix = files.find_prefix(("", "model."), "fc.weight")
    files.check(expected_drafter(config, prefix))
    return _Reader(files, layout, dtype, device).drafter(prefix, config)


def dummy_target(
    config: ModelConfig, layout: Layout, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> TargetWeights:
    """Return a target of random weights; ranks of any layout hold slices of the same model."""
    return _Reader(Random(expected_target(config), device, seed), layout, dtype, device).target("", config)


def dummy_drafter(
    config: DrafterConfig, layout: Layout, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> DrafterWeights:
    """Return a drafter of random weights; ranks of any layout hold slices of the same drafter."""
    return _Reader(Random(expected_drafter(config), device, seed), layout, dtype, device).drafter("", config)
