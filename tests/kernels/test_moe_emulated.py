"""The expert and router kernels' own source, run on the CPU through their launchers.

An emulated sum inside an mma is exact and rounded once, so bits are not a GPU's; but the same chain gives the same bits here
as well, so equality between kernels, rows and lists is tested as on a GPU.
"""

import functools

import numpy as np
import pytest
import torch

from draftwood.kernels import jit
from draftwood.kernels.moe_int4 import op, ref, repack
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.model.int4 import pack_int4, unpack_int4
from tests.kernels.emulate import COMPILER, Emulated

# One worker: the compiled sources are kept by a process.
pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.xdist_group("emulated")]
NANO, ROUTER = op.shape_of(384, 128, 4, 16), route_op.Shape(384, 16, 4)
NAN = float("nan")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def expert_kernel(name: str, part: str, shape: op.Shape, device: int) -> Emulated:
        variant = op._combine_variant(shape) if part == "combine" else op._variant(name, part, shape, "sm_90a")
        return Emulated(variant.source)

    def router_kernel(entry: str, shape: route_op.Shape, parts: int, device: int) -> Emulated:
        return Emulated(route_op._variant(entry, shape, parts).source)

    monkeypatch.setattr(op, "_kernel", functools.cache(expert_kernel))
    monkeypatch.setattr(op, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(op, "_multiprocessors", lambda device: 1)
    monkeypatch.setattr(route_op, "_kernel", functools.cache(router_kernel))


class Layer:
    """Nano's router and experts with random weights, and rows to run."""

    def __init__(self, rows: int, width: int = 128) -> None:
        make = torch.Generator().manual_seed(0)
        normal = functools.partial(torch.randn, generator=make)
        self.x = normal(rows, 384).to(torch.bfloat16)
        self.shared = normal(rows, 384).to(torch.bfloat16)
        self.router = normal(16, 384) * 0.05
        self.bias = torch.rand(16, generator=make) * 0.3
        packed = [pack_int4(normal(16, *size) * 0.05) for size in ((width, 384), (width, 384), (384, width))]
        self.parts = [t for pair in packed for t in pair]
        self.dense = [unpack_int4(*pair, torch.float64) for pair in packed]

    def expert(self, e: int) -> ref.Expert:
        return self.dense[0][e], self.dense[1][e], self.dense[2][e]

    def route(
        self, tile: int, rank: tuple[int, int] = (0, 16), live: int | None = None, exact: bool = False, form: str = "parts"
    ) -> route_op.Lists:
        weight = self.router.to(torch.bfloat16).float() if exact else self.router
        router = route_op.Router(ROUTER, route_op.repack(weight), self.bias, 2.0)
        lists = route_op.allocate(ROUTER, len(self.x), *rank, "cpu")
        for t in (lists.experts, lists.pairs, lists.jobs, lists.njobs):
            t.fill_(2**30)
        for t in (lists.weights, lists.partial):
            t.fill_(NAN)
        count = torch.tensor([len(self.x) if live is None else live], dtype=torch.int32)
        for launched in filter(None, route_op.FORMS.get(form, (form,))):
            route_op.route(self.x, router, count, lists, tile, form=launched)
        assert not lists.tickets.any()
        return lists

    def experts(
        self, plan: op.Plan, rank: tuple[int, int] = (0, 16), live: int | None = None, lists: route_op.Lists | None = None
    ) -> torch.Tensor:
        held = repack.repack(*(t[rank[0] : sum(rank)] for t in self.parts))
        shape = op.Shape(384, held.width, 4)
        work = op.workspace(shape, len(self.x), "cpu")
        work.h.fill_(NAN)
        work.y.fill_(NAN)
        out = torch.full_like(self.x, NAN)
        count = torch.tensor([len(self.x) if live is None else live], dtype=torch.int32)
        lists = lists or self.route(plan.tile, rank, live)
        op.moe_int4(self.x, held, lists, count, self.shared, out, work, plan)
        return out


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("exact", [True, False])
def test_router_chooses_as_the_reference_and_makes_its_lists(rows: int, exact: bool) -> None:
    layer = Layer(rows)
    weight = layer.router.to(torch.bfloat16).float() if exact else layer.router
    right = route_ref.choose(layer.x, weight, layer.bias, 4, 2.0, torch.float64)
    for tile, rank in ((8, (0, 16)), (24, (4, 8)), (64, (13, 3))):
        lists = layer.route(tile, rank, exact=exact)
        assert torch.equal(lists.experts.long(), right.experts)
        want = route_ref.held_weights(right.experts, right.weights, *rank)
        assert (lists.weights - want).abs().max() < 1e-6
        assert torch.equal(lists.weights == 0, want == 0)
        pairs, jobs = route_ref.lists(right.experts.tolist(), *rank, tile)
        assert lists.pairs.tolist() == pairs + [2**30] * (rows * 4 - len(pairs))
        assert int(lists.njobs) == len(jobs)
        assert [tuple(j) for j in lists.jobs[: len(jobs)].tolist()] == jobs


@pytest.mark.parametrize(("rows", "live"), [(1, 1), (9, 9), (9, 0), (40, 33), (72, 71)])
@pytest.mark.parametrize("form", ["beside", "apart"])
def test_every_form_leaves_the_same(rows: int, live: int, form: str) -> None:
    """Every bit, for experts held whole or in part, and jobs of one or more tiles."""
    layer, many = Layer(rows), rows > 16
    for tile, rank in ((8, (0, 16)), (24, (4, 8)), (64, (13, 3)))[many : 2 if many else 3]:
        want = layer.route(tile, rank, live)
        found = layer.route(tile, rank, live, form=form)
        for name in ("experts", "weights", "pairs", "jobs", "njobs"):
            a, b = getattr(want, name), getattr(found, name)
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (name, tile, rank)


def test_many_rows_are_several_launches_and_unknown_forms_are_refused() -> None:
    assert [route_op.launches(route_op.best_form(n)) for n in (1, 128, 129)] == [1, 1, 2]
    for rows, form in ((1, "all"), (129, "beside")):
        with pytest.raises(ValueError, match=f"form '{form}' must be parts, scores, settle, or up to 128 rows beside; .* {rows}"):
            Layer(rows).route(8, form=form)


def test_router_does_not_see_other_rows_or_padding() -> None:
    layer = Layer(40)
    whole = layer.route(8)
    some = Layer(40)
    some.x = layer.x[[7, 30, 2]].contiguous()
    few = some.route(8)
    assert torch.equal(few.weights, whole.weights[[7, 30, 2]]) and torch.equal(few.experts, whole.experts[[7, 30, 2]])
    layer.x[21:] = NAN
    cut = layer.route(8, live=21)
    assert torch.equal(cut.weights[:21], whole.weights[:21])
    assert (cut.pairs[: 21 * 4] < 21 * 4).all() and (cut.pairs[21 * 4 :] == 2**30).all()
    assert int(layer.route(8, live=0).njobs) == 0


@pytest.mark.parametrize("rows", [5, 40])
def test_blocks_of_48_experts_score_as_the_reference(rows: int) -> None:
    shape, make = route_op.Shape(384, 48, 4), torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randn(rows, 384, generator=make).to(torch.bfloat16),
        torch.randn(48, 384, generator=make).to(torch.bfloat16).float(),
    )
    router = route_op.Router(shape, route_op.repack(weight * 0.0625), torch.rand(48, generator=make), 2.0)
    lists, live = route_op.allocate(shape, rows, 0, 48, "cpu"), torch.tensor([rows], dtype=torch.int32)
    route_op.route(x, router, live, lists, 8)
    right = route_ref.choose(x, weight * 0.0625, router.bias, 4, 2.0, torch.float64)
    assert torch.equal(lists.experts.long(), right.experts) and (lists.weights - right.weights).abs().max() < 1e-6
    whole = route_op.allocate(shape, rows, 0, 48, "cpu")
    route_op.route(x, router, live, whole, 8, form="beside")
    assert torch.equal(lists.partial.view(torch.int32), whole.partial.view(torch.int32))


def test_ties_go_to_the_lowest_expert_in_the_kernel() -> None:
    layer = Layer(3)
    layer.router.zero_()
    layer.bias = torch.zeros(16)
    layer.bias[[3, 9, 12]] = 1
    assert layer.route(8).experts.tolist() == [[3, 9, 12, 0]] * 3
    assert torch.equal(layer.route(8).weights, torch.full((3, 4), 0.5))


def _plans(rows: int) -> list[op.Plan]:
    """Plans in which every form occurs that may run."""
    forms = [(n, f) for n, f in op.HOPPER.items() if rows <= (f.rows or rows)]
    ups, downs = ([n for n, f in forms if f.fits(NANO, part)] for part in ("gate_up", "down"))
    return [op.Plan(ups[i % len(ups)], downs[i % len(downs)]) for i in range(max(len(ups), len(downs)))]


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_experts_match_float64_and_every_form_gives_the_same_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(rows)
    results = []
    for early in (False, True):
        if early:
            monkeypatch.setenv("EMULATED_EARLY", "1")
        results += [layer.experts(plan) for plan in _plans(rows)]
    lists = layer.route(8)
    want = ref.experts(layer.x, layer.expert, lists.experts, lists.weights, 0, 16, layer.shared)
    assert (results[0].double() - want).abs().max() < 6e-3 * want.abs().max()
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_a_row_does_not_depend_on_the_others() -> None:
    layer, alone = Layer(40), Layer(40)
    whole = layer.experts(op.Plan("wide", "wide"))
    for row in (0, 17, 39):
        alone.x, alone.shared = layer.x[row : row + 1], layer.shared[row : row + 1]
        assert torch.equal(alone.experts(op.Plan("stream", "few"))[0], whole[row])


def test_ranks_of_experts_add_up_and_padding_is_left_alone() -> None:
    layer = Layer(12)
    layer.shared.zero_()
    whole = layer.experts(op.Plan("wide", "wide"))
    halves = [layer.experts(op.Plan("stream", "wide"), rank, live=9) for rank in ((0, 8), (8, 8))]
    assert all(h[9:].isnan().all() for h in halves)
    total = sum(h[:9].float() for h in halves)
    assert (total - whole[:9].float()).abs().max() < 1e-2 * whole.float().abs().max()


def test_a_narrow_slice_is_padded_with_nothing() -> None:
    layer = Layer(3, width=96)
    lists = layer.route(8)
    got = layer.experts(op.Plan("stream", "few"), lists=lists)
    want = ref.experts(layer.x, layer.expert, lists.experts, lists.weights, 0, 16, layer.shared)
    assert (got.double() - want).abs().max() < 6e-3 * want.abs().max()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("scaled", [False, True])
def test_rings_of_every_depth_give_the_same_bits_over_a_long_row(arch: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 columns: 8 steps, more than any ring holds, in the down part; every architecture's forms."""
    shape = op.Shape(128, 512, 4, scaled)
    forms = [f for f in op.FORMS[arch].values() if f.file == "staged" and f.warps == 4]
    forms = [f for f in forms if f.fits(shape, "down")]
    kernels = [Emulated(jit.Source(op.FOLDER / f"{f.file}.cu", f"down_{f.file}", f.macros(shape, "down"))) for f in forms]
    make = torch.Generator().manual_seed(3)
    packed, scale = pack_int4(torch.randn(1, 128, 512, generator=make))
    gate = pack_int4(torch.randn(1, 512, 128, generator=make))
    weights = repack.repack(*gate, *gate, packed, scale)
    h = torch.randn(13, 512, generator=make).to(torch.bfloat16)
    pairs = torch.randperm(13, generator=make).int()
    dense = unpack_int4(packed, scale, torch.float64)[0]
    want = h.double() @ (dense.to(torch.bfloat16).double() if scaled else dense).T
    results = []
    for early in (False, True):
        if early:
            monkeypatch.setenv("EMULATED_EARLY", "1")
        for form, kernel in zip(forms, kernels, strict=True):
            y, tile = torch.full((13, 128), NAN), 8 * form.tokens
            jobs = torch.tensor([[0, at, min(tile, 13 - at), 0] for at in range(0, 13, tile)], dtype=torch.int32)
            count = torch.tensor([len(jobs)], dtype=torch.int32)
            kernel((1, len(jobs)), form.threads, (weights.down, weights.down_scale, h, jobs, count, pairs, y, np.int32(1)))
            assert (y - want).abs().max() < 1e-4 * want.abs().max()
            results.append(y)
    assert all(torch.equal(r, results[0]) for r in results)
    assert len(kernels) >= 2


@pytest.mark.parametrize(("rows", "scaled"), [(1, False), (4, False), (4, True)])
def test_every_form_gives_the_same_bits_over_a_long_row(rows: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = op.Shape(2048, 128, 4, scaled)
    make = torch.Generator().manual_seed(4)
    parts = [t for size in ((128, 2048), (128, 2048), (2048, 128)) for t in pack_int4(torch.randn(4, *size, generator=make))]
    weights = repack.repack(*parts)
    x = torch.randn(rows, 2048, generator=make).to(torch.bfloat16)
    pairs, jobs = route_ref.lists([[(t + k) % 6 for k in range(4)] for t in range(rows)], 0, 4, 8)
    device = [torch.tensor(v, dtype=torch.int32) for v in (jobs, [len(jobs)], pairs)]
    results = {}
    for early in (False, True):
        if early:
            monkeypatch.setenv("EMULATED_EARLY", "1")
        for name, form in op.HOPPER.items():
            if form.fits(shape, "gate_up"):
                h = torch.full((rows * 4, 128), NAN, dtype=torch.bfloat16)
                args = (weights.gate_up, weights.gate_up_scale, x, *device, h, np.int32(0))
                op._launch("gate_up", name, shape, 0, len(jobs), args, True)
                results[name, early] = h
    first = results["stream", False]
    written = ~first.isnan().any(-1)
    assert written.nonzero().flatten().tolist() == sorted(pairs)
    for key, h in results.items():
        assert torch.equal(h[written], first[written]) and h[~written].isnan().all(), key
    gate, up, _ = repack.expert(weights, 0, rounded=scaled)
    for p in [p for p in pairs if (p // 4 + p % 4) % 6 == 0]:
        want = ref.hidden(x[p // 4 : p // 4 + 1], gate, up, rounded=False)[0]
        assert (first[p].double() - want).abs().max() < 6e-3 * want.abs().max()
