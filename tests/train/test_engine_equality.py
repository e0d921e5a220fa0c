"""What training exports is what the engine loads and computes: same logits, taps, drafts and accept lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood import nano, samples
from draftwood.engine.request import SamplingParams
from draftwood.llm import LLM
from draftwood.model import drafter, reference
from draftwood.model.config import check_pair, read_drafter_config, read_model_config
from draftwood.model.layers import Linear
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.layout import Layout
from draftwood.spec import echo
from draftwood.spec.noise import gumbel
from draftwood.train import export, offline
from draftwood.train.evaluate import Text, study
from draftwood.train.network import DrafterNet, TargetNet
from draftwood.train.shapes import NANO, NANO_DRAFT, SMOKE, SMOKE_DRAFT

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["nano", "smoke"])
def test_engine_and_training_network_agree_on_an_exported_pair(name: str, tmp_path: Path) -> None:
    shape, draft = (SMOKE, SMOKE_DRAFT) if name == "smoke" else (replace(NANO, layers=4, taps=(0, 1, 2)), NANO_DRAFT)
    torch.manual_seed(0)
    net, guesser = TargetNet(shape), DrafterNet(shape, draft)
    with torch.no_grad():
        for p in [*net.parameters(), *guesser.parameters()]:
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
        for block in net.blocks:
            if not block.dense:
                block.bias.add_(torch.randn_like(block.bias) * 0.02)
                block.router.mul_(20)
    export.save_target(net, tmp_path, None)
    export.save_drafter(guesser, tmp_path / "draft")

    config, drafter_config = read_model_config(tmp_path), read_drafter_config(tmp_path / "draft")
    check_pair(config, drafter_config)
    assert config.stop_ids == (shape.im_end, shape.eos) and drafter_config.amplitude == 1.0
    weights = load_target(tmp_path, config, Layout(), torch.float32, "cpu")
    mine = export.load_target(tmp_path, shape.taps, CPU, torch.float32)
    ids = torch.randint(0, shape.vocab, (shape.original + 60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden, taps = mine(ids[None], torch.float32)
        logits, features = reference.target(config, weights, ids, shape.taps)
    assert (hidden[0] @ mine.head.T - logits).abs().max() < 1e-4
    assert (torch.cat(taps, -1)[0] - features).abs().max() < 1e-3

    theirs = load_drafter(tmp_path / "draft", drafter_config, Layout(), torch.float32, "cpu")
    again = export.load_drafter(tmp_path / "draft", shape, CPU)
    anchor, start = len(ids) - 20, torch.zeros(1, dtype=torch.long)
    for width in (4, 8, 16):
        with torch.no_grad():
            root = ids[anchor]
            want = reference.drafter(drafter_config, theirs, weights.embed, weights.lm_head, features[:anchor], int(root), width)
            got = again(mine.embed, root[None, None], features[None], torch.tensor([[anchor]]), start, width)
        assert (got[0, 0, 1:] @ mine.head.T - want).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "noise"), [(0.0, "none"), (1.0, "none"), (1.0, "own"), (1.0, "shared")])
def test_offline_scores_are_the_accept_lengths_of_the_engine(
    temperature: float, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text, drafter, table and noise: the engine's steps and the offline walk differ by rounding at most.

    The engine's drafter with the weights that it was trained to, not those of 8 bits, which guess as well but not the same; and
    its trees without echoes of the text and with the nodes that are not worth their time.
    """

    def engines(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found = gumbel(seeds.flatten(), positions.reshape(len(seeds), -1), len(tokens))
        return found.view(*positions.shape[:-1], len(tokens))

    monkeypatch.setattr(offline, "keyed_gumbel", engines)
    monkeypatch.setattr(drafter, "guesses", Linear)
    monkeypatch.setattr(echo, "BONUS", 0.0)
    count, budget, seed = 40, 16, 5
    with LLM("nano", tree_budget=budget, topk_cap=32, noise="shared" if noise == "none" else noise, device="cpu") as llm:
        parts = llm.engine.parts
        parts.noise, parts.options = noise, replace(parts.options, worth=0.0)
        prompts = [samples.encode(s, llm) for s in samples.SAMPLES[:4]]
        params = [
            SamplingParams(max_tokens=count, temperature=temperature, seed=seed + i, ignore_eos=True) for i in range(len(prompts))
        ]
        answers = llm.generate(prompts, params)
    ids = torch.zeros(len(prompts), max(map(len, prompts)) + count + 16, dtype=torch.long)
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):
        row[: len(prompt) + count] = torch.tensor(prompt + answer.token_ids)
    first = np.array([len(p) for p in prompts])  # the first token of an answer comes from the prompt's own step
    text = Text(ids, first, first + count - 1, first + count + 7, np.zeros(len(first), bool))
    net = export.load_target(nano.path(), read_drafter_config(nano.path() / "draft").taps, CPU, torch.float32)
    guesser = export.load_drafter(nano.path() / "draft", net.shape, CPU)
    table = offline.dense_bigram(nano.path() / "draft" / "bigram.safetensors", net.shape.vocab, CPU)
    seeds = torch.arange(len(prompts)) + seed
    found = {}
    for line in study(net, guesser, text, temperature, seeds, 8, table, torch.float32):
        found[line["noise"], line["table"]] = line["all"][str(budget)]
    steps = sum(a.steps for a in answers)
    length = sum(a.accept_length * a.steps for a in answers) / steps
    if noise == "own":  # other noise than the engine's own, so alike on average only
        assert abs(found["own", True] - length) < 0.15 * length
        assert found["shared", True] > max(found["own", True], length)
    else:
        assert abs(found[noise, True] - length) <= 1.5 * length / steps  # a step more or less
