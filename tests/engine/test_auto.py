"""`auto` changes the size of trees and never the tokens; where trees cost more than they give, it stops drafting."""

import pytest

from draftwood.engine import probe
from draftwood.engine.probe import Probe, Timing
from draftwood.engine.request import SamplingParams
from tests.fakes import fake_engine, fake_plan, run

ASKS = [([n, 2, 3], SamplingParams(max_tokens=60, temperature=n % 2, seed=n)) for n in range(1, 6)]


def engine_with_costs(kind, seconds):
    """An engine on `auto` whose probes say what `seconds(probe)` says."""
    engine = fake_engine(kind, fake_plan("auto"))
    engine.timing.learn = lambda *load: Timing.learn(engine.timing, *load[:-1], seconds)
    return engine


def flat(p: Probe) -> float:
    return 1.0


def steep(p: Probe) -> float:
    return 1.0 if p.depth == 0 else 20.0 * p.nodes


@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("kind", ["good", "random", "nan"])
def test_tokens_are_those_of_plain_decoding(kind, seconds):
    expected = list(run(fake_engine(None, fake_plan(0)), ASKS).values())
    assert list(run(engine_with_costs(kind, seconds), ASKS).values()) == expected


def test_trees_that_cost_nothing_are_used_and_trees_that_never_pay_are_not():
    cheap, dear = engine_with_costs("good", flat), engine_with_costs("good", steep)
    run(cheap, ASKS[1:2])
    run(dear, ASKS[1:2])
    assert cheap.parts.target.forwards < 20
    assert dear.parts.drafter.proposals <= 6


def test_a_request_may_be_auto_beside_fixed_ones():
    asks = [(p, SamplingParams(max_tokens=20, tree_budget=b)) for b, (p, _) in zip(("auto", 0, 5, "auto"), ASKS, strict=False)]
    expected = list(run(fake_engine(None, fake_plan(0)), asks).values())
    assert list(run(engine_with_costs("blurred", flat), asks).values()) == expected


def test_probes_leave_no_trace_in_pages_or_windows():
    engine = fake_engine("good", fake_plan("auto"))
    target = engine.parts.target

    class Untaught:
        """The fake's own checks of the cache make no sense for a probe."""

        def forward(self, tokens, positions, slots, ancestors, counts, verified):
            slots.cache[:, slots.nodes.flatten()] = 7.0
            taps = slots.cache.new_zeros(*tokens.shape, 2)
            return target.toy.logits(verified[1]), taps

    class Guess:
        def propose(self, roots, window, block):
            return target.toy.logits(roots)[:, None].expand(-1, block - 1, -1).clone()

    engine.parts.target, engine.parts.drafter = Untaught(), Guess()
    kept = engine.plan.num_pages * engine.plan.page_size
    cache, keys = engine.parts.kv.cache.clone(), engine.parts.draft_kv.keys.clone()
    for rows, nodes, depth, sampled in ((1, 1, 0, False), (3, 9, 7, False), (8, 65, 7, True)):
        assert probe.measure(engine.parts, Probe(rows, nodes, depth, 50, sampled)) > 0
    assert bool((engine.parts.kv.cache[:, :kept] == cache[:, :kept]).all())
    assert bool((engine.parts.draft_kv.keys == keys).all())


def test_each_load_is_measured_once_and_sizes_beyond_any_repayment_are_not():
    asked = []

    def seconds(p):
        asked.append(p)
        return 1.0 if p.depth == 0 else float(p.nodes * p.rows)

    timing = Timing(max_rows=6, max_budget=64, block=8)
    assert timing.missing(3, False)
    timing.learn(3, 10, False, seconds)
    assert not timing.missing(4, False) and not timing.missing(3, False)
    assert timing.missing(5, False) and timing.missing(2, False) and timing.missing(4, True)
    assert {p.rows for p in asked} == {4} and max(p.nodes for p in asked) < 17
    costs = timing.learn(6, 10, False, seconds)
    assert costs.table.rows == (4, 6) and not costs.sampled
    assert timing.learn(6, 10, True, seconds).table.rows == (6,)


def test_a_machine_that_changes_its_speed_while_it_is_measured_gives_the_same_ratios():
    def table(speed):
        calls = []

        def seconds(p):
            calls.append(p)
            return (1.0 if p.depth == 0 else 1.5 + 0.1 * p.nodes) * speed(len(calls))

        return Timing(max_rows=1, max_budget=64, block=8).learn(1, 10, False, seconds).table

    steady = table(lambda call: 1.0)
    for speed in (lambda call: 2.0 if call > 4 else 1.0, lambda call: 1.0 if call > 2 else 3.0):
        found = table(speed)
        assert found.drafted[0] / found.plain[0] == pytest.approx(steady.drafted[0] / steady.plain[0])


def learned(plain: float, ratio: float) -> Timing:
    timing = Timing(8, 64, 8)
    timing.learn(1, 50, False, lambda p: plain * (1.0 if p.depth == 0 else ratio))
    return timing


def test_real_steps_correct_a_table_that_was_measured_wrongly():
    """Drafted steps were probed four times too slow, plain ones twice too fast: what really happens wins."""
    timing = learned(0.005, 8.0)
    told = [timing.correct(1, 17.0, True, False, 0.020) for _ in range(60)]
    told += [timing.correct(1, 1.0, False, False, 0.010) for _ in range(60)]
    table = [costs for costs in told if costs is not None][-1].table
    assert float(table.seconds(1, 17)) == pytest.approx(0.020, rel=0.1)
    assert table.plain_seconds(1) == pytest.approx(0.010, rel=0.1)


def test_a_step_between_two_sizes_corrects_both_and_a_small_change_is_not_told():
    timing = learned(0.010, 2.0)
    assert timing.correct(1, 13.0, True, False, 0.0201) is None
    told = [timing.correct(1, 13.0, True, False, 0.040) for _ in range(80)]
    table = [costs for costs in told if costs is not None][-1].table
    assert float(table.seconds(1, 13)) == pytest.approx(0.040, rel=0.1)
    assert float(table.seconds(1, 65)) >= float(table.seconds(1, 13)) > float(table.seconds(1, 5)) >= 0.0199


@pytest.mark.parametrize(("rows", "sampled"), [(3, False), (1, True), (2, False)])
def test_loads_that_were_not_measured_teach_nothing(rows, sampled):
    timing = learned(0.010, 2.0)
    assert timing.correct(rows, 9.0, True, sampled, 1.0) is None
    assert not timing.missing(1, False)


def test_drafting_that_pays_is_checked_against_a_plain_step_now_and_then():
    engine = engine_with_costs("good", flat)
    steps = []
    keep = engine.timing.correct
    engine.timing.correct = lambda rows, nodes, drafted, *rest: steps.append(drafted) or keep(rows, nodes, drafted, *rest)
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=400, seed=1))])
    assert steps.count(False) >= len(steps) // 70
    assert steps.count(True) > steps.count(False)
