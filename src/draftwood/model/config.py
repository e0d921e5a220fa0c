"""What a checkpoint says it is: reading and checking config.json of the target and of the drafter. No torch.

Every refusal is one ConfigError line: where, which field, its value, what this engine needs. The cost formulas that
belong to these shapes are in `draftwood.model.costs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError
from draftwood.model.fields import Fields, brief, read_json
from draftwood.model.shapes import BUILTIN, K2_6, K2_6_DRAFT

ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
MODEL_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")
GROUP = 32
LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: Moonshot's and Hugging Face's modules build them with the class
default, not with rms_norm_eps (vLLM and SGLang pass 1e-5). A config may say otherwise with `latent_norm_eps`."""
K2_VOCABULARY, K2_STOPS = 163840, (163586, 163585)
"""Turns of K2.x end with <|im_end|> (163586), documents with [EOS] (163585); eos_token_id names only one of them."""

Source = Path | str | Mapping[str, Any]

__all__ = [
    "BUILTIN", "K2_6", "K2_6_DRAFT", "DrafterConfig", "ModelConfig", "RopeConfig", "check_pair", "read_drafter_config",
    "read_model_config", "resized", "yarn_mscale",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------- the records


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's length-dependent gain 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, eq. 22); 1 without scaling."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and mscale != 0 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding with YaRN scaling; factor 1 means plain RoPE."""

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin of the target: mscale over mscale_all_dim (DeepSeek's reading; 1 for every K2)."""
        return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a K2 text model. Sizes count elements; `dtype` is the type the file declares."""

    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    intermediate_size: int
    first_k_dense: int
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float
    vocab_size: int
    max_position: int
    bos_id: int
    stop_ids: tuple[int, ...]
    pad_id: int
    rope: RopeConfig
    weight_bits: int
    group_size: int
    tensor_prefix: str
    dtype: str

    @property
    def latent_width(self) -> int:
        """Values per token and layer in the KV cache: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: its part without position, then its rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention logits: qk_head_dim^-0.5 times YaRN's gain squared (0.14468 for K2.6)."""
        return float(self.qk_head_dim**-0.5 * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.first_k_dense

    @property
    def shared_intermediate_size(self) -> int:
        """FFN width of the shared experts, stored as one."""
        return self.num_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and constants of a DFlash drafter. `amplitude` is the decided factor on cos and sin."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_type: str
    amplitude: float
    block_size: int
    """Largest block trained: the known token and block_size - 1 masked ones."""
    taps: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    num_target_layers: int
    max_position: int


# ----------------------------------------------------------------------------------------------------- the target


def _open(source: Source) -> tuple[Fields, Path | None]:
    if isinstance(source, Mapping):
        return Fields(source, "config"), None
    folder = Path(source)
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; give a checkpoint folder with a config.json")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); check its permissions") from None
    path = folder / "config.json"
    return Fields(read_json(path), str(path)), folder


def _refuse_recurrent(fields: Fields) -> None:
    """Refuse recurrent, linear-attention and hybrid layers by name: they keep state that a tree cannot branch."""
    names = fields.data.get("architectures") or [fields.data.get("model_type")]
    who = names[0] if isinstance(names, list) and names else names
    tail = f"{who} keeps recurrent state; this engine runs full-attention K2 models only"
    kinds = fields.data.get("layer_types") or fields.data.get("layers_block_type") or []
    for index, kind in enumerate(kinds if isinstance(kinds, list) else []):
        if re.search(r"linear|mamba|recurrent|rwkv|ssm|kda|delta|conv", str(kind)):
            raise fields.fail(f"layer {index} is {brief(kind)}; {tail}")
    marks = ("linear_attn_config", "hybrid_override_pattern", "full_attention_interval", "attn_layer_period")
    for name, value in fields.data.items():
        marked = name in marks or re.match(r"(linear_(num|key|value|conv)|mamba|ssm|rwkv|kda)_", name)
        if marked and value not in (None, False):
            raise fields.fail(f"{name} describes linear-attention layers; {tail}")
    if isinstance(who, str) and re.search(r"linear|mamba|rwkv|hybrid|next|jamba|falcon_?h", who, re.IGNORECASE):
        raise fields.fail(tail)


def _check_architecture(fields: Fields) -> None:
    kind, names = fields.data.get("model_type"), fields.data.get("architectures") or []
    if not isinstance(names, list):
        raise fields.fail(f"architectures = {brief(names)} is not a list")
    name = str(names[0]) if names else None
    if name is None and kind is None:
        raise fields.fail("fields 'model_type' and 'architectures' are missing; this is not a model's config.json")
    if (name is not None and name not in ARCHITECTURES) or (kind is not None and kind not in MODEL_TYPES):
        raise fields.fail(
            f"architecture {name} (model_type {brief(kind)}) is not supported; "
            "give a Kimi K2-Thinking, K2.5, K2.6 or K2.7 checkpoint"
        )


def _matches(patterns: list[str], names: tuple[str, ...]) -> bool:
    """Whether compressed-tensors' `ignore` list covers a module known by any of `names`."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(re.match(pattern[3:], name) for name in names):
                return True
        elif pattern in names:
            return True
    return False


def _check_ignored(quant: Fields, prefix: str, first_k_dense: int) -> None:
    """Only routed experts may be quantised: everything else must be in `ignore`, no expert may be."""
    patterns = quant.data.get("ignore") or []
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise quant.fail(f"ignore = {brief(patterns)} is not a list of names")
    layer = f"model.layers.{first_k_dense}"
    plain = [f"{layer}.self_attn.o_proj", f"{layer}.mlp.shared_experts.up_proj", "lm_head"]
    if first_k_dense:
        plain.append("model.layers.0.mlp.up_proj")
    try:
        missing = [name for name in plain if not _matches(patterns, (name, prefix + name))]
        expert = f"{layer}.mlp.experts.0.up_proj"
        ignored = _matches(patterns, (expert, prefix + expert))
    except re.error as error:
        raise quant.fail(f"ignore holds a pattern that does not compile ({error})") from None
    if missing:
        raise quant.fail(f"{missing[0]} is quantised; this engine runs INT4 in routed experts only")
    if ignored:
        raise quant.fail("routed experts are not quantised; this engine runs INT4 experts only")


def _check_quantisation(outer: Fields, text: Fields, prefix: str, first_k_dense: int) -> int:
    """Check for compressed-tensors pack-quantized INT4 of group 32 in routed experts; return the bits."""
    name = "quantization_config"
    quant = text.object(name) or outer.object(name) or text.object("compression_config")
    if quant is None:
        raise text.fail(f"field {name!r} is missing; this engine runs compressed-tensors INT4 checkpoints only")
    quant.expect("quant_method", ("compressed-tensors",), required=True)
    quant.expect("format", ("pack-quantized",), required=True)
    quant.expect("quantization_status", ("compressed",))
    if quant.data.get("kv_cache_scheme") is not None:
        raise quant.fail("kv_cache_scheme is set; this engine runs checkpoints without a quantised KV cache")
    groups = quant.object("config_groups")
    if groups is None or len(groups.data) != 1:
        raise quant.fail("config_groups must hold one group (INT4 experts); mixed quantisation is not supported")
    group = groups.object(next(iter(groups.data)))
    weights = group.object("weights") if group else None
    if group is None or weights is None:
        raise quant.fail("config_groups states no weights; this engine runs INT4 experts only")
    group.expect("targets", (["Linear"],))
    for side in ("input_activations", "output_activations"):
        if group.data.get(side) is not None:
            raise group.fail(f"{side} is set; quantised activations are not supported")
    weights.expect("num_bits", (4,), required=True)
    weights.expect("type", ("int",), required=True)
    weights.expect("symmetric", (True,), required=True)
    weights.expect("strategy", ("group",), required=True)
    weights.expect("group_size", (GROUP,), required=True)
    weights.expect("dynamic", (False,))
    for extra in ("actorder", "block_structure"):
        if weights.data.get(extra) not in (None, False):
            raise weights.fail(f"{extra} = {brief(weights.data[extra])} is not supported; weights must be in file order")
    _check_ignored(quant, prefix, first_k_dense)
    return 4


def _read_rope(fields: Fields, max_position: int, types: tuple[str, ...]) -> tuple[RopeConfig, str, Fields]:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). Returns (rope, type, fields)."""
    new = fields.object("rope_parameters")
    rope = new or fields.object("rope_scaling") or Fields({"rope_type": "default"}, fields.where)
    kind = rope.data.get("rope_type") or rope.data.get("type") or "default"
    theta = (rope if rope.data.get("rope_theta") is not None else fields).number("rope_theta")
    if kind == "default":
        return RopeConfig(theta, 1.0, max_position, 32.0, 1.0, 1.0, 0.0), "default", rope
    if kind not in types:
        raise rope.fail(f"rope_type = {brief(kind)} is not supported; this engine runs {' or '.join(types)}")
    rope.expect("truncate", (True,))
    original = rope.integer("original_max_position_embeddings")
    # Below 0 only: DeepSeek's code reads a missing mscale as 1 and a missing mscale_all_dim as 0.
    mscale, all_dim = rope.number("mscale", -1e-9, default=1.0), rope.number("mscale_all_dim", -1e-9, default=0.0)
    config = RopeConfig(
        theta, rope.number("factor", 0.999), original, rope.number("beta_fast", default=32.0),
        rope.number("beta_slow", default=1.0), mscale, all_dim,
    )  # fmt: skip
    return config, str(kind), rope


def _stop_ids(outer: Fields, text: Fields, folder: Path | None, vocab: int, bos: int) -> tuple[int, ...]:
    """Ids that end an answer: eos_token_id of both levels and of generation_config.json, and K2's own pair."""
    found = list((text if text.data.get("eos_token_id") is not None else outer).integers("eos_token_id"))
    if outer.data.get("eos_token_id") is not None:
        found += outer.integers("eos_token_id")
    if folder is not None and (folder / "generation_config.json").exists():
        generation = Fields(read_json(folder / "generation_config.json"), str(folder / "generation_config.json"))
        if generation.data.get("eos_token_id") is not None:
            found += generation.integers("eos_token_id")
    if vocab == K2_VOCABULARY and bos == K2_STOPS[1] - 1:
        found += K2_STOPS
    if max(found) >= vocab:
        raise text.fail(f"eos_token_id {max(found)} is outside the vocabulary of {vocab}")
    return tuple(dict.fromkeys(found))


_FIXED: tuple[tuple[str, tuple[Any, ...], bool], ...] = (
    ("scoring_func", ("sigmoid",), False),
    ("topk_method", ("noaux_tc",), False),
    ("n_group", (1,), True),
    ("topk_group", (1,), True),
    ("norm_topk_prob", (True,), False),
    ("hidden_act", ("silu",), False),
    ("moe_layer_freq", (1,), False),
    ("attention_bias", (False,), False),
    ("rope_interleave", (True,), False),
    ("tie_word_embeddings", (False,), False),
    ("use_sliding_window", (False,), False),
)


def read_model_config(source: Source) -> ModelConfig:
    """Read a K2 config: a checkpoint folder or the parsed config.json, wrapped (KimiK25) or bare.

    Raises ConfigError, one line, for anything this engine would not run exactly as the checkpoint means it.
    """
    outer, folder = _open(source)
    inner = outer.object("text_config")
    text = inner or outer
    for level in (outer, text):
        _refuse_recurrent(level)
        _check_architecture(level)
    kinds = text.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}):
        raise text.fail(f"layer_types = {brief(kinds)} is not supported; this engine runs full_attention layers only")
    wrapped = inner is not None
    for name, allowed, required in _FIXED:
        text.expect(name, allowed, required)
    heads, layers = text.integer("num_attention_heads"), text.integer("num_hidden_layers", 1, 4096)
    text.expect("num_key_value_heads", (heads,))
    vocab, max_position = text.integer("vocab_size", 2), text.integer("max_position_embeddings", 2)
    first_dense = text.integer("first_k_dense_replace", 0, layers)
    prefix = "language_model." if wrapped else ""
    bits = _check_quantisation(outer, text, prefix, first_dense)
    rope, _, rope_fields = _read_rope(text, max_position, ("yarn", "deepseek_yarn"))
    if rope_fields.data.get("attention_factor") is not None:
        raise rope_fields.fail("attention_factor is not supported for the target; K2 states mscale and mscale_all_dim")
    ids = text if text.data.get("bos_token_id") is not None else outer
    bos = ids.integer("bos_token_id", 0, vocab - 1)
    stops = _stop_ids(outer, text, folder, vocab, bos)
    pads = text if text.data.get("pad_token_id") is not None else outer
    experts = text.integer("n_routed_experts", 1, 1 << 16)
    dtype = str(text.data.get("dtype") or text.data.get("torch_dtype") or outer.data.get("dtype") or "bfloat16")
    config = ModelConfig(
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim", 2),
        v_head_dim=text.integer("v_head_dim"),
        num_experts=experts,
        experts_per_token=text.integer("num_experts_per_tok", 1, experts),
        num_shared_experts=text.integer("n_shared_experts", 1, 64),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        intermediate_size=text.integer("intermediate_size"),
        first_k_dense=first_dense,
        routed_scaling_factor=text.number("routed_scaling_factor"),
        rms_norm_eps=text.number("rms_norm_eps"),
        latent_norm_eps=text.number("latent_norm_eps", default=LATENT_NORM_EPS),
        vocab_size=vocab,
        max_position=max_position,
        bos_id=bos,
        stop_ids=stops,
        pad_id=pads.integer("pad_token_id", 0, vocab - 1, stops[0]),
        rope=rope,
        weight_bits=bits,
        group_size=GROUP,
        tensor_prefix=prefix,
        dtype=dtype.removeprefix("torch."),
    )
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(config, name) % GROUP:
            raise text.fail(f"{name} = {getattr(config, name)} is not a multiple of {GROUP}, the INT4 group")
    if config.qk_rope_head_dim % 2:
        raise text.fail(f"qk_rope_head_dim = {config.qk_rope_head_dim} is odd; rotary positions need pairs")
    return config


# ---------------------------------------------------------------------------------------------------- the drafter

K25_DFLASH = {"hidden_size": 7168, "vocab_size": 163840, "num_target_layers": 61, "taps": (1, 12, 24, 35, 47, 58)}
"""What identifies z-lab/Kimi-K2.5-DFlash together with rope_type `yarn`."""


def _amplitude(
    rope: RopeConfig, kind: str, fields: Fields, dflash: Fields, known: Mapping[str, Any], ask: str
) -> float:
    """Decide the factor on the drafter's cos and sin, on which engines disagree. In order:

    1. asked ("1", or "mscale" = 0.1 ln(factor) + 1);
    2. stated: dflash_config.rope_amplitude (ours), then attention_factor of the rope (Hugging Face);
    3. z-lab/Kimi-K2.5-DFlash, rope_type `yarn`: "mscale". Hugging Face's formula gives 1 for its mscale fields, but
       vllm-ascend measured fewer accepted drafts with 1 and restores 1.4159 for this checkpoint only;
    4. otherwise Hugging Face's formula: mscale over mscale_all_dim when both are set (1 for `deepseek_yarn` of
       K2.6-DFlash), else 0.1 ln(factor) + 1.
    """
    if ask != "auto":
        return 1.0 if ask == "1" else yarn_mscale(rope.factor, 1.0)
    for holder, name in ((dflash, "rope_amplitude"), (fields, "attention_factor")):
        if holder.data.get(name) is not None:
            return holder.number(name)
    if kind == "yarn" and known == K25_DFLASH:
        return yarn_mscale(rope.factor, 1.0)
    if fields.data.get("mscale") and fields.data.get("mscale_all_dim"):
        return rope.amplitude
    return yarn_mscale(rope.factor, 1.0)


_DRAFTER_FIXED: tuple[tuple[str, tuple[Any, ...], bool], ...] = (
    ("model_type", ("qwen3",), False),
    ("attention_bias", (False,), False),
    ("hidden_act", ("silu",), False),
    ("use_sliding_window", (False,), False),
)
_DFLASH_KEYS = ("target_layer_ids", "mask_token_id", "rope_amplitude", "causal", "block_size")


def _check_drafter_kind(fields: Fields, dflash: Fields, layers: int) -> None:
    """Refuse drafters that are not the plain DFlash network: DSpark, DFlash2, EAGLE, sliding windows, sinks."""
    names = fields.data.get("architectures") or []
    if names != ["DFlashDraftModel"]:
        raise fields.fail(f"architectures = {brief(names)} is not supported; give a DFlash drafter (DFlashDraftModel)")
    for name, allowed, required in _DRAFTER_FIXED:
        fields.expect(name, allowed, required)
    kinds = fields.data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or set(kinds) != {"full_attention"}):
        raise fields.fail(f"layer_types = {brief(kinds)} is not supported; this engine runs {layers} full_attention layers")
    dflash.expect("causal", (False,))
    for name, value in dflash.data.items():
        if name not in _DFLASH_KEYS and value not in (None, False):
            raise dflash.fail(f"{name} = {brief(value)} is not understood; this engine runs the plain DFlash network only")


def read_drafter_config(source: Source, rope: str = "auto") -> DrafterConfig:
    """Read a drafter in the z-lab format: a folder or the parsed config.json. `rope`: "auto", "1" or "mscale".

    Raises ConfigError, one line, for a drafter this engine would not run exactly as trained.
    """
    fields, _ = _open(source)
    dflash = fields.object("dflash_config")
    if dflash is None:
        raise fields.fail("field 'dflash_config' is missing; give a DFlash drafter (DFlashDraftModel)")
    layers = fields.integer("num_hidden_layers", 1, 256)
    _check_drafter_kind(fields, dflash, layers)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    vocab, target_layers = fields.integer("vocab_size", 2), fields.integer("num_target_layers", 1, 4096)
    kv_heads = fields.integer("num_key_value_heads", 1, heads)
    if heads % kv_heads:
        raise fields.fail(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    taps = dflash.integers("target_layer_ids")
    if len(set(taps)) != len(taps) or max(taps) >= target_layers:
        raise dflash.fail(f"target_layer_ids = {brief(list(taps))} must be different layers of 0..{target_layers - 1}")
    max_position = fields.integer("max_position_embeddings", 2, default=262144)
    config, kind, rope_fields = _read_rope(fields, max_position, ("yarn", "deepseek_yarn"))
    known = {"hidden_size": hidden, "vocab_size": vocab, "num_target_layers": target_layers, "taps": taps}
    return DrafterConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", 2, default=max(2, hidden // heads)),
        # The quoted part of K2.5-DFlash lacks these two; both follow from its file size and its sister checkpoint.
        intermediate_size=fields.integer("intermediate_size", default=18432 if known == K25_DFLASH else None),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-5 if known == K25_DFLASH else None),
        rope=config,
        rope_type=kind,
        amplitude=_amplitude(config, kind, rope_fields, dflash, known, rope),
        block_size=(fields if fields.data.get("block_size") is not None else dflash).integer("block_size", 2, 256),
        taps=taps,
        mask_token_id=dflash.integer("mask_token_id", 0, vocab - 1),
        vocab_size=vocab,
        num_target_layers=target_layers,
        max_position=max_position,
    )


def check_pair(model: ModelConfig, drafter: DrafterConfig, block: int | None = None) -> None:
    """Check that a drafter fits its target, and a block that was asked for (tokens incl. the known one).

    Raises ConfigError naming the two values that do not fit.
    """
    for name, of in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary")):
        ours, theirs = getattr(drafter, name), getattr(model, name)
        if ours != theirs:
            raise ConfigError(f"drafter has {of} {ours}, the target {theirs}; give the drafter trained for this target")
    if drafter.num_target_layers != model.num_layers:
        raise ConfigError(
            f"drafter was trained for a target of {drafter.num_target_layers} layers, this one has {model.num_layers}; "
            "give the drafter trained for this target"
        )
    if max(drafter.taps) >= model.num_layers:
        raise ConfigError(f"drafter taps layer {max(drafter.taps)}, the target has layers 0..{model.num_layers - 1}")
    if block is not None and block > drafter.block_size:
        raise ConfigError(
            f"--draft-block {block}: this drafter was trained for blocks of at most {drafter.block_size}; "
            f"ask for {drafter.block_size} or less"
        )


def resized(
    model: ModelConfig, drafter: DrafterConfig | None, experts: int | None, layers: int | None
) -> tuple[ModelConfig, DrafterConfig | None]:
    """Return the shapes with fewer routed experts a layer and fewer layers (None: as they are), for random weights.

    The drafter's taps keep their places in proportion; those that fall on one layer become one. Raises ConfigError for a number
    that no model of this kind has.
    """
    count = model.num_experts if experts is None else experts
    depth = model.num_layers if layers is None else layers
    if not model.experts_per_token < count <= model.num_experts or count % 16:
        raise ConfigError(
            f"--routed-experts {count}: a token chooses {model.experts_per_token} of this model's {model.num_experts}; give a "
            "multiple of 16 between them"
        )
    if not max(1, model.first_k_dense) < depth <= model.num_layers:
        raise ConfigError(
            f"--layers {depth}: this model has {model.num_layers}, {model.first_k_dense} of them dense; give more than the dense "
            "ones and no more than all"
        )
    if drafter is not None:
        taps = dict.fromkeys(tap * (depth - 1) // max(1, model.num_layers - 1) for tap in drafter.taps)
        drafter = replace(drafter, taps=tuple(taps), num_target_layers=depth)
    return replace(model, num_experts=count, num_layers=depth), drafter
