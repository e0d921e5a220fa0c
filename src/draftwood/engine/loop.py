"""The engine: requests in, tokens out. Rank 0 decides each step and tells the others; every rank runs it.

A step is planned, broadcast, launched and read. Reading cuts each row's tokens at its stop token or its limit; what a
finished row committed beyond that is never seen. Where the stepper allows it, the next step is launched before the last one
is read: a row that turns out to have ended runs once more, and nobody sees what came of that, or waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from draftwood.config import Plan
from draftwood.engine.probe import Costs, Probe, Timing, measure
from draftwood.engine.request import Output, Request, SamplingParams, Usage
from draftwood.engine.rows import Rows
from draftwood.engine.scheduler import Scheduler, Sequence, StepPlan
from draftwood.engine.step import Common, Parts, StepResult
from draftwood.engine.stepper import HostStepper, Pending, Stepper
from draftwood.engine.totals import Totals
from draftwood.errors import DeviceLost, RequestError
from draftwood.spec.noise import COLD
from draftwood.spec.policy import AutoSize


@dataclass(frozen=True)
class Trace:
    """One row of one step, for drawing trees and for measuring. Lists are by node or by accepted place."""

    request_id: int
    length: int
    """Committed tokens before the step: the root's position."""
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    logprob: list[float]
    """Cumulative log-probability that the drafter gave each node."""
    path: list[int]
    """Accepted nodes, the root first."""
    committed: list[int]
    """Tokens the step returned, the final choice last, before any stop or limit."""
    gaps: list[float]
    """Lead of each committed token over the next best, in logits."""
    forced: bool
    """True for a prompt chunk."""
    prints: list[int] = field(default_factory=list)
    """Of the logits behind each committed token, where a GPU was asked for them."""


@dataclass(frozen=True)
class StepRecord:
    """One step as a whole."""

    seconds: dict[str, float]
    rows: list[Trace]


@dataclass(frozen=True)
class _Flight:
    """A step that was launched and not read yet."""

    plan: StepPlan
    sequences: list[Sequence]
    bases: list[int]
    """Of rows with a prompt chunk: committed tokens before it."""
    pending: Pending
    began: float
    sampled: bool


@dataclass(frozen=True)
class Rest:
    """The order to do nothing and to wait for the next one."""


class Engine:
    """Runs requests to their ends. One thread; `step` does everything."""

    def __init__(self, parts: Common, plan: Plan, stop_ids: Iterable[int], stepper: Stepper | None = None) -> None:
        """`parts` of a CPU bring their own stepper; others come with one."""
        self.parts = parts
        self.plan = plan
        self.stop_ids = frozenset(stop_ids)
        self.scheduler = Scheduler(plan, parts.vocab)
        self.stepper = self._host_stepper() if stepper is None else stepper
        self.ahead = self.stepper.ahead
        """Steps launched before the oldest is read. 0 is the plain loop, with the same tokens."""
        self._flights: deque[_Flight] = deque()
        self.timing = Timing(plan.max_num_seqs, plan.max_budget, plan.block)
        self.usage: dict[int, Usage] = {}
        self.totals = Totals()
        self.records: list[StepRecord] | None = None
        """Set to a list to collect a record of each step."""
        self._next_id = 0

    def _host_stepper(self) -> HostStepper:
        parts, width = self._host, self.scheduler.table_width
        rows = Rows(
            self.plan.max_num_seqs, width, parts.kv.sink, parts.vocab, parts.device, self.stop_ids, parts.grammars,
            echo=parts.bigram is not None,
        )  # fmt: skip
        return HostStepper(parts, rows)

    @property
    def _host(self) -> Parts:
        """The parts of a CPU's engine, where sizes of trees are chosen by the host."""
        assert isinstance(self.parts, Parts)
        return self.parts

    @property
    def idle(self) -> bool:
        """True when there is nothing to do: no request, and no step that flies. One whose rows have all ended may still fly when
        the last output has been returned; the next `step` reads it."""
        return self.scheduler.idle and not self._flights

    def check(self, prompt: Iterable[int], params: SamplingParams) -> None:
        """Raise RequestError for what `add` would refuse. Changes nothing, so any thread may ask."""
        request = Request(-1, tuple(prompt), params)
        self.scheduler.check(request)
        self.stepper.refuse(request.params)
        self._formed(request)

    def add(self, prompt: Iterable[int], params: SamplingParams) -> int:
        """Queue a prompt and return the request's id. Raises RequestError when it cannot be served."""
        self.stepper.refuse(params)
        request = self._formed(Request(self._next_id, tuple(prompt), params.seeded()))
        self.scheduler.add(request)
        self._next_id += 1
        self.usage[request.id] = Usage(prompt_tokens=len(request.prompt))
        return request.id

    def _formed(self, request: Request) -> Request:
        """Return a request with its grammar as the prompt's end needs it. Raises RequestError where it cannot be used."""
        grammar = request.params.grammar
        if grammar is None:
            return request
        if self.parts.grammars is None:
            raise RequestError(f"{grammar.param} needs a tokenizer, and this model has none", grammar.param)
        checked = self.parts.grammars.check(grammar, request.prompt)
        return dataclasses.replace(request, params=dataclasses.replace(request.params, grammar=checked))

    def abort(self, request_id: int) -> Usage | None:
        """Forget a request, whatever it is doing; return what it has cost, None when it is not here."""
        self.scheduler.finish(request_id)
        return self.usage.pop(request_id, None)

    def step(self) -> list[Output]:
        """Launch as many steps as may fly, read the oldest that somebody waits for and return what it added to each request;
        nothing when there was nothing to run. Steps whose rows have all ended since are read on the way."""
        while True:
            while len(self._flights) <= self._reach and (flight := self._launch()) is not None:
                self._flights.append(flight)
            if not self._flights:
                return []
            flight = self._flights.popleft()
            awaited = any(self.scheduler.runs(seq) for seq in flight.sequences)
            outputs = self._read(flight)
            if awaited:
                return outputs

    @property
    def _reach(self) -> int:
        """How many steps may fly: grammars have to see what each step commits before the next."""
        formed = any(seq.request.params.grammar is not None for seq in self.scheduler.running.values())
        return 0 if formed else self.ahead

    def _launch(self) -> _Flight | None:
        """Plan a step and launch it; None when nothing can run before a flying step is read."""
        plan = self.scheduler.next_step()
        if plan is None:
            return None
        sequences = self.scheduler.sequences(plan)
        sampled = any(seq.request.params.temperature > COLD for seq in sequences)
        if any(plan.auto) and isinstance(self.parts, Parts):
            plan = self._sized(plan, sampled)
        began, bases = time.monotonic(), [seq.length for seq in sequences]
        pending: Pending = self._obey(self._tell(plan))
        self.scheduler.launched(plan, sequences)
        return _Flight(plan, sequences, bases, pending, began, sampled)

    def _correct(self, plan: StepPlan, result: StepResult, sampled: bool) -> None:
        """Let the cost table learn from what a step without prompts took, and tell all ranks when it moved."""
        nodes, seconds = float(result.tree.counts.double().mean()), sum(result.seconds.values())
        costs = self.timing.correct(len(plan.rows), nodes, any(plan.budgets), sampled, seconds)
        if costs is not None:
            self._obey(self._tell(costs))

    def _sized(self, plan: StepPlan, sampled: bool) -> StepPlan:
        """Set how much the rows on `auto` draft in this step; 0 where trees do not pay at this load."""
        rows = len(plan.rows)
        if self.timing.missing(rows, sampled):
            self._obey(self._tell(self.timing.learn(rows, plan.longest, sampled, lambda p: self._obey(self._tell(p)))))
        assert self._host.auto is not None
        self._host.auto.costs = self._host.costs[sampled]
        most = self._host.auto.budget(rows)
        budgets = tuple(min(b, most) if auto else b for b, auto in zip(plan.budgets, plan.auto, strict=True))
        auto = tuple(auto and most > 0 for auto in plan.auto)
        return dataclasses.replace(plan, budgets=budgets, auto=auto, depth=plan.depth if any(budgets) else 0)

    def _tell(self, order: Any) -> Any:
        return self.parts.comm.broadcast(order)

    def rest(self) -> None:
        """Tell the other ranks, when there is nothing to do, that rank 0 lives: they wait for an order only so long."""
        self._tell(Rest())

    def _obey(self, order: StepPlan | Probe | Costs | Rest) -> Any:
        """Do what rank 0 has told; the same on every rank."""
        if isinstance(order, StepPlan):
            return self.stepper.launch(order, trace=self.records is not None)
        if isinstance(order, Probe):
            return measure(self._host, order)
        if isinstance(order, Rest):
            return None
        self._host.costs[order.sampled] = order.table
        if self._host.auto is None:
            self._host.auto = AutoSize(order.table, self.plan.max_budget)
        return None

    def follow(self) -> None:
        """On ranks above 0: run every step that rank 0 decides, until it closes."""
        while True:
            order = self._tell(None)
            if order is None:
                return
            self._obey(order)

    def close(self) -> None:
        """End the followers. The engine is of no use afterwards."""
        if self.parts.comm.rank == 0:
            with contextlib.suppress(DeviceLost):  # who is gone needs no farewell; the first error is the better one
                self._tell(None)
        self.parts.comm.close()
        if self.parts.grammars is not None:
            self.parts.grammars.close()

    def _read(self, flight: _Flight) -> list[Output]:
        """Wait for a step, turn its tensors into outputs and end what is finished."""
        plan, result = flight.plan, flight.pending.read()
        self.scheduler.landed(plan, flight.sequences)
        if any(plan.auto) and not any(plan.chunks) and isinstance(self.parts, Parts):
            self._correct(plan, result, flight.sampled)
        if self.records is not None:
            self.records.append(_record(flight, result, self.scheduler))
        now, read, outputs = time.monotonic(), _Read.of(result), []
        self.totals.step(result.seconds)
        for place, seq in enumerate(flight.sequences):
            if not self.scheduler.runs(seq):
                continue
            forced = bool(plan.chunks[place])
            if forced:
                self.totals.prompt(read.counts[place])
            else:
                self.totals.row(read.nodes[place] - 1, read.counts[place] - 1)
            usage = self.usage[seq.request.id]
            if not usage.started:
                usage.started, usage.cached_tokens = flight.began, seq.cached
                if self.scheduler.prefix is not None:
                    self.totals.looked_up(len(seq.request.prompt), seq.cached)
            usage.ended = now
            usage.prompt_steps += forced
            if not forced:
                for stage, seconds in result.seconds.items():
                    usage.stage_seconds[stage] += seconds
            if plan.emits[place]:
                outputs.append(self._emit(place, seq, usage, forced, read))
        return outputs

    def _emit(self, place: int, seq: Sequence, usage: Usage, forced: bool, read: _Read) -> Output:
        """Take what a row returned, up to its end; let go of the request when that is reached."""
        new, wants = read.tokens[place][: read.emitted[place]], seq.request.params.logprobs
        taken, reason = self._cut(seq, new)
        self.scheduler.commit(seq, 0 if forced else read.counts[place], new[:taken])
        usage.completion_tokens += taken
        if not forced:
            usage.steps += 1
            usage.decoded += taken
            usage.nodes += read.nodes[place] - 1
        if reason is not None:
            self.scheduler.finish(seq.request.id)
            del self.usage[seq.request.id]
        return Output(
            request_id=seq.request.id,
            token_ids=tuple(new[:taken]),
            logprobs=None if wants is None else tuple(read.logprobs[place, :taken].tolist()),
            finish_reason=reason,
            usage=usage,
            top_logprobs=read.top_of(place, taken, wants) if wants else None,
        )

    def _cut(self, seq: Sequence, tokens: list[int]) -> tuple[int, str | None]:
        """Return how many of the step's tokens belong to the answer, the stop token included, and why it ends there.

        The first stop token within the limit ends it; a stop token that the limit cuts off was never generated.
        """
        params, left = seq.request.params, seq.most - len(seq.tokens)
        room = min(len(tokens), left)
        if params.stop_token_ids or not params.ignore_eos and not self.stop_ids.isdisjoint(tokens):
            for place, token in enumerate(tokens[:room]):
                if token in params.stop_token_ids or token in self.stop_ids and not params.ignore_eos:
                    return place + 1, "stop"
        return room, "length" if room == left else None


@dataclass(frozen=True)
class _Read:
    """A step's result on the host, by row. What few rows want is left in tensors."""

    counts: list[int]
    emitted: list[int]
    tokens: list[list[int]]
    logprobs: Tensor
    nodes: list[int]
    top: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(result: StepResult) -> _Read:
        path = result.path
        emitted: list[int] = path.emitted.tolist()
        return _Read(
            counts=path.counts.tolist(),
            emitted=emitted,
            tokens=path.tokens[:, : max(emitted, default=0)].tolist(),
            logprobs=path.logprobs,
            nodes=result.tree.counts.tolist(),
            top=result.top,
        )

    def top_of(self, place: int, taken: int, most: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The `most` likeliest tokens and their log-probabilities at each of the first `taken` tokens of a row."""
        assert self.top is not None
        ids, values = (part[place, :taken, :most].tolist() for part in self.top)
        return tuple(tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True))


def _record(flight: _Flight, result: StepResult, scheduler: Scheduler) -> StepRecord:
    plan, tree, path = flight.plan, result.tree, result.path
    rows = []
    for place, seq in enumerate(flight.sequences):
        if not scheduler.runs(seq):
            continue
        live, accepted, emitted = int(tree.counts[place]), int(path.counts[place]), int(path.emitted[place])
        shown = emitted if plan.emits[place] else 0
        rows.append(
            Trace(
                request_id=seq.request.id,
                length=flight.bases[place] if plan.chunks[place] else seq.length,
                tokens=tree.tokens[place, :live].tolist(),
                parents=tree.parents[place, :live].tolist(),
                depths=tree.depths[place, :live].tolist(),
                logprob=tree.logprob[place, :live].tolist(),
                path=path.nodes[place, :accepted].tolist(),
                committed=path.tokens[place, :shown].tolist(),
                gaps=[] if result.gaps is None else result.gaps[place, :shown].tolist(),
                forced=bool(plan.chunks[place]),
                prints=[] if result.prints is None else result.prints[place, :shown].tolist(),
            )
        )
    return StepRecord(result.seconds, rows)
