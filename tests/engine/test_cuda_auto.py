"""Automatic trees on a GPU, the host's part: what the device is told of what was measured, and how much the next step grows."""

import dataclasses

import pytest
import torch

from draftwood.engine.cuda.auto import NODES, AutoTrees
from draftwood.engine.cuda.budgets import PAUSE, Budgets
from draftwood.engine.scheduler import StepPlan
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes import ref as sizes_ref
from draftwood.kernels.sizes.ref import ONE, seconds_at
from draftwood.kernels.tree import op as tree_op
from draftwood.model.cuda.keys import Sizes

CPU = torch.device("cpu")


def automatic(rows: int = 2, context: int = 512) -> AutoTrees:
    return AutoTrees(Sizes.make(context, rows, 8, 64, 64), rows, context, CPU)


def decoding(rows: int, longest: int = 100, chunk: tuple[int, ...] = ()) -> StepPlan:
    """Rows that decode with automatic trees, and one with a chunk of a prompt, if it is given."""
    more = int(bool(chunk))
    chunks = ((),) * rows + (chunk,) * more
    budgets, auto = (64,) * rows + (0,) * more, (True,) * rows + (False,) * more
    return StepPlan((), tuple(range(rows + more)), chunks, (True,) * (rows + more), budgets, auto, 7, longest)


@pytest.mark.parametrize(
    "nodes", [(1, 2, 3, 5, 9, 17, 33, 65), (1, 2, 3, 5, 8, 8, 8, 8), (1, 2, 3, 5, 9, 17, 33, 32), (1, 2, 3, 5, 4, 4, 3, 65)]
)
def test_nodes_of_a_cost_table_always_rise_and_times_never_fall(nodes):
    """Trees may stop growing below their budgets; a division by no nodes at all would make every rate a NaN."""
    auto = automatic()
    grown = dict(zip(NODES, nodes, strict=True))
    auto.measure(lambda rows, size, context, trees: (0.01 + 1e-3 * size - 5e-3 * (size == 9), rows * grown.get(size, 1)))
    for costs in auto.costs.values():
        for cap in range(4):
            totals = costs.totals[cap].tolist()
            assert all(a < b for a, b in zip(totals, totals[1:], strict=False))
            found = [float(seconds_at(costs, cap, total)) for total in range(totals[0], totals[-1] + 20)]
            assert all(0 < a <= b * (1 + 1e-6) for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("total", [5, 6, 17, 44, 45])
def test_steps_are_timed_with_trees_that_are_cut_to_so_many_nodes_in_all(total):
    """Five trees of nine nodes, none of which is as likely as another."""
    auto, rows = automatic(8), 5
    auto.keep(8, total)
    trees, fitted = tree_op.allocate_trees(rows, "cpu"), sizes_op.allocate_fitted("cpu")
    trees.counts.fill_(9)
    trees.logprob[:, 1:9] = -0.15 * torch.arange(40).reshape(8, 5).T - 0.1
    one = torch.tensor([rows], dtype=torch.int32)
    flags = torch.ones(rows, dtype=torch.uint8)
    sizes_ref.fit(one, one, flags, trees, torch.zeros(rows), auto.calibration, auto.costs[8, False], 0, fitted)
    assert int(trees.counts.sum()) == total


def test_measuring_teaches_nothing_about_acceptance():
    auto = automatic()

    def time(rows: int, size: int, context: int, trees: int) -> tuple[float, int]:
        auto.calibration.predicted.fill_(5)
        auto.calibration.observed.fill_(7)
        auto.calibration.ratio.fill_(1.4)
        return 0.01, rows * size

    auto.measure(time)
    known = auto.calibration
    assert not known.predicted.any() and not known.observed.any() and bool((known.ratio == 1).all())


def test_costs_of_steps_follow_the_longest_row():
    auto = automatic(2, 1 << 18)
    assert auto.contexts == (256, 16384)
    auto.measure(lambda rows, nodes, context, trees: (1 + 0.001 * nodes + rows * nodes * context / 1e6, rows * nodes))
    near = auto.costs[2, False].seconds.clone()
    auto.sized(decoding(2, 200))
    assert torch.equal(auto.costs[2, False].seconds, near)
    auto.sized(decoding(2, 8192))
    for cap, size in enumerate(auto.caps):
        points = [n for n in NODES if n <= 1 + size]
        want = [1 + 0.001 * n + 2 * n * 8192 / 1e6 for n in points]
        assert auto.costs[2, False].seconds[cap, : len(points)].tolist() == pytest.approx(want, rel=1e-5)
        assert auto.costs[2, False].totals[cap, : len(points)].tolist() == [2 * n for n in points]
    assert auto.plain_seconds(2) == pytest.approx(1 + 0.001 + 2 * 8192 / 1e6)
    auto.sized(decoding(2, 100))
    assert torch.equal(auto.costs[2, False].seconds, near)


@pytest.mark.parametrize("graph", [0.0, 1.0])
def test_sizes_that_cannot_pay_are_neither_timed_nor_grown(graph):
    """A step of one row returns at most 8 tokens: what takes longer than 8 plain steps is out of the question. graph: seconds that
    a step of 64 rows takes longer in the graph of the largest trees, whatever it holds."""
    auto, timed = automatic(64), []

    def time(rows: int, size: int, context: int, trees: int) -> tuple[float, int]:
        timed.append((rows, size, trees))
        return 0.01 + 1e-4 * rows * size + graph * (rows == 64 and trees == 64), rows * size

    auto.measure(time)
    assert max(size for rows, size, _ in timed if rows == 1) == 65
    assert max(size for rows, size, _ in timed if rows == 64) == 33, "64 x 33 nodes take 13 times as long as 64"
    assert (64, 65, 64) not in timed and (64, 33, 32) in timed and ((64, 3, 64) in timed) == (graph == 0)
    for _ in range(400):
        plan = auto.sized(decoding(64))
        assert max(plan.budgets) <= (32 if graph else 64)  # small trees of a graph may pay where its large ones do not


@pytest.mark.parametrize("best", [0, 1, 2, 3])
def test_the_size_that_is_best_in_the_same_steps_is_found_and_kept(best):
    budgets, grown = Budgets((8, 16, 32, 64)), []
    for step in range(600):
        size = budgets.next(1, 3)
        grown.append(size)
        if size:
            # Texts differ by more than sizes do.
            text = (3.0, 1.2, 2.0)[step % 3]
            place = budgets.sizes.index(size)
            budgets.learn(1, 3, [text * (1 - 0.05 * abs(c - best)) for c in range(place + 1)], 2.0)
    assert grown[0] == 16 and 0 not in grown
    assert grown[60:].count(budgets.sizes[best]) >= 0.93 * len(grown[60:])
    assert best == 3 or budgets.sizes[best + 1] in grown[150:], "a larger one is looked at now and then"


@pytest.mark.parametrize(("pays", "learned"), [(2.0, 64 + 50), (1.05, 264)])
def test_few_steps_are_learned_from_once_it_is_clear_that_they_pay(pays, learned):
    budgets, count = Budgets((8,)), 0
    for _ in range(264):
        if budgets.next(1, 0) and budgets.wants(1, 0, 0):
            budgets.learn(1, 0, [pays], 2.0)
            count += 1
    assert count == learned


@pytest.mark.parametrize(("promise", "taken"), [(1.01, 8), (1.05, 32)])
def test_a_larger_size_is_taken_where_it_promises_more_than_costs_are_known(promise, taken):
    """The size between them may be worse than both."""
    budgets, grown = Budgets((8, 16, 32, 64)), []
    for _ in range(600):
        size = budgets.next(1, 3)
        grown.append(size)
        budgets.learn(1, 3, [2 * x for x in (1, 0.97, promise, 0.9)][: 1 + budgets.sizes.index(size)], 2.0)
    assert grown[300:].count(taken) >= 0.95 * 300


def test_drafting_that_does_not_pay_is_tried_as_rarely_as_it_costs_and_taken_up_when_it_pays():
    budgets = Budgets((8, 16, 32, 64))

    def tries(steps: int, pays: float, lasts: float) -> list[int]:
        """Steps of drafting among so many."""
        found = []
        for step in range(steps):
            if size := budgets.next(64, 1):
                found.append(step)
                budgets.learn(64, 1, [pays] * (1 + budgets.sizes.index(size)), lasts)
        return found

    def gaps(found: list[int]) -> set[int]:
        return {b - a - 1 for a, b in zip(found, found[1:], strict=False)}

    assert gaps(tries(1000, 0.8, 3.0)) == {60}, "a fifth of three steps is lost once in 60 steps"
    assert gaps(tries(9000, 0.4, 5.0)[40:]) == {PAUSE}
    assert len(tries(1000, 2.0, 3.0)) > 800
    assert gaps(tries(3000, 0.98, 2.0)[500:]) == {4}


def paced(auto: AutoTrees, rows: int, seconds: float, device: float, steps: int = 200) -> None:
    """Have steps of so many rows take the host and the device so long, one flying while the host works on the next."""
    now, plan = 0.0, decoding(rows)
    auto.begins(plan, now)
    for _ in range(steps):
        auto.begins(plan, now)
        waited = max(device - seconds, 0.0)
        auto.pace.waited(waited / 3)  # by the launch
        auto.pace.waited(waited * 2 / 3)  # for the results
        auto.pace.read()
        now += seconds + waited
    auto.pace.read()


@pytest.mark.parametrize("device", [0.0, 0.003, 0.02])
def test_the_hosts_time_of_a_step_is_what_it_does_not_wait(device):
    auto = automatic()
    auto.measure(lambda rows, nodes, context, trees: (0.001 * nodes, rows * nodes))
    paced(auto, 2, 0.005, device)
    assert auto.pace.seconds((2, False)) == pytest.approx(0.005)
    assert auto.pace.seconds((1, False)) == 0


def test_a_pause_of_the_caller_and_steps_of_prompts_alone_are_not_the_hosts_pace():
    auto = automatic()
    auto.measure(lambda rows, nodes, context, trees: (0.001 * nodes, rows * nodes))
    paced(auto, 2, 0.005, 0.02)
    known, prompts = auto.pace.seconds((2, False)), decoding(0, chunk=(1, 2))
    auto.begins(decoding(2), 1e6)  # nothing flew
    auto.begins(decoding(2), 1e6 + 1)  # nothing was read
    auto.pace.read()
    auto.begins(prompts, 2e6)
    auto.pace.read()
    auto.begins(decoding(2), 3e6)  # what the step of a prompt took
    assert auto.pace.seconds((2, False)) == known
    auto.pace.read()
    auto.begins(decoding(2), 4e6)
    assert known < auto.pace.seconds((2, False)) <= 1.16 * known


def test_what_prompts_beside_them_take_the_host_is_a_load_of_its_own():
    """Three steps of four with a prompt, which takes twice as long: in those larger trees are free."""
    auto = automatic(4)
    auto.measure(lambda rows, nodes, context, trees: (1e-4 * rows * nodes, rows * nodes))
    now = 0.0
    auto.begins(decoding(4), now)
    for step in range(400):
        auto.begins(decoding(4, chunk=(1, 2) if step % 4 else ()), now)
        now += 0.02 if step % 4 else 0.01
        auto.pace.read()
    auto.sized(decoding(4))
    for prompts, seconds in ((False, 0.01), (True, 0.02)):
        assert auto.pace.seconds((4, prompts)) == pytest.approx(seconds, rel=0.01)
        assert float(auto.costs[4, prompts].seconds.min()) == pytest.approx(seconds, rel=0.01)


def test_no_step_costs_less_than_it_takes_the_host():
    """Ten times as long as the device needs for the largest trees: these cost nothing, and they are grown."""
    auto = automatic(4)
    auto.measure(lambda rows, nodes, context, trees: (1e-3 + 1e-4 * rows * nodes + 1e-3 * trees / 64, rows * nodes))
    measured = auto.costs[4, False].seconds.clone()
    auto.sized(decoding(4))
    assert torch.equal(auto.costs[4, False].seconds, measured)
    paced(auto, 4, 0.3, 0.03)
    plan = auto.sized(decoding(4))
    assert auto.costs[4, False].seconds.unique().tolist() == pytest.approx([0.3])
    assert auto.costs[2, False].seconds.max() < 0.1, "of other loads nothing is known"
    for _ in range(300):
        size = auto.caps.index(max(plan.budgets))
        key = auto._sizes.key(4, max(plan.budgets), False)
        auto.learn(plan, key, [int(4 * (2 + c) * ONE) for c in range(4)], [4 * (1 + cap) for cap in auto.caps], 4 * (2 + size))
        plan = auto.sized(decoding(4))
    assert max(plan.budgets) == 64
    paced(auto, 4, 1e-6, 0.03, steps=600)
    auto.sized(decoding(4))
    assert torch.equal(auto.costs[4, False].seconds, measured)


def told(auto: AutoTrees, plan: StepPlan, tokens: float, came: int) -> None:
    """Have the host learn that every size would return `tokens` tokens a row from all its nodes."""
    rows, size = len(plan.rows), max(plan.budgets)
    key = auto._sizes.key(rows, size, any(plan.chunks))
    auto.learn(plan, key, [int(rows * tokens * ONE)] * 4, [rows * (1 + cap) for cap in auto.caps], came)


def test_tokens_that_do_not_come_end_drafting():
    """The drafter is sure of five tokens, and one comes."""
    auto = automatic(4)
    auto.measure(lambda rows, nodes, context, trees: (0.01 + 0.01 * (nodes > 1) + 1e-5 * trees, rows * nodes))
    drafted = []
    for _ in range(200):
        plan = auto.sized(decoding(4))
        drafted.append(max(plan.budgets) > 0)
        if drafted[-1]:
            told(auto, plan, 5.0, 4)
    assert all(drafted[:5]) and sum(drafted[100:]) < 15


def test_steps_with_prompts_and_with_trees_of_their_own_size_teach_nothing():
    auto = automatic(4)
    auto.measure(lambda rows, nodes, context, trees: (0.01, rows * nodes))
    first = auto.sized(decoding(2))
    assert set(first.budgets) == {16}
    for plan in (
        auto.sized(decoding(2, chunk=(1, 2, 3))),
        dataclasses.replace(first, auto=(True, False)),
        dataclasses.replace(first, budgets=(16, 9)),
    ):
        told(auto, plan, 0.1, 2)
    assert max(auto.sized(decoding(2)).budgets) == 16
    told(auto, first, 0.1, 0)
    assert max(auto.sized(decoding(2)).budgets) == 0
    assert max(auto.sized(decoding(2, chunk=(1, 2, 3))).budgets) == 0
