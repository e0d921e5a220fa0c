"""Around every route: the key, a name for the request, and a count of the response."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.server.errors import HttpError, dumps, envelope, headers

OPEN_PATHS = frozenset({"/health"})
"""Served without a key: a load balancer has none."""
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def error_response(error: HttpError) -> Response:
    """Return an error as a response."""
    return Response(dumps(envelope(error)), error.status, headers(error), "application/json")


class Gate:
    """ASGI middleware; plain, so that disconnects and streams pass through untouched."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], count: Callable[[str, int], None]) -> None:
        """`keys`: any of them opens the routes; none: all are open. `count` is told (route, status)."""
        self._app = app
        self._keys = tuple(key.encode() for key in keys)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        name = given.get("x-request-id", "")
        name = name if _NAME.fullmatch(name) else f"req-{secrets.token_hex(8)}"

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
                route = getattr(scope.get("route"), "path", "(no route)")
                self._count(route, message["status"])
            await send(message)

        if self._refuses(scope, given):
            fault = HttpError(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", code="invalid_api_key")
            await error_response(fault)(scope, receive, told)
            return
        await self._app(scope, receive, told)

    def _refuses(self, scope: Scope, given: Headers) -> bool:
        # A browser asks with OPTIONS, without the key, whether it may send it.
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return False
        kind, _, key = given.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(key.strip().encode("latin-1", "replace"), other) for other in self._keys]
        return kind.lower() != "bearer" or not any(known)
