"""Hits, misses and preemptions change speed and nothing else: tokens, logprobs, drafts and forms are those of a run alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.engine.request import SamplingParams
from tests.engine.test_ahead import Lenient
from tests.engine.test_identity import params
from tests.fakes import FakeDrafter, Toy, fake_engine, fake_plan, run

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 9
NARROW = {"num_pages": 12, "max_model_len": 120, "prefill_chunk": 32}


def alone(ask, **plan):
    """What one request gives by plain decoding without a cache."""
    (tokens,) = run(fake_engine(None, fake_plan(0, **plan), stop_ids=(11,)), [ask]).values()
    return tokens


def cached(kind, budget, **plan):
    return fake_engine(kind, fake_plan(budget, **{"enable_prefix_caching": True, **plan}), stop_ids=(11,))


def finished(engine, asks):
    """Run the requests together; return (tokens, usage) of each."""
    out = {engine.add(*ask): ([], []) for ask in asks}
    while not engine.idle:
        for output in engine.step():
            out[output.request_id][0].extend(output.token_ids)
            out[output.request_id][1][:] = [output.usage]
    return [(tokens, usage) for tokens, (usage,) in out.values()]


@pytest.mark.parametrize("window", [16, 2048])
@pytest.mark.parametrize("kind", FakeDrafter.KINDS)
@pytest.mark.parametrize("budget", [0, 7, 64])
def test_a_hit_gives_the_tokens_and_the_accept_length_of_a_miss(kind, budget, window):
    engine = cached(kind if budget else None, budget, window=window)
    ask = (PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    (miss,), (hit,) = finished(engine, [ask]), finished(engine, [ask])
    assert miss[0] == hit[0] == Toy().greedy(PROMPT, 40)
    assert (miss[1].cached_tokens, hit[1].cached_tokens) == (0, 64)
    if kind in ("good", "flat"):  # the others guess by dice that have gone on
        assert hit[1].accept_length == miss[1].accept_length and hit[1].steps == miss[1].steps
    assert (engine.totals.prefix_queries, engine.totals.prefix_hits) == (144, 64)


def test_the_next_turn_of_a_conversation_begins_behind_the_last_answer():
    engine = cached("good", 7)
    ((answer, _),) = finished(engine, [(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))])
    turn = PROMPT + answer + [7, 7, 7]
    ((tokens, usage),) = finished(engine, [(turn, SamplingParams(max_tokens=30, ignore_eos=True))])
    assert tokens == Toy().greedy(turn, 30)
    assert usage.cached_tokens == (len(PROMPT) + 59) // 16 * 16


def test_a_request_that_never_drafts_leaves_its_context_for_those_that_do():
    engine = cached("good", 7)
    plain = SamplingParams(max_tokens=20, tree_budget=0, ignore_eos=True)
    finished(engine, [(PROMPT, plain)])
    (again,) = finished(engine, [(PROMPT, SamplingParams(max_tokens=41, ignore_eos=True))])
    assert again[1].cached_tokens == 64 and again[1].accept_length == 8


def test_aborted_requests_leave_their_full_pages():
    engine = cached("good", 7)
    new = engine.add(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.scheduler.running == {} or len(engine.scheduler.running[new].tokens) < len(PROMPT) + 20:
        engine.step()
    engine.abort(new)
    text = PROMPT + Toy().greedy(PROMPT, 20)
    ((tokens, usage),) = finished(engine, [(text, SamplingParams(max_tokens=9, ignore_eos=True))])
    assert tokens == Toy().greedy(text, 9) and usage.cached_tokens >= 80


def test_without_the_cache_nothing_is_kept_and_nothing_is_looked_for():
    engine = fake_engine("good", fake_plan(7))
    for _ in range(2):
        ((_, usage),) = finished(engine, [(PROMPT, SamplingParams(max_tokens=9))])
        assert usage.cached_tokens == 0
    assert engine.totals.prefix_queries == 0 and engine.parts.draft_kv.kept_keys.numel() == 0
    assert engine.scheduler.pool.free_count == engine.plan.num_pages


shared = st.builds(lambda n, tail: PROMPT[:n] + tail, st.integers(0, 70), st.lists(st.integers(0, 47), min_size=1, max_size=12))


@settings(max_examples=60, deadline=None)
@given(
    asks=st.lists(st.tuples(shared, params), min_size=2, max_size=7),
    kind=st.sampled_from(FakeDrafter.KINDS),
    budget=st.sampled_from([0, 7, 40]),
    pages=st.integers(11, 24),
    prefix=st.booleans(),
    ahead=st.integers(0, 1),
    rows=st.integers(1, 5),
    data=st.data(),
)
def test_arrivals_aborts_hits_and_preemptions_leave_every_request_its_own_tokens(
    asks, kind, budget, pages, prefix, ahead, rows, data
):
    plan = {"num_pages": pages, "max_model_len": 100, "max_num_seqs": rows, "prefill_chunk": 16, "window": 32}
    engine = cached(kind, budget, enable_prefix_caching=prefix, **plan)
    engine.parts.target, engine.ahead = Lenient(engine.parts.target.toy, engine.parts.positions - 1), ahead
    arrive = {i: data.draw(st.integers(0, 20)) for i in range(len(asks))}
    doomed = data.draw(st.dictionaries(st.integers(0, len(asks) - 1), st.integers(0, 30), max_size=2))
    ids, out, tick = {}, {}, 0
    while not engine.idle or len(ids) < len(asks) or any(at >= tick for at in doomed.values()):
        for i in [i for i, at in arrive.items() if at == tick]:
            ids[i] = engine.add(*asks[i])
            out[ids[i]] = []
        for i in [i for i, at in doomed.items() if at == tick and i in ids]:
            engine.abort(ids[i])
        for output in engine.step():
            out[output.request_id] += output.token_ids
        engine.scheduler.recount()
        tick += 1
    assert engine.scheduler.available == pages and not engine.usage
    for i, ask in enumerate(asks):
        if i not in doomed:
            assert out[ids[i]] == alone(ask, max_model_len=100, num_pages=24)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("budget", [0, 16, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_preemptions_change_no_token_logprob_or_count(temperature, budget, prefix):
    asks = [
        (
            PROMPT[i:][: 30 + i],
            SamplingParams(
                max_tokens=40 - i, temperature=temperature, seed=i, logprobs=3, ignore_eos=True, frequency_penalty=0.5,
                repetition_penalty=1.2, min_tokens=24, stop_token_ids=tuple(range(9)),
            ),
        )
        for i in range(5)
    ]  # fmt: skip

    def result(engine, asks):
        out = {engine.add(*ask): [[], [], [], None] for ask in asks}
        while not engine.idle:
            for o in engine.step():
                kept = out[o.request_id]
                kept[0] += o.token_ids
                kept[1] += o.logprobs
                kept[2] += o.top_logprobs
                kept[3] = (o.finish_reason, o.usage.completion_tokens, o.usage.prompt_tokens)
        return list(out.values())

    engine = cached("blurred", budget, enable_prefix_caching=prefix, **{**NARROW, "num_pages": {0: 9, 16: 12, 64: 15}[budget]})
    found = result(engine, asks)
    assert engine.scheduler.preemptions > 0
    for ask, mine in zip(asks, found, strict=True):
        assert mine == result(fake_engine(None, fake_plan(0), stop_ids=(11,)), [ask])[0]
        assert mine[3][1] == len(mine[0])


def test_a_row_that_was_preempted_drafts_as_well_as_before():
    ask = (PROMPT[:30], SamplingParams(max_tokens=66, ignore_eos=True))
    engine = cached("good", 7, **{**NARROW, "num_pages": 10})
    results = finished(engine, [ask, (PROMPT[5:40], SamplingParams(max_tokens=66, ignore_eos=True))])
    assert engine.scheduler.preemptions > 0
    for (tokens, usage), prompt in zip(results, (PROMPT[:30], PROMPT[5:40]), strict=True):
        assert tokens == Toy().greedy(prompt, 66)
        assert usage.accept_length > 6 and usage.decoded <= 65


def test_followers_share_grow_and_resume_as_rank_0_does():
    first, second = (cached("blurred", 9, **NARROW) for _ in range(2))
    launch = first.stepper.launch

    def both(plan, trace=False):
        second.stepper.launch(plan)
        return launch(plan, trace)

    first.stepper.launch = both
    asks = [(PROMPT[:n], SamplingParams(max_tokens=40, temperature=n % 2, seed=n, presence_penalty=1)) for n in range(30, 37)]
    for _ in range(2):
        finished(first, asks)
    assert first.scheduler.preemptions > 0 and first.totals.prefix_hits > 0
    for name in ("lengths", "roots", "tables"):
        assert torch.equal(getattr(first.stepper.rows, name), getattr(second.stepper.rows, name))
    kept = first.plan.num_pages * first.plan.page_size
    assert torch.equal(first.parts.kv.cache[:, :kept], second.parts.kv.cache[:, :kept])
    assert torch.equal(first.parts.draft_kv.kept_keys[:, :kept], second.parts.draft_kv.kept_keys[:, :kept])
