"""The published procedure that speed is compared with: its trees, and that it decodes what plain decoding does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood import nano, samples
from draftwood.config import Options
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.layout import Layout
from draftwood.plan import find
from draftwood.text.tokenizer import Tokenizer
from tests.peer import ddtree, modules
from tests.spec.test_tree import reference_ddtree


@pytest.mark.parametrize("budget", [1, 2, 8, 16, 33, 64])
@pytest.mark.parametrize("depth", [1, 3, 15])
def test_its_trees_are_those_of_the_description(budget: int, depth: int) -> None:
    logits = torch.randn(depth, 100, generator=torch.Generator().manual_seed(budget + depth), dtype=torch.float64) * 3
    best = logits.log_softmax(-1).topk(budget)
    tree = ddtree.best_first(7, best.indices.tolist(), best.values.tolist(), budget)
    assert list(zip(tree.tokens, tree.parents, strict=True))[1:] == reference_ddtree(logits.numpy(), budget)
    assert tree.depths == [int(row.sum()) - 1 for row in tree.visible()]


def test_a_node_sees_itself_and_its_ancestors() -> None:
    tree = ddtree.Hosted([5, 6, 7, 8, 9], [-1, 0, 1, 0, 2], [0, 1, 2, 1, 3])
    seen = [set(np.flatnonzero(row).tolist()) for row in tree.visible()]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 3}, {0, 1, 2, 4}]
    assert tree.walk([6, 7, 1, 0, 0]) == ([0, 1, 2], 1)
    assert tree.walk([8, 7, 1, 6, 0]) == ([0, 3], 6)
    assert tree.walk([7, 0, 0, 0, 0]) == ([0], 7)


def test_nano_decodes_the_same_tokens_plain_and_with_trees() -> None:
    pytest.importorskip("dflash.model")
    found = find(Options(model=str(nano.path())))
    assert found.folder and found.draft_folder and found.drafter
    weights = load_target(found.folder, found.config, Layout(), torch.float32, "cpu")
    target = modules.place(modules.huggingface(found.config, weights, "sdpa"), "cpu", torch.float32)
    drafter = modules.dflash(found.drafter, load_drafter(found.draft_folder, found.drafter, Layout(), torch.float32, "cpu"))
    prompt = Tokenizer.load(found.folder).encode(samples.first(1)[0].text)
    stop = found.config.stop_ids
    plain = ddtree.plain(target, prompt, 32, stop)
    assert len(plain.tokens) == 32 and plain.steps == 31
    for budget in (4, 16):
        trees = ddtree.ddtree(target, drafter, prompt, 32, stop, budget)
        assert trees.tokens == plain.tokens
        assert trees.steps < 16, "the drafter's guesses are accepted"
    early = plain.tokens[9]
    assert ddtree.ddtree(target, drafter, prompt, 32, {early}, 16).tokens == plain.tokens[: plain.tokens.index(early) + 1]
