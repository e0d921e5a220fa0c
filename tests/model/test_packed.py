"""Packed products: exact weights, float32 sums, and rows that do not know of each other."""

from __future__ import annotations

import warnings

import pytest
import torch

from draftwood.model import layers, packed
from draftwood.model.int4 import pack_int4, unpack_int4

needs_fbgemm = pytest.mark.skipif(not packed._fbgemm(), reason="this build or processor has no FBGEMM")
SMALL, LARGE = (100, 64), (1024, 384)


def bfloat16(shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.05).bfloat16().float()


def test_bfloat16_and_int4_weights_fit_float16_after_a_power_of_two() -> None:
    codes = unpack_int4(*pack_int4(torch.randn(64, 128)), torch.float32)
    assert packed.half_shift(codes) == 0
    for weight in (bfloat16(LARGE), bfloat16(LARGE) * 2.0**20, codes * 2.0**-20, codes * 2.0**20):
        shift = packed.half_shift(weight)
        assert shift is not None
        scaled = weight * 2.0**shift
        assert torch.equal(scaled.half().float() * 2.0**-shift, weight)


@pytest.mark.parametrize("hostile", [torch.inf, torch.nan, 1.0 + 2**-20, 2.0**-45])
def test_what_float16_cannot_hold_is_not_rounded(hostile: float) -> None:
    weight = bfloat16(SMALL)
    weight[3, 5] = hostile
    assert packed.half_shift(weight) is None


def test_no_weights_at_all_are_no_error() -> None:
    assert packed.half_shift(torch.zeros(4, 4)) == 0 and packed.half_shift(torch.zeros(0, 4)) == 0


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("rows", [1, 8, 17, 65])
@pytest.mark.parametrize("form", ["half", "blocked", "plain"])
def test_every_form_gives_the_product(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], rows: int, form: str) -> None:
    if form != "half":
        monkeypatch.setattr(packed, "_fbgemm", lambda: False)
    if form == "plain":
        monkeypatch.setattr(packed, "_onednn", lambda: False)
    weight, x = bfloat16(shape), torch.randn(rows, shape[1])
    product = packed.packed(weight)
    if form == "plain" or form == "blocked" and weight.numel() < packed.SHARED_FROM:
        assert product is None
        return
    if product is None:
        pytest.skip(f"this build has no product of the form {form}")
    torch.testing.assert_close(product(x).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@needs_fbgemm
@pytest.mark.parametrize("shape", [SMALL, LARGE, (16, 384), (384, 1152)])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    product, x = packed.packed(bfloat16(shape)), torch.randn(70, shape[1])
    assert product is not None
    whole = product(x)
    for rows in (1, 2, 5, 9, 14, 15, 33, 65):
        assert torch.equal(product(x[:rows]), whole[:rows])


@needs_fbgemm
def test_no_warning_reaches_the_user() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in (SMALL, LARGE):
            for product in (packed.packed(bfloat16(shape)), packed.rounded(bfloat16(shape))):
                assert product is not None
                product(torch.randn(2, shape[1]))


def test_other_types_are_left_alone() -> None:
    assert packed.packed(bfloat16(SMALL).bfloat16()) is None


@needs_fbgemm
def test_a_product_for_guesses_is_close_and_takes_empty_outputs() -> None:
    weight, x = bfloat16(LARGE), torch.randn(7, LARGE[1])
    weight[5] = 0
    product = packed.rounded(weight)
    assert product is not None
    off = product(x) - x @ weight.T
    assert off.std() < 0.03 * (x @ weight.T).std() and torch.equal(product(x)[:, 5], torch.zeros(7))


def test_guesses_are_exact_where_there_is_no_faster_product(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = layers.Linear(bfloat16(LARGE))
    assert layers.guesses(bfloat16(LARGE).bfloat16(), exact) is exact
    monkeypatch.setattr(packed, "_fbgemm", lambda: False)
    assert layers.guesses(bfloat16(LARGE), exact) is exact
