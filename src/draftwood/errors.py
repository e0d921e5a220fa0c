"""Errors for people. Each message is one line: what, the value, the limit, and what to change.

The command line prints the message and exits with 2 (ConfigError, RequestError) or 1 (the rest).
"""

from __future__ import annotations


class DraftwoodError(Exception):
    """Base of every error this package raises on purpose; never a bug."""

    exit_code = 1


class ConfigError(DraftwoodError):
    """The options, the checkpoint or the machine do not fit together. Nothing was started."""

    exit_code = 2


class RequestError(DraftwoodError):
    """One request cannot be served; `param` names the field at fault, `code` the kind of fault where clients ask for it."""

    exit_code = 2

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(DraftwoodError):
    """The queue is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KernelBuildError(DraftwoodError):
    """A CUDA kernel did not compile; `log` is the compiler's output, `source` the kept file."""

    def __init__(self, message: str, log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class DeviceLost(DraftwoodError):
    """A device or a rank is gone; the engine cannot go on."""
