"""Where tensors come from: safetensors files on disk, checked before any is read, or seeded random numbers.

A source answers `read(name, rows, columns)` with just that part of a tensor, so that a rank never holds a whole one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.model.fields import Fields, parse_json, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
FLOATS, PACKED, SCALE, SHAPE = ("BF16", "F16", "F32"), ("I32",), ("BF16",), ("I64", "I32")


@dataclass(frozen=True)
class Expected:
    """What a tensor must look like: its shape, and the file types it may have."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Entry:
    """What a file's header says about one tensor."""

    file: Path
    type: str
    shape: tuple[int, ...]


class Source(Protocol):
    """Answers with a part of a named tensor; None means all of that dimension."""

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor: ...


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors in a safetensors file, having checked that the file holds them all.

    Raises ConfigError naming the file when it is missing, unreadable, malformed or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            text = file.read(length) if 0 < length <= size - 8 else b""
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; download the checkpoint again") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    if not text:
        raise ConfigError(f"{path} is truncated: {size} bytes do not hold its header; download it again")
    try:
        header = parse_json(text)
        entries, end = _entries(header, path)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path} has a header that is not safetensors; download it again") from None
    if size != 8 + length + end:
        word = "truncated" if size < 8 + length + end else "too long"
        raise ConfigError(f"{path} is {word}: {size} bytes, its header says {8 + length + end}; download it again")
    return entries


def _entries(header: Mapping[str, Any], path: Path) -> tuple[dict[str, Entry], int]:
    entries, spans = {}, []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        shape, (start, stop) = tuple(int(n) for n in info["shape"]), info["data_offsets"]
        width = BYTES.get(info["dtype"])
        if width is not None and stop - start != width * math.prod(shape):
            raise ValueError(name)
        entries[name] = Entry(path, str(info["dtype"]), shape)
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):  # without holes and overlaps, as the format demands
        if start != end or stop < start:
            raise ValueError(start)
        end = stop
    return entries, end


class Files:
    """All tensors of a checkpoint folder: one safetensors file, or shards with an index."""

    def __init__(self, folder: Path | str) -> None:
        """Read every header. Raises ConfigError for missing, truncated or contradictory files."""
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        self._open: dict[Path, Any] = {}
        index = self.folder / INDEX
        try:
            sharded, single = index.exists(), (self.folder / SINGLE).exists()
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read ({error.strerror}); check its permissions") from None
        if sharded:
            self._read_index(index)
        elif single:
            self.entries = read_header(self.folder / SINGLE)
        else:
            raise ConfigError(f"{self.folder} holds neither {INDEX} nor {SINGLE}; give a folder with weights")

    def _read_index(self, index: Path) -> None:
        where = Fields(read_json(index), str(index)).object("weight_map")
        if where is None or not where.data:
            raise ConfigError(f"{index}: weight_map is missing or empty; download it again")
        names: dict[str, set[str]] = {}
        for name, file in where.data.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{index}: {name} is in {file!r}, not a file of this folder; download it again")
            names.setdefault(file, set()).add(name)
        for file in sorted(names):
            found = read_header(self.folder / file)
            for name in found:
                if name in self.entries:
                    raise ConfigError(
                        f"{self.folder / file}: tensor {name} is also in {self.entries[name].file.name}; "
                        "keep one of them"
                    )
            if absent := sorted(names[file] - found.keys()):
                raise ConfigError(f"{self.folder / file}: tensor {absent[0]} is missing, {INDEX} says it is there")
            self.entries.update(found)

    def find_prefix(self, candidates: Iterable[str], probe: str) -> str:
        """Return the first candidate prefix under which tensor `probe` exists; the first candidate when none does."""
        options = list(candidates)
        return next((p for p in options if p + probe in self.entries), options[0])

    def check(self, expected: Mapping[str, Expected], skip: tuple[str, ...] = ()) -> None:
        """Check that these tensors and no others are there, with their shapes and types.

        Names that start with one of `skip` are left alone. Raises ConfigError for the first gap, leftover or mismatch.
        """
        gaps = [name for name in expected if name not in self.entries]
        if gaps:
            more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
            raise ConfigError(f"{self.folder}: tensor {gaps[0]} is missing{more}; download the checkpoint again")
        left = sorted(name for name in self.entries if name not in expected and not name.startswith(skip))
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ConfigError(f"{self.entries[left[0]].file}: tensor {left[0]}{more} is not part of this architecture")
        for name, want in expected.items():
            entry = self.entries[name]
            if entry.shape != want.shape:
                raise self.fail(name, f"has shape {list(entry.shape)}, config.json makes it {list(want.shape)}")
            if entry.type not in want.types:
                raise self.fail(name, f"is {entry.type}, this engine reads {' or '.join(want.types)}")

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return [rows, columns] of a tensor in its file type, on the CPU, without reading the rest."""
        entry = self.entries[name]
        handle = self._open.get(entry.file)
        if handle is None:
            try:
                handle = self._open[entry.file] = safe_open(str(entry.file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{entry.file} cannot be opened ({error}); download it again") from None
        part: Tensor
        r = slice(None) if rows is None else slice(rows.start, rows.stop)
        if columns is not None:
            part = handle.get_slice(name)[r, columns.start : columns.stop]
        else:
            part = handle.get_tensor(name) if rows is None else handle.get_slice(name)[r]
        return part

    def fail(self, name: str, text: str) -> ConfigError:
        """Return an error about one tensor, naming its file."""
        return ConfigError(f"{self.entries[name].file}: tensor {name} {text}")


class Random:
    """Random tensors of the expected shapes, the same for every rank: seeded by (seed, name)."""

    def __init__(self, expected: Mapping[str, Expected], device: torch.device | str, seed: int = 0) -> None:
        self.expected, self.device, self.seed = expected, torch.device(device), seed

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return [rows, columns] of the tensor: norms 1, INT4 codes of random bits, the rest of variance 1 / inputs."""
        want = self.expected[name]
        shape, inputs = want.shape, want.shape[-1]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        if want.types == PACKED:
            full = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=self.device, generator=generator)
        elif want.types == SCALE:
            # Codes -8..7 have a mean square of 21.5: this keeps the output's variance at the input's.
            level = (21.5 * inputs * 32) ** -0.5
            full = torch.full(shape, level, dtype=torch.bfloat16, device=self.device)
        elif want.types == SHAPE:
            raise KeyError(name)
        elif "norm" in name.rsplit(".", 2)[-2]:
            full = torch.ones(shape, device=self.device)
        else:
            scale = 0.02 if len(shape) == 1 or "embed" in name else inputs**-0.5
            full = torch.randn(shape, device=self.device, generator=generator).mul_(scale)
        if rows is not None:
            full = full[rows.start : rows.stop]
        return full if columns is None else full[:, columns.start : columns.stop]
