"""What the terminal commands share: lists of facts and dim text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from draftwood import env
from draftwood.config import Plan
from draftwood.plan import NOT_LOADED

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(text: str, end: str = "\n") -> None:
    """Write progress or a summary to stderr; stdout carries results only."""
    print(text, end=end, file=sys.stderr, flush=True)


def say_notes(plan: Plan) -> None:
    """Say where the plan is not what was asked for, or not what might be expected."""
    for note in plan.notes:
        if note != NOT_LOADED:  # that was asked for
            say(f"note: {note}")


def write(text: str, end: str = "") -> None:
    """Write a result to stdout now. Text the terminal's encoding lacks is escaped, never an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write((text + end).encode(encoding, errors="backslashreplace").decode(encoding))
    sys.stdout.flush()


def coloured(stream: TextIO) -> bool:
    """Tell whether `stream` is a terminal that takes colours."""
    return stream.isatty() and not env.read("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    """Return `text` dimmed where `stream` shows it."""
    return f"\x1b[2m{text}\x1b[0m" if text and coloured(stream) else text


def bold(text: str, stream: TextIO) -> str:
    """Return `text` in bold where `stream` shows it."""
    return f"\x1b[1m{text}\x1b[0m" if text and coloured(stream) else text


def table(rows: Sequence[Sequence[Any]], indent: str = "  ") -> str:
    """Return rows of cells as aligned columns: numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = max(map(len, cells), default=0)
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(columns)]
    lines = []
    for row, shown in zip(rows, cells, strict=True):
        padded = [
            text.rjust(width) if isinstance(value, int | float) and not isinstance(value, bool) else text.ljust(width)
            for value, text, width in zip(row, shown, widths, strict=False)
        ]
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def size(count: float) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least 1 of it."""
    power = 0
    while abs(count) >= 1024 and power < len(UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} {UNITS[power]}" if power == 0 else f"{count:.2f} {UNITS[power]}"
