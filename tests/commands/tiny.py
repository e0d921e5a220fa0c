"""A tiny checkpoint folder for commands: configs, tokenizer and template; its weights are random (--load-format dummy)."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

from draftwood.model.config import K2_6, K2_6_DRAFT
from tests.text.vocabulary import ranks, write

DATA = Path(__file__).parent.parent / "data"
BASE = len(ranks())
VOCABULARY = BASE + 256
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 96, "vocab_size": VOCABULARY,
    "max_position_embeddings": 512, "bos_token_id": BASE, "eos_token_id": BASE + 2, "pad_token_id": BASE + 255,
}  # fmt: skip
DRAFT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "num_target_layers": 3,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": BASE + 254},
}  # fmt: skip


def checkpoint(folder: Path) -> str:
    """Write the folder; return its name."""
    config = copy.deepcopy(K2_6)
    config["text_config"] |= TEXT
    write(folder, {})
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(DATA / "Kimi-K2.6_chat_template.jinja", folder / "chat_template.jinja")
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(K2_6_DRAFT | DRAFT))
    return str(folder)
