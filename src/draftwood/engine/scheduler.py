"""Who runs in the next step, with which pages. Decides; touches no tensor.

Admission is first come, first served, and optimistic: a request begins when its known text and the scratch of its
largest tree fit, and takes more pages as it grows. Every row holds at all times the pages of its committed tokens, its
root and its largest tree, so a step never waits for memory. When pages run out, the youngest row is preempted: its full
pages stay in the prefix cache, it waits at the front, and begins again by forcing the text it had. The oldest row can
always take what it needs, so it always ends, and so does everybody in turn.

A row may begin on pages of the prefix cache. Those are shared; they end before the row's first own token, and scratch
and commits lie behind the committed length, so nothing is ever written into a shared page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from draftwood.config import Plan
from draftwood.engine.request import Request, SamplingParams
from draftwood.errors import RequestError
from draftwood.kv.pages import PagePool
from draftwood.kv.prefix import Node, PrefixCache

NO_END = 1 << 62
"""More tokens than there are."""


@dataclass(frozen=True)
class Start:
    """A row that begins with this step: what every rank has to know about its request."""

    row: int
    pages: tuple[int, ...]
    params: SamplingParams
    prompt: tuple[int, ...]
    """The whole prompt where penalties count its tokens or trees may repeat them, else empty."""
    drafts: bool
    """False when nobody will ever want the drafter's context of this row."""
    cached: int = 0
    """Tokens that are committed already, whole pages of them: the row's first pages are shared. The drafter's context
    of these tokens has to be brought into the row's window before the step."""
    generated: tuple[int, ...] = ()
    """The answer so far of a request that was preempted. Its steps force these tokens again after the prompt; counts,
    floors and grammars take note of them when the row begins."""


@dataclass(frozen=True)
class Growth:
    """Pages that a running row has from this step on: entries `place`, place + 1, ... of its table."""

    row: int
    place: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step, as rank 0 decides it and all ranks run it. Rows are in order of admission.

    `starts` and `growths` change the state of rows before the step, and are all that ever changes a page table; a row of
    `starts` may be one that another request has just left.
    """

    starts: tuple[Start, ...]
    rows: tuple[int, ...]
    """Row id of each row in the step."""
    chunks: tuple[tuple[int, ...], ...]
    """Known tokens forced by the row, starting at its root; empty for a decoding row."""
    emits: tuple[bool, ...]
    """True when the row's final choice is a token of the answer: all but the earlier chunks of a known text."""
    budgets: tuple[int, ...]
    """Most tree nodes of each row beyond its root; 0 for forced rows."""
    auto: tuple[bool, ...]
    """True where the policy may choose fewer nodes than the budget."""
    depth: int
    """Deepest node that can still be of use to some row."""
    longest: int
    """At least the committed tokens of every row."""
    growths: tuple[Growth, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """A request without a row."""

    request: Request
    generated: tuple[int, ...] = ()
    """What it had generated when it was preempted."""


@dataclass(frozen=True)
class Refused:
    """Why the first of those that wait did not fit. To look a long text up again in every step would be slow."""

    waited: Waiting
    spare: int
    """Pages that could be had, without those left to the rows that ran."""
    node: Node | None
    """Where its text ended in the prefix cache, and what its next page would be called there; None where nothing can follow."""
    key: bytes | None


@dataclass
class Sequence:
    """A request that holds a row and its pages."""

    request: Request
    row: int
    pages: list[int]
    most: int
    """Most tokens of prompt and answer."""
    budget: int
    auto: bool
    tokens: list[int]
    """Prompt and answer so far."""
    forced: int
    """How many of them were known when the row began: they go through the target as chunks."""
    cached: int
    """How many of them were committed when the row began."""
    length: int
    """Committed tokens as far as is known: their latents are in the cache."""
    node: Node | None
    """Where its text ends in the prefix cache, `kept` pages deep; None without one."""
    kept: int
    room: int
    """Committed tokens up to which its pages hold a root and its largest tree."""
    flying: int = 0
    """Steps launched and not read yet that return tokens of the answer, at least one each."""

    @property
    def prompting(self) -> bool:
        return self.length < self.forced

    @property
    def left(self) -> int:
        """Most tokens that the answer may still need beyond what flying steps return for sure."""
        return self.most - len(self.tokens) - self.flying

    def reach(self, block: int) -> int:
        """Most tokens that it may have committed by now: a flying step commits at most a block, without a drafter one."""
        return self.length + self.flying * max(block, 1)


class Scheduler:
    """Rows, pages and the queue of one engine."""

    def __init__(self, plan: Plan, vocab_size: int) -> None:
        self.plan = plan
        self.vocab_size = vocab_size
        self.pool = PagePool(plan.num_pages, plan.page_size)
        self.prefix = PrefixCache(self.pool) if plan.options.enable_prefix_caching else None
        self.waiting: deque[Waiting] = deque()
        """By age: all of them are younger than all that run."""
        self.running: dict[int, Sequence] = {}
        """By request id, in order of age."""
        self.preemptions = 0
        """Since the beginning."""
        self._rows = list(range(plan.max_num_seqs - 1, -1, -1))
        self._handed_out = 0
        """Pages, since the last recount."""
        self._refused: Refused | None = None

    @property
    def available(self) -> int:
        """Pages that can be had: the free ones and those that only the prefix cache holds."""
        return self.pool.free_count + (self.prefix.idle_count if self.prefix is not None else 0)

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
        self.waiting.append(Waiting(request))

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
        pages = self.pool.pages_for(self._most(request) + budget)
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

    def _most(self, request: Request) -> int:
        """Most tokens of prompt and answer."""
        known, asked = len(request.prompt), request.params.max_tokens
        return self.plan.max_model_len if asked is None else min(known + asked, self.plan.max_model_len)

    def _budget(self, params: SamplingParams) -> tuple[int, bool]:
        """Return (most nodes beyond the root, may the policy choose fewer); RequestError above plan.max_budget, and for any
        tree where nothing drafts."""
        asked = self.plan.options.tree_budget if params.tree_budget is None else params.tree_budget
        if self.plan.block == 0:
            if params.tree_budget:
                fault = f"tree_budget {asked} needs a drafter and this engine runs without one; leave it out"
                raise RequestError(fault, "tree_budget")
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
        """Give every row the pages it needs, admit what fits and return the next step, or None when nothing can run."""
        growths = tuple(self._grow())
        starts = tuple(self._admit())
        chosen = self._choose()
        if not chosen:
            return None
        deepest, block = self.plan.block - 1, self.plan.block
        emits, budgets, auto, depth, longest = list[bool](), list[int](), list[bool](), 0, 0
        for seq, chunk in chosen:
            useful = 0 if chunk else min(deepest, seq.left - 1)
            budget = seq.budget if useful > 0 else 0
            emits.append(seq.length + len(chunk) >= seq.forced)
            budgets.append(budget)
            auto.append(seq.auto and budget > 0)
            depth = max(depth, useful if seq.budget else 0)
            longest = max(longest, seq.reach(block))
        return StepPlan(
            starts=starts,
            growths=growths,
            rows=tuple([seq.row for seq, _ in chosen]),
            chunks=tuple([chunk for _, chunk in chosen]),
            emits=tuple(emits),
            budgets=tuple(budgets),
            auto=tuple(auto),
            depth=depth,
            longest=longest,
        )

    def _choose(self) -> list[tuple[Sequence, tuple[int, ...]]]:
        """Return the rows of the step with their chunks: all that decode, and forced ones while the step has room."""
        chosen: list[tuple[Sequence, tuple[int, ...]]] = []
        room, first, blocked = self._room, True, False
        for seq in self.running.values():
            chunk: tuple[int, ...] = ()
            if seq.prompting:
                chunk = self._chunk(seq)
                size = self._size(len(chunk))
                blocked = blocked or not first and size > room
                if blocked:
                    continue
                first, room = False, room - size
            elif seq.left <= 0:
                continue
            chosen.append((seq, chunk))
        return chosen

    @property
    def _room(self) -> int:
        """Most known tokens of a step: on a GPU as many as one chunk may have, for that is what its graphs are made for."""
        return self.plan.prefill_chunk if self.plan.device == "cuda" else self.plan.options.max_num_batched_tokens

    def _size(self, tokens: int) -> int:
        """The room that a chunk takes. A GPU runs it in pieces of a page."""
        return self.pool.pages_for(tokens) * self.plan.page_size if self.plan.device == "cuda" else tokens

    def _chunk(self, seq: Sequence) -> tuple[int, ...]:
        """The known text from the committed length to the next multiple of the chunk size, whoever else runs."""
        size = self.plan.prefill_chunk
        return tuple(seq.tokens[seq.length : min((seq.length // size + 1) * size, seq.forced)])

    def _need(self, most: int, known: int, budget: int) -> int:
        """Pages for `known` committed tokens, a root and its largest tree, for a request of `most` tokens; never more than `check`
        has found to fit."""
        return self.pool.pages_for(min(known + 1, most) + budget)

    def _room_of(self, most: int, pages: int, budget: int) -> int:
        """Committed tokens for which so many pages are enough by `_need`, NO_END where they are for all that it may have."""
        tokens = pages * self.pool.page_size - budget
        return NO_END if tokens >= most else tokens - 1

    def _grow(self) -> Iterator[Growth]:
        """Give the rows, oldest first, the pages that their next step may reach; preempt the youngest where there are none."""
        for seq in list(self.running.values()):
            reach = seq.reach(self.plan.block)
            if reach <= seq.room:  # as nearly all rows have in nearly all steps
                continue
            short = self._need(seq.most, reach, seq.budget) - len(seq.pages)
            while short > self.available and self.runs(seq):
                self._preempt()
            if self.runs(seq):
                pages = self._allocate(short)
                yield Growth(seq.row, len(seq.pages), tuple(pages))
                seq.pages += pages
                seq.room = self._room_of(seq.most, len(seq.pages), seq.budget)

    def _preempt(self) -> None:
        """Take row and pages from the youngest request; it is the next to be admitted."""
        _, seq = self.running.popitem()
        self._release(seq)
        self.waiting.appendleft(Waiting(seq.request, tuple(seq.tokens[len(seq.request.prompt) :])))
        self.preemptions += 1

    def _admit(self) -> Iterator[Start]:
        """Begin those that fit while the step has room for known tokens: who comes later may find more in the prefix cache."""
        if not self.waiting:
            return
        room = self._room - sum(self._size(len(self._chunk(seq))) for seq in self.running.values() if seq.prompting)
        while room > 0 and self.waiting and self._rows and not self._still_refused():
            seq = self._begin(self.waiting[0])
            if seq is None:
                return
            room -= self._size(len(self._chunk(seq)))
            waited = self.waiting.popleft()
            self.running[seq.request.id] = seq
            params = seq.request.params
            prompt = seq.request.prompt if params.counts_tokens or seq.budget > 0 else ()
            drafts = seq.budget > 0 or self.prefix is not None and self.plan.block > 0
            yield Start(seq.row, tuple(seq.pages), params, prompt, drafts, seq.cached, waited.generated)

    @property
    def _spare(self) -> int:
        """Pages that a newcomer may take: one for each row that runs is left alone, so that it is not preempted as soon as
        somebody grows."""
        return self.available - len(self.running)

    def _still_refused(self) -> bool:
        """True when no page has come free, and none of its text into the cache, since the first that waits was refused."""
        past = self._refused
        if past is None or past.waited is not self.waiting[0] or self._spare > past.spare:
            return False
        return past.node is None or past.key not in past.node.children

    def _begin(self, waited: Waiting) -> Sequence | None:
        """Give a request a row and pages for its known text and its tree, or return None when they are not to be had.

        The last known token is never taken from the cache: its choice is the next token.
        """
        request, tokens = waited.request, [*waited.request.prompt, *waited.generated]
        budget, auto = self._budget(request.params)
        node, shared, most = None, list[int](), (len(tokens) - 1) // self.pool.page_size
        if self.prefix is not None:
            node, shared = self.prefix.enter(tokens, most)
        longest = self._most(request)
        need = self._need(longest, len(tokens), budget) - len(shared)
        if need > self._spare:
            self._give_back(node, shared)
            key = self.prefix.key(tokens, len(shared)) if self.prefix is not None and len(shared) < most else None
            self._refused = Refused(waited, self._spare, node, key)
            return None
        cached, pages = len(shared) * self.pool.page_size, shared + self._allocate(need)
        return Sequence(
            request=request,
            row=self._rows.pop(),
            pages=pages,
            most=longest,
            budget=budget,
            auto=auto,
            tokens=tokens,
            forced=len(tokens),
            cached=cached,
            length=cached,
            node=node,
            kept=len(shared),
            room=self._room_of(longest, len(pages), budget),
        )

    def _allocate(self, pages: int) -> list[int]:
        self._handed_out += pages
        if self.prefix is not None:
            self.prefix.make_room(pages)
        return self.pool.allocate(pages)

    def sequences(self, plan: StepPlan) -> list[Sequence]:
        """The sequence of each row of the plan that `next_step` has just returned."""
        by_row = {seq.row: seq for seq in self.running.values()}
        return [by_row[row] for row in plan.rows]

    def launched(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Note that a step runs: a chunk commits exactly itself, a decoding row at least its root."""
        for seq, chunk, emits in zip(sequences, plan.chunks, plan.emits, strict=True):
            seq.flying += emits
            if chunk:
                seq.length += len(chunk)
                self._keep(seq)

    def landed(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Note that a step was read."""
        for seq, emits in zip(sequences, plan.emits, strict=True):
            seq.flying -= emits

    def commit(self, seq: Sequence, count: int, tokens: Tokens[int]) -> None:
        """Note what came of a row's step: `count` tokens were committed that `launched` did not count; `tokens` are new
        ones of the answer."""
        seq.length += count
        seq.tokens += tokens
        self._keep(seq)

    def _keep(self, seq: Sequence) -> None:
        """Put pages that have become full into the prefix cache. Steps that fly or follow write behind them only."""
        if seq.node is None or self.prefix is None:
            return
        # What a last step commits beyond the end of an answer is not known here.
        full = min(seq.length, len(seq.tokens)) // self.pool.page_size
        for index in range(seq.kept, full):
            seq.node = self.prefix.extend(seq.node, seq.tokens, index, seq.pages[index])
        seq.kept = full

    def runs(self, seq: Sequence) -> bool:
        """False when the request has ended since; its results are of no use."""
        return self.running.get(seq.request.id) is seq

    def finish(self, request_id: int) -> bool:
        """Let go of a request at any point of its life; False when it is not here."""
        seq = self.running.pop(request_id, None)
        if seq is None:
            before = len(self.waiting)
            self.waiting = deque(w for w in self.waiting if w.request.id != request_id)
            return len(self.waiting) < before
        self._release(seq)
        # A recount looks at every page, and somebody waits for the last token: not after every small request.
        if self.idle and self._handed_out >= self.pool.num_pages // 8:
            self.recount()
        return True

    def _release(self, seq: Sequence) -> None:
        self._give_back(seq.node, seq.pages)
        self._rows.append(seq.row)

    def _give_back(self, node: Node | None, pages: Tokens[int]) -> None:
        if node is not None and self.prefix is not None:
            self.prefix.leave(node)
        self.pool.release(pages)

    def recount(self) -> None:
        """Prove that every page is free or held by exactly the requests that run and the prefix cache; rows likewise."""
        self._handed_out = 0
        cached = [] if self.prefix is None else self.prefix.pages()
        self.pool.recount([*(seq.pages for seq in self.running.values()), cached])
        rows = sorted(self._rows + [seq.row for seq in self.running.values()])
        if rows != list(range(self.plan.max_num_seqs)):
            raise AssertionError(f"rows are lost or held twice: {rows}")
