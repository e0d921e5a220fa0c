"""Tools declared as K2 was trained to read them: a TypeScript namespace.

    # Tools

    ## functions
    namespace functions {
    // Weather of a place
    type get_weather = (_: {
      // Name of the city
      city: string,
      days?: number
    }) => any;
    }

The form is that of `tool_declaration_ts.py` beside Kimi K2.5 and K2.6. Object keys are sorted before, as their
tokenizers do, so that the order in which a client writes a schema does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_DEFINITIONS = "#/$defs/"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Keywords that are shown as a comment, by type, in order."""
_IN_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_PYTHON: dict[str, tuple[type, ...]] = {"string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,)}

Schema = Mapping[str, Any]


def sort_keys(value: Any) -> Any:
    """Return `value` with the keys of every object in order; lists keep theirs."""
    if isinstance(value, Mapping):
        return {key: sort_keys(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [sort_keys(item) for item in value]
    return value


def declare(tools: Sequence[Schema]) -> str:
    """Return the declaration of the tools of type function; empty when there are none.

    Raises ValueError for a schema that has no TypeScript form.
    """
    functions = [tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")]
    if not functions:
        return ""
    body = "\n".join(_Function(function).declare() for function in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


class _Function:
    """One function: its definitions and whether its parameters refer to themselves."""

    def __init__(self, function: Any) -> None:
        if not isinstance(function, Mapping):
            raise ValueError("function is not an object")
        self.name = function.get("name", "function")
        self.description = function.get("description")
        self.parameters = _mapping(function.get("parameters") or {})
        self.definitions: dict[str, Any] = {}
        self._find_definitions(self.parameters)
        self.recursive = False

    def _find_definitions(self, schema: Any) -> None:
        if isinstance(schema, Mapping):
            for name, definition in _mapping(schema.get("$defs") or {}).items():
                self.definitions.setdefault(name, definition)
            for value in schema.values():
                self._find_definitions(value)
        elif isinstance(schema, list):
            for value in schema:
                self._find_definitions(value)

    def declare(self) -> str:
        whole = self._object(self.parameters, "")  # also finds out whether they are recursive
        lines = []
        if self.recursive:
            fields = [self._field(name, schema, self.parameters, _INDENT) for name, schema in _properties(self.parameters)]
            whole = "parameters"
            lines.append("interface parameters {" + (_block(fields) if fields else "") + "}")
        for name, schema in self.definitions.items():
            text = f"interface {name} {self._type(schema, '')}"
            lines.append(_comment(_mapping(schema).get("description"), "") + text)
        if self.description:
            lines.append(_comment(self.description, "")[:-1])
        lines.append(f"type {self.name} = (_: {whole}) => any;")
        return "\n".join(line for line in lines if line)

    def _type(self, schema: Any, indent: str) -> str:
        """Return the type that a schema describes, its first line without indentation."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        schema = _mapping(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(one, indent) for one in _list(schema["anyOf"]))
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_in_union(one) for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if kind is None and schema:
            raise ValueError(f"schema without a type: {sorted(schema)}")
        return "number" if kind == "integer" else str(kind or "any")

    def _reference(self, target: Any) -> str:
        if target == "#":
            self.recursive = True
            return "parameters"
        name = str(target).removeprefix(_DEFINITIONS)
        if not str(target).startswith(_DEFINITIONS) or name not in self.definitions:
            raise ValueError(f"$ref {target!r} is not in $defs")
        return name

    def _object(self, schema: Schema, indent: str) -> str:
        inner = indent + _INDENT
        required = _required(schema)
        order = sorted(_properties(schema), key=lambda item: (item[0] not in required, str(item[0])))
        fields = [self._field(name, one, schema, inner) for name, one in order]
        extra = schema.get("additionalProperties")
        if isinstance(extra, bool):
            fields.append(f"{inner}[k: string]: {'any' if extra else 'never'}")
        elif extra is not None:
            fields.append(f"{inner}[k: string]: {self._type(extra, inner)}")
        return "{" + _block(fields) + indent + "}" if fields else "{}"

    def _field(self, name: str, schema: Any, owner: Schema, indent: str) -> str:
        notes = _notes(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            shown = repr(default) if isinstance(default, (int, float)) else json.dumps(default, ensure_ascii=False)
            notes += f"{indent}// Default: {shown}\n"
        mark = "" if name in _required(owner) else "?"
        return f"{notes}{indent}{name}{mark}: {self._type(schema, indent)}"

    def _array(self, schema: Schema, indent: str) -> str:
        item = schema.get("items") or True
        inner = indent + _INDENT
        notes = _notes(item, inner)
        if not notes:
            return f"Array<{self._type(item, indent)}>"
        return f"Array<\n{notes}{inner}{self._type(item, inner)}\n{indent}>"


def _mapping(value: Any) -> Schema:
    if not isinstance(value, Mapping):
        raise ValueError(f"{type(value).__name__} where a schema has an object")
    return value


def _properties(schema: Schema) -> list[tuple[str, Any]]:
    return list(_mapping(schema.get("properties", {})).items())


def _required(schema: Schema) -> list[Any]:
    return _list(schema.get("required", []))


def _block(fields: list[str]) -> str:
    return "\n" + ",\n".join(fields) + "\n"


def _comment(text: Any, indent: str) -> str:
    """Return the lines of a description as comments; empty lines stay empty."""
    if not text:
        return ""
    if not isinstance(text, str):
        raise ValueError("description is not text")
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n"))


def _notes(schema: Any, indent: str) -> str:
    """Return the comments before a field or an array's item: its description, then its limits."""
    if not isinstance(schema, Mapping):
        return ""
    kind = str(schema.get("type"))
    keys = () if schema.keys() & {"$ref", "anyOf", "enum"} else _CONSTRAINTS.get(kind, ())
    limits = [f"{key}: {schema[key]}" for key in keys if key in schema]
    return _comment(schema.get("description"), indent) + (f"{indent}// {', '.join(limits)}\n" if limits else "")


def _enum(schema: Schema) -> str:
    values, kind = _list(schema["enum"]), schema.get("type")
    if isinstance(kind, list):
        kinds = [one for one in kind if one != "null"] if len(kind) == 2 else kind
        if len(kinds) != 1:
            raise ValueError(f"enum of types {kind}")
        kind = kinds[0]
    expected = _PYTHON.get(str(kind))
    for value in values:
        if expected and value is not None and not isinstance(value, expected):
            raise ValueError(f"enum value {value!r} is no {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _in_union(kind: Any) -> str:
    if not isinstance(kind, str) or kind not in _IN_UNION:
        raise ValueError(f"type {kind!r}")
    return _IN_UNION[kind]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} where a schema has a list")
    return value
