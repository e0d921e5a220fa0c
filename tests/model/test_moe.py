"""Routing and the expert products, against the formula written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from draftwood.model import costs, moe, reference
from draftwood.model.weights import MoEWeights
from draftwood.parallel.layout import Layout
from tests.model.tools import SMALL, target_weights

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def layer(config=SMALL, layout: Layout | None = None) -> MoEWeights:
    weights = target_weights(config, layout).layers[1].mlp
    assert isinstance(weights, MoEWeights)
    return weights


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, SMALL.hidden_size, generator=torch.Generator().manual_seed(seed))


def test_the_bias_chooses_but_does_not_weigh() -> None:
    weights = layer()
    weights.bias.copy_(torch.tensor([9.0, 0, 0, 8, 0, 0, 0, 7]))
    chosen, factors = moe.Router(weights, SMALL)(inputs(5))
    assert chosen.tolist() == [[0, 3, 7]] * 5
    scores = torch.sigmoid(inputs(5) @ weights.router.T)[:, [0, 3, 7]]
    expected = scores / scores.sum(1, keepdim=True) * SMALL.routed_scaling_factor
    torch.testing.assert_close(factors, expected, **CLOSE)


def test_ties_go_to_the_lowest_id() -> None:
    weights = layer()
    weights.router.zero_()
    weights.bias.zero_()
    assert moe.Router(weights, SMALL)(inputs(40))[0].tolist() == [[0, 1, 2]] * 40
    weights.bias[4:] = 1
    assert moe.Router(weights, SMALL)(inputs(3))[0].tolist() == [[4, 5, 6]] * 3


def test_routing_is_float32_whatever_the_type_of_the_model() -> None:
    weights, x = layer(), inputs(64).bfloat16()
    low, wide = moe.Router(weights, SMALL)(x), moe.Router(weights, SMALL)(x.float())
    assert torch.equal(low[0], wide[0]) and torch.equal(low[1], wide[1]) and low[1].dtype == torch.float32


def test_weights_sum_to_the_scaling_factor_also_for_tiny_scores() -> None:
    weights = layer()
    weights.router.fill_(-0.1)
    factors = moe.Router(weights, SMALL)(inputs(3).abs())[1]
    torch.testing.assert_close(factors.sum(1), torch.full((3,), SMALL.routed_scaling_factor), **CLOSE)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """One wide product is for threads that share it; with one thread it is never used."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 15, 16, 17, 64, 65, 200])
def test_every_way_of_computing_equals_the_formula(monkeypatch: pytest.MonkeyPatch, tokens: int, wide: bool) -> None:
    monkeypatch.setattr(costs, "WIDE_WASTE", 4 if wide else 0)
    weights = layer()
    x = inputs(tokens, tokens)
    torch.testing.assert_close(moe.MoE(weights, SMALL, torch.float32)(x), reference.moe(x, weights, SMALL), **CLOSE)


def test_all_tokens_on_the_same_experts() -> None:
    weights = layer()
    weights.bias.copy_(torch.tensor([0.0, 9, 0, 0, 9, 9, 0, 0]))
    for tokens in (1, 16, 100):
        x = inputs(tokens)
        torch.testing.assert_close(moe.MoE(weights, SMALL, torch.float32)(x), reference.moe(x, weights, SMALL), **CLOSE)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (1, 4), (1, 8)])
@pytest.mark.parametrize("tokens", [1, 9, 65])
@pytest.mark.parametrize("wide", [True, False])
def test_parts_of_the_ranks_sum_to_the_whole(monkeypatch: pytest.MonkeyPatch, tp: int, ep: int, tokens: int, wide: bool) -> None:
    monkeypatch.setattr(costs, "WIDE_WASTE", 4 if wide else 0)
    x, total = inputs(tokens), torch.zeros(tokens, SMALL.hidden_size)
    for rank in range(tp * ep):
        total += moe.MoE(layer(layout=Layout(tp, ep, rank)), SMALL, torch.float32)(x)
    torch.testing.assert_close(total, reference.moe(x, layer(), SMALL), **CLOSE)


def test_a_rank_without_any_chosen_expert_gives_only_the_shared_one() -> None:
    weights = layer(layout=Layout(1, 2, 1))
    weights.bias.copy_(torch.tensor([9.0, 9, 9, 0, 0, 0, 0, 0]))
    for tokens in (1, 5, 40):
        block, x = moe.MoE(weights, SMALL, torch.float32), inputs(tokens)
        torch.testing.assert_close(block(x), reference.mlp(x, weights.shared), **CLOSE)


def test_experts_whose_scales_float16_cannot_hold_are_not_rounded() -> None:
    """Scales so different that no power of two fits both: such an expert stays as it is."""
    weights = layer()
    scale = weights.experts.gate_scale.clone()
    scale[:, 0] *= 2**-30
    uneven = replace(weights, experts=replace(weights.experts, gate_scale=scale))
    x = inputs(5)
    torch.testing.assert_close(moe.MoE(uneven, SMALL, torch.float32)(x), reference.moe(x, uneven, SMALL), **CLOSE)


def test_bfloat16_experts_give_bfloat16() -> None:
    config = SMALL
    weights = target_weights(config, dtype=torch.bfloat16).layers[1].mlp
    assert isinstance(weights, MoEWeights)
    for tokens in (9, 40):
        block, x = moe.MoE(weights, config, torch.bfloat16), inputs(tokens).bfloat16()
        out = block(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), reference.moe(x, weights, config).float(), rtol=0.05, atol=0.05)
