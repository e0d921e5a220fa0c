"""Which function a tool call is for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ID = re.compile(r"(?:functions\.)?(\S+):\d+")

Signature = tuple[frozenset[str], frozenset[str]]
"""Names of a tool's parameters: all, required."""


def signatures(tools: Sequence[Mapping[str, Any]]) -> dict[str, Signature]:
    """Return what is known of each tool, by name. Odd schemas are as if they named no parameter."""
    out: dict[str, Signature] = {}
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            continue
        schema = function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else {}
        every, required = schema.get("properties"), schema.get("required")
        out[name] = (
            frozenset(every if isinstance(every, Mapping) else ()),
            frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset(),
        )
    return out


def call_name(id: str, tools: Mapping[str, Signature]) -> str | None:
    """Return the function that a call's id names: `functions.NAME:0`, `NAME:0`, or the bare name of a known tool."""
    found = _ID.fullmatch(id)
    bare = found[1] if found else id.removeprefix("functions.")
    return bare if found or bare in tools else None


def guess_name(arguments: str, tools: Mapping[str, Signature]) -> str | None:
    """Return the only tool that takes these arguments: ids copied from other systems do not name it."""
    if len(tools) == 1:
        return next(iter(tools))
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    fitting = [name for name, (every, required) in tools.items() if required <= given.keys() <= every]
    return fitting[0] if len(fitting) == 1 else None
