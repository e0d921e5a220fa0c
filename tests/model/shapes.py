"""Tiny shapes of a target and its drafter, in which every dimension differs."""

from dataclasses import replace

from draftwood.model.config import K2_6, K2_6_DRAFT, read_drafter_config, read_model_config

TINY = replace(
    read_model_config(K2_6), hidden_size=64, num_layers=3, num_heads=4, q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts=4, experts_per_token=2,
    moe_intermediate_size=64, intermediate_size=96, vocab_size=128,
)  # fmt: skip
TINY_DRAFT = replace(
    read_drafter_config(K2_6_DRAFT), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=96, taps=(0, 2), vocab_size=128, num_target_layers=3,
)  # fmt: skip
