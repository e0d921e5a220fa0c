"""The published modules with draftwood's weights: transformers' DeepseekV3ForCausalLM and z-lab's DFlashDraftModel."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.model.config import DrafterConfig, ModelConfig
from draftwood.model.weights import DenseWeights, DrafterWeights, MoEWeights, TargetWeights, unpack_int4


def huggingface(config: ModelConfig, weights: TargetWeights, attention: str = "eager") -> torch.nn.Module:
    """transformers' DeepseekV3ForCausalLM, float32 on the CPU, with weights of one rank; its experts are dequantised."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    c, rope = config, config.rope
    parameters = {
        "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow, "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim,
        "original_max_position_embeddings": rope.original_max_position,
    }  # fmt: skip
    published = DeepseekV3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_heads, n_shared_experts=1, n_routed_experts=c.num_experts,
        routed_scaling_factor=c.routed_scaling_factor, kv_lora_rank=c.kv_lora_rank, q_lora_rank=c.q_lora_rank,
        qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim, qk_nope_head_dim=c.qk_nope_head_dim, n_group=1,
        topk_group=1, num_experts_per_tok=c.experts_per_token, first_k_dense_replace=c.first_k_dense,
        norm_topk_prob=True, max_position_embeddings=c.max_position, rms_norm_eps=c.rms_norm_eps,
        rope_parameters=parameters, attn_implementation=attention, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(published).eval()
    model.load_state_dict(_target_names(weights), strict=True)
    return model


def _target_names(weights: TargetWeights) -> dict[str, Tensor]:
    out = {"model.embed_tokens.weight": weights.embed, "lm_head.weight": weights.lm_head, "model.norm.weight": weights.norm}

    def mlp(name: str, w: DenseWeights) -> None:
        out[f"{name}.gate_proj.weight"], out[f"{name}.up_proj.weight"], out[f"{name}.down_proj.weight"] = w.gate, w.up, w.down

    for i, w in enumerate(weights.layers):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        out[f"{layer}.input_layernorm.weight"] = w.input_norm
        out[f"{layer}.post_attention_layernorm.weight"] = w.post_norm
        out[f"{attention}.q_a_proj.weight"], out[f"{attention}.q_a_layernorm.weight"] = w.q_a, w.q_a_norm
        out[f"{attention}.q_b_proj.weight"], out[f"{attention}.kv_b_proj.weight"] = w.q_b, w.kv_b
        out[f"{attention}.kv_a_proj_with_mqa.weight"], out[f"{attention}.kv_a_layernorm.weight"] = w.kv_a, w.kv_a_norm
        out[f"{attention}.o_proj.weight"] = w.o
        if isinstance(w.mlp, MoEWeights):
            e = w.mlp.experts
            gate = unpack_int4(e.gate_packed, e.gate_scale, torch.float32)
            up = unpack_int4(e.up_packed, e.up_scale, torch.float32)
            out[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
            out[f"{layer}.mlp.experts.down_proj"] = unpack_int4(e.down_packed, e.down_scale, torch.float32)
            out[f"{layer}.mlp.gate.weight"], out[f"{layer}.mlp.gate.e_score_correction_bias"] = w.mlp.router, w.mlp.bias
            mlp(f"{layer}.mlp.shared_experts", w.mlp.shared)
        else:
            mlp(f"{layer}.mlp", w.mlp)
    return out


def dflash(config: DrafterConfig, weights: DrafterWeights) -> torch.nn.Module:
    """z-lab's DFlashDraftModel, float32 on the CPU, with weights of one rank. Raises ImportError without package dflash.

    `attention_factor` is its name for the amplitude.
    """
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    c, rope = config, config.rope
    published = Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow, "original_max_position_embeddings": rope.original_max_position,
            "attention_factor": c.amplitude,
        },
        dflash_config={"target_layer_ids": list(c.taps), "mask_token_id": c.mask_token_id},
        block_size=c.block_size, num_target_layers=c.num_target_layers,
    )  # fmt: skip
    net = DFlashDraftModel(published).eval()
    out = {"fc.weight": weights.fc, "hidden_norm.weight": weights.hidden_norm, "norm.weight": weights.norm}
    for i, w in enumerate(weights.layers):
        out[f"layers.{i}.input_layernorm.weight"] = w.input_norm
        out[f"layers.{i}.post_attention_layernorm.weight"] = w.post_norm
        for name in ("q", "k", "v", "o"):
            out[f"layers.{i}.self_attn.{name}_proj.weight"] = getattr(w, name)
        out[f"layers.{i}.self_attn.q_norm.weight"], out[f"layers.{i}.self_attn.k_norm.weight"] = w.q_norm, w.k_norm
        for name in ("gate", "up", "down"):
            out[f"layers.{i}.mlp.{name}_proj.weight"] = getattr(w.mlp, name)
    net.load_state_dict(out, strict=True)
    return net


def place(module: torch.nn.Module, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """Move a module to a device and its parameters to `dtype`, but for routers: as transformers does when it loads them.

    Buffers keep their type: rotation frequencies and choice biases are float32 always.
    """
    for name, parameter in module.named_parameters():
        if not name.endswith("mlp.gate.weight"):
            parameter.data = parameter.data.to(dtype)
    return module.to(device).requires_grad_(False)
