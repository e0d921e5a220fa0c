"""Typed look-ups in a JSON file, each failure one ConfigError line. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {brief(twice)} stands twice")
    return found


def parse_json(text: bytes) -> Any:
    """Return the value of JSON text. Raises ValueError for NaN, infinities, doubled keys and what is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def brief(value: Any) -> str:
    """Return the value's repr on one line, cut to a length that an error line bears."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ConfigError when it cannot be read, parsed, or is not an object."""
    try:
        data = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a checkpoint folder that has it") from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent} is not a folder; give a checkpoint folder") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({str(error).splitlines()[0]}); download it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a JSON {type(data).__name__}, not an object; download it again")
    return data


class Fields:
    """Typed look-ups in one JSON object; `where` opens every error line."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, text: str) -> ConfigError:
        """Return the error `text` about this object."""
        return ConfigError(" ".join(f"{self.where}: {text}".split()))

    def get(self, name: str) -> Any:
        """Return the field's value. Raises ConfigError when it is missing or null."""
        value = self.data.get(name)
        if value is None:
            raise self.fail(f"field {name!r} is missing; a K2 checkpoint states it")
        return value

    def integer(self, name: str, low: int = 1, high: int = 1 << 31, default: int | None = None) -> int:
        """Return a whole number within low..high; `default` when the field is missing or null."""
        if default is not None and self.data.get(name) is None:
            return default
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"{name} = {brief(value)} is not a whole number")
        if not low <= value <= high:
            raise self.fail(f"{name} = {value} is outside {low}..{high}")
        return value

    def number(self, name: str, low: float = 0.0, default: float | None = None) -> float:
        """Return a finite number above `low`; `default` when the field is missing or null."""
        if default is not None and self.data.get(name) is None:
            return default
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"{name} = {brief(value)} is not a finite number")
        if value <= low:
            raise self.fail(f"{name} = {value} must be above {low:g}")
        return float(value)

    def expect(self, name: str, allowed: tuple[Any, ...], required: bool = False) -> None:
        """Check that a fixed fact holds: the field is one of `allowed`, or missing where its default says the same."""
        value = self.data.get(name)
        if value is None and not required:
            return
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            raise self.fail(f"{name} = {brief(value)} is not supported; this engine runs {name} = {allowed[0]!r} only")

    def object(self, name: str) -> Fields | None:
        """Return the nested object `name`, None when it is missing or null."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(f"{name} is {brief(value)}, not an object")
        return Fields(value, f"{self.where}: {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers >= 0 (a single number counts as a list of one)."""
        value = self.get(name)
        items = value if isinstance(value, list) else [value]
        if not items or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in items):
            raise self.fail(f"{name} = {brief(value)} is not a list of whole numbers")
        return tuple(items)
