"""What training exports is what the engine loads and computes: same logits, taps and drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.model import reference
from draftwood.model.config import check_pair, read_drafter_config, read_model_config
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.layout import Layout
from draftwood.train import export
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
