"""Reading configs: every published form is read alike, everything else is refused in one line that names the cause."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood.errors import ConfigError
from draftwood.model.config import (
    K2_6,
    K2_6_DRAFT,
    check_pair,
    read_drafter_config,
    read_model_config,
    resized,
)

DATA = Path(__file__).parents[1] / "data"


def published(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text())


def refusal(read, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 2
    return text


# ------------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", ["Kimi-K2.6_config", "Kimi-K2.5_config", "Kimi-K2-Thinking_config"])
def test_every_published_config_gives_k2s_shape(name):
    config = read_model_config(published(name))
    assert (config.hidden_size, config.num_layers, config.num_heads) == (7168, 61, 64)
    assert (config.num_experts, config.experts_per_token, config.first_k_dense) == (384, 8, 1)
    assert (config.latent_width, config.qk_head_dim, config.group_size) == (576, 192, 32)
    assert config.softmax_scale == pytest.approx(0.144680, abs=5e-7)
    assert config.rope.amplitude == 1.0
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert {163585, 163586} <= set(config.stop_ids) and config.bos_id == 163584


def test_prefix_follows_the_wrapper_and_the_builtin_shape_is_k26():
    k26 = read_model_config(published("Kimi-K2.6_config"))
    assert k26.tensor_prefix == "language_model." and k26.stop_ids[0] == 163586
    assert read_model_config(published("Kimi-K2-Thinking_config")).tensor_prefix == ""
    assert read_model_config(K2_6) == k26
    assert read_drafter_config(K2_6_DRAFT) == read_drafter_config(published("Kimi-K2.6-DFlash_config_partial"))


def test_transformers_5_spelling_reads_the_same():
    old = published("Kimi-K2-Thinking_config")
    new = copy.deepcopy(old)
    scaling = new.pop("rope_scaling")
    kind = scaling.pop("type")
    new["rope_parameters"] = {"rope_type": kind, "rope_theta": new.pop("rope_theta"), **scaling}
    for gone in ("scoring_func", "topk_method", "moe_layer_freq", "seq_aux", "aux_loss_alpha"):
        del new[gone]
    assert read_model_config(new) == read_model_config(old)


def test_a_config_saved_by_transformers_is_read():
    transformers = pytest.importorskip("transformers")
    old = published("Kimi-K2-Thinking_config")
    old.pop("_note")
    hf = transformers.DeepseekV3Config.from_dict(copy.deepcopy(old) | {"model_type": "deepseek_v3"})
    saved = json.loads(hf.to_json_string(use_diff=False))
    saved["quantization_config"] = old["quantization_config"]
    assert read_model_config(saved) == read_model_config(old)


def test_generation_config_adds_stop_ids(tmp_path):
    config = published("Kimi-K2-Thinking_config") | {"vocab_size": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_model_config(tmp_path).stop_ids == (2, 7)


def edited(path: str, value, base: str = "Kimi-K2.6_config") -> dict:
    """A published config with the field at a dotted path replaced, or removed when value is ...."""
    config = published(base)
    *parents, last = path.split(".")
    place = config
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return config


WEIGHTS = "text_config.quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("text_config.kv_lora_rank", ..., ["'kv_lora_rank' is missing"]),
        ("text_config.hidden_size", "7168", ["hidden_size = '7168' is not a whole number"]),
        ("text_config.hidden_size", True, ["hidden_size"]),
        ("text_config.hidden_size", 7169, ["hidden_size = 7169", "multiple of 32"]),
        ("text_config.num_hidden_layers", 0, ["num_hidden_layers = 0"]),
        ("text_config.rms_norm_eps", "tiny", ["rms_norm_eps"]),
        ("text_config.rms_norm_eps", math.inf, ["rms_norm_eps"]),
        ("text_config.rms_norm_eps", math.nan, ["rms_norm_eps"]),
        ("text_config.routed_scaling_factor", -1.0, ["routed_scaling_factor = -1.0"]),
        ("text_config.num_experts_per_tok", 400, ["num_experts_per_tok = 400", "384"]),
        ("text_config.eos_token_id", 200000, ["eos_token_id 200000", "163840"]),
        ("text_config.n_group", 8, ["n_group = 8"]),
        ("text_config.n_group", ..., ["n_group"]),
        ("text_config.scoring_func", "softmax", ["scoring_func = 'softmax'"]),
        ("text_config.topk_method", "greedy", ["topk_method = 'greedy'"]),
        ("text_config.norm_topk_prob", False, ["norm_topk_prob = False"]),
        ("text_config.tie_word_embeddings", True, ["tie_word_embeddings = True"]),
        ("text_config.attention_bias", True, ["attention_bias = True"]),
        ("text_config.moe_layer_freq", 2, ["moe_layer_freq = 2"]),
        ("text_config.num_key_value_heads", 8, ["num_key_value_heads = 8"]),
        ("text_config.q_lora_rank", None, ["q_lora_rank"]),
        ("text_config.rope_scaling.type", "longrope", ["rope_type = 'longrope'"]),
        ("text_config.rope_scaling", "yarn", ["rope_scaling"]),
        ("text_config", [], ["text_config"]),
        ("text_config.quantization_config", ..., ["quantization_config", "INT4"]),
        ("text_config.quantization_config.quant_method", "fp8", ["quant_method = 'fp8'", "compressed-tensors"]),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized", ["format = 'nvfp4-pack-quantized'"]),
        ("text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}, ["kv_cache_scheme"]),
        ("text_config.quantization_config.ignore", ["lm_head"], ["self_attn", "INT4 in routed experts only"]),
        ("text_config.quantization_config.ignore", ["re:.*"], ["routed experts are not quantised"]),
        ("text_config.quantization_config.ignore", ["re:("], ["pattern"]),
        (f"{WEIGHTS}.num_bits", 8, ["num_bits = 8"]),
        (f"{WEIGHTS}.group_size", 128, ["group_size = 128"]),
        (f"{WEIGHTS}.symmetric", False, ["symmetric = False"]),
        (f"{WEIGHTS}.type", "float", ["type = 'float'"]),
        (f"{WEIGHTS}.strategy", "channel", ["strategy = 'channel'"]),
        (f"{WEIGHTS}.actorder", "group", ["actorder = 'group'"]),
        ("architectures", ["Qwen3MoeForCausalLM"], ["Qwen3MoeForCausalLM", "Kimi"]),
        ("text_config.model_type", "llama", ["llama"]),
        ("text_config.layer_types", ["sliding_attention"] * 61, ["sliding_attention"]),
    ],
)  # fmt: skip
def test_what_this_engine_would_not_run_exactly_is_refused_by_name(path, value, parts):
    text = refusal(read_model_config, edited(path, value))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ["Qwen3ForCausalLM", "qwen3"]),
        ({"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
          "linear_attn_config": {"full_attn_layers": [4]}}, ["KimiLinearForCausalLM", "recurrent"]),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
          "layer_types": ["linear_attention", "full_attention"]}, ["layer 0", "linear_attention", "recurrent"]),
        ({"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
          "hybrid_override_pattern": "M-M*"}, ["hybrid_override_pattern", "recurrent"]),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["MambaForCausalLM", "recurrent"]),
        (edited("text_config.linear_attn_config", {"kda_layers": [1]}), ["linear_attn_config", "recurrent"]),
        ({}, ["model_type"]),
    ],
)  # fmt: skip
def test_other_architectures_are_refused_by_name(config, parts):
    text = refusal(read_model_config, config)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"rms_norm_eps": NaN}', "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_a_file_that_is_no_json_object_is_one_line(tmp_path, content, part):
    (tmp_path / "config.json").write_bytes(content)
    text = refusal(read_model_config, tmp_path)
    assert part in text and str(tmp_path) in text


def test_a_folder_that_is_none_is_one_line(tmp_path):
    assert "config.json" in refusal(read_model_config, tmp_path)
    assert "not a folder" in refusal(read_model_config, tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in refusal(read_model_config, tmp_path / "file")


# ------------------------------------------------------------------------------------------------------ the drafter


def drafter(**changes) -> dict:
    return published("Kimi-K2.6-DFlash_config_partial") | changes


def test_drafter_shape_is_the_published_one():
    config = read_drafter_config(drafter())
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (7168, 6, 64, 8)
    assert config.taps == (1, 12, 24, 35, 47, 58) and config.mask_token_id == 163838 and config.block_size == 8


def test_yarn_amplitude_is_decided_per_checkpoint_and_can_be_chosen():
    k25, k26 = published("Kimi-K2.5-DFlash_config_partial"), drafter()
    gain = 0.1 * math.log(64) + 1
    assert read_drafter_config(k25).amplitude == pytest.approx(gain)
    assert read_drafter_config(k26).amplitude == 1.0
    for config in (k25, k26):
        assert read_drafter_config(config, "1").amplitude == 1.0
        assert read_drafter_config(config, "mscale").amplitude == pytest.approx(gain)


def test_another_drafter_with_yarn_follows_hugging_face():
    other = published("Kimi-K2.5-DFlash_config_partial")
    other |= {"hidden_size": 512, "intermediate_size": 64, "rms_norm_eps": 1e-6}
    assert read_drafter_config(other).amplitude == 1.0
    rope = other["rope_scaling"] = dict(other["rope_scaling"])
    del rope["mscale"], rope["mscale_all_dim"]
    assert read_drafter_config(other).amplitude == pytest.approx(0.1 * math.log(64) + 1)
    rope["attention_factor"] = 1.25
    assert read_drafter_config(other).amplitude == 1.25
    other["dflash_config"] = other["dflash_config"] | {"rope_amplitude": 1.0}
    assert read_drafter_config(other).amplitude == 1.0


def test_plain_rope_has_amplitude_one():
    config = drafter(rope_theta=10000.0)
    del config["rope_parameters"]
    read = read_drafter_config(config)
    assert read.amplitude == 1.0 and read.rope.factor == 1.0 and read.rope_type == "default"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, ["Qwen3DSparkModel", "DFlashDraftModel"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel"]),
        ({"dflash_config": None}, ["dflash_config"]),
        ({"dflash_config": {"target_layer_ids": [1, 1], "mask_token_id": 5}}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [1, 61], "mask_token_id": 5}}, ["target_layer_ids", "0..60"]),
        ({"dflash_config": {"target_layer_ids": ["1"], "mask_token_id": 5}}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 163840}}, ["mask_token_id = 163840"]),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 5, "markov_rank": 256}}, ["markov_rank"]),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 5, "causal": True}}, ["causal = True"]),
        ({"layer_types": ["sliding_attention"] * 6}, ["layer_types"]),
        ({"layer_types": ["full_attention"] * 5}, ["layer_types"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"num_key_value_heads": 7}, ["num_attention_heads = 64", "7"]),
        ({"block_size": 1}, ["block_size = 1"]),
        ({"intermediate_size": None}, ["intermediate_size"]),
        ({"model_type": "llama"}, ["model_type = 'llama'"]),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_name(changes, parts):
    if changes.get("intermediate_size", 1) is None:
        changes = changes | {"hidden_size": 512}
    text = refusal(read_drafter_config, drafter(**changes))
    assert all(part in text for part in parts), text


def test_a_pair_must_fit_and_a_block_must_have_been_trained():
    target, draft = read_model_config(K2_6), read_drafter_config(K2_6_DRAFT)
    check_pair(target, draft, 8)
    assert all(p in refusal(check_pair, target, draft, 32) for p in ("32", "at most 8", "8 or less"))
    for field, value, part in (("hidden_size", 512, "512"), ("vocab_size", 32000, "32000"), ("num_layers", 48, "48")):
        name = "num_target_layers" if field == "num_layers" else field
        assert part in refusal(check_pair, target, replace(draft, **{name: value}))


def test_shapes_can_have_fewer_experts_and_layers():
    target, draft = read_model_config(K2_6), read_drafter_config(K2_6_DRAFT)
    assert resized(target, draft, None, None) == (target, draft)
    small, drafter = resized(target, draft, 48, 8)
    assert (small.num_experts, small.num_layers, small.num_moe_layers) == (48, 8, 7)
    assert drafter.taps == (0, 1, 2, 4, 5, 6) and drafter.num_target_layers == 8
    check_pair(small, drafter)
    assert resized(target, draft, None, 2)[1].taps == (0,)
    assert resized(target, None, 384, 61) == (target, None)
    for experts in (0, 8, 40, 400):
        assert all(p in refusal(resized, target, draft, experts, None) for p in (f"--routed-experts {experts}", "8 of", "384"))
    for layers in (0, 1, 62):
        assert all(p in refusal(resized, target, draft, None, layers) for p in (f"--layers {layers}", "61"))
