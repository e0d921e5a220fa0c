"""Automatic tree sizes: the best by the table, prefixes only, the same everywhere, and never worse than plain for long."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import ConfigError
from draftwood.spec.accept import accept
from draftwood.spec.policy import CONTROL, LONGEST_PAUSE, AutoSize, Calibration, CostTable, fit_sizes
from draftwood.spec.tree import Tree, chain, grow, join

GREEDY = np.zeros(1, np.float32)


def table(fixed: float, per_node: float, draft: float, rows=(1, 4), nodes=(1, 9, 65)) -> CostTable:
    """Seconds = fixed + per_node * all nodes (+ draft)."""
    drafted = [[fixed + draft + per_node * r * n for n in nodes] for r in rows]
    return CostTable.of(rows, nodes, drafted, [fixed + per_node * r for r in rows])


def trees(seed: int, rows: int, budget: int, scale: float = 3.0) -> Tree:
    logits = torch.randn(rows, 5, 30, generator=torch.Generator().manual_seed(seed)) * scale
    return grow(logits, torch.zeros(rows, dtype=torch.long), [budget] * rows, [0.0] * rows, None)


def probability(tree: Tree) -> np.ndarray:
    return Calibration().probability(tree.logprob.numpy(), np.zeros(len(tree.counts), np.float32))


def test_cost_is_linear_between_points_and_beyond_them():
    costs = table(1.0, 0.1, 0.5)
    for rows, total in itertools.product((1, 2, 4, 6), (6, 30, 400)):
        assert np.isclose(costs.seconds(rows, np.array([total]))[0], 1.5 + 0.1 * total)
        assert np.isclose(costs.plain_seconds(rows), 1.0 + 0.1 * rows)
    spike = CostTable.of((1,), (1, 2, 3), [[2.0, 1.0, 3.0]], [1.0])
    assert spike.seconds(1, np.array([1, 2, 3])).tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "bad",
    [
        ((1, 2), (1, 2), [[1.0, 1.0]], [1.0]),
        ((2, 1), (1,), [[1.0], [1.0]], [1.0, 1.0]),
        ((1,), (1,), [[0.0]], [1.0]),
        ((1,), (1,), [[float("nan")]], [1.0]),
    ],
)
def test_an_impossible_cost_table_is_refused(bad):
    with pytest.raises(ConfigError):
        CostTable.of(*bad)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), per_node=st.floats(1e-4, 1.0), rows=st.integers(1, 3))
def test_sizes_are_the_best_of_all_prefixes(seed, per_node, rows):
    """Against every combination of sizes; uncalibrated probabilities fall along pop order, so greedy merging is exact."""
    tree, costs = trees(seed, rows, 5), table(1.0, per_node, 0.2)
    p = probability(tree)
    fit = fit_sizes(tree, costs, p)
    best = max(
        (rows + sum(p[r, 1 : b + 1].sum() for r, b in enumerate(sizes)))
        / costs.seconds(rows, np.array(rows + sum(sizes)))
        for sizes in itertools.product(range(6), repeat=rows)
    )
    assert np.isclose(fit.tokens / fit.seconds, best)
    assert np.isclose(fit.tokens, rows + sum(p[r, 1 : b + 1].sum() for r, b in enumerate(fit.sizes)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), per_node=st.floats(1e-3, 0.5))
def test_sizes_are_prefixes_even_where_calibration_makes_a_later_node_likelier(seed, per_node):
    tree = trees(seed, 3, 6)
    p = np.random.default_rng(seed).random(tree.logprob.shape)
    fit = fit_sizes(tree, table(1.0, per_node, 0.2), p)
    assert np.isclose(fit.tokens, 3 + sum(p[r, 1 : b + 1].sum() for r, b in enumerate(fit.sizes)))


def test_cheap_nodes_give_whole_trees_and_dear_ones_roots():
    tree = trees(1, 2, 16)
    assert fit_sizes(tree, table(1.0, 1e-9, 0.1), probability(tree)).sizes.tolist() == [16, 16]
    assert fit_sizes(tree, table(0.001, 1.0, 0.1), probability(tree)).sizes.tolist() == [0, 0]


def test_forced_rows_stay_whole_and_cost_but_gain_nothing():
    tree = join([trees(1, 1, 8), chain([[1, 2, 3, 4]])])
    fit = fit_sizes(tree, table(1.0, 0.05, 0.1), probability(tree))
    assert fit.sizes[1] == 3 and np.isclose(fit.seconds, 1.1 + 0.05 * (5 + fit.sizes[0]))
    assert tree.cut(torch.from_numpy(fit.sizes)).counts.tolist() == [1 + fit.sizes[0], 4]


def simulate(auto: AutoSize, costs: CostTable, steps: int, accepting: float, rows: int = 2) -> tuple[float, int]:
    """(tokens per second by the table, steps that drafted); a node is accepted with `accepting` x its own odds."""
    rng = np.random.default_rng(0)
    heat, tokens, seconds, drafted = np.zeros(rows, np.float32), 0, 0.0, 0
    for step in range(steps):
        budget = auto.budget(rows)
        if budget == 0:
            tokens += rows
            seconds += costs.plain_seconds(rows)
            continue
        tree = trees(step, rows, budget, 4.0)
        tree = tree.cut(auto.fit(tree, heat))
        at, nodes = tree.verified()
        choices = torch.full((len(at),), -5)
        for m, (r, n) in enumerate(zip(at.tolist(), nodes.tolist(), strict=True)):
            draw = rng.random()
            for child in np.flatnonzero(tree.parents[r].numpy() == n):
                draw -= accepting * float(torch.exp(tree.logprob[r, child] - tree.logprob[r, n]))
                if draw < 0:
                    choices[m] = tree.tokens[r, child]
                    break
        path = accept(tree, choices, (at, nodes))
        auto.observe(tree, path, heat)
        tokens += int(path.emitted.sum())
        seconds += float(costs.seconds(rows, np.array(int(tree.counts.sum()))))
        drafted += 1
    return tokens / seconds, drafted


def test_a_useless_drafter_is_left_alone_and_costs_next_to_nothing():
    costs = table(1.0, 0.02, 0.2)
    speed, drafted = simulate(AutoSize(costs), costs, 1500, accepting=0.0)
    assert speed >= 0.97 * 2 / costs.plain_seconds(2) and drafted < 100


def test_a_good_drafter_is_used_and_beats_plain_and_fixed_sizes_are_not_much_better():
    costs = table(1.0, 0.02, 0.2)
    speed, drafted = simulate(AutoSize(costs), costs, 200, accepting=1.0)
    assert drafted == 200 - 200 // CONTROL and speed > 1.3 * 2 / costs.plain_seconds(2)


def test_where_drafting_does_not_pay_trees_are_no_slower_than_none():
    """Compute-bound: each node costs as much as a step."""
    costs = table(0.01, 1.0, 0.3)
    speed, drafted = simulate(AutoSize(costs), costs, 1500, accepting=1.0)
    assert speed >= 0.98 * 2 / costs.plain_seconds(2) and 0 < drafted < 60


def test_drafting_comes_back_when_it_pays_again():
    """A drafter that fails for a while (a foreign language, say) is tried again."""
    costs = table(1.0, 0.02, 0.2)
    auto = AutoSize(costs)
    simulate(auto, costs, 100, accepting=0.0)
    _, drafted = simulate(auto, costs, 1000, accepting=1.0)
    assert drafted > 500


def test_pauses_are_bounded_and_per_load():
    costs = table(0.01, 1.0, 0.3)
    auto = AutoSize(costs)
    simulate(auto, costs, 1000, accepting=1.0)
    assert max(load.pause for load in auto.loads.values()) == LONGEST_PAUSE
    assert auto.budget(64) > 0


def test_the_same_inputs_give_the_same_sizes():
    costs = table(1.0, 0.02, 0.2)
    one, two = AutoSize(costs), AutoSize(costs)
    assert simulate(one, costs, 60, 0.7) == simulate(two, costs, 60, 0.7)
    assert np.array_equal(one.calibration.observed, two.calibration.observed)


def test_calibration_learns_the_rate_of_acceptance_by_temperature_class():
    calibration = Calibration()
    tree = trees(3, 64, 1)
    heat = np.array([0.0, 1.0] * 32, np.float32)
    at, nodes = tree.verified()
    choices = torch.where((nodes == 0) & (at % 2 == 0), tree.tokens[at, 1], -5)  # greedy rows accept, hot ones do not
    for _ in range(20):
        calibration.observe(tree, accept(tree, choices, (at, nodes)), heat)
    p = calibration.probability(tree.logprob.numpy(), heat)[:, 1]
    raw = np.exp(tree.logprob[:, 1].numpy())
    assert (p[::2] >= raw[::2] * 0.999).all() and p[::2].mean() > 0.75 and p[1::2].mean() < 0.1
    assert np.allclose(Calibration().probability(tree.logprob.numpy(), heat)[:, 1], raw)
