"""The engine's thread: it alone touches the model. Requests go in by a queue, updates come out on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from draftwood.engine.request import SamplingParams, Usage
from draftwood.errors import DraftwoodError, Overloaded, RequestError
from draftwood.server.errors import EngineFailed, HttpError

if TYPE_CHECKING:
    from draftwood.llm import LLM, Answer, Delta
    from draftwood.text.tools import AnswerStream

LOADING, READY, DRAINING, FAILED, STOPPED = "loading", "ready", "draining", "failed", "stopped"
STOP_GRACE = 5.0
"""Seconds that the engine gets to end its last step."""


@dataclass(frozen=True)
class Update:
    """What became of a request since its last update. With an `error` or a `finish_reason` it is the last one."""

    time: float
    """Monotonic seconds at which the engine had it."""
    delta: Delta | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    usage: Usage = field(default_factory=Usage)
    reasoning_tokens: int = 0
    error: DraftwoodError | None = None

    @property
    def last(self) -> bool:
        return self.error is not None or self.finish_reason is not None


class Receiver(Protocol):
    """Where a ticket's updates go."""

    def put(self, ticket: Ticket, update: Update) -> None: ...


@dataclass(eq=False)
class Ticket:
    """One answer that is asked for."""

    index: int
    """Place among the choices of the response."""
    ids: Sequence[int]
    params: SamplingParams
    receiver: Receiver
    reader: AnswerStream | None = None
    ends: frozenset[int] = frozenset()
    """Stop tokens that the caller did not ask for: an answer that one of them ends has no stop reason."""
    created: float = field(default_factory=time.monotonic)
    answer: Answer | None = None
    """The engine thread's own."""
    first: float = 0.0
    """Monotonic seconds of its first token."""


@dataclass(frozen=True)
class _Begin:
    ticket: Ticket


@dataclass(frozen=True)
class _Drop:
    ticket: Ticket


@dataclass(frozen=True)
class _Stop:
    pass


class Runner:
    """Loads a model in a thread of its own and runs requests there. Methods are for the event loop's thread."""

    def __init__(self, load: Callable[[], LLM], most: Callable[[LLM], int], rest_seconds: float = 60.0) -> None:
        """`most`: requests that may be open at a time. `rest_seconds`: how often idle ranks are told to go on waiting."""
        self.phase = LOADING
        self.llm: LLM | None = None
        self.error: BaseException | None = None
        """What ended the engine, if it was not asked to end."""
        self.open: set[Ticket] = set()
        self.ended = asyncio.Event()
        self.ready = asyncio.Event()
        self._load = load
        self._most = most
        self._rest = rest_seconds
        self._orders: SimpleQueue[_Begin | _Drop | _Stop] = SimpleQueue()
        self._live: dict[int, Ticket] = {}
        self._seconds = 1.0
        """Running mean of how long a request takes."""

    def start(self) -> None:
        """Begin to load. Call it once, on the running event loop."""
        self.loop = asyncio.get_running_loop()
        # An executor hands over whatever ends its thread, so that nothing has to be caught there.
        thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        future = self.loop.run_in_executor(thread, self._run)
        future.add_done_callback(self._end)

    def require(self) -> LLM:
        """Return the model. Raises HttpError 503 while it loads, drains, or after it failed."""
        if self.phase != READY or self.llm is None:
            wait = 5.0 if self.phase == LOADING else None
            raise HttpError(503, self.reason(), code=self.phase, retry_after=wait)
        return self.llm

    def most(self) -> int:
        """Most requests that may be open at a time. Raises HttpError as `require`."""
        return self._most(self.require())

    def reason(self) -> str:
        """Say why there is no answer now."""
        return {
            LOADING: "the model is loading; try again soon",
            DRAINING: "the server is shutting down and takes no new requests",
            FAILED: "the engine has failed",
            STOPPED: "the engine has ended",
        }.get(self.phase, "ready")

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets, all or none. Raises Overloaded when too many requests are open, HttpError when not ready."""
        most = self.most()
        if len(self.open) + len(tickets) > most:
            raise Overloaded(
                f"{len(self.open)} requests are open and {len(tickets)} more exceed the limit of {most}; try again later",
                min(60.0, max(1.0, self._seconds)),
            )
        self.open.update(tickets)
        for ticket in tickets:
            self._orders.put(_Begin(ticket))

    def cancel(self, ticket: Ticket) -> bool:
        """Forget a ticket at once; False where it has ended."""
        if ticket not in self.open:
            return False
        self.open.discard(ticket)
        self._orders.put(_Drop(ticket))
        return True

    async def drain(self, seconds: float) -> None:
        """Take no new requests, let the open ones end for at most `seconds`, then end the rest and the engine."""
        if self.phase in (LOADING, READY):
            self.phase = DRAINING
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline and not self.ended.is_set():
            await asyncio.sleep(0.02)
        for ticket in list(self.open):
            self.cancel(ticket)
            fault = HttpError(503, "the server shut down before this answer ended", code="shutdown")
            ticket.receiver.put(ticket, Update(time.monotonic(), error=fault))
        self._orders.put(_Stop())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), STOP_GRACE)

    # On the engine's thread.

    def _run(self) -> None:
        with self._load() as llm:
            self.loop.call_soon_threadsafe(self._loaded, llm)
            while self._obey(llm):
                if self._live:
                    self._step(llm)

    def _obey(self, llm: LLM) -> bool:
        """Do what was ordered, waiting for an order where nothing runs; False to end."""
        while True:
            try:
                order = self._orders.get(block=not self._live, timeout=self._rest)
            except Empty:
                if self._live:
                    return True
                llm.rest()
                continue
            if isinstance(order, _Stop):
                return False
            if isinstance(order, _Begin):
                self._begin(llm, order.ticket)
            elif order.ticket.answer is not None:
                llm.drop(order.ticket.answer)
                self._live.pop(order.ticket.answer.id, None)

    def _begin(self, llm: LLM, ticket: Ticket) -> None:
        try:
            ticket.answer = llm.start(ticket.ids, ticket.params, ticket.reader)
        except RequestError as error:
            self._send([(ticket, Update(time.monotonic(), error=error))])
            return
        self._live[ticket.answer.id] = ticket

    def _step(self, llm: LLM) -> None:
        grown = llm.advance()
        now = time.monotonic()
        updates = []
        for answer in grown:
            ticket = self._live[answer.id]
            updates.append((ticket, _update(answer, now)))
            if answer.reason is not None:
                del self._live[answer.id]
        if updates:
            self._send(updates)

    def _send(self, updates: list[tuple[Ticket, Update]]) -> None:
        self.loop.call_soon_threadsafe(self._deliver, updates)

    # On the event loop, called by the engine's thread.

    def _loaded(self, llm: LLM) -> None:
        self.llm = llm
        if self.phase == LOADING:
            self.phase = READY
        self.ready.set()

    def _deliver(self, updates: list[tuple[Ticket, Update]]) -> None:
        for ticket, update in updates:
            if ticket not in self.open:
                continue
            if update.last:
                self.open.discard(ticket)
                self._seconds += 0.1 * (update.time - ticket.created - self._seconds)
            ticket.receiver.put(ticket, update)

    def _end(self, future: asyncio.Future[None]) -> None:
        self.error = future.exception()
        self.phase = FAILED if self.error is not None else STOPPED
        for ticket in list(self.open):
            self.open.discard(ticket)
            ticket.receiver.put(ticket, Update(time.monotonic(), error=EngineFailed()))
        self.ended.set()


def _update(answer: Answer, now: float) -> Update:
    return Update(
        time=now,
        delta=answer.news(),
        finish_reason=answer.reason,
        stop=answer.stop,
        usage=dataclasses.replace(answer.usage, stage_seconds=dict(answer.usage.stage_seconds)),
        reasoning_tokens=answer.reader.reasoning_tokens if answer.reader is not None else 0,
        error=answer.error,
    )
