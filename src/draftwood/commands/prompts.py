"""Prompts from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftwood.errors import ConfigError

STDIN = "-"


def read_prompts(given: Sequence[str] | None) -> list[str]:
    """Return the prompts of `-p` in order, `-` replaced by all of stdin.

    Raises ConfigError for none, for `-` given twice, and for stdin that is not UTF-8.
    """
    if not given:
        raise ConfigError("no prompt; give one with -p TEXT, or -p - to read it from stdin")
    if given.count(STDIN) > 1:
        raise ConfigError("-p - is given twice, but stdin can be read once; give it once")
    return [_stdin() if text == STDIN else text for text in given]


def _stdin() -> str:
    raw = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x})") from None
