"""The body of a request as JSON: read within limits of size, time and depth; whatever is wrong is named."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from draftwood.errors import RequestError
from draftwood.server.errors import HttpError

MAX_DEPTH = 64
READ_SECONDS = 60.0


async def read_json(request: Request, most: int) -> dict[str, Any]:
    """Return the JSON object that a request carries. Raises HttpError (413, 415, 408) or RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(415, f"content-type {kind or '(none)'} is not application/json", "content-type")
    try:
        raw = await asyncio.wait_for(_read(request, most), READ_SECONDS)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {READ_SECONDS:.0f} seconds", "body") from None
    return parse(raw)


async def _read(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        _too_large(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> NoReturn:
    fault = f"the body is larger than {most} bytes; send less or start the server with a larger --max-request-bytes"
    raise HttpError(413, fault, "body", "request_too_large")


def parse(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` spells. Raises RequestError: no UTF-8, no JSON, no object, NaN, too deep, a lone
    surrogate."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}", "body") from None
    try:
        value = json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels", "body") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", "body") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type(value).__name__}, not an object", "body")
    for name, field in value.items():
        _check(name, field)
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(name: str, field: Any) -> None:
    """Raise RequestError when a top-level field is too deep or holds text without a UTF-8 form."""
    level = [name, field]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                if not value.isascii():
                    _check_unicode(value, name)
            elif isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
        if not below:
            return
        level = below
    raise RequestError(f"{name[:60]} is nested deeper than {MAX_DEPTH} levels", name)


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(f"{name[:60]} has a lone surrogate U+{code:04X}; send valid Unicode text", name) from None
