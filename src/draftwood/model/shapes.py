"""Shapes of published checkpoints, for planning and random weights without their files. No torch."""

from __future__ import annotations

from typing import Any

_K2_QUANTISATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
_YARN = {
    "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
K2_6: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "dtype": "bfloat16",
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "intermediate_size": 18432, "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "vocab_size": 163840, "max_position_embeddings": 262144, "bos_token_id": 163584, "eos_token_id": 163586,
        "pad_token_id": 163839, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **_YARN},
        "quantization_config": _K2_QUANTISATION,
    },
}  # fmt: skip
"""Shape of Kimi-K2.6, for planning and random weights without a checkpoint (MODEL `k2.6`)."""
K2_6_DRAFT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "intermediate_size": 18432,
    "vocab_size": 163840, "head_dim": 128, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 6,
    "num_target_layers": 61, "block_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    "rope_parameters": {"rope_type": "deepseek_yarn", "rope_theta": 50000.0, **_YARN},
}  # fmt: skip
"""Shape of Kimi-K2.6-DFlash."""

BUILTIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"k2.6": (K2_6, K2_6_DRAFT)}
"""Built-in shapes by the name users type: (target, drafter)."""
