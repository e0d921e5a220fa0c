"""Malformed requests: each is a 4xx within a second that names the field, and the server is as it was."""

import json
import time

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
MANY = 10_000_000


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


RAW = {
    "empty": (b"", "body"),
    "not json": (b"{prompt: hello}", "body"),
    "cut off": (b'{"prompt": "hel', "body"),
    "trailing": (b'{"prompt": "a"} x', "body"),
    "a list": (b"[]", "body"),
    "a text": (b'"prompt"', "body"),
    "a number": (b"1", "body"),
    "null": (b"null", "body"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "body"),
    "Infinity": (b'{"prompt": "a", "temperature": Infinity}', "body"),
    "overflow": (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    "long integer": (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", "body"),
    "large integer": (b'{"prompt": "a", "seed": ' + b"9" * 100 + b"}", "seed"),
    "latin-1": (b'{"prompt": "caf\xe9"}', "body"),
    "broken utf-8": (b'{"prompt": "\xf0\x9f\x98"}', "body"),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), "body"),
    "surrogate bytes": (b'{"prompt": "\xed\xa0\x80"}', "body"),
    "nul bytes": (b"\x00" * 100, "body"),
    "lone surrogate": (rb'{"prompt": "a\ud800"}', "prompt"),
    "reversed pair": (rb'{"prompt": "\ude00\ud83d"}', "prompt"),
    "surrogate in a name": (rb'{"prompt": "a", "\ud800": 1}', "\\ud800"),
    "surrogate in a stop": (rb'{"prompt": "a", "stop": ["\udfff"]}', "stop"),
    "deep field": (f'{{"prompt": "a", "metadata": {nested(500)}}}'.encode(), "metadata"),
    "deeper field": (f'{{"prompt": "a", "x": {nested(100_000)}}}'.encode(), "body"),
    "deep prompt": (f'{{"prompt": {nested(300)}}}'.encode(), "prompt"),
    "only depth": (b"[" * 200_000, "body"),
    "deep objects": (b'{"a":' * 200_000, "body"),
    "10 MB text": (b'{"prompt": "' + b"a" * MANY + b'"}', "body"),
    "10 MB of spaces": (b" " * MANY, "body"),
    "10 MB number": (b'{"seed": ' + b"1" * MANY + b"}", "body"),
}

BOTH = {
    "model type": ({"model": 5}, "model"),
    "model unknown": ({"model": "x" * 5000}, "model"),
    "n zero": ({"n": 0}, "n"),
    "n huge": ({"n": 10**9}, "n"),
    "n negative": ({"n": -1}, "n"),
    "n text": ({"n": "2"}, "n"),
    "n true": ({"n": True}, "n"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens"),
    "max_tokens float": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": 10**30}, "max_tokens"),
    "temperature negative": ({"temperature": -1}, "temperature"),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "temperature huge": ({"temperature": 1e300}, "temperature"),
    "temperature list": ({"temperature": [1]}, "temperature"),
    "top_p above": ({"top_p": 1.1}, "top_p"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "top_k negative": ({"top_k": -7}, "top_k"),
    "top_k float": ({"top_k": 2.5}, "top_k"),
    "min_p above": ({"min_p": 2}, "min_p"),
    "seed float": ({"seed": 1.5}, "seed"),
    "seed text": ({"seed": "1"}, "seed"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop number": ({"stop": 5}, "stop"),
    "stop mixed": ({"stop": ["a", 1]}, "stop"),
    "stop many": ({"stop": ["a"] * 1000}, "stop"),
    "stop long": ({"stop": "a" * 100_000}, "stop"),
    "stop ids text": ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    "stop ids outside": ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    "stop ids negative": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "bias list": ({"logit_bias": [1]}, "logit_bias"),
    "bias key": ({"logit_bias": {"the": 1}}, "logit_bias"),
    "bias key minus": ({"logit_bias": {"-1": 1}}, "logit_bias"),
    "bias key outside": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "bias value": ({"logit_bias": {"1": 1000}}, "logit_bias"),
    "bias value text": ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
    "bias many": ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    "presence": ({"presence_penalty": 3}, "presence_penalty"),
    "frequency": ({"frequency_penalty": -3}, "frequency_penalty"),
    "repetition": ({"repetition_penalty": 0}, "repetition_penalty"),
    "ignore_eos": ({"ignore_eos": "yes"}, "ignore_eos"),
    "min_tokens above max_tokens": ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    "min_tokens with stops": ({"max_tokens": 5, "min_tokens": 1, "stop": "a"}, "min_tokens"),
    "budget huge": ({"tree_budget": 1000}, "tree_budget"),
    "budget above the engine's": ({"tree_budget": 64}, "tree_budget"),
    "budget text": ({"tree_budget": "big"}, "tree_budget"),
    "budget object": ({"tree_budget": {}}, "tree_budget"),
    "stream text": ({"stream": "true"}, "stream"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stream options type": ({"stream": True, "stream_options": 1}, "stream_options"),
    "stream options inner": ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    "best_of": ({"best_of": 2}, "best_of"),
    "beam search": ({"use_beam_search": True}, "use_beam_search"),
    "echo": ({"echo": True}, "echo"),
    "bad words": ({"bad_words": ["a"]}, "bad_words"),
    "prompt logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "timings": ({"timings": 1}, "timings"),
}

CHATS = {
    "no messages": ({"messages": None}, "messages"),
    "messages empty": ({"messages": []}, "messages"),
    "messages text": ({"messages": "Hi"}, "messages"),
    "messages numbers": ({"messages": [1, 2]}, "messages[0]"),
    "messages object": ({"messages": {"role": "user"}}, "messages"),
    "role unknown": ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    "role missing": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "role list": ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    "role long": ({"messages": [{"role": "u" * 90_000, "content": "a"}]}, "messages[0].role"),
    "content missing": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "content object": ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "messages[0].content"),
    "part number": ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        "messages[0].content[0]",
    ),
    "audio": (
        {"messages": [*TALK, {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[1].content[0]",
    ),
    "tool without id": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]},
        "messages[0].tool_calls",
    ),
    "call without name": ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0]"),
    "tools text": ({"tools": "f"}, "tools"),
    "tools numbers": ({"tools": [1]}, "tools[0]"),
    "tools without name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
    "tools of another type": ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    "tool_choice": ({"tool_choice": 5}, "tool_choice"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "top_logprobs many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "logprobs number": ({"logprobs": 3}, "logprobs"),
    "max_completion_tokens": ({"max_completion_tokens": -1}, "max_completion_tokens"),
    "response_format text": ({"response_format": "json"}, "response_format"),
    "response_format unknown": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "schema missing": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "schema text": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
        "response_format.json_schema.schema",
    ),
    "schema large": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 100_000]}}}},
        "response_format.json_schema.schema",
    ),
    "regex long": ({"response_format": {"type": "regex", "regex": "a" * 5000}}, "response_format.regex"),
    "regex brackets": ({"response_format": {"type": "regex", "regex": "(" * 500}}, "response_format.regex"),
    "ebnf empty": ({"response_format": {"type": "ebnf", "ebnf": ""}}, "response_format.ebnf"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a tool that is not there": (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [TOOL]},
        "tool_choice",
    ),
    "a tool without name": ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
    "a choice that is none": ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
    "one call and min_tokens": ({"tools": [TOOL], "parallel_tool_calls": False, "min_tokens": 2}, "min_tokens"),
    "template kwargs": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "template kwargs reserved": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    "template kwargs self": ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "thinking": ({"thinking": "maybe"}, "thinking"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
}

TEXTS = {
    "no prompt": ({"prompt": None}, "prompt"),
    "prompt empty": ({"prompt": ""}, "prompt"),
    "prompt number": ({"prompt": 5}, "prompt"),
    "prompt object": ({"prompt": {"a": 1}}, "prompt"),
    "prompt list empty": ({"prompt": []}, "prompt"),
    "prompt list of empties": ({"prompt": ["", ""]}, "prompt"),
    "prompt mixed": ({"prompt": ["a", 1]}, "prompt"),
    "prompt ids mixed": ({"prompt": [1, "a"]}, "prompt"),
    "prompt ids outside": ({"prompt": [10**8]}, "prompt"),
    "prompt ids negative": ({"prompt": [-1, 5]}, "prompt"),
    "prompt ids float": ({"prompt": [1.0]}, "prompt"),
    "prompts many": ({"prompt": ["a"] * 1000}, "prompt"),
    "prompt too long": ({"prompt": "word " * 5000}, "prompt"),
    "prompt fills the context": ({"prompt": [65] * 1024}, "prompt"),
    "logprobs many": ({"logprobs": 100}, "logprobs"),
    "logprobs true": ({"logprobs": True}, "logprobs"),
    "suffix": ({"suffix": "end"}, "suffix"),
}


def refused(server, path, raw: bytes, param: str, **headers) -> None:
    began = time.monotonic()
    response = server.http.post(path, content=raw, headers={"content-type": "application/json", **headers})
    took = time.monotonic() - began
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error["param"] == param and set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and 5 < len(error["message"]) <= 600
    assert took < 1


@pytest.fixture(scope="module", autouse=True)
def unharmed(server):
    """The server answers as before once all of it is over."""
    body = {"prompt": "def f(", "max_tokens": 12, "seed": 1}
    before = server.complete(**body)["choices"]
    yield
    assert server.complete(**body)["choices"] == before
    state = server.runner.llm.state()
    assert not server.runner.open and state.free_pages == state.pages
    assert server.metric("http_responses_total", status="500") == 0


@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bytes_that_are_no_request_are_refused(server, path, name):
    raw, param = RAW[name]
    raw = raw.replace(b'"prompt": "a"', b'"messages": [{"role": "user", "content": "a"}]') if path == CHAT else raw
    param = "messages" if path == CHAT and param == "prompt" else param
    raw = raw.replace(b'"prompt"', b'"messages"') if path == CHAT else raw
    refused(server, path, raw, param)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_bad_field_is_named(server, path, name):
    change, param = BOTH[name]
    start = {"messages": TALK} if path == CHAT else {"prompt": "a"}
    refused(server, path, json.dumps({**start, **change}).encode(), param)


@pytest.mark.parametrize("name", CHATS)
def test_a_bad_conversation_is_named(server, name):
    change, param = CHATS[name]
    refused(server, CHAT, json.dumps({"messages": TALK, "max_tokens": 2, **change}).encode(), param)


@pytest.mark.parametrize("name", TEXTS)
def test_a_bad_prompt_is_named(server, name):
    change, param = TEXTS[name]
    refused(server, TEXT, json.dumps({"prompt": "a", "max_tokens": 2, **change}).encode(), param)


def test_a_body_of_another_type_is_refused_by_its_header(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        refused(server, TEXT, b'{"prompt": "a"}', "content-type", **{"content-type": kind})


def test_errors_say_the_context_was_exceeded_in_the_code_clients_look_for(server):
    for path, body in ((TEXT, {"prompt": [65] * 2000}), (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]})):
        assert server.post(path, body).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_token_routes_refuse_as_the_others(server, path):
    for raw, param in RAW.values():
        if param == "body":
            refused(server, path, raw, "body")
    bad = {"/tokenize": [({}, "prompt"), ({"prompt": 5}, "prompt"), ({"messages": [5]}, "messages[0]")],
           "/detokenize": [({}, "tokens"), ({"tokens": [-1]}, "tokens"), ({"tokens": ["a"]}, "tokens[0]")]}  # fmt: skip
    for body, param in bad[path]:
        refused(server, path, json.dumps(body).encode(), param)


def test_a_neutral_value_of_a_known_field_is_accepted(server):
    neutral = {"best_of": 1, "use_beam_search": False, "echo": False, "suffix": "", "min_tokens": 0, "user": "me", "top_k": -1,
               "logit_bias": {}, "stop": None, "service_tier": "auto", "metadata": {"a": "b"}, "seed": None}  # fmt: skip
    server.complete(prompt="a", max_tokens=1, **neutral)
    chat = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
            "parallel_tool_calls": True, "store": False, "reasoning_effort": "none", "logprobs": False}  # fmt: skip
    assert server.post(CHAT, {"messages": TALK, "max_tokens": 1, **chat}).status_code == 200
