"""An answer ends exactly where it must: at its stop token, its limit or the context, wherever in an accepted run."""

import math

import pytest

from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from tests.fakes import Toy, fake_engine, fake_plan

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def first_places(tokens):
    """Places whose token did not occur before."""
    return [i for i, t in enumerate(tokens) if t not in tokens[:i]]


def ask(engine, **params):
    """Run one request; return (tokens, reason, usage), checking that only the last output has a reason."""
    engine.add(PROMPT, SamplingParams(**params))
    tokens, reasons, usage = [], [], None
    while not engine.idle:
        for output in engine.step():
            tokens += output.token_ids
            reasons.append(output.finish_reason)
            usage = output.usage
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert usage.completion_tokens == len(tokens)
    assert engine.scheduler.pool.free_count == engine.plan.num_pages
    return tokens, reasons[-1], usage


@pytest.mark.parametrize("how", ["model", "request"])
@pytest.mark.parametrize("kind", ["good", "random"])
def test_a_stop_token_at_each_offset_of_an_accepted_run_wins_exactly_within_the_limit(kind, how):
    text = Toy().greedy(PROMPT, 17)
    for place in first_places(text):
        for limit in (place, place + 1, place + 2):
            if limit == 0:
                continue
            stops = {"stop_ids": (text[place],)} if how == "model" else {}
            mine = {"stop_token_ids": (text[place],)} if how == "request" else {}
            engine = fake_engine(kind, fake_plan(7), **stops)
            tokens, reason, _ = ask(engine, max_tokens=limit, logprobs=0, **mine)
            assert tokens == text[: min(limit, place + 1)]
            assert reason == ("stop" if place < limit else "length")


def test_ignore_eos_goes_on_after_the_models_stops_but_not_after_the_requests_own():
    text = Toy().greedy(PROMPT, 20)
    engine = fake_engine("good", fake_plan(7), stop_ids=(text[4],))
    assert ask(engine, max_tokens=20, ignore_eos=True)[0] == text
    tokens, reason, _ = ask(engine, max_tokens=20, ignore_eos=True, stop_token_ids=[text[9]])
    assert (tokens, reason) == (text[: text.index(text[9]) + 1], "stop")


def greedy_held(stops, least: int, most: int) -> list[int]:
    """Greedy tokens one by one; `stops` cannot be chosen before `least` tokens and end the answer after."""
    toy, tokens = Toy(), []
    state = toy.state(PROMPT)
    while len(tokens) < most and not (tokens and tokens[-1] in stops):
        logits = toy.logits(state).clone()
        if len(tokens) < least:
            logits[list(stops)] = -math.inf
        tokens.append(int(logits.argmax()))
        state = toy.extend(state, tokens[-1])
    return tokens


@pytest.mark.parametrize("kind", ["good", "random", None])
@pytest.mark.parametrize("least", [0, 1, 4, 5, 6, 12, 30])
def test_no_answer_ends_before_min_tokens_whatever_the_tree(kind, least):
    text = Toy().greedy(PROMPT, 30)
    stops = {text[0], text[4], text[11]}
    expected = greedy_held(stops, least, 30)
    for how in ({"stop_ids": tuple(stops)}, {}):
        engine = fake_engine(kind, fake_plan(7), **how)
        mine = {} if how else {"stop_token_ids": tuple(stops)}
        for _ in range(2):
            tokens, reason, _ = ask(engine, max_tokens=30, min_tokens=least, **mine)
            assert tokens == expected and len(tokens) >= least
            assert reason == ("stop" if tokens[-1] in stops else "length")


@pytest.mark.parametrize("limit", range(1, 19))
def test_max_tokens_is_exact(limit):
    tokens, reason, usage = ask(fake_engine("good", fake_plan(7)), max_tokens=limit)
    assert (tokens, reason) == (Toy().greedy(PROMPT, limit), "length")
    assert usage.decoded == limit - 1 and usage.prompt_steps == 1
    assert usage.steps == -(-(limit - 1) // 8)


@pytest.mark.parametrize("asked", [None, 500])
def test_the_context_is_a_limit_and_nothing_is_drafted_beyond_it(asked):
    engine = fake_engine("good", fake_plan(64, max_model_len=30))
    engine.records = []
    tokens, reason, _ = ask(engine, max_tokens=asked)
    assert (tokens, reason) == (Toy().greedy(PROMPT, 22), "length")
    for record in engine.records:
        for row in record.rows:
            assert row.length + max(row.depths) < 30


def test_a_last_token_drafts_nothing():
    engine = fake_engine("good", fake_plan(7))
    ask(engine, max_tokens=1)
    assert engine.parts.drafter.proposals == 0
    ask(engine, max_tokens=10)
    assert engine.parts.drafter.proposals == 1, "one step of 8, and the last token plain"


def test_a_request_that_never_drafts_costs_the_drafter_nothing():
    engine = fake_engine("good", fake_plan(7))
    ask(engine, max_tokens=10, tree_budget=0)
    assert engine.parts.drafter.proposals == 0 and engine.parts.drafter.observed == 0


@pytest.mark.parametrize("prompt", [[], list(range(40)) * 20, [3, 48], [-1]])
def test_a_prompt_that_cannot_be_served_is_refused_and_disturbs_nobody(prompt):
    engine = fake_engine("good", fake_plan(7))
    engine.add(PROMPT, SamplingParams(max_tokens=9))
    with pytest.raises(RequestError) as error:
        engine.add(prompt, SamplingParams())
    assert error.value.param == "prompt" and "\n" not in str(error.value)
    tokens = []
    while not engine.idle:
        tokens += [t for output in engine.step() for t in output.token_ids]
    assert tokens == Toy().greedy(PROMPT, 9)


def test_what_the_cache_can_never_hold_is_refused_at_once():
    engine = fake_engine("good", fake_plan(8, num_pages=4))
    with pytest.raises(RequestError, match="4; lower max_tokens"):
        engine.add(PROMPT, SamplingParams(max_tokens=60))
    engine.add(PROMPT, SamplingParams(max_tokens=48))


def test_a_tree_budget_above_the_engines_is_refused():
    engine = fake_engine("good", fake_plan(8, max_budget=8))
    with pytest.raises(RequestError, match="start with --tree-budget 9"):
        engine.add(PROMPT, SamplingParams(tree_budget=9))
