"""Answers with a form over HTTP: JSON that fits its schema, the same with trees and without, bombs refused."""

import json
import time

import pytest

from tests.server.test_hostile import CHAT, TALK

pytest.importorskip("xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def ask(client, **more):
    given = {"model": "nano", "messages": TALK, "max_tokens": 60, "seed": 3, "temperature": 0.8, **more}
    return client.chat.completions.create(**given)


def test_json_fits_its_schema_and_is_the_same_with_trees_and_without_streamed_or_not(client):
    answers = [ask(client, response_format=FORMAT, extra_body={"tree_budget": b}).choices[0] for b in (0, 16)]
    assert answers[0] == answers[1] and answers[0].finish_reason == "stop"
    found = json.loads(answers[0].message.content)
    assert set(found) == {"name", "count"} and isinstance(found["count"], int) and len(found["name"]) <= 12
    chunks = ask(client, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answers[0].message.content


def test_n_answers_each_fit(client):
    for choice in ask(client, response_format=FORMAT, n=3).choices:
        assert set(json.loads(choice.message.content)) == {"name", "count"}


def test_completions_take_a_regular_expression(server):
    form = {"type": "regex", "regex": "(yes|no), [0-9]{3}"}
    for seed in range(3):
        (choice,) = server.complete(prompt="x", max_tokens=20, seed=seed, response_format=form)["choices"]
        word, _, number = choice["text"].partition(", ")
        assert word in ("yes", "no") and len(number) == 3 and number.isdecimal()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_required_tool_is_called_with_arguments_that_fit(client, choice):
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("search", "find")]
    answer = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=200).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.id.startswith(f"functions.{call.function.name}:")
    assert call.function.name in (("find",) if choice != "required" else ("search", "find"))
    assert set(json.loads(call.function.arguments)) == {"name", "count"}
    assert call.id.endswith(":0"), "calls count over the conversation"


BOMBS = {
    "not a regular expression": {"type": "regex", "regex": "(a"},
    "not a grammar": {"type": "ebnf", "ebnf": "root ::= ::="},
    "a grammar without root": {"type": "ebnf", "ebnf": 'a ::= "b"'},
    "nested repeats": {"type": "regex", "regex": "(((a{1,999}){1,999}){1,999}){1,999}"},
    "a schema that refers to itself alone": {
        "type": "json_schema",
        "json_schema": {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    },
    "a bad reference": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/nothing"}}},
    "a bad pattern": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(("}}},
    "many levels": {
        "type": "json_schema",
        "json_schema": {"schema": json.loads('{"properties":{"a":' * 100 + "{}" + "}}" * 100)},
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_forms_that_cannot_be_used_are_refused_and_hold_nobody_up(server, name):
    server.complete(prompt="x", max_tokens=1, response_format={"type": "regex", "regex": "x"})  # the process that tries them runs
    began = time.monotonic()
    refused = server.post(CHAT, {"messages": TALK, "max_tokens": 2, "response_format": BOMBS[name]})
    took = time.monotonic() - began
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"].startswith("response_format")
    assert took < 4  # 0.6 s of a CPU that others use too
