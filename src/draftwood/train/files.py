"""Files of the data commands: token files, JSON lines, xz for travel, and the report each command ends with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError

#: Token ids repeat in pairs of bytes, hence lp = pb = 1; the dictionary spans a whole file of 45 M ids.
XZ_DICT = 96 << 20
CHUNK = 4_000_000
SHARDS = 100  # most files that a corpus is cut into


def xz_filters() -> list[dict[str, int]]:
    """The filter chain of every `.xz` written here (`xz --lzma2=preset=6,dict=96MiB,lc=3,lp=1,pb=1`)."""
    import lzma

    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": XZ_DICT, "lc": 3, "lp": 1, "pb": 1}]


def compress(source: Path, target: Path, step: int = 8 << 20) -> int:
    """Write `source` as xz to `target`; returns the compressed size in bytes."""
    import lzma

    with source.open("rb") as read, lzma.open(target, "wb", filters=xz_filters()) as write:
        while block := read.read(step):
            write.write(block)
    return target.stat().st_size


def token_chunks(path: Path, dtype: str = "uint16", chunk: int = CHUNK) -> Iterator[Any]:
    """Yield the ids of a token file (little endian, `.xz` or plain) as arrays [<= chunk] of `dtype`."""
    import lzma

    import numpy as np

    if not path.is_file():
        raise ConfigError(f"token file {path} does not exist; give the file that `draftwood train pack` wrote")
    kind = np.dtype(dtype).newbyteorder("<")
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
        while True:
            try:
                block = stream.read(chunk * kind.itemsize)
            except (lzma.LZMAError, EOFError) as error:
                raise ConfigError(f"token file {path} is not a complete xz file ({error}); write it again") from None
            if len(block) % kind.itemsize:
                raise ConfigError(f"token file {path} is cut: its size is no multiple of {kind.itemsize} ({dtype})")
            if not block:
                return
            yield np.frombuffer(block, dtype=kind)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; run `draftwood train corpus` into that folder first")
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                raise ConfigError(f"{path} line {number} is not JSON; run `draftwood train corpus` again") from None


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line; returns the number of rows."""
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def report(rows: Iterable[tuple[str, Any]], facts: dict[str, Any]) -> None:
    """Print a two-column table for people, then `facts` as one line of JSON, last on stdout."""
    shown = [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in rows]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name:<{width}}  {value:>14}")
    print(json.dumps(facts))
