"""Whoever comes, goes or is aborted: rows and pages add up, prompts go first come first served, nobody starves."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draftwood.engine.request import Request, SamplingParams
from draftwood.engine.scheduler import Scheduler
from draftwood.errors import RequestError
from tests.fakes import fake_plan


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine: commits random numbers of tokens of what the scheduler plans."""

    def __init__(self):
        super().__init__()
        self.plan = fake_plan(6, prefill_chunk=8, max_num_seqs=3, num_pages=30, max_model_len=200)
        self.scheduler = Scheduler(self.plan, 50)
        self.next_id = 0
        self.order = []

    @rule(length=st.integers(1, 150), most=st.integers(1, 120), budget=st.sampled_from([None, 0, 64, "auto"]))
    def add(self, length, most, budget):
        request = Request(self.next_id, (1,) * length, SamplingParams(max_tokens=most, tree_budget=budget))
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.order.append(self.next_id)
        self.next_id += 1

    @rule(data=st.data())
    def abort(self, data):
        if self.next_id:
            self.scheduler.finish(data.draw(st.integers(0, self.next_id)))

    @rule(data=st.data())
    def step(self, data):
        scheduler = self.scheduler
        plan = scheduler.next_step()
        if plan is None:
            assert scheduler.idle
            return
        sequences = scheduler.sequences(plan)
        assert len(set(plan.rows)) == len(plan.rows) <= self.plan.max_num_seqs
        chunks = [c for c in plan.chunks if c]
        assert sum(map(len, chunks)) <= self.plan.options.max_num_batched_tokens or len(chunks) == 1
        decoding = [s.row for s in scheduler.running.values() if not s.prompting]
        assert set(decoding) <= set(plan.rows), "a decoding row was left out"
        prompting = [s.request.id for s in scheduler.running.values() if s.prompting]
        chosen = [s.request.id for s in sequences if s.prompting]
        assert chosen == prompting[: len(chosen)] and (chosen or not prompting), "prompts out of turn"
        for seq, chunk, emits, budget in zip(sequences, plan.chunks, plan.emits, plan.budgets, strict=True):
            if chunk:
                assert seq.length % 8 == 0 and len(chunk) <= 8 and budget == 0
                seq.length += len(chunk)
                assert emits == (not seq.prompting)
                taken = int(emits)
            else:
                taken = min(data.draw(st.integers(1, plan.depth + 1)), seq.limit - seq.generated)
                assert budget <= seq.budget and emits
                assert seq.length + budget < len(seq.pages) * self.plan.page_size
                seq.length += taken
            seq.generated += taken
            if seq.generated == seq.limit:
                scheduler.finish(seq.request.id)

    @invariant()
    def adds_up(self):
        self.scheduler.recount()
        running, waiting = list(self.scheduler.running), [r.id for r in self.scheduler.waiting]
        assert running + waiting == sorted(running + waiting), "admitted out of turn"

    def teardown(self):
        for i in range(self.next_id):
            self.scheduler.finish(i)
        assert self.scheduler.idle and self.scheduler.pool.free_count == self.plan.num_pages


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_prompt_leaves_room_for_decoding_rows_and_blocks_later_prompts_only_while_the_step_is_full():
    plan = fake_plan(4, prefill_chunk=64, max_num_batched_tokens=100, max_model_len=400)
    scheduler = Scheduler(plan, 50)
    for i, length in enumerate((2, 200, 30, 90)):
        scheduler.add(Request(i, (1,) * length, SamplingParams(max_tokens=5)))
    first = scheduler.next_step()
    assert [len(c) for c in first.chunks] == [2, 64, 30]
