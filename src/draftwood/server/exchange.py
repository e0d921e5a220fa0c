"""The answers that one HTTP request waits for: opened together, merged as they grow, dropped when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from starlette.types import Receive

from draftwood.server.runner import Runner, Ticket, Update

Batch = list[tuple[Ticket, Update]]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """Tickets of one request. Use it in `with`: leaving it cancels what has not ended."""

    def __init__(
        self, runner: Runner, observe: Callable[[Ticket, Update], None], left: Callable[[Ticket], None]
    ) -> None:
        """For metrics, `observe` is told of every update and `left` of every ticket that is given up."""
        self._runner = runner
        self._observe = observe
        self._give_up = left
        self._tickets: Sequence[Ticket] = ()
        self._updates: Batch = []
        self._news = asyncio.Event()
        self._left = 0
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def open(self, tickets: Sequence[Ticket]) -> None:
        """Queue the tickets. Raises Overloaded or HttpError."""
        self._runner.submit(tickets)
        self._tickets = tickets
        self._left = len(tickets)

    def put(self, ticket: Ticket, update: Update) -> None:
        """Take an update; the runner calls it."""
        self._observe(ticket, update)
        self._updates.append((ticket, update))
        self._news.set()

    def watch(self, receive: Receive) -> None:
        """Notice when the client goes. The request's body has been read."""
        self._watch = asyncio.create_task(self._listen(receive))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._news.set()

    async def batches(self, patience: float | None = None) -> AsyncIterator[Batch]:
        """Yield what has come since the last time, until every answer has ended; an empty batch after `patience`
        seconds without news. Raises ClientGone, and the error of an answer that could not be given."""
        while self._left:
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except TimeoutError:
                yield []
                continue
            if self._gone:
                raise ClientGone
            batch, self._updates = self._updates, []
            self._news.clear()
            for _, update in batch:
                if update.error is not None:
                    raise update.error
                self._left -= update.last
            yield batch

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for ticket in self._tickets:
            if self._runner.cancel(ticket):
                self._give_up(ticket)
        if self._watch is not None:
            self._watch.cancel()
