"""The tree kernels' own source, run on the CPU: the reference to the bit; and the reference is the spec room's trees."""

import functools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels.tree import numbers, op, ref
from draftwood.kv.store import LatentStore
from draftwood.spec import noise, rank
from draftwood.spec import tree as spec
from draftwood.spec.bigram import Bigram
from tests.kernels.emulate import COMPILER, Emulated

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(entry: str, flag: int, device: int, special: int = 0) -> Emulated:
        return Emulated(op._source(entry, flag, special))

    monkeypatch.setattr(op, "_kernel", functools.cache(kernel))


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise, floats too."""
    if a.dtype == torch.float32:
        return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
    return torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ numbers and ranks


def test_noise_has_the_bits_of_the_spec_room() -> None:
    seeds = torch.tensor([0, 1, -1, 1 << 62, -(1 << 63), 123456789012345])
    at = torch.tensor([[0, 1], [7, 2**31], [2**32 - 1, 2**32], [5, 6], [262143, 1], [3, 4]])
    want = noise.gumbel(seeds, at, 4099)
    assert same(numbers.gumbel(seeds[:, None].expand_as(at), at, 4099), want)
    assert numbers.COLD == noise.COLD


def test_exp_is_exact_to_a_few_units() -> None:
    x = torch.cat((-torch.logspace(-8, 1.93, 4001), torch.linspace(-86, 0, 4001)))
    got, want = numbers.exp_of(x).double(), x.double().exp()
    assert float(((got - want) / want).abs().max()) < 3e-7
    one, *rest = numbers.exp_of(torch.tensor([0.0, -87.0, -torch.inf])).tolist()
    assert one == 1 and all(0 < x < 1e-37 for x in rest)


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1 << 23, 1 << 24, (3000,), generator=g).float() for _ in range(2))
    near = -(a * b) + torch.randint(-3, 4, (3000,), generator=g).float()
    for c in (near, torch.randn(3000, generator=g), torch.randn(3000, generator=g) * 1e-20, near * 2.0**-24):
        exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
        got = numbers.fma(a, b, c)
        below, above = got.nextafter(-got.abs() - 1), got.nextafter(got.abs() + 1)
        for x, *found in zip(exact, got.tolist(), below.tolist(), above.tolist(), strict=True):
            value, *others = (Fraction(f) for f in found)
            assert abs(value - x) <= min(abs(other - x) for other in others)


def test_ranks_are_the_spec_rooms() -> None:
    z = torch.randint(-3, 3, (40, 97)).float()
    z[::3, ::2] = -torch.inf
    z[::5, ::3] = -0.0
    z[7] = -torch.inf
    for k in (1, 5, 64, 97):
        ids, values = rank.top(z.numpy(), k)
        got = numbers.ranked(z, k)
        assert got[0].tolist() == ids.tolist() and got[1].tolist() == values.tolist()


# -------------------------------------------------------------------------------------------------------- candidates


def make_logits(r: int, d: int, v: int, dtype: torch.dtype, kind: str, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if kind == "ties":
        x = torch.randint(-2, 2, (r, d, v), generator=g).float()
    elif kind == "heavy":
        x = -1.8 * torch.rand((r, d, v), generator=g).clamp(min=1e-9).log()
    elif kind == "equal":
        x = torch.full((r, d, v), 1.5)
    else:
        x = torch.randn(r, d, v, generator=g) * 3
    if kind == "hostile":
        bad = torch.rand(x.shape, generator=g)
        for share, value in ((0.3, float("nan")), (0.5, -torch.inf), (0.51, torch.inf), (0.52, 3e38), (0.53, -3e38), (0.6, -0.0)):
            x[(bad < share) & (bad > share - 0.2)] = value
        x[-1, -1] = float("nan")
        x[0, 0, 30:] = -torch.inf
    return x.to(dtype)


@emulated
@pytest.mark.parametrize(
    ("v", "dtype", "kind"),
    [(8192, BF16, "normal"), (16392, torch.float32, "normal"), (8200, BF16, "ties"), (8192, BF16, "equal"), (24, BF16, "hostile"),
     (9000, torch.float32, "hostile"), (8192, BF16, "heavy")],
)  # fmt: skip
def test_candidates_are_the_references_to_the_bit(v: int, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r, d = 3, 2
    logits = make_logits(r, d, v, dtype, kind)
    heat, budgets = torch.tensor([0.0, 1.0, 0.6]), torch.tensor([4, 1, 64], dtype=torch.int32)
    seeds, lengths = torch.tensor([5, -3, 1 << 60]), torch.tensor([0, 77, 1 << 20])
    given = op.knobs(ref.Options(), d, "cpu")
    for noisy in (True, False):
        z = ref.heated(logits, heat, given.options.beta, seeds if noisy else None, lengths)
        want = ref.candidates(z, d)
        buffers = op.allocate(r + 1, d, v, "cpu")
        got = op.candidates(logits, heat, budgets, given, buffers, seeds if noisy else None, lengths)
        for name in ("ids", "z", "places", "norm"):
            assert same(getattr(got, name)[:r], getattr(want, name)), (name, noisy)
        if noisy:  # where no sum is wanted, most noise is not found
            few = op.candidates(logits, heat, budgets, given, op.allocate(r, d, v, "cpu"), seeds, lengths, norms=0)
            for name in ("ids", "z", "places"):
                assert same(getattr(few, name), getattr(want, name)), name
        if v > 2 * numbers.SEGMENT or kind != "normal" and v > numbers.SEGMENT:  # one block reads all segments
            with monkeypatch.context() as patch:
                patch.setattr(op, "slots", lambda device: 1)
                for norms in (d, 0) if noisy else (d,):
                    one = op.candidates(
                        logits, heat, budgets, given, op.allocate(r, d, v, "cpu"), seeds if noisy else None, lengths, norms=norms
                    )
                    for name in ("ids", "z", "places", "norm")[: 4 if norms else 3]:
                        assert same(getattr(one, name), getattr(want, name)), (name, noisy, norms)
        if not noisy:
            continue
        spec_noise = torch.stack([noise.gumbel(seeds, lengths[:, None] + 1 + i, v)[:, 0] for i in range(d)], 1)
        ids, scores, raw = spec._marginals(logits, [0, 1, 2], heat.tolist(), spec_noise, given.options.beta, 64)
        width = ids.shape[-1]
        assert want.ids[..., :width].tolist() == ids.tolist()
        assert torch.equal(want.z[..., :width], torch.from_numpy(raw))  # -0 is +0 here
        normed = want.z - want.norm.where(want.norm > -torch.inf, 0.0)[..., None]
        torch.testing.assert_close(normed[..., :width], torch.from_numpy(scores), rtol=1e-6, atol=4e-6)


@emulated
@pytest.mark.parametrize("beta", [(0.0, 2.5), (1e-7, 1e-3)])
@pytest.mark.parametrize(("size", "offset"), [(0.01, 0.0), (3.0, -1e5), (1e3, 50.0)])
def test_noise_that_is_skipped_changes_no_candidate(beta: tuple[float, ...], size: float, offset: float) -> None:
    r, d, v = 2, 2, 8200
    logits = make_logits(r, d, v, torch.float32, "normal") * size + offset
    logits[1, :, 5:8190] = -torch.inf  # fewer than 64 in the first segment
    heat, seeds, lengths = torch.tensor([1.0, 0.3]), torch.tensor([5, -3]), torch.tensor([7, 1 << 17])
    budgets, given = torch.ones(r, dtype=torch.int32), op.knobs(ref.Options(beta=beta), d, "cpu")
    want = ref.candidates(ref.heated(logits, heat, beta, seeds, lengths), d)
    got = op.candidates(logits, heat, budgets, given, op.allocate(r, d, v, "cpu"), seeds, lengths, norms=0)
    for name in ("ids", "z", "places"):
        assert same(getattr(got, name), getattr(want, name)), name


@emulated
def test_rows_without_budget_or_beyond_the_count_are_left_alone() -> None:
    logits = make_logits(3, 1, 8192, BF16, "normal")
    given, buffers = op.knobs(ref.Options(), 1, "cpu"), op.allocate(3, 1, 8192, "cpu")
    for t in (buffers.found.ids, buffers.found.z):
        t.fill_(7)
    logits[1:] = float("nan")
    heat, budgets = torch.zeros(3), torch.tensor([3, 0, 3], dtype=torch.int32)
    op.candidates(logits, heat, budgets, given, buffers, rows=torch.tensor([2], dtype=torch.int32))
    assert bool((buffers.found.ids[1:] == 7).all()) and bool((buffers.found.z[1:] == 7).all())
    assert same(buffers.found.ids[:1], ref.candidates(ref.heated(logits[:1], heat[:1], (1.0,)), 1).ids)


# ------------------------------------------------------------------------------------------------------------ growth

CORRECTION = torch.linspace(-0.5, 0.3, 12).view(2, 2, 3)
OPTIONS = [
    ref.Options(),
    ref.Options(caps=((64, 64),)),
    ref.Options(caps=((64, 2),), spine=True),
    ref.Options(spine=True, candidates=7, correction=CORRECTION),
    ref.Options(caps=((3, 1), (64, 5)), alpha=1.3, candidates=40, correction=CORRECTION),
]


def make_table(vocab: int, seed: int, longest: int) -> Bigram:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, vocab)
    cols = np.concatenate([np.sort(rng.choice(vocab, n, replace=False)) for n in lengths]).astype(np.int64)
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    return Bigram(ptr, cols, rng.normal(0, 2, len(cols)).astype(np.float32), rng.normal(0, 1, vocab).astype(np.float32))


def on_device(table: Bigram) -> ref.Table:
    return ref.Table(
        torch.from_numpy(table.row_ptr).int(), torch.from_numpy(table.cols).int(), torch.from_numpy(table.vals),
        torch.from_numpy(table.base),
    )  # fmt: skip


def compare(got: ref.Trees, want: ref.Trees, rows: int) -> None:
    for name in ("counts", "tokens", "parents", "depths", "positions", "logprob", "ancestors"):
        assert same(getattr(got, name)[:rows], getattr(want, name)[:rows]), name


@emulated
@pytest.mark.parametrize(("options", "kind"), [
    (OPTIONS[0], "ties"), (OPTIONS[1], "normal"), (OPTIONS[2], "ties"), (OPTIONS[3], "hostile"), (OPTIONS[4], "ties"),
    *[pytest.param(o, k, marks=pytest.mark.slow) for o in OPTIONS for k in ("normal", "hostile")],
])  # fmt: skip
@pytest.mark.parametrize("with_table", [False, True])
def test_trees_are_the_references_to_the_bit(options: ref.Options, kind: str, with_table: bool) -> None:
    budgets = torch.tensor([0, 1, 17, 64], dtype=torch.int32)
    r, v = len(budgets), 96
    for depth, seed in ((7, 0), (1, 1)) if options.caps == ref.CAP_STEPS else ((15, 2), (3, 3)):
        logits = make_logits(r, depth, v, torch.float32, kind, seed)
        heat = torch.tensor([1.0, 0.0, 0.6, 0.0])
        lengths, roots = torch.arange(r) * 1000, torch.randint(0, v, (r,), generator=torch.Generator().manual_seed(seed))
        seeds = torch.arange(r) * 77777
        table = on_device(make_table(v, seed, 60)) if with_table else None
        given, norms = op.knobs(options, depth, "cpu"), 1 if with_table else depth
        found = ref.candidates(ref.heated(logits, heat, options.beta, seeds, lengths), norms)
        want = ref.grow(found, roots, lengths, budgets, heat, options, table)
        got = op.grow(found, roots, lengths, budgets, heat, given, op.allocate_trees(r, "cpu"), table)
        compare(got, want, r)
        assert int(got.counts[0]) == 1 and (kind == "hostile" or int(got.counts[-1]) > 1)


@emulated
def test_flattened_nodes_are_the_references_and_lie_where_the_store_puts_them() -> None:
    rows, depth, v = 5, 3, 64
    heat = torch.zeros(rows)
    budgets, lengths = torch.tensor([0, 64, 3, 9, 20], dtype=torch.int32), torch.tensor([5, 63, 64, 127, 0])
    found = ref.candidates(ref.heated(make_logits(rows, depth, v, torch.float32, "normal"), heat, (1.0,)), depth)
    trees = ref.grow(found, torch.arange(rows), lengths, budgets, heat)
    table = torch.randperm(40)[: rows * 4].view(rows, 4).int()
    want = ref.flatten(trees, lengths, table, 64)
    total = int(want.total)
    scratch = LatentStore(1, 40, 64, 8, torch.float32, "cpu").scratch(table.long(), lengths, trees.counts, 65, 127)
    live = torch.arange(65) < trees.counts[:, None]
    assert torch.equal(want.places, scratch.nodes[live]) and torch.equal(want.tokens, trees.tokens[live])
    out = op.flatten(trees, lengths, table, 64, op.allocate_flat(rows, total + 2, "cpu"))
    for name in ("starts", "total", "slots"):
        assert torch.equal(getattr(out, name), getattr(want, name)), name
    for name in ("tokens", "positions", "places", "rows", "nodes", "ancestors"):
        assert torch.equal(getattr(out, name)[:total], getattr(want, name)), name
        assert not getattr(out, name)[total:].any()
    some = op.flatten(trees, lengths, table, 64, op.allocate_flat(rows, total, "cpu"), torch.tensor([2], dtype=torch.int32))
    kept = int(trees.counts[:2].sum())
    assert trees.counts.tolist()[2:] == [0, 0, 0] and some.total.tolist() == [kept] and some.starts.tolist()[2:] == [kept] * 3
    assert not some.tokens[kept:].any()


@emulated
def test_a_long_row_of_the_table_is_searched_and_an_unknown_token_changes_nothing() -> None:
    v, depth = 4000, 4
    logits = make_logits(2, depth, v, torch.float32, "normal")
    table = on_device(make_table(v, 3, 3900))
    assert int(table.row_ptr.diff().max()) > 2048 and int(table.row_ptr.diff().min()) < 2048
    small = ref.Table(table.row_ptr[:2001], table.cols, table.vals, table.base[:2000])
    lengths, roots, heat = torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.ones(2)
    budgets, given = torch.full((2,), 64, dtype=torch.int32), op.knobs(ref.Options(), depth, "cpu")
    found = ref.candidates(ref.heated(logits, heat, (1.0,)), 1)
    for some in (table, small):
        want = ref.grow(found, roots, lengths, budgets, heat, ref.Options(), some)
        compare(op.grow(found, roots, lengths, budgets, heat, given, op.allocate_trees(2, "cpu"), some), want, 2)


@pytest.mark.parametrize("kind", ["ties", "normal", "hostile"])
@pytest.mark.parametrize("options", OPTIONS)
def test_growth_from_equal_scores_is_the_spec_rooms(options: ref.Options, kind: str) -> None:
    """Ties and all: the spec room's growth is given the reference's scores, which differ from its own by the log's last bits."""
    r, depth, v = 4, 7, 96
    logits = make_logits(r, depth, v, torch.float32, kind)
    lengths, roots, heat, budgets = torch.arange(r), torch.arange(r), torch.zeros(r), torch.tensor([64, 33, 9, 16])
    found = ref.candidates(ref.heated(logits, heat, options.beta), depth)
    got = ref.grow(found, roots, lengths, budgets, heat, options)
    scores = (found.z - found.norm.where(found.norm > -torch.inf, 0.0)[..., None]).where(found.ids >= 0, -torch.inf)
    want = spec._pack(
        [spec._grow_row(spec._Marginal(found.ids[i].numpy(), scores[i].numpy()), i, int(budgets[i]), spec_options(options))
         for i in range(r)], False,
    )  # fmt: skip
    is_spec_tree(got, want, lengths, exact=True)


def spec_options(options: ref.Options) -> spec.GrowOptions:
    class Steps(spec.GrowOptions):
        def caps(self) -> tuple[tuple[int, int], ...]:
            return options.caps

    correction = None if options.correction is None else options.correction.numpy()
    most = options.caps[-1][1]
    return Steps(most, options.spine, options.beta, options.alpha, options.candidates, calibration=correction)


def is_spec_tree(got: ref.Trees, want: spec.Tree, lengths: Tensor, exact: bool) -> None:
    n = want.tokens.shape[1]
    assert torch.equal(got.counts, want.counts)
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(got, name)[:, :n], getattr(want, name)), name
    assert torch.equal(got.positions[:, :n], want.positions(lengths))
    words = want.ancestors()
    assert torch.equal(got.ancestors[:, :n, : words.shape[2]], words)
    assert not got.ancestors[:, n:].any() and not got.ancestors[..., words.shape[2] :].any()
    if exact:
        assert same(got.logprob[:, :n], want.logprob)
    else:
        torch.testing.assert_close(got.logprob[:, :n], want.logprob, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_table", [False, True])
def test_whole_trees_are_the_spec_rooms(options: ref.Options, with_table: bool) -> None:
    """From logits without ties, whose scores lie further apart than the logs' last bits."""
    r, depth, v = 6, 7, 512
    for seed in range(3):
        logits = make_logits(r, depth, v, torch.float32, "normal", seed)
        heat, budgets = torch.tensor([1.0, 0.0, 0.6, 1.0, 0.0, 2.0]), torch.tensor([64, 33, 64, 0, 16, 9])
        lengths, roots, seeds = torch.arange(r) * 100, torch.arange(r) * 3, torch.arange(r) * 12345
        shared = torch.stack([noise.gumbel(seeds, lengths[:, None] + 1 + i, v)[:, 0] for i in range(depth)], 1)
        table = make_table(v, seed, 100) if with_table else None
        found = ref.candidates(ref.heated(logits, heat, options.beta, seeds, lengths), 1 if with_table else depth)
        got = ref.grow(found, roots, lengths, budgets, heat, options, None if table is None else on_device(table))
        want = spec.grow(logits, roots, budgets, heat, shared, spec_options(options), table)
        is_spec_tree(got, want, lengths, exact=False)


def test_the_default_caps_are_the_spec_rooms() -> None:
    assert ref.Options().caps == spec.GrowOptions().caps() and ref.Options().beta == spec.GrowOptions().beta
    assert ref.Options().alpha == spec.GrowOptions().alpha and ref.Options().candidates == spec.GrowOptions().candidates
