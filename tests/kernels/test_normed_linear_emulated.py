"""A product that norms its few rows itself has the bits of a norm and a product; sources run on the CPU through their launchers."""

from __future__ import annotations

import functools

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.linear import op
from draftwood.kernels.norm_rope import op as norm_op
from tests.kernels.emulate import COMPILER, Emulated, emulate_linear

BF16 = torch.bfloat16
EPS = 1e-6
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_linear(monkeypatch)
    monkeypatch.setattr(norm_op, "_kernel", functools.cache(lambda device, make, *given: Emulated(make(*given))))


@emulated
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 1536), (96, 128), (32, 7168)])
def test_bits_are_those_of_a_norm_and_a_product(outputs: int, inputs: int) -> None:
    numbers = torch.Generator().manual_seed(outputs)
    wide = torch.randn(8, inputs + 24, generator=numbers).to(BF16) * 3
    x, scale = wide[:, :inputs], torch.randn(inputs, generator=numbers).to(BF16)
    weight = op.pack(torch.randn(outputs, inputs, generator=numbers).to(BF16))
    normed = norm_op.add_norm(x, scale, EPS)
    want = op.linear(normed, weight)
    for rows, live in ((1, 1), (3, 2), (8, 8), (8, 5)):
        out = torch.full((rows, outputs), 7, dtype=BF16)
        op.linear(x[:rows], weight, out, rows=torch.tensor([live], dtype=torch.int32), norm=(scale, EPS))
        assert torch.equal(out[:live], want[:live]) and bool((out[live:] == 7).all()), (rows, live)
    assert torch.equal(op.linear(x[:2], weight, norm=(scale, EPS), early=True), want[:2])


def test_what_no_kernel_norms_is_refused() -> None:
    weight = op.pack(torch.zeros(32, 128, dtype=BF16))
    scale = torch.ones(128, dtype=BF16)
    with pytest.raises(ValueError, match="up to 8 rows"):
        op.linear(torch.zeros(9, 128, dtype=BF16), weight, norm=(scale, EPS))
    with pytest.raises(ValueError, match="norm's weight must be"):
        op.linear(torch.zeros(2, 128, dtype=BF16), weight, norm=(scale[:64], EPS))
    with pytest.raises(ValueError, match="multiples of 64 inputs"):
        op.linear(torch.zeros(2, 80, dtype=BF16), op.pack(torch.zeros(32, 80, dtype=BF16)), norm=(scale, EPS))


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_special_forms_stay_within_limits(arch: str) -> None:
    found = [v for v in op.variants() if arch in v.archs and {"NORM", "GOES_EARLY"} & set(v.source.macros)]
    assert len(found) >= 8
    for variant in found:
        check.check("linear", variant, arch)
