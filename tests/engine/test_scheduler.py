"""Whoever comes, goes, grows, is preempted or aborted: every row reads its own text, pages add up, nobody starves."""

import dataclasses
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draftwood.engine.request import Request, SamplingParams
from draftwood.engine.scheduler import Scheduler
from draftwood.errors import RequestError
from tests.fakes import fake_plan

CHUNK, ROWS, CONTEXT = 8, 3, 200
SIZE = 16


class Device:
    """What the ranks do with plans: page tables by row, and which (request's text, position) each slot holds."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.memory: dict[int, int | None] = {}

    def launch(self, plan, sequences, accepted) -> list[int]:
        """Run a step; `accepted(most)` says how many tokens a decoding row commits. Returns that by row."""
        for start in plan.starts:
            self.tables[start.row], self.lengths[start.row] = list(start.pages), start.cached
        for growth in plan.growths:
            assert growth.place == len(self.tables[growth.row])
            self.tables[growth.row] += growth.pages
        return [self._row(plan, i, seq, accepted) for i, seq in enumerate(sequences)]

    def _row(self, plan, i, seq, accepted) -> int:
        row, chunk, budget = plan.rows[i], plan.chunks[i], plan.budgets[i]
        length = self.lengths[row]
        assert self.tables[row] == seq.pages and length <= plan.longest
        known = [self.memory[self._slot(row, p)] for p in range(min(length, len(seq.pages) * SIZE))]
        assert known == [text(seq.request, p) for p in range(len(known))], "a row read what is not its text"
        if chunk:
            assert budget == 0 and length == seq.length and len(chunk) <= self.scheduler.plan.prefill_chunk
            assert chunk == tuple(text(seq.request, p) for p in range(length, length + len(chunk)))
            count = len(chunk)
        else:
            count = accepted(min(plan.depth, budget) + 1)
        if length + budget < seq.most:  # else it has ended, which nobody knows yet
            assert length + budget < len(seq.pages) * SIZE, "a tree does not fit the row's pages"
        for p in range(length, max(length + count, length + budget + 1)):
            if p < len(seq.pages) * SIZE:
                page = seq.pages[p // SIZE]
                assert self.scheduler.pool.count(page) == 1, "a shared page was written"
                self.memory[self._slot(row, p)] = text(seq.request, p) if p < length + count else None
        self.lengths[row] += count
        return count

    def _slot(self, row, position):
        return self.tables[row][position // SIZE] * SIZE + position % SIZE


def text(request, position):
    """The token at a position: of the prompt, or of the one answer that this prompt has."""
    if position < len(request.prompt):
        return request.prompt[position]
    return (request.prompt[0] * 7 + position * position) % 50


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine, at most one step ahead: commits random numbers of tokens of what the scheduler plans."""

    @initialize(prefix=st.booleans(), pages=st.integers(13, 30), ahead=st.integers(0, 1))
    def begin(self, prefix, pages, ahead):
        self.plan = fake_plan(
            6, prefill_chunk=CHUNK, max_num_seqs=ROWS, num_pages=pages, max_model_len=CONTEXT, enable_prefix_caching=prefix
        )
        self.scheduler = Scheduler(self.plan, 50)
        self.device, self.ahead = Device(self.scheduler), ahead
        self.flights: deque = deque()
        self.requests: dict[int, Request] = {}
        self.answers: dict[int, list[int]] = {}

    @rule(
        who=st.integers(0, 2), length=st.integers(1, 150), most=st.integers(1, 120), budget=st.sampled_from([None, 0, 64, "auto"])
    )
    def add(self, who, length, most, budget):
        new = len(self.requests)
        request = Request(new, (who,) * length, SamplingParams(max_tokens=most, tree_budget=budget))
        try:
            self.scheduler.add(request)
        except RequestError as refused:
            need = self.scheduler.pool.pages_for(
                length + min(most, CONTEXT - length) + (64 if budget in (64, "auto") else budget or 0)
            )
            assert need > self.plan.num_pages and str(self.plan.num_pages) in str(refused)
            return
        self.requests[new], self.answers[new] = request, []

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            self._gone(data.draw(st.sampled_from(sorted(self.requests))))

    def _gone(self, request_id):
        self.scheduler.finish(request_id)
        self.answers.pop(request_id, None)

    @rule(data=st.data())
    def step(self, data):
        self._step(lambda most: data.draw(st.integers(1, most)))

    def _step(self, accepted):
        """As the engine does it: launch as many steps as may fly, then read the oldest."""
        while len(self.flights) <= self.ahead and self._launch(accepted):
            pass
        if self.flights:
            self._land()

    def _launch(self, accepted) -> bool:
        scheduler = self.scheduler
        plan = scheduler.next_step()
        if plan is None:
            assert self.flights or scheduler.idle
            return False
        sequences = scheduler.sequences(plan)
        assert len(set(plan.rows)) == len(plan.rows) <= ROWS
        chunks = [c for c in plan.chunks if c]
        assert sum(map(len, chunks)) <= self.plan.options.max_num_batched_tokens or len(chunks) == 1
        decoding = [s.row for s in scheduler.running.values() if not s.prompting and s.left > 0]
        assert set(decoding) <= set(plan.rows), "a decoding row was left out"
        prompting = [s.request.id for s in scheduler.running.values() if s.prompting]
        chosen = [s.request.id for s in sequences if s.prompting]
        assert chosen == prompting[: len(chosen)] and (chosen or not prompting), "prompts out of turn"
        for start in plan.starts:
            (seq,) = [s for s in scheduler.running.values() if s.row == start.row]
            assert start.cached < seq.forced and start.cached % SIZE == 0
            assert list(start.generated) == self.answers[seq.request.id]
        counts = self.device.launch(plan, sequences, accepted)
        scheduler.launched(plan, sequences)
        self.flights.append((plan, sequences, counts))
        return True

    def _land(self):
        plan, sequences, counts = self.flights.popleft()
        self.scheduler.landed(plan, sequences)
        for seq, chunk, emits, count in zip(sequences, plan.chunks, plan.emits, counts, strict=True):
            if not self.scheduler.runs(seq) or not emits:
                continue
            first = len(seq.tokens)
            new = [text(seq.request, p) for p in range(first, first + (1 if chunk else count))][: seq.most - len(seq.tokens)]
            self.scheduler.commit(seq, 0 if chunk else count, new)
            self.answers[seq.request.id] += new
            if len(seq.tokens) == seq.most:
                self.scheduler.finish(seq.request.id)

    @invariant()
    def adds_up(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.recount()
        running, waiting = list(self.scheduler.running), [w.request.id for w in self.scheduler.waiting]
        assert running + waiting == sorted(running + waiting), "admitted out of turn"
        assert self.scheduler.prefix is not None or not any(seq.cached for seq in self.scheduler.running.values())

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20000):  # everybody ends, the oldest always moving
            if self.scheduler.idle and not self.flights:
                break
            self._step(lambda most: 1)
        assert self.scheduler.idle and self.scheduler.available == self.plan.num_pages
        for i, answer in self.answers.items():
            request = self.requests[i]
            limit = min(request.params.max_tokens, CONTEXT - len(request.prompt))
            assert answer == [text(request, len(request.prompt) + n) for n in range(limit)]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_long_prompt_leaves_room_for_decoding_rows_and_blocks_later_prompts_only_while_the_step_is_full():
    plan = fake_plan(4, prefill_chunk=64, max_num_batched_tokens=100, max_model_len=400)
    scheduler = Scheduler(plan, 50)
    for i, length in enumerate((2, 200, 30, 90)):
        scheduler.add(Request(i, (1,) * length, SamplingParams(max_tokens=5)))
    first = scheduler.next_step()
    assert [len(c) for c in first.chunks] == [2, 64, 30]


def played(scheduler, most=20000):
    """Run everything to its end, a token a step; return how many rows ran in each step."""
    device, widths = Device(scheduler), []
    while not scheduler.idle:
        plan = scheduler.next_step()
        sequences = scheduler.sequences(plan)
        device.launch(plan, sequences, lambda most: 1)
        scheduler.launched(plan, sequences)
        scheduler.landed(plan, sequences)
        for seq, chunk, emits in zip(sequences, plan.chunks, plan.emits, strict=True):
            if emits:
                scheduler.commit(seq, 0 if chunk else 1, [text(seq.request, len(seq.tokens))])
                if len(seq.tokens) == seq.most:
                    scheduler.finish(seq.request.id)
        widths.append(len(plan.rows))
        assert len(widths) < most
    return widths


@pytest.mark.parametrize("prefix", [False, True])
def test_admission_does_not_wait_for_pages_that_an_answer_may_never_need(prefix):
    plan = fake_plan(0, num_pages=12, max_num_seqs=8, max_model_len=190, enable_prefix_caching=prefix)
    scheduler = Scheduler(plan, 50)
    for i in range(8):
        scheduler.add(Request(i, (i,) * 10, SamplingParams(max_tokens=180 if i == 0 else 20)))
    widths = played(scheduler)
    assert max(widths) >= 5
    assert scheduler.available == 12


def test_a_preempted_request_finds_its_full_pages_again():
    plan = fake_plan(0, num_pages=13, max_num_seqs=2, max_model_len=200, prefill_chunk=64, enable_prefix_caching=True)
    scheduler = Scheduler(plan, 50)
    for i in range(2):
        scheduler.add(Request(i, (i,) * 60, SamplingParams(max_tokens=100)))
    starts = []
    admit = scheduler._admit
    scheduler._admit = lambda: [starts.append(s) or s for s in admit()]
    played(scheduler)
    assert scheduler.preemptions == 1 and len(starts) == 3
    again = starts[-1]
    assert again.generated and again.cached >= 16 and again.cached == len(again.pages[: again.cached // 16]) * 16


def test_rows_of_the_same_beginning_share_pages_while_the_first_still_runs():
    plan = fake_plan(0, num_pages=20, max_num_seqs=2, prefill_chunk=64, enable_prefix_caching=True)
    scheduler = Scheduler(plan, 50)
    scheduler.add(Request(0, (3,) * 50, SamplingParams(max_tokens=30)))
    first = scheduler.next_step()
    scheduler.launched(first, scheduler.sequences(first))
    scheduler.add(Request(1, (3,) * 50, SamplingParams(max_tokens=30)))
    second = scheduler.next_step()
    (start,) = second.starts
    assert start.cached == 48 and start.pages[:3] == first.starts[0].pages[:3]
    assert second.chunks == ((), (3, 3))
    assert all(scheduler.pool.count(page) == 3 for page in start.pages[:3])


class Lookups:
    """A scheduler of few pages whose look-ups of texts are noted: (tokens, pages found)."""

    def __init__(self):
        plan = fake_plan(0, num_pages=20, max_num_seqs=3, max_model_len=300, prefill_chunk=64, enable_prefix_caching=True)
        self.scheduler, self.seen = Scheduler(plan, 50), []
        self._enter, self.scheduler.prefix.enter = self.scheduler.prefix.enter, self.enter

    def enter(self, tokens, most):
        node, pages = self._enter(tokens, most)
        self.seen.append((len(tokens), len(pages)))
        return node, pages

    def add(self, new, token, length, most):
        self.scheduler.add(Request(new, (token,) * length, SamplingParams(max_tokens=most)))

    def step(self, token):
        """Run a step in which every row's answer grows by `token`."""
        plan = self.scheduler.next_step()
        sequences = self.scheduler.sequences(plan)
        self.scheduler.launched(plan, sequences)
        self.scheduler.landed(plan, sequences)
        for seq, chunk, emits in zip(sequences, plan.chunks, plan.emits, strict=True):
            self.scheduler.commit(seq, 0 if chunk else 1, [token] if emits else [])


def test_a_text_that_waits_is_looked_up_again_only_when_pages_have_come_free():
    look = Lookups()
    look.add(0, 7, 32, 260)
    look.add(1, 5, 32, 260)
    look.step(9)
    look.add(2, 5, 290, 5)
    for _ in range(40):
        look.step(9)
    assert look.seen == [(32, 0), (32, 0), (290, 2)], "others grew, into pages of other texts"
    look.scheduler.finish(0)
    look.step(9)
    assert look.seen[3:] == [(290, 2)] and set(look.scheduler.running) == {1}, "not enough of them"
    look.scheduler.finish(1)
    look.step(9)
    assert look.seen[4:] == [(290, 2)] and set(look.scheduler.running) == {2}


def test_a_text_that_waits_is_looked_up_again_when_its_next_page_is_there():
    look = Lookups()
    look.add(0, 5, 32, 260)
    look.add(1, 7, 32, 260)
    look.step(5)
    look.add(2, 5, 290, 5)
    for _ in range(66):
        look.step(5)
    assert look.seen[2:] == [(290, pages) for pages in range(2, 7)] and 2 not in look.scheduler.running


def known_tokens(scheduler):
    """Run everything to its end; return how many known tokens went through the target."""
    computed, launched = [], scheduler.launched
    scheduler.launched = lambda plan, seqs: computed.append(sum(map(len, plan.chunks))) or launched(plan, seqs)
    played(scheduler)
    return sum(computed)


def test_many_that_begin_alike_and_come_at_once_compute_their_beginning_once():
    plan = fake_plan(0, num_pages=200, max_num_seqs=6, max_model_len=300, prefill_chunk=64, enable_prefix_caching=True)
    plan = dataclasses.replace(plan, options=dataclasses.replace(plan.options, max_num_batched_tokens=64))
    scheduler = Scheduler(plan, 50)
    for i in range(6):
        scheduler.add(Request(i, (5,) * 256 + (i,), SamplingParams(max_tokens=2)))
    assert known_tokens(scheduler) < 256 + 6 * 70


def test_the_last_known_token_is_always_computed():
    plan = fake_plan(0, num_pages=20, enable_prefix_caching=True)
    for length in (15, 16, 17, 32, 33, 48):
        scheduler = Scheduler(plan, 50)
        scheduler.add(Request(0, (1,) * 64, SamplingParams(max_tokens=1)))
        played(scheduler)
        scheduler.add(Request(1, (1,) * length, SamplingParams(max_tokens=1)))
        step = scheduler.next_step()
        assert step.starts[0].cached == (length - 1) // 16 * 16
        assert sum(map(len, step.chunks)) == length - step.starts[0].cached > 0
