"""A response as server-sent events: comments while nothing comes, one event a chunk, [DONE] last."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.errors import DraftwoodError
from draftwood.server.errors import as_http, dumps, envelope
from draftwood.server.exchange import Batch, ClientGone, Exchange
from draftwood.server.runner import Ticket
from draftwood.server.shapes import Choice, Shape

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Streams the answers of an exchange that is open. The exchange ends with the response, however that ends."""

    media_type = "text/event-stream"

    def __init__(
        self, exchange: Exchange, shape: Shape, tickets: list[Ticket], patience: float, usage: bool, running: bool
    ) -> None:
        """`patience`: seconds without news before a comment. `usage`: a last chunk of it; `running`: in every chunk."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._shape = shape
        self._choices = {ticket: Choice(ticket) for ticket in tickets}
        self._patience = patience
        self._usage = usage
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with self._exchange as exchange:
            exchange.watch(receive)
            try:
                async for part in self._parts():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except ClientGone:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            async for batch in self._exchange.batches(self._patience):
                yield self._events(batch) or KEEP_ALIVE
        except DraftwoodError as error:
            yield _event(envelope(as_http(error)))
            return
        if self._usage:
            choices = list(self._choices.values())
            yield _event(self._shape.chunk([], self._shape.usage(choices), True))
        yield DONE

    def _events(self, batch: Batch) -> bytes:
        parts: list[bytes] = []
        for ticket, update in batch:
            choice = self._choices[ticket]
            pieces = [] if choice.first else self._shape.opening(choice)
            choice.add(update, keep=False)
            pieces += self._shape.pieces(choice, update)
            if update.last:
                pieces.append(self._shape.closing(choice))
            usage = self._shape.usage(list(self._choices.values())) if self._running else None
            parts += [_event(self._shape.chunk([piece], usage, self._usage or self._running)) for piece in pieces]
        return b"".join(parts)


def _event(value: object) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"
