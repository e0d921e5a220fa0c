"""The sources of kernels/sizes, run on the CPU, beside their reference and the policy of the CPU engine."""

import copy
import functools

import numpy as np
import pytest
import torch

from draftwood.kernels.rows import scenario
from draftwood.kernels.sizes import checks, op, ref
from draftwood.kernels.tree import op as tree_op
from draftwood.spec.policy import CostTable, fit_sizes
from draftwood.spec.tree import Tree
from tests.kernels.emulate import COMPILER, Emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_kernel", functools.cache(lambda entry, device: Emulated(op._source(entry))))


@pytest.mark.parametrize(("kind", "own"), [("flat", 3), ("steep", 1), ("mixed", 3), ("mixed", 0), ("mixed", 2)])
@pytest.mark.parametrize(("free", "places"), checks.CASES)
def test_sizes_are_the_references_and_only_automatic_rows_are_cut(free: int, places: int, kind: str, own: int) -> None:
    before, after, _, _ = checks.fit(free, places, kind, "cpu", own)
    if free == 64:
        total = (int(before.counts[:free].sum()), int(after.counts[:free].sum()))
        assert total[1] <= total[0] if kind == "flat" else total[1] < total[0]


@pytest.mark.parametrize(("free", "places"), checks.CASES)
def test_what_was_accepted_corrects_the_ratios(free: int, places: int) -> None:
    checks.learn(free, places, "cpu")


@pytest.mark.parametrize("chosen", [0, 1])
def test_sums_of_sure_nodes_are_beyond_32_bits(chosen: int) -> None:
    """128 rows of 64 nodes that are sure to be accepted: 2^31 units of gain, whether the rows may be cut or not."""
    trees, known = tree_op.allocate_trees(128, "cpu"), op.allocate("cpu")
    trees.counts.fill_(65)
    count, flags = torch.tensor([128], dtype=torch.int32), torch.full((128,), chosen, dtype=torch.uint8)
    ours = op.allocate_fitted("cpu")
    op.fit(count, count, flags, trees, torch.zeros(128), known, checks.costs("flat", "cpu"), 3, ours)
    assert int(ours.expected[3]) == 128 * 65 * ref.ONE and bool((trees.counts == 65).all())
    assert not chosen or ours.expected[:3].tolist() == [128 * (1 + cap) * ref.ONE for cap in ref.CAPS[:3]]


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_what_would_have_been_with_smaller_trees_is_what_comes_of_them(rows: int) -> None:
    """Trees are nested: those of a smaller cap are the first nodes of these."""
    known, count, flags = op.allocate("cpu"), torch.tensor([rows], dtype=torch.int32), torch.ones(rows, dtype=torch.uint8)
    said = op.allocate_fitted("cpu")
    given = (count, count, flags), (torch.zeros(rows), known, checks.costs("mixed", "cpu"))
    op.fit(*given[0], checks.grown(rows, "cpu", rows), *given[1], 3, said)
    for own, cap in enumerate(ref.CAPS):
        smaller, found = checks.grown(rows, "cpu", rows), op.allocate_fitted("cpu")
        smaller.counts.clamp_(max=1 + cap)
        op.fit(*given[0], smaller, *given[1], own, found)
        assert found.expected[own] == said.expected[own] and found.sized[own] == said.sized[own] == smaller.counts.sum()


def test_a_class_keeps_what_it_knows_below_its_memory_however_many_rows_teach_it() -> None:
    rows, known = 128, op.allocate("cpu")
    trees, path = checks.grown(rows, "cpu", 3), scenario.path(rows, 8, "cpu", 3)
    free, none = torch.tensor([rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    trees.logprob.fill_(-0.01)
    op.learn(free, trees, torch.zeros(rows), path, known)
    most = torch.maximum(known.predicted, known.observed)
    assert ref.MEMORY / 2 < float(most.max()) / ref.ONE <= ref.MEMORY
    before = copy.deepcopy(known)
    op.learn(none, trees, torch.zeros(rows), path, known)
    assert scenario.same(known, before), "a step without decoding rows teaches and forgets nothing"


@pytest.mark.parametrize(("slope", "kept"), [(0.00462, 9), (0.01575, 5)])
def test_trees_are_cut_where_that_promises_more_than_costs_are_known(slope: float, kept: int) -> None:
    """Four sure nodes and four of a hundredth: without these a step gives 1 and 5 % more tokens a second."""
    trees, found = tree_op.allocate_trees(1, "cpu"), op.allocate_fitted("cpu")
    trees.counts.fill_(9)
    trees.logprob[0, 5:] = float(np.log(0.01))
    one, totals = torch.tensor([1], dtype=torch.int32), torch.tensor([1, 9], dtype=torch.int32).repeat(len(ref.CAPS), 1)
    costs = ref.Costs(totals, 1 + slope * totals.float())
    op.fit(one, one, torch.ones(1, dtype=torch.uint8), trees, torch.zeros(1), op.allocate("cpu"), costs, 0, found)
    assert int(trees.counts[0]) == kept == int(found.sized[0])


@pytest.mark.parametrize("slope", [0.0, 0.001, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_sizes_are_as_good_as_those_of_the_cpu_engine(rows: int, slope: float) -> None:
    """Expected tokens per second of the sizes chosen in bins are within 2 % of the exact optimum's."""
    trees = checks.grown(rows, "cpu", rows)
    heat, known = torch.zeros(rows), op.allocate("cpu")
    totals = torch.tensor([rows, 2 * rows, 9 * rows, 65 * rows], dtype=torch.int32).repeat(len(ref.CAPS), 1)
    seconds = 1 + slope * totals.float() / rows
    chances = np.zeros((rows, 65))
    for r in range(rows):
        n = int(trees.counts[r])
        chances[r, 1:n] = ref.chances(trees, heat, known.ratio, r).numpy()
    counts = trees.counts.clone()
    count, found = torch.tensor([rows], dtype=torch.int32), op.allocate_fitted("cpu")
    op.fit(count, count, torch.ones(rows, dtype=torch.uint8), trees, heat, known, ref.Costs(totals, seconds), 3, found)
    table = CostTable.of([rows], [1, 2, 9, 65], [seconds[3].tolist()], [1.0])
    whole = Tree(trees.tokens, trees.parents, trees.depths, counts, torch.zeros(rows, dtype=torch.bool), trees.logprob)
    best = fit_sizes(whole, table, chances)

    def rate(sizes: np.ndarray) -> float:
        gain = rows + sum(chances[r, 1 : 1 + int(n)].sum() for r, n in enumerate(sizes))
        return gain / float(table.seconds(rows, np.array(rows + sizes.sum())))

    sizes = trees.counts.numpy() - 1
    assert rate(sizes) >= 0.98 * rate(best.sizes)
    gain = rows + sum(chances[r, 1 : 1 + int(n)].sum() for r, n in enumerate(sizes))
    assert int(found.expected[3]) / ref.ONE == pytest.approx(gain, rel=1e-3)
