"""What `response_format` and tool choice may ask for, and what is refused before any grammar is compiled."""

import json

import pytest

from draftwood.errors import RequestError
from draftwood.spec.formats import MAX_DEPTH, MAX_REGEX, MAX_SCHEMA, Grammar, response_grammar, tool_grammar

SPECIAL = {
    name: 100 + i
    for i, name in enumerate(
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        )
    )
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_every_form_gives_its_grammar():
    assert response_grammar(None) is response_grammar({"type": "text"}) is None
    assert response_grammar({"type": "json_object"}) == Grammar("json", '{"type":"object"}')
    assert response_grammar(schema({"type": "string", "x": "é"})) == Grammar("json", '{"type":"string","x":"é"}')
    assert response_grammar(schema(True)) == Grammar("json", "true")
    assert response_grammar({"type": "regex", "regex": "a+"}) == Grammar("regex", "a+")
    assert response_grammar({"type": "ebnf", "ebnf": 'root ::= "a"'}) == Grammar("ebnf", 'root ::= "a"')


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (3, "response_format"),
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": 3}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema"),
        (schema(None), "response_format.json_schema.schema"),
        (schema([]), "response_format.json_schema.schema"),
        (schema(nested(MAX_DEPTH + 1)), "response_format.json_schema.schema"),
        (schema({"enum": ["x" * MAX_SCHEMA]}), "response_format.json_schema.schema"),
        (schema({"pattern": "a" * (MAX_REGEX + 1)}), "response_format.json_schema.schema"),
        (schema({"patternProperties": {"(" * 100: {}}}), "response_format.json_schema.schema"),
        (schema({"const": float("nan")}), "response_format.json_schema.schema"),
        (schema({"const": "\ud800"}), "response_format.json_schema.schema"),
        ({"type": "regex"}, "response_format.regex"),
        ({"type": "regex", "regex": ""}, "response_format.regex"),
        ({"type": "regex", "regex": "a" * (MAX_REGEX + 1)}, "response_format.regex"),
        ({"type": "regex", "regex": "(" * 65 + "a" + ")" * 65}, "response_format.regex"),
        ({"type": "regex", "regex": "\ud800"}, "response_format.regex"),
        ({"type": "ebnf", "ebnf": 3}, "response_format.ebnf"),
    ],
    ids=lambda value: str(value)[:40].replace("\ud800", "?"),
)
def test_what_cannot_be_used_is_refused_with_its_field_named(value, param):
    with pytest.raises(RequestError) as refused:
        response_grammar(value)
    assert refused.value.param == param
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "part",
    [
        {"not": {"type": "string"}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"contains": {}},
        {"dependentRequired": {"a": ["b"]}},
        {"allOf": [{}, {}]},
        {"type": "number", "multipleOf": 2},
        {"type": "string", "pattern": "a", "maxLength": 3},
    ],
)
def test_what_a_grammar_would_let_pass_is_refused_for_an_answer_and_taken_for_a_tool(part):
    whole = {"type": "object", "properties": {"x": {"anyOf": [{"items": part}]}}}
    with pytest.raises(RequestError, match="cannot be guaranteed"):
        response_grammar(schema(whole))
    tool_grammar([{"type": "function", "function": {"name": "f", "parameters": whole}}], SPECIAL)


def test_names_and_values_are_not_taken_for_keywords():
    names = {"not": {"type": "string"}, "if": {"const": {"contains": 1, "pattern": "("}}, "pattern": {"enum": [{"not": 1}]}}
    value = {"type": "object", "properties": names, "$defs": {"contains": {"allOf": [{"type": "integer", "multipleOf": 2}]}}}
    assert json.loads(response_grammar(schema(value)).text) == value


def test_nesting_beyond_any_recursion_is_refused():
    with pytest.raises(RequestError, match="nested more than"):
        response_grammar(schema(nested(100_000)))


def test_a_required_call_may_name_any_tool_and_a_named_one_is_called_once():
    whole = json.loads(tool_grammar(TOOLS, SPECIAL).text)["format"]["elements"]
    assert whole[0] == {"type": "token", "token": SPECIAL["<|tool_calls_section_begin|>"]}
    assert len(whole[1]["tags"]) == 2 and not whole[1]["stop_after_first"]
    named = tool_grammar(TOOLS, SPECIAL, "g")
    one = json.loads(named.text)["format"]["elements"][1]
    assert len(one["tags"]) == 1 and one["stop_after_first"]
    assert one["tags"][0]["content"]["elements"][0]["value"] == "functions.g:"
    assert (named.opens, named.param) == (SPECIAL["<|tool_calls_section_begin|>"], "tools")
    numbered = json.loads(tool_grammar(TOOLS, SPECIAL, "g", first=7).text)["format"]["elements"][1]["tags"][0]
    assert numbered["content"]["elements"][1]["pattern"] == "7"
    assert json.loads(tool_grammar(TOOLS, SPECIAL, parallel=False).text)["format"]["elements"][1]["stop_after_first"]


@pytest.mark.parametrize(
    ("tools", "special", "name", "param"),
    [
        (TOOLS, SPECIAL, "h", "tool_choice"),
        ([], SPECIAL, None, "tool_choice"),
        (TOOLS, {}, None, "tool_choice"),
        (TOOLS * 100, SPECIAL, None, "tools"),
        ([{"function": {"name": "f", "parameters": nested(99)}}], SPECIAL, None, "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": [1]}}], SPECIAL, None, "tools[0].function.parameters"),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(tools, special, name, param):
    with pytest.raises(RequestError) as refused:
        tool_grammar(tools, special, name)
    assert refused.value.param == param


def test_an_unknown_kind_is_a_bug():
    with pytest.raises(ValueError, match="known: json"):
        Grammar("xml", "")
