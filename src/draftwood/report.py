"""How results are shown: an aligned table, one line of JSON, and a bar of progress; and readers that stop reading.

Only commands call this.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from draftwood.errors import ConfigError

N = TypeVar("N", int, float)

_QUIET_SECONDS = 15.0
"""A log file gets a line of progress this often; a terminal ten times a second."""


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return aligned columns under their names: numbers to the right, text to the left, None as "-"."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), *map(line, cells)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    return "-" if value is None else str(value)


def json_line(value: Any) -> str:
    """Return `value` as one line of JSON; text outside ASCII stays readable, NaN is refused."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def show(text: str) -> None:
    """Write a result to stdout, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def closed_pipe_is_fine() -> Iterator[None]:
    """End quietly when the reader of stdout or stderr has gone (`| head -1`): it has read what it wanted."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give what is left a place that takes it.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def note(text: str) -> None:
    """Write a remark to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def progress(total: int | None, label: str, unit: str) -> tqdm[Any]:
    """Return a bar on stderr (a counter where the total is not known); call its `update(n)`, and close it."""
    seconds = 0.1 if sys.stderr.isatty() else _QUIET_SECONDS
    return tqdm(total=total, desc=label, unit=unit, file=sys.stderr, mininterval=seconds, dynamic_ncols=True, leave=False)


def numbers(flag: str, text: str, kind: Callable[[str], N], low: N, high: N) -> tuple[N, ...]:
    """Return the numbers of a flag's comma-separated text, each once, in order.

    Raises ConfigError for text that holds no such numbers, and for one outside low..high.
    """
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not a list of numbers; write them with commas, as in 1,4,8") from None
    for value in found:
        if not low <= value <= high:
            raise ConfigError(f"{flag} {value} is outside {low}..{high}; choose values in that range")
    return found
