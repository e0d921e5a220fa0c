"""Router: the reference against brute force, repacking, capacity, limits of the compiled kernels; on a GPU, the laws."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.kernels import check, jit
from draftwood.kernels.moe_route import op, ref

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
K26, NANO = op.Shape(7168, 384, 8), op.Shape(384, 16, 4)


def test_ties_go_to_the_lowest_expert() -> None:
    chosen = ref.choose(torch.zeros(2, 8), torch.randn(6, 8), torch.tensor([0.0, 1, 1, 0, 1, 1]), 3, 2.0)
    assert chosen.experts.tolist() == [[1, 2, 4]] * 2
    assert torch.allclose(chosen.weights, torch.full((2, 3), 2 / 3))


def test_bias_chooses_but_does_not_weigh() -> None:
    torch.manual_seed(0)
    x, router = torch.randn(5, 16), torch.randn(8, 16)
    bias = torch.randn(8) * 5
    chosen = ref.choose(x, router, bias, 2, 2.827)
    for t in range(5):
        scores = [1 / (1 + math.exp(-float(x[t] @ router[e]))) for e in range(8)]
        best = sorted(range(8), key=lambda e: (-(scores[e] + float(bias[e])), e))[:2]
        assert chosen.experts[t].tolist() == best
        total = sum(scores[e] for e in best)
        assert chosen.weights[t].tolist() == pytest.approx([scores[e] / total * 2.827 for e in best], rel=1e-5)


@given(
    st.lists(st.permutations(range(12)).map(lambda p: list(p[:3])), max_size=40),
    st.integers(0, 6), st.integers(1, 6), st.sampled_from([8, 16, 24, 64]),
)  # fmt: skip
def test_lists_hold_every_pair_of_held_experts_once(experts: list[list[int]], first: int, held: int, tile: int) -> None:
    pairs, jobs = ref.lists(experts, first, held, tile)
    chosen = list(itertools.chain.from_iterable(experts))
    assert sorted(pairs) == [p for p, e in enumerate(chosen) if first <= e < first + held]
    covered: list[int] = []
    for expert, start, count, _ in jobs:
        assert 1 <= count <= tile
        assert all(chosen[p] == first + expert for p in pairs[start : start + count])
        covered += range(start, start + count)
    assert covered == list(range(len(pairs)))
    assert len(jobs) <= op.most_jobs(max(len(experts), 1), 3, held, tile)
    assert pairs == sorted(pairs, key=lambda p: (chosen[p], p))


@pytest.mark.parametrize("shape", [K26, NANO])
def test_repacked_parts_sum_to_the_weight_exactly(shape: op.Shape) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape.experts, shape.hidden) * 0.02
    assert op.repack(weight.to(torch.bfloat16)).shape[0] == 1
    packed = op.repack(weight)
    assert packed.shape == (3, shape.experts // 16, shape.hidden // 16, 32, 4)
    assert torch.equal(_unpack(packed, shape).float().sum(0), weight)


def _unpack(packed: torch.Tensor, shape: op.Shape) -> torch.Tensor:
    """Walk lanes and registers as route.cu's header tells: -> bfloat16 [parts, E, H]."""
    out = torch.zeros(packed.shape[0], shape.experts // 16, 16, shape.hidden, dtype=torch.bfloat16)
    values = packed.view(torch.bfloat16).view(*packed.shape[:4], 4, 2)
    steps = torch.arange(shape.hidden // 16)
    for g, q, register, half in itertools.product(range(8), range(4), range(4), range(2)):
        k = 32 * (steps // 2) + 8 * q + 4 * (steps % 2) + 2 * (register // 2) + half
        out[:, :, g + 8 * (register % 2), k] = values[:, :, :, 4 * g + q, register, half]
    return out.view(packed.shape[0], shape.experts, shape.hidden)


def test_bad_shapes_are_one_line() -> None:
    with pytest.raises(ValueError, match="hidden 100"):
        op.Shape(100, 16, 2)
    with pytest.raises(ValueError, match="1 to 1024 rows"):
        op.allocate(K26, 1025, 0, 384, "cpu")
    with pytest.raises(ValueError, match="1 to 2304 rows"):
        op.allocate(NANO, 2305, 0, 16, "cpu")
    with pytest.raises(ValueError, match="1 to 1024 rows"):
        op.allocate(op.Shape(384, 64, 32), 1025, 0, 64, "cpu")
    with pytest.raises(ValueError, match="experts 8 to 23"):
        op.allocate(NANO, 8, 8, 16, "cpu")


def test_capacity_covers_the_worst_routing() -> None:
    for rows, tile in ((1, 8), (8, 8), (9, 8), (65, 8), (1024, 64), (2304, 128)):
        same = [list(range(8))] * rows
        assert len(ref.lists(same, 0, 384, tile)[1]) <= op.most_jobs(rows, 8, 384, tile)
        apart = [[(8 * t + k) % 384 for k in range(8)] for t in range(rows)]
        assert len(ref.lists(apart, 0, 384, tile)[1]) <= op.most_jobs(rows, 8, 384, tile)


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("moe_route", variant, arch).spill_bytes == 0


# ---------------------------------------------------------------- on a GPU


def _router(shape: op.Shape, exact: bool, seed: int = 0) -> tuple[op.Router, torch.Tensor]:
    """A router on the device and its weight in float32."""
    make = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(shape.experts, shape.hidden, device="cuda", generator=make) * shape.hidden**-0.5
    weight = weight.to(torch.bfloat16).float() if exact else weight
    bias = torch.rand(shape.experts, device="cuda", generator=make) * 0.3
    return op.Router(shape, op.repack(weight), bias, 2.827), weight


def _run(
    x: torch.Tensor, router: op.Router, tile: int = 8, live: int | None = None, rank: tuple[int, int] | None = None, spare: int = 0,
    form: str = "parts",
) -> op.Lists:  # fmt: skip
    first, held = rank or (0, router.shape.experts)
    out = op.allocate(router.shape, x.shape[0] + spare, first, held, "cuda")
    for t in (out.experts, out.pairs, out.jobs, out.njobs):
        t.fill_(-1)
    for t in (out.weights, out.partial):
        t.fill_(float("nan"))
    count = torch.tensor([x.shape[0] if live is None else live], dtype=torch.int32, device="cuda")
    for launched in filter(None, op.FORMS[form]):
        op.route(x, router, count, out, tile, form=launched)
        torch.cuda.synchronize()  # what runs beside a kernel must not follow one that it needs
    return out


EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 512, 1024)


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [K26, NANO])
@pytest.mark.parametrize("exact", [True, False])
def test_choice_and_weights_match_float64(shape: op.Shape, exact: bool) -> None:
    router, weight = _router(shape, exact)
    x = torch.randn(1024, shape.hidden, device="cuda").to(torch.bfloat16)
    right = ref.choose(x, weight, router.bias, shape.topk, router.scale, torch.float64)
    out = _run(x, router)
    clear = right.gap > 1e-5
    assert clear.float().mean() > 0.98
    order = out.experts.long().sort(-1).indices
    want = right.experts.sort(-1)
    assert torch.equal(out.experts.long().gather(1, order)[clear], want.values[clear])
    error = (out.weights.double().gather(1, order) - right.weights.gather(1, want.indices)).abs()[clear].max()
    assert error < 2e-6


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [K26, NANO])
@pytest.mark.parametrize("rows", EDGES)
def test_a_row_does_not_depend_on_the_others_and_lists_are_exact(shape: op.Shape, rows: int) -> None:
    router, _ = _router(shape, True)
    pool = torch.randn(1024, shape.hidden, device="cuda").to(torch.bfloat16)
    whole = _run(pool, router)
    pick = torch.randperm(1024, device="cuda")[:rows]
    for tile, rank in ((8, None), (24, (shape.experts // 4, shape.experts // 2)), (64, (0, shape.experts // 8))):
        out = _run(pool[pick].contiguous(), router, tile, rank=rank, spare=min(3, op.MOST_ROWS - rows))
        first, held = rank or (0, shape.experts)
        assert torch.equal(out.experts[:rows], whole.experts[pick])
        assert torch.equal(out.weights[:rows], ref.held_weights(whole.experts[pick], whole.weights[pick], first, held))
        pairs, jobs = ref.lists(out.experts[:rows].tolist(), first, held, tile)
        assert out.pairs[: len(pairs)].tolist() == pairs
        assert int(out.njobs) == len(jobs)
        assert [tuple(j) for j in out.jobs[: len(jobs)].tolist()] == jobs
        assert (out.pairs[len(pairs) :] == -1).all() and (out.jobs[len(jobs) :] == -1).all()


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [K26, NANO])
@pytest.mark.parametrize("form", ["parts", "apart"])
def test_a_rank_of_few_experts_takes_more_rows_at_once(shape: op.Shape, form: str) -> None:
    router, _ = _router(shape, True)
    first, held = rank = (shape.experts // 8, min(48, shape.experts // 2))
    x = torch.randn(op.MOST_ROWS_TO_FEW, shape.hidden, device="cuda").to(torch.bfloat16)
    known = [_run(part.contiguous(), router, rank=rank) for part in x.split(768)]
    experts, weights = (torch.cat([getattr(out, name) for out in known]) for name in ("experts", "weights"))
    for rows, live in ((1025, 1025), (1152, 1100), (2304, 2304)):
        out = _run(x[:rows], router, 128, live, rank, form=form)
        assert torch.equal(out.experts[:live], experts[:live]) and torch.equal(out.weights[:live], weights[:live])
        pairs, jobs = ref.lists(out.experts[:live].tolist(), first, held, 128)
        assert out.pairs[: len(pairs)].tolist() == pairs and int(out.njobs) == len(jobs)
        assert [tuple(j) for j in out.jobs[: len(jobs)].tolist()] == jobs


@gpu
@needs_gpu
@pytest.mark.parametrize("rows,live", [(8, 0), (8, 3), (65, 64), (65, 1), (128, 100)])
def test_padding_rows_have_no_pairs(rows: int, live: int) -> None:
    router, _ = _router(NANO, True)
    x = torch.randn(rows, NANO.hidden, device="cuda").to(torch.bfloat16)
    alone = _run(x[:live].contiguous(), router) if live else None
    x[live:] = float("nan")
    out = _run(x, router, live=live)
    assert int(out.njobs) == (int(alone.njobs) if alone else 0)
    assert (out.pairs >= 0).sum() == live * NANO.topk and (out.pairs < live * NANO.topk).all()
    if alone:
        assert torch.equal(out.weights[:live], alone.weights) and torch.equal(out.experts[:live], alone.experts)


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [K26, NANO])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("form", ["beside", "apart"])
def test_one_launch_and_launches_apart_leave_the_same(shape: op.Shape, exact: bool, form: str) -> None:
    """Again and again from a graph: blocks meet in another order every time."""
    router, _ = _router(shape, exact)
    for rows in [n for n in EDGES if n <= op.WHOLE_ROWS or form != "beside"]:
        x = torch.randn(rows, shape.hidden, device="cuda").to(torch.bfloat16)
        for tile, rank, live in ((8, None, rows), (24, (shape.experts // 4, shape.experts // 2), rows), (64, None, rows // 2)):
            want = _run(x, router, tile, live, rank)
            out = _run(x, router, tile, live, rank, form=form)
            graph, count = torch.cuda.CUDAGraph(), torch.tensor([live], dtype=torch.int32, device="cuda")
            other = torch.zeros(1, device="cuda")
            with torch.cuda.graph(graph):
                for launched in filter(None, op.FORMS[form]):
                    op.route(x, router, count, out, tile, form=launched)
                    other += 1  # what the next one runs beside
            for _ in range(20):
                for name in ("experts", "weights", "pairs", "jobs", "njobs"):
                    a, b = getattr(want, name), getattr(out, name)
                    assert torch.equal(a.view(torch.int32), b.view(torch.int32)), (name, rows, tile, rank, live)
                out.partial.fill_(float("nan"))
                graph.replay()
            assert not out.tickets.any()


@gpu
@needs_gpu
def test_rows_of_nan_still_choose_distinct_experts() -> None:
    router, _ = _router(K26, True)
    out = _run(torch.full((9, K26.hidden), float("nan"), device="cuda").to(torch.bfloat16), router)
    for row in out.experts[:9].tolist():
        assert len(set(row)) == 8 and all(0 <= e < 384 for e in row)


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 33])
def test_graph_replays_are_bitwise_equal(rows: int) -> None:
    router, _ = _router(K26, True)
    x = torch.randn(rows, K26.hidden, device="cuda").to(torch.bfloat16)
    first = _run(x, router)
    out = op.allocate(K26, rows, 0, 384, "cuda")
    live = torch.tensor([rows], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.route(x, router, live, out, 8)
    for i in range(1000):
        graph.replay()
        if i % 100 == 99:
            assert torch.equal(out.weights, first.weights) and torch.equal(out.pairs, first.pairs)
            assert torch.equal(out.jobs[: int(out.njobs)], first.jobs[: int(first.njobs)])
            out.weights.zero_()
            out.pairs.zero_()
