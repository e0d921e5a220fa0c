"""Norms, rotary tables and products, against formulas and Hugging Face's YaRN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.model import layers
from draftwood.model.reference import interleaved
from tests.model.tools import SMALL, SMALL_DRAFT

K2_ROPE = replace(SMALL.rope, factor=64.0, original_max_position=4096)


@pytest.mark.parametrize(("rope", "dim"), [(SMALL.rope, 8), (K2_ROPE, 64), (K2_ROPE, 128), (replace(K2_ROPE, beta_fast=1.0), 64)])
def test_frequencies_equal_hugging_face_bitwise(rope, dim: int) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        head_dim=dim, max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": rope.original_max_position,
        },
    )  # fmt: skip
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert torch.equal(layers.rope_frequencies(rope, dim), expected) and amplitude == rope.amplitude


def test_the_table_is_a_rotation_of_the_given_amplitude() -> None:
    table = layers.rope_table(SMALL_DRAFT.rope, 16, 300, 1.25, "cpu")
    assert table.shape == (300, 8) and table.dtype == torch.complex64
    torch.testing.assert_close(table.abs(), torch.full((300, 8), 1.25))
    angle = torch.tensor(299.0) * layers.rope_frequencies(SMALL_DRAFT.rope, 16)
    torch.testing.assert_close(table[299].real, 1.25 * angle.cos())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_in_place_and_halves_give_the_same_products(dtype: torch.dtype) -> None:
    """Queries and keys rotated either way have the same dot products; a strided view is rotated in place."""
    table = layers.rope_table(SMALL.rope, 8, 50, 1.0, "cpu")
    wide = torch.randn(50, 3, 20).to(dtype)
    q, k = wide[..., 12:], torch.randn(50, 3, 8).to(dtype)
    turns = table.unsqueeze(1)
    expected = interleaved(q.clone(), turns).float() @ interleaved(k.clone(), turns).float().mT
    before = wide[..., :12].clone()
    layers.rotate_pairs_(q, turns)
    layers.rotate_pairs_(k, turns)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(q.float() @ k.float().mT, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[..., :12], before)


def test_rows_reordered_to_pairs_rotate_like_halves() -> None:
    table = layers.rope_table(SMALL_DRAFT.rope, 16, 9, 1.4, "cpu").unsqueeze(1)
    weight, x = torch.randn(3 * 16, 32), torch.randn(9, 32)
    halves = layers.rotate_half((x @ weight.T).view(9, 3, 16), table)
    pairs = layers.rotate_pairs_((x @ layers.halves_to_pairs(weight, 16).T).view(9, 3, 16), table)
    torch.testing.assert_close(pairs.unflatten(-1, (8, 2)).transpose(-1, -2).flatten(-2), halves, rtol=1e-5, atol=1e-5)


def test_norm_is_float32_inside() -> None:
    x = (torch.randn(5, 64) * 300).bfloat16()
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    out = layers.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=0)
    assert layers.rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-5).abs().max() == 0


@pytest.mark.parametrize("shape", [(100, 64), (1024, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_keeps_leading_dimensions_and_is_shared_not_copied(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = torch.randn(shape).to(dtype), torch.randn(6, shape[1]).to(dtype)
    product = layers.Linear(weight)
    torch.testing.assert_close(product(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert product(x.view(2, 3, -1)).shape == (2, 3, shape[0])
    assert layers.linear(product) is product


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 1.0, 1e6])
def test_the_prepared_norm_equals_the_formula(scale: float) -> None:
    """Also where eps decides."""
    x, weight = torch.randn(9, 3, 96) * scale, torch.rand(3, 96) + 0.5
    torch.testing.assert_close(layers.Norm(weight, 1e-6)(x), layers.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-7)
