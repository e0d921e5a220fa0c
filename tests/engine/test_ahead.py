"""A loop that launches the next step before it reads the last one gives the plain loop's tokens, and loses nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.engine.request import SamplingParams
from tests.engine.test_identity import abort_some, params, prompts
from tests.fakes import FakeDrafter, FakeTarget, Toy, fake_engine, fake_plan, run

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Lenient(FakeTarget):
    """A row that has ended runs once more, perhaps beyond its pages: its nodes then share slots that nobody owns.

    A tree may also pass the longest text that a row can have, `last` + 1 tokens, since a loop that is ahead does not know
    how much of it is left: positions beyond `last` are held there, and what such nodes give is never part of an answer.
    """

    def __init__(self, toy: Toy, last: int):
        super().__init__(toy)
        self.last = last

    def forward(self, tokens, positions, slots, ancestors, counts, verified):
        depths = [[sum((word & (1 << 64) - 1).bit_count() for word in node) - 1 for node in row] for row in ancestors.tolist()]
        free = slots.lengths[:, None] + torch.tensor(depths)
        live = torch.arange(positions.shape[1]) < counts[:, None]
        assert torch.equal(positions[live], free.clamp(max=self.last)[live])
        return super().forward(tokens, torch.where(live, free, positions), slots, ancestors, counts, verified)

    def _row(self, tokens, positions, slots, r, length, live, ancestors):
        own, sink = slots.nodes[r, :live].tolist(), slots.cache.shape[1] - 16
        if len(set(own)) < live or max(own) >= sink:
            return [0] * live
        return super()._row(tokens, positions, slots, r, length, live, ancestors)


def ahead(kind, plan, **parts):
    """An engine whose loop is a step ahead."""
    engine = fake_engine(kind, plan, **parts)
    engine.parts.target = Lenient(engine.parts.target.toy, engine.parts.positions - 1)
    engine.ahead = 1
    return engine


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=5),
    kind=st.sampled_from(FakeDrafter.KINDS),
    budget=st.integers(0, 64),
    chunk=st.sampled_from([4, 16, 64]),
    rows=st.integers(1, 5),
)
def test_the_loop_that_is_ahead_gives_the_plain_loops_tokens(requests, kind, budget, chunk, rows):
    plan = fake_plan(budget, prefill_chunk=chunk, max_num_seqs=rows)
    plain = run(fake_engine(kind, plan, stop_ids=(11,)), requests)
    assert run(ahead(kind, plan, stop_ids=(11,)), requests) == plain


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_aborts_while_steps_fly_disturb_nobody(data):
    abort_some(ahead("blurred", fake_plan(9, prefill_chunk=8, max_num_seqs=3, num_pages=40)), data)


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_no_step_is_launched_for_a_row_that_is_sure_to_have_ended(limit):
    engine = ahead(None, fake_plan(0))
    run(engine, [(PROMPT, SamplingParams(max_tokens=limit))])
    assert engine.parts.target.forwards == limit


def test_what_an_ended_row_does_once_more_is_counted_nowhere():
    toy = Toy()
    text = toy.greedy(PROMPT, 12)
    stop = text[6]
    engine = ahead(None, fake_plan(0), toy=toy, stop_ids=(stop,))
    engine.records = []
    (tokens,) = run(engine, [(PROMPT, SamplingParams(max_tokens=30))]).values()
    assert tokens == text[: text.index(stop) + 1]
    assert engine.totals.decoded == len(tokens) - 1
    assert [len(r.rows) for r in engine.records].count(0) == 1, "the step after the end has no row that anybody knows"


class Watched:
    """A pending step whose reading is counted."""

    def __init__(self, pending, reads):
        self.pending, self.reads = pending, reads

    def read(self):
        self.reads.append(self)
        return self.pending.read()


def ends_early(stop_at: int = 6):
    """An engine whose loop is a step ahead, a request that ends by a stop token, its tokens, and lists of launches and reads."""
    toy = Toy()
    text = toy.greedy(PROMPT, 12)
    engine = ahead(None, fake_plan(0), toy=toy, stop_ids=(text[stop_at],))
    launched, reads, launch = [], [], engine.stepper.launch

    def watched(plan, trace=False):
        launched.append(Watched(launch(plan, trace), reads))
        return launched[-1]

    engine.stepper.launch = watched
    return engine, text[: text.index(text[stop_at]) + 1], launched, reads


def test_the_last_token_of_a_request_does_not_wait_for_the_step_after_it():
    engine, want, launched, reads = ends_early()
    engine.add(PROMPT, SamplingParams(max_tokens=30))
    tokens = []
    while len(tokens) < len(want):
        (output,) = engine.step()
        tokens += output.token_ids
    assert tokens == want and output.finish_reason == "stop" and not engine.usage
    assert len(launched) == len(want) + 1 and len(reads) == len(want), "one flies on, and was not waited for"
    assert engine.scheduler.idle and not engine.idle
    engine.scheduler.recount()
    assert engine.step() == [] and engine.idle and reads == launched
    assert engine.step() == [] and len(launched) == len(want) + 1


def test_a_request_begins_behind_a_step_that_nobody_waits_for():
    engine, want, launched, reads = ends_early()
    for turn in range(3):
        engine.add(PROMPT, SamplingParams(max_tokens=30))
        (first,) = engine.step()
        assert list(first.token_ids) == want[:1]
        assert len(launched) - len(reads) == 1, "what follows the first token flies before it is read"
        assert len(reads) == turn * (len(want) + 1) + 1, "the step left over was read on the way"
        rest = [engine.step() for _ in want[1:]]
        assert [t for outputs in rest for o in outputs for t in o.token_ids] == want[1:] and rest[-1][0].finish_reason == "stop"
        assert not engine.idle


@settings(max_examples=25, deadline=None)
@given(requests=st.lists(st.tuples(prompts, params), min_size=1, max_size=4), more=st.lists(st.tuples(prompts, params), max_size=3))
def test_nothing_of_a_step_left_over_gets_into_later_requests(requests, more):
    """Later requests get rows and pages of those that ended, while a step of those still flies."""
    plan = fake_plan(4, prefill_chunk=16, max_num_seqs=2)
    want = [run(fake_engine("blurred", plan, stop_ids=(11,)), part) for part in (requests, more)]
    engine = ahead("blurred", plan, stop_ids=(11,))
    for part, expected in zip((requests, more), want, strict=True):
        out = {engine.add(prompt, one): [] for prompt, one in part}
        ended: set[int] = set()
        while len(ended) < len(out):
            for output in engine.step():
                out[output.request_id] += output.token_ids
                ended |= {output.request_id} if output.finish_reason else set()
        assert list(out.values()) == list(expected.values()) and engine.scheduler.available == plan.num_pages
