"""Weights: a checkpoint is checked whole before it is read, and ranks together hold exactly the whole model."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from draftwood.errors import ConfigError
from draftwood.model import costs
from draftwood.model.int4 import unpack_int4
from draftwood.model.tensors import PACKED, SCALE, SHAPE, Files, Random
from draftwood.model.weights import (
    dummy_drafter,
    dummy_target,
    expected_drafter,
    expected_target,
    load_drafter,
    load_target,
)
from draftwood.parallel.layout import Layout
from tests.model.shapes import TINY, TINY_DRAFT

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EXPERT = "language_model.model.layers.1.mlp.experts.0.down_proj.weight"


def file_tensors(expected) -> dict[str, torch.Tensor]:
    """Random tensors in file types, as a checkpoint holds them."""
    source, out = Random(expected, "cpu", 3), {}
    for name, want in expected.items():
        if want.types == SHAPE:
            packed = expected[name.replace("_shape", "_packed")].shape
            out[name] = torch.tensor([packed[0], packed[1] * 8])
        else:
            tensor = source.read(name)
            keep = want.types in (PACKED, SCALE) or name.endswith("bias")
            out[name] = (tensor if keep else tensor.to(torch.bfloat16)).clone()
        if want.types == SCALE:
            out[name] = (torch.rand(want.shape) * 0.1).to(torch.bfloat16)
    return out


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, part in zip(SHARDS, halves, strict=True):
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
    weight_map = {n: file for file, part in zip(SHARDS, halves, strict=True) for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    out = file_tensors(expected_target(TINY, "language_model."))
    out["vision_tower.blocks.0.weight"] = torch.zeros(2, 2)
    out["mm_projector.proj.0.weight"] = torch.zeros(2)
    return out


@pytest.fixture
def folder(tmp_path, tensors) -> Path:
    return write(tmp_path, tensors)


def load(folder, layout=None, config=TINY, dtype=torch.float32):
    return load_target(folder, config, layout or Layout(), dtype, "cpu")


def refusal(folder, config=TINY) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, config=config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def change(folder: Path, name: str, edit) -> None:
    """Rewrite the shard that holds `name` after edit(tensors of the shard)."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index[name]
    part = {n: t.clone() for n, t in load_file(path).items()}
    edit(part)
    save_file(part, path)


# -------------------------------------------------------------------------------------------------------- what is read


def test_every_tensor_arrives_where_it_belongs(folder, tensors):
    got, p = load(folder), "language_model.model.layers.1."
    layer = got.layers[1]
    assert torch.equal(got.embed, tensors["language_model.model.embed_tokens.weight"].float())
    assert torch.equal(got.lm_head, tensors["language_model.lm_head.weight"].float())
    for field, name in (
        ("q_a", "self_attn.q_a_proj"), ("q_b", "self_attn.q_b_proj"), ("kv_a", "self_attn.kv_a_proj_with_mqa"),
        ("kv_b", "self_attn.kv_b_proj"), ("o", "self_attn.o_proj"), ("q_a_norm", "self_attn.q_a_layernorm"),
        ("kv_a_norm", "self_attn.kv_a_layernorm"), ("input_norm", "input_layernorm"),
        ("post_norm", "post_attention_layernorm"),
    ):  # fmt: skip
        assert torch.equal(getattr(layer, field), tensors[f"{p}{name}.weight"].float()), field
    moe = layer.mlp
    assert torch.equal(moe.router, tensors[f"{p}mlp.gate.weight"].float())
    assert torch.equal(moe.bias, tensors[f"{p}mlp.gate.e_score_correction_bias"])
    assert torch.equal(moe.shared.down, tensors[f"{p}mlp.shared_experts.down_proj.weight"].float())
    for part in ("gate", "up", "down"):
        for kind in ("packed", "scale"):
            stored = torch.stack([tensors[f"{p}mlp.experts.{e}.{part}_proj.weight_{kind}"] for e in range(4)])
            assert torch.equal(getattr(moe.experts, f"{part}_{kind}"), stored)
    assert got.layers[0].mlp.gate.shape == (96, 64)


def test_router_stays_float32_and_experts_packed_whatever_the_type(folder):
    layer = load(folder, dtype=torch.bfloat16).layers[2]
    assert layer.mlp.router.dtype == layer.mlp.bias.dtype == torch.float32
    assert layer.mlp.experts.up_packed.dtype == torch.int32 and layer.mlp.experts.up_scale.dtype == torch.bfloat16
    assert layer.q_a.dtype == layer.input_norm.dtype == torch.bfloat16


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_prefix_is_detected_and_one_file_needs_no_index(tmp_path, tensors, prefix):
    bare = {n.replace("language_model.", prefix): t for n, t in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).norm, torch.ones(64))


def joined(parts: list[torch.Tensor], whole: torch.Tensor, dim: int) -> bool:
    return torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_ranks_together_hold_exactly_the_whole_model(folder, tp, ep):
    whole, ranks = load(folder), [load(folder, Layout(tp, ep, rank)) for rank in range(tp * ep)]
    assert joined([r.lm_head for r in ranks], whole.lm_head, 0)
    for index, layer in enumerate(whole.layers):
        mine = [r.layers[index] for r in ranks]
        assert joined([m.q_b for m in mine], layer.q_b, 0) and joined([m.o for m in mine], layer.o, 1)
        assert joined([m.kv_b for m in mine], layer.kv_b, 0)
        assert all(torch.equal(m.q_a, layer.q_a) and torch.equal(m.kv_a, layer.kv_a) for m in mine)
        dense = [m.mlp.shared if index else m.mlp for m in mine]
        full = layer.mlp.shared if index else layer.mlp
        assert joined([d.gate for d in dense], full.gate, 0) and joined([d.down for d in dense], full.down, 1)
        if not index:
            continue
        for part, dim in (("gate", 1), ("up", 1), ("down", 2)):
            for kind in ("packed", "scale"):
                field = f"{part}_{kind}"
                stripes = [
                    torch.cat([getattr(mine[e * tp + t].mlp.experts, field) for t in range(tp)], dim) for e in range(ep)
                ]
                assert joined(stripes, getattr(layer.mlp.experts, field), 0), field
        assert [m.mlp.experts.first for m in mine] == [rank // tp * (4 // ep) for rank in range(tp * ep)]


def test_a_cut_expert_dequantises_to_a_cut_of_the_whole(folder):
    whole, part = load(folder).layers[1].mlp.experts, load(folder, Layout(2, 1, 1)).layers[1].mlp.experts
    full = unpack_int4(whole.down_packed, whole.down_scale, torch.float32)
    assert torch.equal(unpack_int4(part.down_packed, part.down_scale, torch.float32), full[..., 32:])


def test_a_rank_reads_only_its_slices(folder, monkeypatch):
    """Whole reads are norms, biases, the replicated matrices and the two-number shapes: no cut tensor is read whole."""
    taken: list[str] = []
    real = safetensors.safe_open

    class Spy:
        def __init__(self, *args, **kwargs):
            self.file = real(*args, **kwargs)

        def get_tensor(self, name):
            taken.append(name)
            return self.file.get_tensor(name)

        def get_slice(self, name):
            return self.file.get_slice(name)

    monkeypatch.setattr("draftwood.model.tensors.safe_open", Spy)
    load(folder, Layout(2, 2, 3))
    cut = ("q_b_proj", "kv_b_proj", "o_proj", "lm_head", "weight_packed", "weight_scale", "shared_experts")
    assert taken and not [n for n in taken if any(c in n for c in cut)]
    assert not [n for n in taken if "experts.0." in n or "experts.1." in n], "experts of other ranks were read"


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_missing_shard_is_named(folder):
    (folder / SHARDS[1]).unlink()
    assert SHARDS[1] in refusal(folder) and "missing" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder, keep):
    path = folder / SHARDS[0]
    os.truncate(path, keep if keep >= 0 else path.stat().st_size - 1)
    text = refusal(folder)
    assert SHARDS[0] in text and "truncated" in text


def test_a_file_longer_than_its_header_says_is_named(folder):
    with (folder / SHARDS[0]).open("ab") as file:
        file.write(b"x")
    assert "too long" in refusal(folder)


def test_a_header_that_is_garbage_is_named(folder):
    (folder / SHARDS[0]).write_bytes((8).to_bytes(8, "little") + b"nonsense")
    assert SHARDS[0] in refusal(folder) and "header" in refusal(folder)


def test_a_gap_is_named(folder):
    name = f"{EXPERT}_scale"
    change(folder, name, lambda part: part.pop(name))
    assert name in refusal(folder) and "missing" in refusal(folder)


def test_a_gap_in_the_index_itself_is_named(tmp_path, tensors):
    name = f"{EXPERT}_packed"
    write(tmp_path, {n: t for n, t in tensors.items() if n != name})
    assert name in refusal(tmp_path) and "missing" in refusal(tmp_path)


def test_a_leftover_is_named(tmp_path, tensors):
    write(tmp_path, tensors | {"language_model.model.layers.3.input_layernorm.weight": torch.ones(64)})
    assert "layers.3.input_layernorm" in refusal(tmp_path) and "not part" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(folder):
    first = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(n for n, file in first.items() if file == SHARDS[0])
    other = next(n for n, file in first.items() if file == SHARDS[1])
    change(folder, other, lambda part: part.update({name: torch.zeros(2)}))
    text = refusal(folder)
    assert name in text and "also in" in text and SHARDS[1] in text


@pytest.mark.parametrize(
    ("kind", "edit", "parts"),
    [
        ("scale", lambda t: torch.cat((t, t), 1), ["[64, 4]", "[64, 2]"]),
        ("packed", lambda t: t[:, :-1], ["[64, 7]", "[64, 8]"]),
        ("shape", lambda t: torch.tensor([64, 65]), ["[64, 65]", "[64, 64]"]),
        ("scale", lambda t: t.half(), ["F16", "BF16"]),
        ("packed", lambda t: t.to(torch.int64), ["I64", "I32"]),
    ],
)
def test_a_wrong_shape_or_type_is_named(folder, kind, edit, parts):
    name = f"{EXPERT}_{kind}"
    change(folder, name, lambda part: part.update({name: edit(part[name]).contiguous()}))
    text = refusal(folder)
    assert name in text and ".safetensors" in text and all(p in text for p in parts), text


def test_a_config_of_another_shape_is_refused(folder):
    assert "config.json makes it" in refusal(folder, replace(TINY, vocab_size=256))


def test_an_index_that_leaves_the_folder_is_refused(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{EXPERT}_scale"] = "../other.safetensors"
    path.write_text(json.dumps(index))
    assert "../other.safetensors" in refusal(folder)


def test_a_folder_without_weights_is_one_line(tmp_path):
    assert "neither" in refusal(tmp_path)


# -------------------------------------------------------------------------------------------------- drafter and dummies


def test_drafter_ranks_share_key_value_heads(tmp_path):
    save_file(file_tensors(expected_drafter(TINY_DRAFT)), tmp_path / "model.safetensors")
    whole = load_drafter(tmp_path, TINY_DRAFT, Layout(), torch.float32, "cpu")
    ranks = [load_drafter(tmp_path, TINY_DRAFT, Layout(4, 1, r), torch.float32, "cpu") for r in range(4)]
    assert whole.fc.shape == (64, 128)
    for index, layer in enumerate(whole.layers):
        mine = [r.layers[index] for r in ranks]
        assert joined([m.q for m in mine], layer.q, 0) and joined([m.o for m in mine], layer.o, 1)
        assert joined([mine[0].k, mine[2].k], layer.k, 0) and torch.equal(mine[0].v, mine[1].v)


def test_a_drafter_with_more_than_the_plain_network_is_refused(tmp_path):
    tensors = file_tensors(expected_drafter(TINY_DRAFT)) | {"markov_head.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="markov_head"):
        load_drafter(tmp_path, TINY_DRAFT, Layout(), torch.float32, "cpu")


def test_dummy_ranks_are_slices_of_one_random_model():
    whole = dummy_target(TINY, Layout(), torch.float32, "cpu")
    part = dummy_target(TINY, Layout(2, 2, 3), torch.float32, "cpu")
    assert torch.equal(part.layers[1].q_b, whole.layers[1].q_b[-12:])
    assert torch.equal(part.layers[1].mlp.experts.up_packed, whole.layers[1].mlp.experts.up_packed[2:, 32:])
    other = dummy_target(TINY, Layout(), torch.float32, "cpu", seed=1)
    assert not torch.equal(other.embed, whole.embed)


def test_dummy_layers_keep_the_size_of_their_input():
    whole = dummy_target(TINY, Layout(), torch.float32, "cpu")
    experts = whole.layers[1].mlp.experts
    up = unpack_int4(experts.up_packed, experts.up_scale, torch.float32)
    assert 0.8 < (up.square().sum(-1).mean().sqrt()) < 1.25
    drafter = dummy_drafter(TINY_DRAFT, Layout(), torch.float32, "cpu")
    assert 0.8 < drafter.fc.square().sum(-1).mean().sqrt() < 1.25
    assert {f.name for f in fields(drafter)} == {"fc", "hidden_norm", "norm", "layers"}


def test_reading_holds_little_more_than_what_stays(folder, monkeypatch):
    """The parts in flight are at most `peak_load_bytes` beside the weights: counted over every read of a layer."""
    layout, parts = Layout(2, 1, 0), []
    real = Files.read

    def counted(self, name, rows=None, columns=None):
        part = real(self, name, rows, columns)
        if ".layers." in name:
            parts.append(part.numel() * 2)
        return part

    monkeypatch.setattr(Files, "read", counted)
    load(folder, layout)
    stays = costs.total(costs.weight_bytes(TINY, layout, 4))
    assert max(parts) <= costs.peak_load_bytes(TINY, layout, 4) - stays
