"""Reasoning and tool calls over HTTP: told apart, streamed, and nothing lost, however the tokens come in runs."""

import json

import openai
import pytest

from tests.server.fake import FakeLLM
from tests.server.serving import serving
from tests.text import vocabulary

TALK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
ANSWER = (
    "Let me see.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{"q": "é世"}<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|><|im_end|>"
)


def runs(text: str, width: int) -> list[list[int]]:
    ids = vocabulary.tokenizer().encode(text, allow_special=True)
    return [ids[i : i + width] for i in range(0, len(ids), width)]


@pytest.fixture(params=[1, 3, 7, 1000])
def width(request):
    return request.param


def chat(server, **more):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.chat.completions.create(model="nano", messages=TALK, **more)
        return list(made) if more.get("stream") else made


def test_reasoning_content_and_calls_are_told_apart(width):
    with serving(lambda: FakeLLM(script=runs(ANSWER, width), thinks=True)) as server:
        whole = chat(server, tools=[TOOL])
        chunks = chat(server, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    (choice,) = whole.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "I look." and message.reasoning_content == message.reasoning == "Let me see."
    calls = [(call.id, call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [
        ("functions.search:0", "function", "search", {"q": "é世"}),
        ("functions.search:1", "function", "search", {}),
    ]
    usage = whole.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert usage.completion_tokens == len(vocabulary.tokenizer().encode(ANSWER, allow_special=True))

    assert chunks[-1].usage == usage
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant" and chunks[-2].choices[0].finish_reason == "tool_calls"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    found: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.id is not None:
                found[call.index] = [call.id, call.function.name, ""]
            found[call.index][2] += call.function.arguments or ""
    assert [tuple(found[i]) for i in sorted(found)] == [
        (call.id, call.function.name, call.function.arguments) for call in message.tool_calls
    ]


def test_an_answer_ends_with_its_first_call_where_only_one_is_wanted(width):
    with serving(lambda: FakeLLM(script=runs(ANSWER, width), thinks=True)) as server:
        (choice,) = chat(server, tools=[TOOL], parallel_tool_calls=False).choices
        (none,) = chat(server, tools=[TOOL], tool_choice="none", parallel_tool_calls=False).choices
        end = vocabulary.tokenizer().special["<|tool_call_end|>"]
        (asked,) = chat(server, tools=[TOOL], parallel_tool_calls=False, extra_body={"stop_token_ids": [end]}).choices
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None), "the caller named no stop"
    assert (asked.finish_reason, asked.stop_reason) == ("tool_calls", end)
    assert [call.id for call in choice.message.tool_calls] == ["functions.search:0"]
    assert choice.message.content == "I look."
    assert none.finish_reason == "stop"


def test_without_tools_a_section_is_content_and_nothing_is_lost(width):
    text = ANSWER.removesuffix("<|im_end|>")
    with serving(lambda: FakeLLM(script=runs(ANSWER, width), thinks=True)) as server:
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            (choice,) = chat(server, **more).choices
            assert choice.finish_reason == "stop" and choice.message.tool_calls is None
            assert f"{choice.message.reasoning_content}</think>{choice.message.content}" == text


def test_a_malformed_section_is_content(width):
    broken = "<|tool_calls_section_begin|><|tool_call_begin|>nothing like an id<|tool_call_end|><|tool_calls_section_end|>"
    with serving(lambda: FakeLLM(script=runs(f"a</think>b{broken}<|im_end|>", width), thinks=True)) as server:
        (choice,) = chat(server, tools=[TOOL]).choices
    assert choice.message.content == f"b{broken}" and choice.finish_reason == "stop"


def test_an_answer_cut_inside_its_reasoning_has_no_content():
    with serving(lambda: FakeLLM(script=runs("Let me see.</think>I look.<|im_end|>", 1), thinks=True)) as server:
        answer = chat(server, max_tokens=3)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert "Let me see.".startswith(choice.message.reasoning_content)
    assert answer.usage.completion_tokens_details.reasoning_tokens == answer.usage.completion_tokens == 3


def test_reasoning_is_never_more_than_the_answer_wherever_it_ends():
    count = len(vocabulary.tokenizer().encode(ANSWER, allow_special=True))
    ends = [{"max_tokens": most} for most in range(1, count, 9)] + [{"stop": stop} for stop in ("see", ".</", "I look", '"q"')]
    with serving(lambda: FakeLLM(script=runs(ANSWER, 1), thinks=True)) as server:
        for end in [{}, *ends]:
            whole, chunks = chat(server, tools=[TOOL], **end), chat(
                server, tools=[TOOL], stream=True, stream_options={"include_usage": True}, **end
            )
            usage, reason = whole.usage, whole.choices[0].finish_reason
            assert usage == chunks[-1].usage and reason == chunks[-2].choices[0].finish_reason
            assert 0 < usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens <= count
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert reason == ("length" if "max_tokens" in end else "stop" if "stop" in end else "tool_calls")


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": False, "chat_template_kwargs": {"thinking": True, "preserve_thinking": True}}, True),
        ({"reasoning_effort": "none"}, False),
    ],
)
def test_the_template_is_told_whether_to_think(fields, thinking):
    llm = FakeLLM()
    with serving(lambda: llm) as server:
        body = {"messages": TALK, "max_tokens": 1, "tools": [TOOL], **fields}
        assert server.post("/v1/chat/completions", body).status_code == 200
        unheeded = server.metric("unknown_fields_total", field="chat_template_kwargs.preserve_thinking")
    (asked,) = llm.asked
    assert unheeded == ("preserve_thinking" in fields.get("chat_template_kwargs", {})), "this template does not read it"
    assert asked.get("thinking") is thinking and asked["tools"] == [TOOL]
    assert asked.get("preserve_thinking") == fields.get("chat_template_kwargs", {}).get("preserve_thinking")


def test_token_ids_of_a_stream_are_those_of_the_answer(width):
    with serving(lambda: FakeLLM(script=runs(ANSWER, width), thinks=True)) as server:
        body = {"messages": TALK, "tools": [TOOL], "return_token_ids": True}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        lines = server.post("/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [id for chunk in chunks for id in chunk.get("token_ids", ())] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
