"""Who runs in the next step, with which pages. Decides; touches no tensor.

A request reserves at admission every page it can ever need (prompt, answer and the scratch of its largest tree), so a
running request never waits for memory and its page table never changes. Admission is first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.config import Plan
from draftwood.engine.request import Request, SamplingParams
from draftwood.errors import RequestError
from draftwood.kv.pages import PagePool


@dataclass(frozen=True)
class Start:
    """A row that begins with this step: what every rank has to know about its request."""

    row: int
    pages: tuple[int, ...]
    params: SamplingParams
    prompt: tuple[int, ...]
    """The whole prompt where penalties count its tokens, else empty."""
    drafts: bool
    """False when no step of the request will ever draft."""


@dataclass(frozen=True)
class StepPlan:
    """One step, as rank 0 decides it and all ranks run it. Rows are in order of admission."""

    starts: tuple[Start, ...]
    rows: tuple[int, ...]
    """Row id of each row in the step."""
    chunks: tuple[tuple[int, ...], ...]
    """Prompt tokens forced by the row, starting at its root; empty for a decoding row."""
    emits: tuple[bool, ...]
    """True when the row's final choice is a token of the answer: all but the earlier chunks of a prompt."""
    budgets: tuple[int, ...]
    """Most tree nodes of each row beyond its root; 0 for forced rows."""
    auto: tuple[bool, ...]
    """True where the policy may choose fewer nodes than the budget."""
    depth: int
    """Deepest node that can still be of use to some row."""
    longest: int
    """At least the committed tokens of every row."""


@dataclass
class Sequence:
    """A request that holds a row and its pages."""

    request: Request
    row: int
    pages: list[int]
    limit: int
    """Most tokens of its answer."""
    budget: int
    auto: bool
    length: int = 0
    """Committed tokens as far as is known: their latents are in the cache."""
    generated: int = 0
    flying: int = 0
    """Steps launched and not read yet that return tokens of the answer, at least one each."""

    @property
    def prompting(self) -> bool:
        return self.length < len(self.request.prompt)

    @property
    def left(self) -> int:
        """Most tokens that the answer may still need beyond what flying steps return for sure."""
        return self.limit - self.generated - self.flying


class Scheduler:
    """Rows, pages and the queue of one engine."""

    def __init__(self, plan: Plan, vocab_size: int) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self.pool = PagePool(plan.num_pages, plan.page_size)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Sequence] = {}
        """By request id, in order of admission."""
        self._rows = list(range(plan.max_num_seqs - 1, -1, -1))

    @property
    def table_width(self) -> int:
        """Pages of the longest request."""
        return self.pool.pages_for(self.plan.max_model_len + self.plan.max_budget)

    @property
    def idle(self) -> bool:
        """True when no request waits or runs."""
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it could never run."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise RequestError when the request could never run, however empty the engine. Reads constants only."""
        prompt, most = request.prompt, self.plan.max_model_len
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        if len(prompt) >= most:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens but the context holds {most} with at least one of the answer; "
                "shorten the prompt or raise --max-model-len",
                "prompt",
                code="context_length_exceeded",
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", request.params.stop_token_ids)
        self._check_ids("logit_bias", request.params.logit_bias)
        budget, _ = self._budget(request.params)
        pages = self.pool.pages_for(len(prompt) + self._limit(request) + budget)
        if pages > self.pool.num_pages:
            raise RequestError(
                f"prompt and max_tokens need {pages} pages of {self.pool.page_size} tokens but the cache has "
                f"{self.pool.num_pages}; lower max_tokens or shorten the prompt",
                "max_tokens",
            )

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"{name} has token id {token}; this model's ids are 0..{self.vocab_size - 1}", name)

    def _limit(self, request: Request) -> int:
        room = self.plan.max_model_len - len(request.prompt)
        asked = request.params.max_tokens
        return room if asked is None else min(asked, room)

    def _budget(self, params: SamplingParams) -> tuple[int, bool]:
        """Return (most nodes beyond the root, may the policy choose fewer); RequestError above plan.max_budget."""
        asked = self.plan.options.tree_budget if params.tree_budget is None else params.tree_budget
        if self.plan.block == 0:
            return 0, False
        if isinstance(asked, str):
            return self.plan.max_budget, True
        if asked > self.plan.max_budget:
            raise RequestError(
                f"tree_budget {asked} is above this engine's {self.plan.max_budget}; lower it or start with --tree-budget {asked}",
                "tree_budget",
            )
        return asked, False

    def next_step(self) -> StepPlan | None:
        """Admit what fits and return the next step, or None when nothing can run."""
        starts = tuple(self._admit())
        chosen: list[tuple[Sequence, tuple[int, ...]]] = []
        room, first, blocked = self.plan.options.max_num_batched_tokens, True, False
        for seq in self.running.values():
            chunk: tuple[int, ...] = ()
            if seq.prompting:
                chunk = self._chunk(seq)
                blocked = blocked or not first and len(chunk) > room
                if blocked:
                    continue
                first, room = False, room - len(chunk)
            elif seq.left <= 0:
                continue
            chosen.append((seq, chunk))
        if not chosen:
            return None
        deepest = self.plan.block - 1
        budgets, depth = [], 0
        for seq, chunk in chosen:
            useful = 0 if chunk else min(deepest, seq.left - 1)
            budgets.append(seq.budget if useful > 0 else 0)
            depth = max(depth, useful if seq.budget else 0)
        return StepPlan(
            starts=starts,
            rows=tuple(seq.row for seq, _ in chosen),
            chunks=tuple(chunk for _, chunk in chosen),
            emits=tuple(seq.length + len(chunk) >= len(seq.request.prompt) for seq, chunk in chosen),
            budgets=tuple(budgets),
            auto=tuple(seq.auto and budget > 0 for (seq, _), budget in zip(chosen, budgets, strict=True)),
            depth=depth,
            longest=max(seq.length + seq.flying * max(self.plan.block, 1) for seq, _ in chosen),
        )

    def _chunk(self, seq: Sequence) -> tuple[int, ...]:
        """The prompt from the committed length to the next multiple of the chunk size, whoever else runs."""
        size = self.plan.prefill_chunk
        return seq.request.prompt[seq.length : (seq.length // size + 1) * size]

    def _admit(self) -> Iterable[Start]:
        while self.waiting and self._rows:
            request = self.waiting[0]
            budget, auto = self._budget(request.params)
            limit = self._limit(request)
            need = self.pool.pages_for(len(request.prompt) + limit + budget)
            if need > self.pool.free_count:
                return
            self.waiting.popleft()
            seq = Sequence(request, self._rows.pop(), self.pool.allocate(need), limit, budget, auto)
            self.running[request.id] = seq
            prompt = request.prompt if request.params.counts_tokens else ()
            yield Start(seq.row, tuple(seq.pages), request.params, prompt, budget > 0)

    def sequences(self, plan: StepPlan) -> list[Sequence]:
        """The sequence of each row of the plan that `next_step` has just returned."""
        by_row = {seq.row: seq for seq in self.running.values()}
        return [by_row[row] for row in plan.rows]

    def launched(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Note that a step runs: a prompt chunk commits exactly itself, a decoding row at least its root."""
        for seq, chunk, emits in zip(sequences, plan.chunks, plan.emits, strict=True):
            seq.length += len(chunk)
            seq.flying += emits

    def landed(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Note that a step was read."""
        for seq, emits in zip(sequences, plan.emits, strict=True):
            seq.flying -= emits

    def runs(self, seq: Sequence) -> bool:
        """False when the request has ended since; its results are of no use."""
        return self.running.get(seq.request.id) is seq

    def finish(self, request_id: int) -> bool:
        """Let go of a request at any point of its life; False when it is not here."""
        seq = self.running.pop(request_id, None)
        if seq is None:
            before = len(self.waiting)
            self.waiting = deque(r for r in self.waiting if r.id != request_id)
            return len(self.waiting) < before
        self.pool.release(seq.pages)
        self._rows.append(seq.row)
        if self.idle:
            self.recount()
        return True

    def recount(self) -> None:
        """Prove that every page and row is free or held by exactly the requests that run."""
        self.pool.recount(seq.pages for seq in self.running.values())
        rows = sorted(self._rows + [seq.row for seq in self.running.values()])
        if rows != list(range(self.plan.max_num_seqs)):
            raise AssertionError(f"rows are lost or held twice: {rows}")
