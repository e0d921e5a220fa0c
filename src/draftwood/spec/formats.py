"""What an answer may look like: the form of a request's `response_format` and tool choice, checked, with limits.

`response_format` is one of

    {"type": "text"}                                             anything
    {"type": "json_object"}                                      any JSON object
    {"type": "json_schema", "json_schema": {"schema": {...}}}    JSON that fits a schema
    {"type": "regex", "regex": "..."}                            text that matches as a whole
    {"type": "ebnf", "ebnf": "root ::= ..."}                     text of a grammar, in xgrammar's EBNF

JSON is written on one line, and in the arguments of a tool there is at most one space at a time, so that no answer
loses itself in whitespace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.errors import RequestError

MAX_SCHEMA, MAX_REGEX, MAX_EBNF = 64 << 10, 1024, 16 << 10
"""Characters of a schema (as JSON), of one regular expression, of a grammar."""
MAX_DEPTH = 64
"""Levels of objects and lists in a schema, of brackets in a regular expression or a grammar."""
MAX_TOOLS = 128
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names and whose values are schemas."""
_VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold no schemas."""
_LOOSE = (
    "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems", "contains", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
"""Keywords that xgrammar 0.2 reads over."""
KINDS = ("json", "regex", "ebnf", "tag")


@dataclass(frozen=True)
class Grammar:
    """A grammar as text. `text` is, by kind, a JSON schema, a regular expression, EBNF, or xgrammar's structural tag.

    `opens`: the token it begins with where that token ends the reasoning by itself, as a tool section does.
    `reasoning`: the answer begins inside reasoning, which the grammar leaves alone. `param`: the field it came from.
    """

    kind: str
    text: str
    opens: int | None = None
    reasoning: bool = False
    param: str = "response_format"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar of kind {self.kind!r}; known: {', '.join(KINDS)}")


def response_grammar(value: Any) -> Grammar | None:
    """Return the grammar of a `response_format`, None for text. Raises RequestError for anything else."""
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {type(value).__name__}, not an object with a type", name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json", '{"type":"object"}')
    if kind == "json_schema":
        holder = value.get("json_schema")
        if not isinstance(holder, Mapping) or "schema" not in holder:
            raise RequestError(f"{name}.json_schema has no schema", f"{name}.json_schema")
        return Grammar("json", check_schema(holder["schema"], f"{name}.json_schema.schema"))
    if kind in ("regex", "ebnf"):
        limit = MAX_REGEX if kind == "regex" else MAX_EBNF
        return Grammar(kind, _check_text(value.get(kind), f"{name}.{kind}", limit))
    known = "text, json_object, json_schema, regex or ebnf"
    raise RequestError(f"{name}.type {_short(kind)} is not known; use {known}", f"{name}.type")


def check_schema(schema: Any, at: str, strict: bool = True) -> str:
    """Return a JSON schema as compact JSON. Raises RequestError naming `at` for one that is too large or no schema.

    `strict`: refuse keywords that the grammar would not hold, too.
    """
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(f"{at} is {type(schema).__name__}, not a JSON schema", at)
    if _depth(schema, MAX_DEPTH) > MAX_DEPTH:
        raise RequestError(f"{at} is nested more than {MAX_DEPTH} levels deep; flatten it, for example with $defs", at)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise RequestError(f"{at} is not JSON: {error}", at) from None
    if len(text) > MAX_SCHEMA:
        raise RequestError(f"{at} has {len(text)} characters; at most {MAX_SCHEMA} are taken", at)
    for part in _schemas(schema):
        for pattern in _patterns(part):
            _check_text(pattern, f"{at} (a pattern in it)", MAX_REGEX, at)
        loose = _not_held(part) if strict else None
        if loose:
            raise RequestError(f"{at} has {loose}, which cannot be guaranteed; leave it out and check the answer", at)
    return text


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    name: str | None = None,
    parallel: bool = True,
    first: int | None = None,
) -> Grammar:
    """Return the grammar of an answer that must call tools: any of `tools`, or the one called `name`.

    `special`: the vocabulary's special tokens; `parallel`: more than one call is allowed (a named tool is called once);
    `first`: calls that the conversation holds already, from which K2 numbers on (only a single call can be held to it).
    Raises RequestError for a name that is not there, a bad schema, or a vocabulary without K2's tool tokens.
    """
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools are too many for tool_choice; at most {MAX_TOOLS} can be required", "tools")
    chosen = [(i, tool["function"]) for i, tool in enumerate(tools) if name in (None, tool["function"]["name"])]
    if not chosen:
        there = f"no tool is called {_short(name)}" if tools else "there are no tools"
        raise RequestError(f"tool_choice asks for a call but {there}", "tool_choice")
    try:
        section, end = special["<|tool_calls_section_begin|>"], special["<|tool_calls_section_end|>"]
        begin, argument = special["<|tool_call_begin|>"], special["<|tool_call_argument_begin|>"]
        call_end = special["<|tool_call_end|>"]
    except KeyError as missing:
        raise RequestError(f"this model's vocabulary has no token {missing.args[0]}; it cannot be made to call tools",
                           "tool_choice") from None  # fmt: skip
    once = name is not None or not parallel
    number = str(first) if once and first is not None else "(0|[1-9][0-9]{0,2})"
    calls = []
    for i, function in chosen:
        at = f"tools[{i}].function.parameters"
        schema = json.loads(check_schema(function.get("parameters") or {"type": "object"}, at, strict=False))
        content = [
            {"type": "const_string", "value": f"functions.{function['name']}:"},
            {"type": "regex", "pattern": number},
            _token(argument),
            {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1},
        ]
        inner = {"type": "sequence", "elements": content}
        calls.append({"type": "tag", "begin": _token(begin), "content": inner, "end": _token(call_end)})
    some = {"type": "tags_with_separator", "tags": calls, "separator": "", "at_least_one": True, "stop_after_first": once}
    whole = {"type": "sequence", "elements": [_token(section), some, _token(end)]}
    text = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False, separators=(",", ":"))
    return Grammar("tag", text, opens=section, param="tools")


def _token(id: int) -> dict[str, Any]:
    return {"type": "token", "token": id}


def _check_text(text: Any, at: str, limit: int, param: str | None = None) -> str:
    """Return a regular expression or a grammar if it is text within the limits."""
    param = param or at
    if not isinstance(text, str) or not text:
        raise RequestError(f"{at} is {'empty' if text == '' else type(text).__name__ + ', not text'}", param)
    if len(text) > limit:
        raise RequestError(f"{at} has {len(text)} characters; at most {limit} are taken", param)
    if any(0xD800 <= ord(c) < 0xE000 or c == "\0" for c in text):
        raise RequestError(f"{at} has a character that no answer can hold (a lone surrogate or U+0000)", param)
    depth = most = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        most = max(most, depth)
    if most > MAX_DEPTH:
        raise RequestError(f"{at} has more than {MAX_DEPTH} brackets inside one another; flatten it", param)
    return text


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema inside it."""
    stack = [schema]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, tuple)):
            stack += one
        elif isinstance(one, Mapping):
            yield one
            for key, value in one.items():
                if key in _NAMED and isinstance(value, Mapping):
                    stack += value.values()
                elif key not in _VALUES:
                    stack.append(value)


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of one schema."""
    keyed = schema.get("patternProperties")
    found = [schema.get("pattern"), *(keyed if isinstance(keyed, Mapping) else ())]
    return [pattern for pattern in found if isinstance(pattern, str) and pattern]


def _not_held(schema: Mapping[str, Any]) -> str | None:
    """Return what of one schema xgrammar would let pass, None if it holds all of it."""
    for key in _LOOSE:
        if schema.get(key) not in (None, False):
            return key
    every = schema.get("allOf")
    if isinstance(every, list) and len(every) > 1:
        return "allOf of more than one schema"
    if "multipleOf" in schema and schema.get("type") != "integer":
        return "multipleOf of anything but integers"
    if "pattern" in schema and schema.keys() & {"minLength", "maxLength"}:
        return "pattern together with minLength or maxLength"
    return None


def _depth(value: Any, limit: int) -> int:
    """Return how deep objects and lists are nested, counting no further than one above `limit`."""
    level, depth = [value], 0
    while level and depth <= limit:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += one.values()
            elif isinstance(one, (list, tuple)):
                inner += one
        level = inner
        depth += bool(level)
    return depth


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
