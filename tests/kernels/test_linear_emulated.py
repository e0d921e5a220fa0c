"""`linear`'s own source, run on the CPU through its launcher, and its meaning in the model.

An emulated sum inside an mma is exact and rounded once, so bits are not a GPU's; but the same chain gives the same bits here
as well, so independence of rows, kernels and company is tested as on a GPU.
"""

import dataclasses

import pytest
import torch

from draftwood.kernels.linear import op, plan, ref
from draftwood.kernels.linear.plan import Shape
from draftwood.model import layers
from draftwood.model.weights import DenseWeights
from tests.kernels.emulate import COMPILER, emulate_linear

BF16 = torch.bfloat16
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SHAPES = {
    "four segments in warps": Shape(480, 1536), "eight in a cluster of four": Shape(64, 3072), "heads": Shape(96, 32, 3),
    "heads of two segments": Shape(32, 512, 2), "tail": Shape(48, 80), "odd tiles": Shape(240, 384), "tiny": Shape(16, 16),
    "one segment of four tiles": Shape(160, 256), "swiglu": Shape(160, 384, glu=True), "swiglu, a tail": Shape(32, 136, glu=True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_linear(monkeypatch)


def _make(shape: Shape, n: int) -> tuple[torch.Tensor, op.Weight, torch.Tensor]:
    """x, the packed weight and the float64 result."""
    numbers = torch.Generator().manual_seed(0)
    w = torch.randn(shape.heads, shape.outputs, shape.inputs, generator=numbers).to(BF16)
    x = torch.randn(n, shape.heads, shape.inputs, generator=numbers).to(BF16)
    if shape.glu:
        gate, up = w[0].chunk(2)
        return x[:, 0], op.pack_swiglu(gate, up), ref.swiglu(x[:, 0].double(), gate.double(), up.double(), torch.float64)
    if shape.heads > 1:
        return x, op.pack(w), ref.heads(x.double(), w.double(), torch.float64)
    return x[:, 0], op.pack(w[0]), ref.linear(x[:, 0].double(), w[0].double(), out=torch.float64)


@emulated
@pytest.mark.parametrize(
    ("name", "early"), [(name, False) for name in SHAPES] + [(name, True) for name in ("odd tiles", "eight in a cluster of four")]
)
def test_both_kernels_give_the_product_and_the_same_bits_in_any_company(
    name: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    shape = SHAPES[name]
    x, weight, want = _make(shape, 41)
    got = op.linear(x, weight)
    assert float((got.double() - want).abs().max() / want.abs().max()) < 6e-3
    for rows in ([3], [40, 0, 7, 8, 9, 31, 32], list(range(5, 22))):
        assert torch.equal(op.linear(x[rows].contiguous(), weight), got[rows]), rows


@emulated
@pytest.mark.parametrize(
    ("name", "early"), [("eight in a cluster of four", False), ("eight in a cluster of four", True), ("swiglu, a tail", False)]
)
def test_warp_groups_give_the_same_bits_and_read_no_rows_beyond_the_count(
    name: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    shape = SHAPES[name]
    x, weight, _ = _make(shape, 41)
    want = op.linear(x, weight)
    forms = [plan.gmma_forms(shape, 5)[0], plan.wide_forms(shape, 5)[0]]
    x[39:] = float("nan")
    for form in forms:
        out = torch.full_like(want, 7)
        op.linear(x, weight, out, rows=torch.tensor([39], dtype=torch.int32), form=form)  # two passes of 40 rows
        assert torch.equal(out[:39], want[:39]) and bool((out[39:] == 7).all()), form


@emulated
@pytest.mark.parametrize(
    ("name", "early"),
    [(name, False) for name in ("eight in a cluster of four", "heads of two segments", "tail", "odd tiles", "swiglu", "tiny")]
    + [("eight in a cluster of four", True), ("heads", True), ("swiglu, a tail", True)],
)
def test_fed_forms_give_the_same_bits_and_read_no_rows_beyond_the_count(
    name: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    x, weight, _ = _make(shape, 41)
    want = op.linear(x, weight)
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    for knobs in ((3, 1, 1, 1, 1), (5, 2, 1, 2, 0)) if not early else ((2, 1, 2, 2, 1), (3, 2, 2, 1, 0), (9, 2, 1, 1, 0)):
        form = plan._fed_form(shape, *knobs)
        for live in (39, 11):
            poisoned, out = x.clone(), torch.full_like(want, 7)
            poisoned[live:] = float("nan")
            op.linear(poisoned, weight, out, rows=torch.tensor([live], dtype=torch.int32), form=form)
            assert torch.equal(out[:live], want[:live]) and bool((out[live:] == 7).all()), (form, live)


@emulated
def test_fed_blocks_take_one_tile_after_another_and_skip_those_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "H200", dataclasses.replace(plan.H200, parts=(4,)))  # a multiprocessor for each block of a cluster
    for name in ("odd tiles", "heads of two segments"):
        x, weight, _ = _make(SHAPES[name], 41)
        want = op.linear(x, weight)
        for arranged in (0, 1):
            form = plan._fed_form(SHAPES[name], 1, 1, 2, 2, arranged)
            assert form.grid(SHAPES[name], 41) == (4, 1, 1)
            for live in (0, 20, 41):
                out = torch.full_like(want, 7)
                op.linear(x, weight, out, rows=torch.tensor([live], dtype=torch.int32), form=form)
                assert torch.equal(out[:live], want[:live]) and bool((out[live:] == 7).all()), (name, arranged, live)


@emulated
def test_fed_forms_add_a_residual_and_leave_results_on_odd_places_to_others() -> None:
    x, weight, _ = _make(SHAPES["odd tiles"], 41)
    want, residual = op.linear(x, weight), torch.randn(41, 240).to(BF16)
    for arranged in (0, 1):
        form = plan._fed_form(SHAPES["odd tiles"], 3, 2, 1, 1, arranged)
        assert torch.equal(op.linear(x, weight, residual=residual, form=form), want + residual)
        assert torch.equal(op.linear(x, weight, dtype=torch.float32, form=form).to(BF16), want)
        out = torch.zeros(41, 242, dtype=BF16)
        assert torch.equal(op.linear(x, weight, out[:, 2:], form=form), want)


@emulated
@pytest.mark.slow
def test_forms_for_small_shared_memory_and_every_width_give_the_same_bits() -> None:
    shape = Shape(480, 1536)
    x, weight, _ = _make(shape, 20)
    want = op.linear(x, weight)
    forms = [plan.stream_form(shape, plan.PRO_6000)]
    forms += [f for t in plan.TILES for machine in (plan.H200, plan.PRO_6000) for f in plan.wide_forms(shape, t, 1, machine)]
    forms += [plan.gmma_forms(shape, t)[0] for t in plan.GMMA_WARPS]
    for form in dict.fromkeys(forms):
        assert torch.equal(op.linear(x, weight, form=form), want), form


@emulated
@pytest.mark.parametrize("name", ["odd tiles", "tail", "eight in a cluster of four"])
def test_rows_beyond_the_count_are_neither_read_nor_written(name: str) -> None:
    x, weight, _ = _make(SHAPES[name], 20)
    want = op.linear(x, weight)
    for n in (0, 1, 8, 9):
        poisoned = x.clone()
        poisoned[n:] = float("nan")
        for capacity in (8, 20):
            out = torch.full_like(want[:capacity], 7)
            op.linear(poisoned[:capacity], weight, out, rows=torch.tensor([n], dtype=torch.int32))
            live = min(n, capacity)
            assert torch.equal(out[:live], want[:live]) and bool((out[live:] == 7).all())


@emulated
def test_results_go_where_they_should_in_either_type_and_onto_a_residual() -> None:
    x, weight, _ = _make(SHAPES["odd tiles"], 11)
    for n in (5, 11):
        plain = op.linear(x[:n], weight)
        assert torch.equal(op.linear(x[:n], weight, dtype=torch.float32).to(BF16), plain)
        residual = torch.randn(n, 240).to(BF16)
        want = plain + residual
        assert torch.equal(op.linear(x[:n], weight, residual=residual), want)
        assert op.linear(x[:n], weight, residual, residual) is residual and torch.equal(residual, want)
    x, weight, _ = _make(SHAPES["heads"], 11)
    query, out = torch.randn(11, 3, 48).to(BF16), torch.full((11, 3, 112), 7, dtype=BF16)
    query[..., :32] = x
    for n in (5, 11):
        op.linear(query[:n, :, :32], weight, out[:n, :, :96])
        assert torch.equal(out[:n, :, :96], op.linear(x[:n].contiguous(), weight))
        assert bool((out[:, :, 96:] == 7).all())


def test_packed_products_mean_what_the_models_layers_mean() -> None:
    x, gate, up, down = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48, 64), torch.randn(64, 48)
    dense = layers.Dense(DenseWeights(gate, up, down))
    hidden = ref.swiglu(x, gate, up, torch.float32)
    torch.testing.assert_close(ref.linear(hidden, down, out=torch.float32), dense(x))
    torch.testing.assert_close(ref.linear(x, down.T, out=torch.float32), layers.Linear(down.T.contiguous())(x))
