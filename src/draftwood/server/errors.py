"""Every error as OpenAI's envelope: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

import json
import math
from typing import Any

from draftwood.errors import DraftwoodError, Overloaded, RequestError

MAX_MESSAGE = 600
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}
STATUS_BY_CODE = {"model_not_found": 404}


class HttpError(DraftwoodError):
    """An answer with a status of its own; `retry_after` seconds go into the header of that name."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


class EngineFailed(HttpError):
    """The engine ended while requests were open."""

    def __init__(self) -> None:
        super().__init__(500, "the engine failed and the server ends; see its log", code="engine_failed")


def as_http(error: DraftwoodError) -> HttpError:
    """Return the error with its HTTP status."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return HttpError(STATUS_BY_CODE.get(error.code or "", 400), str(error), error.param, error.code)
    if isinstance(error, Overloaded):
        return HttpError(429, str(error), code="overloaded", retry_after=error.retry_after)
    return HttpError(500, str(error))


def envelope(error: HttpError) -> dict[str, Any]:
    """Return the body of an error. Text of a hostile request in it is cut and made valid Unicode."""
    return {
        "error": {
            "message": _clean(str(error), MAX_MESSAGE),
            "type": TYPES.get(error.status, "invalid_request_error"),
            "param": None if error.param is None else _clean(error.param, 100),
            "code": error.code,
        }
    }


def headers(error: HttpError) -> dict[str, str]:
    """Return the headers that belong to an error."""
    found = {}
    if error.retry_after is not None:
        found["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        found["www-authenticate"] = "Bearer"
    return found


def _clean(text: str, most: int) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= most else text[: most - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def dumps(value: Any) -> bytes:
    """Return JSON as UTF-8. Numbers are finite and text is valid Unicode everywhere this is used."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
