"""The target's forward: its meaning, and that trees, pages, chunks and padding change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftwood.model import mla, reference
from draftwood.model.kimi import Target
from draftwood.model.weights import TargetWeights
from tests.model.tools import (
    SMALL,
    TAPS,
    Pages,
    chain,
    make_step,
    random_tokens,
    random_tree,
    small_target,
    target_weights,
)  # fmt: skip
from tests.peer.modules import huggingface

EDGES = (7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def weights() -> TargetWeights:
    return target_weights()


@pytest.fixture(scope="module")
def target(weights: TargetWeights) -> Iterator[Target]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield small_target(weights=weights)
    torch.set_num_threads(before)


def whole(target: Target, tokens: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Pages]:
    """Logits and taps of a sequence run as one prompt chunk, and the pages it left."""
    pages = Pages.make(SMALL, 1, len(tokens) + 80, seed)
    logits, taps = make_step(pages, [(0, 0, tokens, chain(len(tokens)))]).run(target)
    return logits, taps[0], pages


def test_logits_and_taps_equal_hugging_face_also_past_the_original_length(target: Target, weights: TargetWeights) -> None:
    """Latent norms with their class default 1e-6, all others with the config's 1e-5; 200 positions, 64 original."""
    assert (SMALL.latent_norm_eps, SMALL.rms_norm_eps) == (1e-6, 1e-5)
    tokens = random_tokens(200, 1)
    model = huggingface(SMALL, weights)
    with torch.inference_mode():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    logits, taps, _ = whole(target, tokens)
    torch.testing.assert_close(logits, out.logits[0], **CLOSE)
    # hidden_states[i + 1] is the residual stream after layer i, but for the last layer it is already normed.
    torch.testing.assert_close(taps[:, SMALL.hidden_size :], out.hidden_states[1][0], **CLOSE)


def test_far_positions_equal_hugging_face(target: Target, weights: TargetWeights) -> None:
    tokens = random_tokens(40, 2)
    positions = torch.arange(900, 940)
    with torch.inference_mode():
        expected = huggingface(SMALL, weights)(torch.tensor([tokens]), position_ids=positions[None]).logits[0]
    step = make_step(Pages.make(SMALL, 1, 60), [(0, 0, tokens, chain(40))])
    step.positions[0] = positions
    torch.testing.assert_close(step.run(target)[0], expected, **CLOSE)


def test_the_reference_formula_gives_the_same_logits_and_taps(target: Target, weights: TargetWeights) -> None:
    tokens = random_tokens(90, 3)
    logits, taps, _ = whole(target, tokens)
    expected, features = reference.target(SMALL, weights, torch.tensor(tokens), TAPS)
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(taps, features, **CLOSE)


@pytest.mark.parametrize("absorbed_to", [0, 1 << 30])
@pytest.mark.parametrize("small", [0, 1 << 30])
def test_absorbed_and_plain_attention_agree(target: Target, monkeypatch: pytest.MonkeyPatch, absorbed_to: int, small: int) -> None:
    tokens = random_tokens(70, 4)
    expected = whole(target, tokens)[0]
    monkeypatch.setattr(mla, "SMALL", small)
    for layer in target.layers:
        monkeypatch.setattr(layer.attention, "plain_from", absorbed_to)
    torch.testing.assert_close(whole(target, tokens)[0], expected, **CLOSE)


def test_where_pages_lie_changes_nothing(target: Target) -> None:
    tokens = random_tokens(30, 5)
    a, taps_a, _ = whole(target, tokens, seed=1)
    b, taps_b, _ = whole(target, tokens, seed=2)
    assert torch.equal(a, b) and torch.equal(taps_a, taps_b)


@pytest.mark.parametrize("cuts", [(1,) * 12, (64, 36), (33, 31, 36), (99, 1), (17, 83)])
def test_a_prompt_in_chunks_equals_the_whole_prompt(target: Target, cuts: tuple[int, ...]) -> None:
    tokens = random_tokens(sum(cuts), 6)
    expected, features, _ = whole(target, tokens)
    pages = Pages.make(SMALL, 1, len(tokens))
    done, logits, taps = 0, [], []
    for n in cuts:
        step = make_step(pages, [(0, done, tokens[done : done + n], chain(n))])
        part = step.run(target)
        logits.append(part[0])
        taps.append(part[1][0])
        done += n
    torch.testing.assert_close(torch.cat(logits), expected, **CLOSE)
    torch.testing.assert_close(torch.cat(taps), features, **CLOSE)


@pytest.mark.parametrize("nodes", EDGES)
def test_a_node_equals_its_path_decoded_as_text(target: Target, nodes: int) -> None:
    prompt, tokens, parents = random_tokens(21, 7), random_tokens(nodes, nodes), random_tree(nodes, nodes)
    pages = whole(target, prompt)[2]
    logits, taps = make_step(pages, [(0, len(prompt), tokens, parents)]).run(target)
    for node in {nodes - 1, nodes // 2, 1}:
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected, features, _ = whole(target, prompt + [tokens[i] for i in path])
        torch.testing.assert_close(logits[node], expected[-1], **CLOSE)
        torch.testing.assert_close(taps[0, node], features[-1], **CLOSE)


@pytest.mark.parametrize("length", EDGES)
def test_any_prefix_length_works(target: Target, length: int) -> None:
    tokens = random_tokens(length + 1, length)
    pages = whole(target, tokens[:length])[2]
    logits, _ = make_step(pages, [(0, length, tokens[length:], [-1])]).run(target)
    torch.testing.assert_close(logits[0], whole(target, tokens)[0][-1], **CLOSE)


def mixed(target: Target, seed: int) -> tuple[Pages, list[tuple[int, int, list[int], list[int]]]]:
    """A prompt chunk, trees and single tokens at very different lengths; their prefixes are in the pages."""
    lengths, sizes = (3, 130, 0, 40, 7, 64), (1, 17, 90, 9, 1, 65)
    pages = Pages.make(SMALL, len(lengths), 260, seed)
    rows = []
    for row, (length, n) in enumerate(zip(lengths, sizes, strict=True)):
        if length:
            make_step(pages, [(row, 0, random_tokens(length, row), chain(length))]).run(target)
        parents = chain(n) if n == 90 else random_tree(n, row)
        rows.append((row, length, random_tokens(n, 50 + row), parents))
    return pages, rows


@pytest.mark.parametrize("alone", [0, 1024, 1 << 30])
def test_rows_of_any_mixture_equal_each_row_alone(target: Target, monkeypatch: pytest.MonkeyPatch, alone: int) -> None:
    """However rows are grouped: one by one, as measured, or all together."""
    pages, rows = mixed(target, 1)
    expected = [make_step(pages, [row]).run(target) for row in rows]
    monkeypatch.setattr(mla, "ALONE", alone)
    logits, taps = make_step(pages, rows).run(target)
    torch.testing.assert_close(logits, torch.cat([e[0] for e in expected]), **CLOSE)
    for row, (_, features) in enumerate(expected):
        torch.testing.assert_close(taps[row, : features.shape[1]], features[0], **CLOSE)


def test_what_stands_at_padding_does_not_matter(target: Target) -> None:
    """Not a bit: tokens, positions, masks, slots of padding nodes, and prefix ids after the length."""
    pages, rows = mixed(target, 2)
    before = pages.cache.isnan().sum()
    clean = make_step(pages, rows).run(target)[0]
    written = pages.cache.isnan().sum()
    for garbage in (1, 2):
        assert torch.equal(make_step(pages, rows, garbage).run(target)[0], clean)
    assert pages.cache.isnan().sum() == written < before


def test_only_verified_nodes_get_logits_in_the_order_asked(target: Target) -> None:
    pages, rows = mixed(target, 3)
    step = make_step(pages, rows)
    logits, _ = step.run(target)
    starts = [0, 1, 18, 108, 117, 118]
    asked = (torch.tensor([5, 1, 2]), torch.tensor([64, 0, 89]))
    some, _ = target.forward(step.tokens, step.positions, step, step.ancestors, step.counts, asked)
    expected = torch.stack([logits[starts[r] + n] for r, n in zip(*map(Tensor.tolist, asked), strict=True)])
    torch.testing.assert_close(some, expected, **CLOSE)
    none = (torch.zeros(0, dtype=torch.long),) * 2
    assert target.forward(step.tokens, step.positions, step, step.ancestors, step.counts, none)[0].shape == (0, 128)


def test_a_second_run_of_a_step_is_bitwise_the_first(target: Target) -> None:
    pages, rows = mixed(target, 4)
    step = make_step(pages, rows)
    first = step.run(target)
    again = step.run(target)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_bfloat16_stays_near_float32(target: Target, weights: TargetWeights) -> None:
    from draftwood.parallel.comm import Local
    from draftwood.parallel.layout import Layout

    low = Target(SMALL, target_weights(dtype=torch.bfloat16), Layout(), Local(), TAPS, torch.bfloat16)
    tokens = random_tokens(80, 8)
    expected = whole(target, tokens)[0]
    pages = Pages.make(SMALL, 1, 80, dtype=torch.bfloat16)
    logits = torch.cat([
        make_step(pages, [(0, 0, tokens[:70], chain(70))]).run(low)[0],
        make_step(pages, [(0, 70, tokens[70:], chain(10))]).run(low)[0],
    ])  # fmt: skip
    assert logits.dtype == torch.float32
    # A rounded router may choose another expert where two are nearly equal: a few tokens may differ more.
    likeness = torch.nn.functional.cosine_similarity(logits, expected).sort().values
    assert likeness[len(likeness) // 10] > 0.98 and likeness.median() > 0.999


def test_yarn_off_is_plain_rope(weights: TargetWeights) -> None:
    config = replace(SMALL, rope=replace(SMALL.rope, factor=1.0))
    tokens = random_tokens(20, 9)
    logits = make_step(Pages.make(config, 1, 20), [(0, 0, tokens, chain(20))]).run(small_target(config, weights))[0]
    torch.testing.assert_close(logits, reference.target(config, weights, torch.tensor(tokens))[0], **CLOSE)
