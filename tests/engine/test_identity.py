"""Law 1: drafter, tree, budget, batch, chunks, aborts and seeds of others change speed and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.engine.request import SamplingParams
from tests.fakes import FakeDrafter, Toy, fake_engine, fake_plan, run

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def plain(requests, **plan):
    """What plain decoding gives, each request alone."""
    out = []
    for request in requests:
        (tokens,) = run(fake_engine(None, fake_plan(0, **plan)), [request]).values()
        out.append(tokens)
    return out


@pytest.mark.parametrize("budget", [0, 1, 7, 8, 33, 64])
@pytest.mark.parametrize("kind", FakeDrafter.KINDS)
def test_greedy_text_is_the_toys_own_with_any_drafter_and_budget(kind, budget):
    toy = Toy()
    out = run(fake_engine(kind, fake_plan(budget)), [(PROMPT, SamplingParams(max_tokens=25))])
    assert list(out.values()) == [toy.greedy(PROMPT, 25)]


def test_a_good_drafter_is_accepted_whole():
    engine = fake_engine("good", fake_plan(7))
    engine.records = []
    run(engine, [(PROMPT, SamplingParams(max_tokens=41))])
    decoded = [r.rows[0] for r in engine.records[1:]]
    assert [len(r.committed) for r in decoded] == [8] * 5
    assert engine.parts.target.forwards == 6


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("noise", ["shared", "own", "none"])
def test_sampled_text_depends_on_the_seed_and_not_on_the_tree(temperature, noise):
    ask = [(PROMPT, SamplingParams(max_tokens=24, temperature=temperature, seed=seed)) for seed in (7, 8, -3)]
    expected = plain(ask)
    assert len({tuple(t) for t in expected}) == 3
    for kind, budget in (("good", 8), ("blurred", 64), ("random", 16), ("nan", 5)):
        assert list(run(fake_engine(kind, fake_plan(budget), noise=noise), ask).values()) == expected


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, 47), st.sampled_from([-100.0, 3.0]), max_size=3),
    tree_budget=st.one_of(st.none(), st.integers(0, 64)),
    stop_token_ids=st.lists(st.integers(0, 47), max_size=2).map(tuple),
)
prompts = st.lists(st.integers(0, 47), min_size=1, max_size=70)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=5),
    kind=st.sampled_from(FakeDrafter.KINDS),
    budget=st.integers(0, 64),
    block=st.integers(4, 16),
    chunk=st.sampled_from([4, 16, 64]),
    rows=st.integers(1, 5),
    window=st.sampled_from([16, 2048]),
)
def test_any_mix_of_requests_gives_what_each_gives_alone_by_plain_decoding(
    requests, kind, budget, block, chunk, rows, window
):
    plan = fake_plan(budget, block, prefill_chunk=chunk, max_num_seqs=rows, window=window)
    assert list(run(fake_engine(kind, plan, stop_ids=(11,)), requests).values()) == [
        list(run(fake_engine(None, fake_plan(0), stop_ids=(11,)), [r]).values())[0] for r in requests
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_aborts_at_any_point_disturb_nobody(data):
    abort_some(fake_engine("blurred", fake_plan(9, prefill_chunk=8, max_num_seqs=3, num_pages=40)), data)


def abort_some(engine, data):
    """Run a few requests, abort some of them at any time, and hold what the others get against plain decoding."""
    asks = data.draw(st.lists(st.tuples(prompts, params), min_size=2, max_size=6))
    doomed = data.draw(st.sets(st.integers(0, len(asks) - 1)))
    ids = [engine.add(*ask) for ask in asks]
    out = {i: [] for i in ids}
    pending = {ids[i]: data.draw(st.integers(0, 12)) for i in doomed}
    tick = 0
    while not engine.idle or pending:
        for i in [i for i, at in pending.items() if at <= tick]:
            engine.abort(i)
            del pending[i]
        for output in engine.step():
            out[output.request_id] += output.token_ids
        engine.scheduler.recount()
        tick += 1
    assert engine.scheduler.pool.free_count == engine.plan.num_pages and not engine.usage
    for i, ask in zip(ids, asks, strict=True):
        if i not in [ids[d] for d in doomed]:
            assert out[i] == plain([ask])[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 64])
def test_chunks_of_a_prompt_start_at_multiples_of_the_chunk_size(chunk):
    engine = fake_engine("good", fake_plan(8, prefill_chunk=chunk))
    engine.records = []
    first, second = list(range(1, 11)), list(range(20, 33))
    run(engine, [(first, SamplingParams(max_tokens=3)), (second, SamplingParams(max_tokens=3))])
    for record in engine.records:
        for row in record.rows:
            if row.forced:
                assert row.length % chunk == 0 and len(row.tokens) <= chunk


def test_a_repeated_token_is_penalised_on_its_own_branch_only():
    ask = [(PROMPT, SamplingParams(max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0))]
    expected = plain(ask)
    assert len(set(expected[0])) > 30, "the penalty must be felt for this test to mean anything"
    for kind in ("good", "blurred", "random"):
        assert list(run(fake_engine(kind, fake_plan(64)), ask).values()) == expected
