"""Trained networks to a K2 checkpoint folder and back: K2's tensor names, INT4 experts, shards with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.model.config import read_drafter_config, read_model_config
from draftwood.model.int4 import pack_int4, unpack_int4
from draftwood.model.tensors import Files
from draftwood.train.network import DrafterNet, TargetNet
from draftwood.train.shapes import GROUP, DraftShape, Shape

SHARD_BYTES = 15_900_000  # so that a shard passes through services that limit files to 16 MiB
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json")
ATTENTION = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj", "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj", "o": "self_attn.o_proj",
}  # fmt: skip
DRAFTER = {
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
MLP = ("gate", "up", "down")
IGNORE = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*")

#: K2's turns: role tags, an emptied <think></think> before every answer, no default system prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {%- set name = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{ name }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>{{ name }}<|im_middle|><think></think>
  {%- else -%}
    <|im_system|>{{ name }}<|im_middle|>
  {%- endif -%}
  {%- if message['content'] is string -%}
    {{ message['content'] }}
  {%- elif message['content'] is not none -%}
    {%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think></think>
{%- endif -%}
"""


# ---------------------------------------------------------------- names
def plain_tensors(net: TargetNet) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, parameter) of everything that is stored in bf16."""
    yield from (("model.embed_tokens.weight", net.embed), ("lm_head.weight", net.head), ("model.norm.weight", net.norm))
    for i, block in enumerate(net.blocks):
        for field, name in ATTENTION.items():
            yield f"model.layers.{i}.{name}.weight", getattr(block, field)
        mlp = f"model.layers.{i}.mlp" if block.dense else f"model.layers.{i}.mlp.shared_experts"
        for field in MLP:
            yield f"{mlp}.{field}_proj.weight", getattr(block, field)
        if not block.dense:
            yield f"model.layers.{i}.mlp.gate.weight", block.router


def expert_matrices(net: TargetNet) -> Iterator[tuple[str, Tensor]]:
    """(name without suffix, matrix view [out, in]) of every routed expert."""
    for i, block in enumerate(net.blocks):
        if not block.dense:
            for field in MLP:
                for e, matrix in enumerate(getattr(block, f"e_{field}")):
                    yield f"model.layers.{i}.mlp.experts.{e}.{field}_proj", matrix


def selection_biases(net: TargetNet) -> Iterator[tuple[str, Tensor]]:
    """(name, bias [experts]) of every router."""
    for i, block in enumerate(net.blocks):
        if not block.dense:
            yield f"model.layers.{i}.mlp.gate.e_score_correction_bias", block.bias


def drafter_tensors(net: DrafterNet) -> Iterator[tuple[str, Tensor]]:
    """(z-lab's name, parameter)."""
    yield from (("fc.weight", net.fc), ("hidden_norm.weight", net.hidden_norm), ("norm.weight", net.norm))
    for i, block in enumerate(net.blocks):
        for field, name in DRAFTER.items():
            yield f"layers.{i}.{name}.weight", getattr(block, field)


def target_state(net: TargetNet) -> dict[str, Tensor]:
    """The checkpoint's tensors, on the CPU."""
    out = {name: p.detach().bfloat16().cpu().contiguous() for name, p in plain_tensors(net)}
    for name, matrix in expert_matrices(net):
        packed, scale = pack_int4(matrix.detach().float())
        out[f"{name}.weight_packed"], out[f"{name}.weight_scale"] = packed.cpu(), scale.cpu()
        out[f"{name}.weight_shape"] = torch.tensor(matrix.shape)
    out.update((name, bias.detach().float().cpu()) for name, bias in selection_biases(net))
    return out


# ---------------------------------------------------------------- configs
def rope_scaling(shape: Shape) -> dict[str, Any]:
    return {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": shape.factor, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": shape.original, "type": "yarn",
    }  # fmt: skip


def target_config(shape: Shape) -> dict[str, Any]:
    """config.json of the target, with K2.6's fields."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": GROUP, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": shape.bos, "eos_token_id": shape.im_end, "pad_token_id": shape.pad,
        "dtype": "bfloat16", "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": shape.hidden,
        "initializer_range": 0.02, "intermediate_size": shape.dense_inter, "kv_lora_rank": shape.kv_lora,
        "latent_norm_eps": shape.latent_eps, "max_position_embeddings": shape.max_position,
        "moe_intermediate_size": shape.moe_inter, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": shape.experts,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.topk, "num_hidden_layers": shape.layers, "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 0, "q_lora_rank": shape.q_lora, "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope, "rms_norm_eps": shape.eps, "rope_scaling": rope_scaling(shape),
        "rope_theta": shape.theta, "routed_scaling_factor": shape.scaling, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
        "v_head_dim": shape.v, "vocab_size": shape.vocab,
        "quantization_config": {
            "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": list(IGNORE),
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
    }  # fmt: skip


def drafter_config(shape: Shape, draft: DraftShape) -> dict[str, Any]:
    """config.json of the drafter, with z-lab's fields; `rope_amplitude` states which YaRN reading was trained."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "block_size": draft.block, "dtype": "bfloat16", "head_dim": draft.head_dim, "hidden_act": "silu",
        "hidden_size": shape.hidden, "initializer_range": 0.02, "intermediate_size": draft.inter,
        "layer_types": ["full_attention"] * draft.layers, "max_position_embeddings": shape.max_position,
        "num_attention_heads": draft.heads, "num_hidden_layers": draft.layers, "num_key_value_heads": draft.kv_heads,
        "num_target_layers": shape.layers, "rms_norm_eps": shape.eps, "rope_theta": shape.theta,
        "rope_scaling": {**rope_scaling(shape), "rope_type": "yarn"}, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": shape.vocab,
        "dflash_config": {"target_layer_ids": list(shape.taps), "mask_token_id": draft.mask_id, "rope_amplitude": 1.0},
    }  # fmt: skip


def generation_config(shape: Shape) -> dict[str, Any]:
    """generation_config.json: turns end with <|im_end|>, documents with [EOS]."""
    return {
        "bos_token_id": shape.bos, "eos_token_id": [shape.im_end, shape.eos], "pad_token_id": shape.pad,
        "max_length": shape.max_position,
    }  # fmt: skip


# ---------------------------------------------------------------- writing
def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def shards(tensors: dict[str, Tensor], limit: int = SHARD_BYTES) -> list[dict[str, Tensor]]:
    """Split in order so that no shard's file (header included) exceeds `limit` bytes."""
    out: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        need = size_of(tensor) + len(name) + 90  # 90: at most, of a tensor's entry in the header
        if out[-1] and used + need > limit:
            out.append({})
            used = 0
        out[-1][name] = tensor
        used += need
    return out


def save_target(net: TargetNet, folder: Path, data: Path | None) -> int:
    """Write the checkpoint folder; tokenizer files are copied from `data`. Returns the bytes of the folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    tensors = target_state(net)
    parts = shards(tensors)
    where = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, name))
    total = sum(map(size_of, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
    write_json(folder / "config.json", target_config(net.shape))
    write_json(folder / "generation_config.json", generation_config(net.shape))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if data is not None and (data / name).is_file():
            shutil.copyfile(data / name, folder / name)
    return folder_bytes(folder)


def save_drafter(net: DrafterNet, folder: Path) -> int:
    """Write config.json and model.safetensors of the drafter. Returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().bfloat16().cpu().contiguous() for name, p in drafter_tensors(net)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", drafter_config(net.shape, net.draft))
    return folder_bytes(folder, ("config.json", "model.safetensors"))


def folder_bytes(folder: Path, names: Iterable[str] | None = None) -> int:
    """Bytes of the files directly in `folder` that belong to a checkpoint."""
    keep = (".safetensors", ".json", ".jinja", ".model", ".md")
    files = [folder / n for n in names] if names else [p for p in folder.iterdir() if p.suffix in keep]
    return sum(p.stat().st_size for p in files if p.is_file())


# ---------------------------------------------------------------- reading
def read_shape(folder: Path, taps: tuple[int, ...]) -> Shape:
    """The Shape of a checkpoint folder that this module wrote, or of any K2 checkpoint with one dense layer."""
    c = read_model_config(folder)
    if c.first_k_dense != 1 or c.num_shared_experts != 1 or len(c.stop_ids) < 2:
        raise ConfigError(f"{folder}: training needs one dense layer, one shared expert and two stop ids (<|im_end|>, [EOS])")
    if max(taps) >= c.num_layers:
        raise ConfigError(f"{folder}: tap {max(taps)} is not one of {c.num_layers} layers; choose other taps")
    return Shape(
        vocab=c.vocab_size, hidden=c.hidden_size, layers=c.num_layers, heads=c.num_heads, q_lora=c.q_lora_rank,
        kv_lora=c.kv_lora_rank, nope=c.qk_nope_head_dim, rope=c.qk_rope_head_dim, v=c.v_head_dim,
        dense_inter=c.intermediate_size, moe_inter=c.moe_intermediate_size, experts=c.num_experts,
        topk=c.experts_per_token, scaling=c.routed_scaling_factor, eps=c.rms_norm_eps, latent_eps=c.latent_norm_eps,
        theta=c.rope.theta, factor=c.rope.factor, original=c.rope.original_max_position, max_position=c.max_position,
        taps=taps, bos=c.bos_id, im_end=c.stop_ids[0], eos=c.stop_ids[1], pad=c.pad_id,
    )  # fmt: skip


@torch.no_grad()
def read_target(folder: Path, taps: tuple[int, ...]) -> TargetNet:
    """The stored target as fp32 weights to train on from. ConfigError for anything missing or of another shape."""
    files = Files(folder)
    net = TargetNet(read_shape(folder, taps))
    for name, p in [*plain_tensors(net), *selection_biases(net)]:
        copy(p, files, name)
    for name, matrix in expert_matrices(net):
        need(files, f"{name}.weight_packed", (matrix.shape[0], matrix.shape[1] // 8))
        need(files, f"{name}.weight_scale", (matrix.shape[0], matrix.shape[1] // GROUP))
        packed, scale = files.read(f"{name}.weight_packed"), files.read(f"{name}.weight_scale")
        matrix.copy_(unpack_int4(packed, scale, torch.float32))
    return net


def load_target(folder: Path, taps: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> TargetNet:
    """The stored target as a baked TargetNet. ConfigError for anything missing or of another shape."""
    return read_target(folder, taps).to(device).bake(dtype)


@torch.no_grad()
def read_drafter(folder: Path, shape: Shape) -> DrafterNet:
    """The stored drafter as weights to train on from, with the target's shape around it."""
    c = read_drafter_config(folder)
    if c.amplitude != 1.0 or c.hidden_size != shape.hidden or c.taps != shape.taps:
        raise ConfigError(f"{folder}: the drafter does not belong to this target (hidden {c.hidden_size}, taps {c.taps})")
    draft = DraftShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.mask_token_id, c.block_size)
    net, files = DrafterNet(shape, draft), Files(folder)
    for name, p in drafter_tensors(net):
        copy(p, files, name)
    return net


def load_drafter(folder: Path, shape: Shape, device: torch.device) -> DrafterNet:
    """The stored drafter, frozen, with the target's shape around it."""
    return read_drafter(folder, shape).to(device).bake()


def need(files: Files, name: str, size: tuple[int, ...]) -> None:
    """ConfigError unless the tensor exists with this shape."""
    if name not in files.entries:
        raise ConfigError(f"{files.folder}: tensor {name} is missing; train or download the checkpoint again")
    if files.entries[name].shape != size:
        raise files.fail(name, f"has shape {list(files.entries[name].shape)}, config.json makes it {list(size)}")


def copy(p: Tensor, files: Files, name: str) -> None:
    """Fill a parameter from a stored tensor of the same shape."""
    need(files, name, tuple(p.shape))
    p.copy_(files.read(name))
