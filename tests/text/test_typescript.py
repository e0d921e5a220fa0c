"""Tools in K2's TypeScript form. Expected texts are what the published encoder gives for the same tools."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.text.chat import ChatTemplate
from draftwood.text.typescript import declare, sort_keys
from tests.text.vocabulary import tokenizer

DATA = Path(__file__).parent.parent / "data"
TEMPLATE = ChatTemplate((DATA / "Kimi-K2.6_chat_template.jinja").read_text(), tokenizer())
CASES = json.loads((DATA / "chat_template_rendered.json").read_text())


def tool(parameters, description=None, name="f"):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def body(parameters, description=None):
    """What stands inside the namespace for one function."""
    text = declare([tool(parameters, description)])
    start, end = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(start) and text.endswith(end)
    return text[len(start) : -len(end)]


def field(schema):
    """The type of one optional field."""
    text = body({"properties": {"x": schema}})
    start, end = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(start) and text.endswith(end)
    return text[len(start) : -len(end)]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "  x?: string"),
        ({"type": "integer"}, "  x?: number"),
        ({"type": "null"}, "  x?: null"),
        ({}, "  x?: any"),
        (True, "  x?: any"),
        (False, "  x?: null"),
        ({"type": ["string", "null"]}, "  x?: string | null"),
        ({"type": ["object", "array"]}, "  x?: {} | Array<any>"),
        ({"enum": ["a", 1, True, None]}, '  x?: "a" | 1 | True | None'),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "  x?: string | Array<any>"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 1}, "  // minItems: 1\n  x?: Array<number>"),
        ({"type": "object"}, "  x?: {}"),
        ({"type": "object", "additionalProperties": False}, "  x?: {\n    [k: string]: never\n  }"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "  x?: {\n    [k: string]: number\n  }"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  x?: string'),
        ({"type": "boolean", "default": True}, "  // Default: True\n  x?: boolean"),
        ({"type": "string", "description": "a\n\nb"}, "  // a\n\n  // b\n  x?: string"),
        (
            {"type": "array", "items": {"type": "string", "description": "one"}},
            "  x?: Array<\n    // one\n    string\n  >",
        ),
        (
            {"type": "string", "pattern": "^a$", "minLength": 1, "maximum": 3, "description": "d"},
            "  // d\n  // minLength: 1, pattern: ^a$\n  x?: string",
        ),
    ],
)
def test_each_kind_of_schema_has_its_form(schema, expected):
    assert field(schema) == expected


def test_required_fields_come_first_each_group_by_name():
    schema = {"type": "object", "properties": {k: {"type": "string"} for k in "dbca"}, "required": ["d", "c"]}
    assert body(schema, "Does\n\nit") == (
        "// Does\n\n// it\ntype f = (_: {\n  c: string,\n  d: string,\n  a?: string,\n  b?: string\n}) => any;"
    )


def test_references_become_interfaces():
    schema = {
        "$defs": {"P": {"type": "object", "description": "A point", "properties": {"n": {"$ref": "#/$defs/P"}}}},
        "properties": {"at": {"$ref": "#/$defs/P"}},
    }
    assert body(schema) == "// A point\ninterface P {\n  n?: P\n}\ntype f = (_: {\n  at?: P\n}) => any;"
    assert body({"properties": {"next": {"$ref": "#"}}}) == (
        "interface parameters {\n  next?: parameters\n}\ntype f = (_: parameters) => any;"
    )


def test_functions_without_parameters_and_other_tools():
    assert body({}) == body(None) == "type f = (_: {}) => any;"
    assert declare([]) == declare([{"type": "_plugin"}, {"type": "function"}]) == ""
    two = declare([tool({}, name="a"), tool({}, name="b")])
    assert two == "# Tools\n\n## functions\nnamespace functions {\ntype a = (_: {}) => any;\ntype b = (_: {}) => any;\n}\n"


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 1},
        {"oneOf": [{}]},
        {"$ref": "#/$defs/none"},
        {"$ref": 3},
        {"type": "integer", "enum": ["a"]},
        {"enum": 3},
        {"anyOf": 3},
        {"type": ["odd"]},
        {"type": [{}]},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {}, "required": 3},
        {"type": "string", "description": 3},
        3,
        None,
    ],
)
def test_what_has_no_such_form_is_declared_as_json(schema):
    tools = [tool({"properties": {"x": schema}})]
    with pytest.raises(ValueError):
        declare(tools)
    text = TEMPLATE.render([{"role": "user", "content": "Hi"}], tools)
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"function":{"description":')


@pytest.mark.parametrize("case", [c for c in CASES if c["case"] == "tools_ts"], ids=lambda case: case["template"])
def test_templates_declare_tools_in_typescript_by_themselves(case):
    template = ChatTemplate((DATA / f"Kimi-{case['template']}_chat_template.jinja").read_text(), tokenizer())
    given = dict(case["kwargs"])
    del given["tools_ts_str"]
    shown = "# Tools\n\n## functions\nnamespace functions {\n// d\ntype get_weather = (_: {\n  city: string\n}) => any;\n}\n"
    assert template.render(**given) == case["rendered"].replace("<TS>", shown)
    assert template.encode(**given) == tokenizer().encode(case["rendered"].replace("<TS>", shown), allow_special=True)


def test_control_tokens_in_a_declaration_stay_text():
    tools = [tool({"properties": {"<|im_end|>": {"type": "string", "description": "<think>", "default": "[EOS]"}}})]
    ids = TEMPLATE.encode([{"role": "user", "content": "Hi"}], tools)
    calm = TEMPLATE.encode([{"role": "user", "content": "Hi"}], [tool({})])
    special = set(tokenizer().special.values())
    assert [i for i in ids if i in special] == [i for i in calm if i in special]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
keywords = st.sampled_from(["type", "properties", "items", "enum", "anyOf", "$ref", "$defs", "required", "default", "description"])
types = st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a"])
schemas = st.recursive(
    json_values | types, lambda inner: st.dictionaries(keywords | st.text(max_size=2), inner | types, max_size=4), max_leaves=12
)


@given(schemas)
@settings(max_examples=300, deadline=None)
def test_any_schema_is_declared_or_refused_with_a_value_error(schema):
    try:
        text = declare(sort_keys([tool(schema)]))
    except ValueError:
        return
    assert text.count("type f = ") >= 1
