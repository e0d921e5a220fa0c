"""The trained networks mean what the published modules mean, and what is exported is what was trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from draftwood.errors import ConfigError
from draftwood.model.int4 import unpack_int4
from draftwood.model.tensors import Files
from draftwood.nano import path
from draftwood.train import export
from draftwood.train.generate import Decoder, Fixed, keyed_gumbel, loop_start
from draftwood.train.network import DrafterNet, TargetNet, distil, weighted
from draftwood.train.shapes import NANO, NANO_DRAFT, SMOKE, SMOKE_DRAFT, DraftShape, Shape

CPU = torch.device("cpu")


def random_target(shape: Shape, seed: int = 0) -> TargetNet:
    """Weights of trained size, norms off 1 and router biases off 0, so that every term counts."""
    torch.manual_seed(seed)
    net = TargetNet(shape)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
            if "router" in name:
                p.mul_(20)
        for block in net.blocks:
            if not block.dense:
                block.bias.add_(torch.randn_like(block.bias) * 0.05)
    return net


def random_drafter(shape: Shape, draft: DraftShape, seed: int = 1) -> DrafterNet:
    torch.manual_seed(seed)
    net = DrafterNet(shape, draft)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return net


@pytest.fixture(scope="module", params=["nano", "smoke"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetNet]:
    """An exported random target and the training network it came from."""
    shape = (
        replace(NANO, vocab=512, layers=4, bos=480, eos=481, im_end=482, pad=511, taps=(0, 1, 2))
        if request.param == "nano"
        else SMOKE
    )
    net = random_target(shape)
    folder = tmp_path_factory.mktemp(request.param)
    export.save_target(net, folder, None)
    return folder, net


def hugging_face(folder: Path) -> torch.nn.Module:
    """transformers' DeepseekV3ForCausalLM with the folder's dequantised weights."""
    transformers = pytest.importorskip("transformers")
    fields = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "architectures", "model_type", "latent_norm_eps"):
        fields.pop(name)
    config = transformers.DeepseekV3Config(**fields)
    config._attn_implementation = "eager"
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    files, state = Files(folder), {}
    for name in files.entries:
        if ".experts." not in name:
            state[name] = files.read(name).float()
    for layer in range(1, config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp.experts"
        parts = {
            k: torch.stack([dequantised(files, f"{mlp}.{e}.{k}_proj") for e in range(config.n_routed_experts)])
            for k in ("gate", "up", "down")
        }
        state[f"{mlp}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        state[f"{mlp}.down_proj"] = parts["down"]
    model.load_state_dict(state, strict=True)
    return model


def dequantised(files: Files, name: str) -> torch.Tensor:
    return unpack_int4(files.read(f"{name}.weight_packed"), files.read(f"{name}.weight_scale"), torch.float32)


def test_target_logits_and_taps_equal_the_published_module_past_the_original_length(exported: tuple[Path, TargetNet]) -> None:
    folder, _ = exported
    mine = export.load_target(folder, exported[1].shape.taps, CPU, torch.float32)
    theirs = hugging_face(folder)
    length = mine.shape.original + 88
    ids = torch.randint(0, mine.shape.vocab, (2, length), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        hidden, taps = mine(ids, torch.float32)
        out = theirs(ids, output_hidden_states=True)
        logits = hidden @ mine.head.T
    assert out.logits.std() > 0.1
    assert (logits - out.logits).abs().max() < 1e-4 * max(1.0, float(out.logits.abs().max()))
    for tap, value in zip(mine.shape.taps, taps, strict=True):
        assert (value - out.hidden_states[tap + 1]).abs().max() < 1e-3


def test_exported_weights_reload_to_what_training_computed_with(exported: tuple[Path, TargetNet]) -> None:
    folder, net = exported
    ids = torch.randint(0, net.shape.vocab, (2, 40), generator=torch.Generator().manual_seed(4))
    stored = export.load_target(folder, net.shape.taps, CPU, torch.float32)
    with torch.no_grad():
        for p in (p for n, p in net.named_parameters() if ".e_" not in n):
            p.copy_(p.bfloat16().float())  # the export's only other rounding; experts are rounded inside forward
        trained, _ = net(ids, torch.float32)
        again, _ = stored(ids, torch.float32)
    assert (trained - again).abs().max() < 1e-4


def test_decoding_with_the_latent_cache_equals_the_training_forward(exported: tuple[Path, TargetNet]) -> None:
    folder, net = exported
    stored = export.load_target(folder, net.shape.taps, CPU, torch.float32)
    prompts = torch.randint(0, net.shape.vocab, (3, 40), generator=torch.Generator().manual_seed(5))
    lengths, seeds = torch.tensor([1, 7, 20]), torch.tensor([5, 6, 7])
    for temperature in (0.0, 1.0):
        ids = Decoder(stored, Fixed(prompts, lengths, seeds, temperature, net.shape.vocab), torch.float32).run()
        with torch.no_grad():
            logits = stored(ids, torch.float32)[0] @ stored.head.T
        at = torch.arange(1, ids.shape[1])
        if temperature > 0:
            logits[:, :-1] += keyed_gumbel(seeds[:, None, None], at[None, :, None], torch.arange(net.shape.vocab))
        choice = logits[:, :-1].argmax(-1)
        for row, n in enumerate(lengths.tolist()):
            assert ids[row, :n].tolist() == prompts[row, :n].tolist()
            assert ids[row, n:].tolist() == choice[row, n - 1 :].tolist()


def test_drafter_equals_the_published_module(tmp_path: Path) -> None:
    published = pytest.importorskip("dflash.model")
    shape, draft = replace(NANO, vocab=512), replace(NANO_DRAFT, mask_id=500)
    export.save_drafter(random_drafter(shape, draft), tmp_path)
    mine = export.load_drafter(tmp_path, shape, CPU)
    theirs = published.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(2)
    embed = torch.randn(512, shape.hidden, generator=generator)
    features = torch.randn(1, 600, shape.hidden * 3, generator=generator)
    for width, anchor, start in ((8, 590, 0), (16, 40, 0), (8, 90, 60)):
        block = torch.full((1, width), draft.mask_id)
        block[0, 0] = 17
        with torch.no_grad():
            got = mine(embed, torch.tensor([[17]]), features[:, start:], torch.tensor([[anchor]]), torch.tensor([start]), width)
            want = theirs(
                position_ids=torch.arange(start, anchor + width)[None], noise_embedding=embed[block],
                target_hidden=features[:, start:anchor],
            )  # fmt: skip
        assert (got[0, 0] - want[0]).abs().max() < 1e-4


def test_blocks_of_one_batch_do_not_see_each_other() -> None:
    net = random_drafter(SMOKE, SMOKE_DRAFT)
    embed = torch.randn(SMOKE.vocab, SMOKE.hidden)
    features = torch.randn(2, 48, SMOKE.hidden * 2)
    anchors, start, roots = torch.tensor([[5, 20, 33]]), torch.zeros(1, dtype=torch.long), torch.randint(0, 200, (2, 3))
    with torch.no_grad():
        together = net(embed, roots, features, anchors, start, 8)
        for a in range(3):
            alone = net(embed, roots[:, a : a + 1], features[:, : anchors[0, a]], anchors[:, a : a + 1], start, 8)
            assert torch.allclose(together[:, a], alone[:, 0], atol=1e-5)


def test_loop_start_finds_the_first_repeated_token() -> None:
    assert loop_start(torch.arange(100)) == 100
    assert loop_start(torch.cat([torch.arange(50), torch.tensor([7, 8, 9] * 20)])) == 53
    assert loop_start(torch.cat([torch.arange(90), torch.tensor([1] * 10)])) == 100  # too short to call


def test_the_bundled_shape_stays_below_forty_megabytes(tmp_path: Path) -> None:
    size = export.save_target(TargetNet(NANO), tmp_path, None) + export.save_drafter(
        DrafterNet(NANO, NANO_DRAFT), tmp_path / "draft"
    )
    assert size + 110_000 + 4_100 + 1_100_000 < 39_800_000  # tokenizer, previous-token table
    assert max(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= 15_900_000


def test_a_checkpoint_with_a_missing_or_wrong_tensor_is_refused_in_one_line(tmp_path: Path) -> None:
    net = random_target(SMOKE)
    export.save_target(net, tmp_path, None)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 64}))
    with pytest.raises(ConfigError, match="has shape"):
        export.load_target(tmp_path, SMOKE.taps, CPU, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="missing"):
        export.load_target(tmp_path, SMOKE.taps, CPU, torch.float32)


def test_the_loss_leaves_out_what_a_chain_never_reaches() -> None:
    losses, weight = torch.tensor([1.0, 2.0, 4.0, 1.0, 2.0, 4.0]), torch.tensor([1.0, 0.5, 0.25]).repeat(2)
    sure, lost = torch.ones(6), torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    plain = float((losses * weight).sum() / weight.sum())
    assert float(weighted(losses, lost, weight, 3, share=0.0)) == pytest.approx(plain)
    assert float(weighted(losses, sure, weight, 3, share=1.0)) == pytest.approx(plain)
    # the first block ends at its first position: one loss of it counts, and all three of the second block
    assert float(weighted(losses, lost, weight, 3, share=1.0)) == pytest.approx((1 + 1 + 1 + 1) / (1 + 1.75))
    half = (1 + 0.5 * 1 + 0.5 * 1 + 1 + 1 + 1) / (1 + 0.25 + 0.125 + 1.75)
    assert float(weighted(losses, lost, weight, 3, share=0.5)) == pytest.approx(half)


def test_the_loss_is_least_where_both_distributions_agree() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 8), torch.randn(20, 8)
    sharp = torch.tensor([1.0, 2.0, 6.0, 1.0, 1.0])
    same, agreement = distil(hidden * sharp[:, None], hidden, head, sharp)
    p = torch.softmax(F.linear(hidden, head) * sharp[:, None], -1)
    assert torch.allclose(same, -(p * p.log()).sum(-1), atol=1e-4) and torch.allclose(agreement, torch.ones(5), atol=1e-5)
    other, less = distil(torch.randn(5, 8), hidden, head, sharp)
    assert bool((other > same).all()) and bool((less < 1).all())


def test_the_bundled_pair_read_for_training_is_written_back_byte_for_byte(tmp_path: Path) -> None:
    bundled = path()
    net = export.read_target(bundled, NANO.taps)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in net.parameters())
    export.save_target(net, tmp_path, bundled)
    drafter = export.read_drafter(bundled / "draft", net.shape)
    export.save_drafter(drafter, tmp_path / "draft")
    for name in ("config.json", "draft/config.json", "draft/model.safetensors", "model.safetensors.index.json", "tiktoken.model"):
        assert (bundled / name).read_bytes() == (tmp_path / name).read_bytes(), name
    for shard in bundled.glob("model-*.safetensors"):
        assert shard.read_bytes() == (tmp_path / shard.name).read_bytes(), shard.name
