"""Tree kernels: compile limits and refusals without a GPU; on a GPU, the reference to the bit, and the laws."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from draftwood.kernels import check, jit
from draftwood.kernels.tree import op, ref, scenario

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128)
K26, NANO = 163840, 8192


@pytest.mark.parametrize("arch", [pytest.param(a, marks=[pytest.mark.slow] * (a in ("sm_100a", "sm_103a"))) for a in jit.ARCHS])
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("tree", variant, arch).spill_bytes == 0


def test_unfit_arguments_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="steps of 8"):
        op.allocate(1, 7, 100, "cpu")
    with pytest.raises(ValueError, match="1 to 15 depths"):
        op.knobs(ref.Options(), 16, "cpu")
    with pytest.raises(ValueError, match="ascending"):
        op.knobs(ref.Options(caps=((8, 4), (4, 8))), 7, "cpu")
    given, buffers = op.knobs(ref.Options(), 2, "cpu"), op.allocate(2, 2, 64, "cpu")
    heat, budgets = torch.ones(2), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="bf16 or float32"):
        op.candidates(torch.zeros(2, 2, 64, dtype=torch.float16), heat, budgets, given, buffers)
    with pytest.raises(ValueError, match="do not fit buffers"):
        op.candidates(torch.zeros(3, 2, 64), torch.ones(3), budgets, given, buffers)
    with pytest.raises(ValueError, match="budgets must be torch.int32"):
        op.candidates(torch.zeros(2, 2, 64), heat, budgets.long(), given, buffers)
    with pytest.raises(ValueError, match="a table is int32"):
        roots, wrong = torch.zeros(2, dtype=torch.int64), torch.zeros(3)
        found, trees = buffers.found, op.allocate_trees(2, "cpu")
        op.grow(found, roots, roots, budgets, heat, given, trees, ref.Table(wrong, wrong, wrong, wrong[:2]))


def test_lists_have_as_many_blocks_as_were_measured_to_be_fastest_on_an_h200() -> None:
    """20 segments, 7 depths; without noise, where all depths draw all of it, and where the first does."""
    measured = {1: (20, 20, 20), 8: (4, 4, 4), 16: (2, 2, 4), 32: (1, 1, 2), 64: (1, 2, 1), 128: (1, 1, 1)}
    for rows, want in measured.items():
        assert tuple(op.blocks_of_a_list(20, rows, 7, *how, 264) for how in ((7, False), (7, True), (1, True))) == want, rows


def test_the_scenarios_table_is_sorted_and_has_long_rows() -> None:
    table = scenario.table(5000, 40, "cpu")
    sizes = table.row_ptr.diff()
    assert int(table.row_ptr[-1]) == len(table.cols) and int(sizes.max()) > 2048
    for token in (0, 1, 2, 250, 4999):
        cols = table.cols[table.row_ptr[token] : table.row_ptr[token + 1]]
        assert bool((cols.diff() > 0).all()) and (not len(cols) or int(cols.max()) < 5000)


def same(
    got: ref.Candidates | ref.Trees, want: ref.Candidates | ref.Trees, rows: int | Tensor, names: tuple[str, ...] = ()
) -> None:
    """Bitwise, the first rows or the rows picked."""
    for field in dataclasses.fields(got):
        if names and field.name not in names:
            continue
        a, b = getattr(got, field.name)[: len(rows) if isinstance(rows, Tensor) else rows], getattr(want, field.name)
        b = b[rows] if isinstance(rows, Tensor) else b[:rows]
        if a.dtype == torch.float32:
            a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
        assert torch.equal(a, b), field.name


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("vocab", "dtype", "rows"), [(K26, torch.bfloat16, 9), (K26, torch.float32, 3), (NANO, torch.float32, 33)]
    )
    @pytest.mark.parametrize("noisy", [True, False])
    def test_candidates_are_the_references_to_the_bit(self, vocab: int, dtype: torch.dtype, rows: int, noisy: bool) -> None:
        depth = 7
        x = scenario.logits(rows, depth, vocab, "cuda", dtype)
        given, knobs = scenario.rows(rows, vocab, "cuda", budget=64), op.knobs(ref.Options(), depth, "cuda")
        found, _ = scenario.run(x, given, knobs, noisy=noisy)
        for r in range(rows):
            row = given.pick(torch.tensor([r], device="cuda"))
            z = ref.heated(x[r : r + 1], row.temperature, knobs.options.beta, row.seeds if noisy else None, row.lengths)
            same(ref.Candidates(*(t[r : r + 1] for t in vars(found).values())), ref.candidates(z, depth), 1)

    def test_ties_and_hostile_logits_are_the_references_too(self) -> None:
        depth, rows = 3, 4
        x = scenario.logits(rows, depth, K26, "cuda", torch.float32)
        x[0] = 1.25
        x[1] = x[1].round()
        x[2, :, ::2] = float("nan")
        x[2, 1] = -torch.inf
        x[3, 0, 5], x[3, 1, 7] = torch.inf, -0.0
        given, knobs = scenario.rows(rows, K26, "cuda", budget=64), op.knobs(ref.Options(), depth, "cuda")
        given.temperature.fill_(0)
        found, trees = scenario.run(x, given, knobs)
        want = ref.candidates(ref.heated(x, given.temperature, (1.0,)), depth)
        same(found, want, rows)
        same(trees, ref.grow(want, given.roots, given.lengths, given.budgets, given.temperature, knobs.options), rows)

    @pytest.mark.parametrize(("vocab", "sharp"), [(K26, True), (K26, False), (NANO, True)])
    def test_candidates_whose_sum_is_not_wanted_are_the_same(self, vocab: int, sharp: bool) -> None:
        """There, noise is found for a few tokens only; for nearly equal logits that gives up, and finds all of it."""
        x = scenario.logits(6, 7, vocab, "cuda") * (1.0 if sharp else 0.05)
        given, knobs = scenario.rows(6, vocab, "cuda", budget=16), op.knobs(ref.Options(), 7, "cuda")
        every = scenario.run(x, given, knobs)[0]
        few = scenario.run(x, given, knobs, scenario.table(vocab, 3, "cuda"))[0]
        same(few, every, 6, ("ids", "z", "places"))

    @pytest.mark.parametrize("depth", [1, 7, 15])
    @pytest.mark.parametrize("with_table", [False, True])
    @pytest.mark.parametrize("options", [
        ref.Options(), ref.Options(caps=((64, 64),), spine=True),
        ref.Options(caps=((3, 1), (64, 5)), alpha=1.3, candidates=40, correction=torch.linspace(-0.5, 0.3, 12).view(2, 2, 3)),
    ])  # fmt: skip
    def test_trees_are_the_references_to_the_bit(self, depth: int, with_table: bool, options: ref.Options) -> None:
        rows = 12
        x = scenario.logits(rows, depth, NANO, "cuda")
        given, knobs = scenario.rows(rows, NANO, "cuda"), op.knobs(options, depth, "cuda")
        table = scenario.table(NANO, 60, "cuda") if with_table else None
        found, trees = scenario.run(x, given, knobs, table)
        live = given.budgets > 0
        held = ref.Candidates(*(t.where(live.view(-1, *[1] * (t.dim() - 1)), 0) for t in vars(found).values()))
        same(trees, ref.grow(held, given.roots, given.lengths, given.budgets, given.temperature, options, table), rows)

    @pytest.mark.parametrize("vocab", [K26, NANO])
    def test_a_row_does_not_depend_on_the_others(self, vocab: int) -> None:
        depth = 7
        x = scenario.logits(128, depth, vocab, "cuda")
        given, knobs = scenario.rows(128, vocab, "cuda"), op.knobs(ref.Options(), depth, "cuda")
        given.budgets.clamp_(min=1)
        table = scenario.table(vocab, 30, "cuda")
        for some in (None, table):
            whole = scenario.run(x, given, knobs, some)
            for n in EDGES if vocab == NANO else (1, 33, 65):
                index = torch.randperm(128, generator=torch.Generator().manual_seed(n)).cuda()[:n]
                part = scenario.run(x[index].contiguous(), given.pick(index), knobs, some, spare=3)
                same(part[0], whole[0], index, ("ids", "z", "places"))
                same(part[1], whole[1], index)

    def test_rows_beyond_the_count_are_neither_read_nor_written(self) -> None:
        x = scenario.logits(9, 7, NANO, "cuda")
        given, knobs = scenario.rows(9, NANO, "cuda", budget=16), op.knobs(ref.Options(), 7, "cuda")
        want = scenario.run(x, given, knobs)[1]
        for n in (0, 1, 8):
            poisoned = x.clone()
            poisoned[n:] = float("nan")
            buffers, out = op.allocate(9, 7, NANO, "cuda"), op.allocate_trees(9, "cuda")
            for t in (*vars(buffers.found).values(), *vars(out).values()):
                t.fill_(77)
            live = torch.tensor([n], dtype=torch.int32, device="cuda")
            op.candidates(poisoned, given.temperature, given.budgets, knobs, buffers, given.seeds, given.lengths, live)
            op.grow(buffers.found, given.roots, given.lengths, given.budgets, given.temperature, knobs, out, rows=live)
            same(out, want, n)
            for t in (*vars(buffers.found).values(), *vars(out).values()):
                assert bool((t[n:] == 77).all())

    @pytest.mark.parametrize("rows", [1, 33, 128])
    def test_flattened_nodes_are_the_references(self, rows: int) -> None:
        x = scenario.logits(rows, 3, NANO, "cuda")
        given, knobs = scenario.rows(rows, NANO, "cuda"), op.knobs(ref.Options(), 3, "cuda")
        _, trees = scenario.run(x, given, knobs)
        table = torch.randint(0, 1 << 25, (rows, 4200), dtype=torch.int32, device="cuda")
        want = ref.flatten(trees, given.lengths, table, 64)
        total = int(want.total)
        out = op.flatten(trees, given.lengths, table, 64, op.allocate_flat(rows, rows * 65, "cuda"))
        for field in dataclasses.fields(out):
            a, b = getattr(out, field.name), getattr(want, field.name)
            assert torch.equal(a if field.name in ("starts", "total", "slots") else a[:total], b), field.name

    def test_a_smaller_budget_grows_a_prefix(self) -> None:
        x = scenario.logits(1, 7, NANO, "cuda").expand(65, -1, -1).contiguous()
        given, knobs = scenario.rows(65, NANO, "cuda", budget=64), op.knobs(ref.Options(), 7, "cuda")
        one = given.pick(torch.ones(65, dtype=torch.int64, device="cuda"))
        one = dataclasses.replace(one, budgets=torch.arange(65, dtype=torch.int32, device="cuda"))
        _, trees = scenario.run(x, one, knobs, scenario.table(NANO, 60, "cuda"))
        assert trees.counts.tolist() == list(range(1, 66))
        for b in range(65):
            assert torch.equal(trees.tokens[b, : b + 1], trees.tokens[64, : b + 1])
            assert torch.equal(trees.parents[b, : b + 1], trees.parents[64, : b + 1])

    def test_offsets_past_two_to_the_31(self) -> None:
        x = scenario.logits(2, 2, K26, "cuda")
        stride = (1 << 31) + 64
        store = torch.empty(stride + 2 * K26, dtype=torch.bfloat16, device="cuda")
        far = store.as_strided(x.shape, (stride, K26, 1))
        far.copy_(x)
        given, knobs = scenario.rows(2, K26, "cuda", budget=16), op.knobs(ref.Options(), 2, "cuda")
        a, b = scenario.run(x, given, knobs), scenario.run(far, given, knobs)
        same(b[0], a[0], 2)
        same(b[1], a[1], 2)

    def test_a_thousand_replays_are_bitwise_equal(self) -> None:
        rows, depth = 33, 7
        x = scenario.logits(rows, depth, NANO, "cuda")
        given, knobs, table = (
            scenario.rows(rows, NANO, "cuda"),
            op.knobs(ref.Options(), depth, "cuda"),
            scenario.table(NANO, 60, "cuda"),
        )
        _, want = scenario.run(x, given, knobs, table)
        buffers, out = op.allocate(rows, depth, NANO, "cuda"), op.allocate_trees(rows, "cuda")

        def step() -> None:
            op.candidates(x, given.temperature, given.budgets, knobs, buffers, given.seeds, given.lengths, norms=1)
            op.grow(buffers.found, given.roots, given.lengths, given.budgets, given.temperature, knobs, out, table)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                step()
        for _ in range(5):
            for t in (buffers.keys, *vars(out).values()):
                t.zero_()
            for _ in range(50):
                graph.replay()
            same(out, want, rows)
