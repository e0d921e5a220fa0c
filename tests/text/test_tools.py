"""Answers to reasoning, content and tool calls: the rules of text/tools.py."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.text.tools import (
    MAX_HELD,
    Answer,
    AnswerParser,
    AnswerStream,
    Content,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolEnd,
    ToolStart,
    collect,
    opens_reasoning,
)
from tests.text.vocabulary import tokenizer

SMALL = tokenizer()
THINK, END = "<think>", "</think>"
SEC, SEC_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARG, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKERS = [THINK, END, SEC, SEC_END, CALL, ARG, CALL_END, SEC.replace("calls", "call"), SEC_END.replace("calls", "call")]


def tool(name, *properties, required=()):
    schema = {"type": "object", "properties": {p: {"type": "string"} for p in properties}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather", "city", required=["city"]), tool("search", "query", "limit", required=["query"])]


def call(id, arguments):
    return f"{CALL}{id}{ARG}{arguments}{CALL_END}"


def encode(text):
    """Ids as the model writes them: markers of the vocabulary as their own token."""
    return SMALL.encode(text, allow_special=True)


def joined(events):
    """Events with neighbours of one part joined: where deltas are cut depends on the split, what they say does not."""
    out = []
    for event in events:
        if out and type(event) is type(out[-1]) and isinstance(event, Reasoning | Content | ToolArguments):
            text = out.pop().text + event.text
            event = ToolArguments(event.index, text) if isinstance(event, ToolArguments) else type(event)(text)
        out.append(event)
    return out


def read(text, reasoning=False, tools=TOOLS, reason="stop", by_id=True, **more):
    """Return the events of a whole answer, one token or one character at a time."""
    if by_id:
        stream = AnswerStream(SMALL, reasoning=reasoning, tools=tools, **more)
        events = [e for id in encode(text) for e in stream.push([id]).events]
        return joined(events + stream.finish(reason).events)
    parser = AnswerParser(None, reasoning, tools, **more)
    events = [e for c in text for e in parser.push(None, c)]
    return joined(events + parser.finish(reason))


def answer(text, **more):
    return collect(read(text, **more))


BOTH = pytest.mark.parametrize("by_id", [True, False], ids=["ids", "text"])


@BOTH
def test_reasoning_content_and_calls_are_told_apart(by_id):
    calls = call("functions.weather:3", '{"city": "Rome"}') + call("functions.search:4", "{}")
    text = f"I think.{END}Let me look.{SEC}{calls}{SEC_END}"
    assert read(text, reasoning=True, by_id=by_id) == [
        Reasoning("I think."),
        Content("Let me look."),
        ToolStart(0, "functions.weather:3", "weather"),
        ToolArguments(0, '{"city": "Rome"}'),
        ToolEnd(0),
        ToolStart(1, "functions.search:4", "search"),
        ToolArguments(1, "{}"),
        ToolEnd(1),
    ]


@BOTH
@pytest.mark.parametrize("begin", [SEC, SEC.replace("calls", "call"), ""], ids=["plural", "singular", "no section"])
def test_a_call_inside_the_reasoning_ends_it(begin, by_id):
    text = f"Look it up.\n\n{begin}{call('functions.weather:0', '{}')}"
    got = answer(text, reasoning=True, by_id=by_id)
    assert got == Answer("Look it up.", "", [ToolCall("functions.weather:0", "weather", "{}")])


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        f"{SEC}{CALL}functions.weather:0{ARG}{{}}{SEC_END}",
        f"{SEC}{CALL}functions.weather:0{ARG}{{}}",
        f"{CALL}functions.weather:0{ARG}{{}}{CALL_END}",
        f"\n {SEC}\n{CALL} functions.weather:0\n{ARG} {{}} {CALL_END}\n{SEC_END}\n",
        f"{SEC}{call('functions.weather:0', '')}{SEC_END}",
        SEC + call("functions.weather:0", " \n") + SEC_END,
        f"{SEC}{call('weather:0', '')}{SEC_END}",
    ],
)
def test_incomplete_sections_whitespace_and_empty_arguments_make_the_same_call(text, by_id):
    got = answer(text, by_id=by_id)
    assert (got.reasoning, got.content) == ("", "")
    assert [(c.name, c.arguments) for c in got.calls] == [("weather", "{}")]


@BOTH
def test_a_call_that_begins_before_the_last_one_ended_ends_it(by_id):
    text = f"{SEC}{CALL}functions.weather:0{ARG}{{1}}{CALL}functions.search:1{ARG}{{2}}{SEC_END}"
    assert [c.arguments for c in answer(text, by_id=by_id).calls] == ["{1}", "{2}"]


@BOTH
def test_a_call_begun_twice_is_restarted_and_its_first_attempt_is_content(by_id):
    text = f"{SEC}{CALL}functions.wea{call('functions.weather:0', '{}')}{SEC_END}"
    got = answer(text, by_id=by_id)
    assert got == Answer("", f"{CALL}functions.wea", [ToolCall("functions.weather:0", "weather", "{}")])


@BOTH
@pytest.mark.parametrize(
    "text",
    [
        f"a{SEC}b{SEC_END}c",
        f"{SEC}{SEC_END}",
        f"{SEC} {CALL}functions.weather:0{SEC_END}",
        f"{SEC}{CALL}functions.weather:0",
        f"{SEC}{CALL}{ARG}{{}}{CALL_END}{SEC_END}",
        f"  {SEC}\n",
        f"x{CALL_END}{ARG}{SEC_END}{END}",
        f"{SEC}{CALL}{'x' * MAX_HELD}{ARG}{{}}{CALL_END}{SEC_END}",
        SEC + call("call_8f2", '{"other": 1}') + SEC_END,
        f"{CALL * 40}",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text, by_id):
    assert answer(text, by_id=by_id) == Answer("", text, [])


@BOTH
def test_garbage_between_calls_is_content(by_id):
    text = f"{SEC}{call('functions.weather:0', '{}')} and also\n{call('functions.search:1', '{}')}{SEC_END} done"
    got = answer(text, by_id=by_id)
    assert (got.content, len(got.calls)) == (" and also\n done", 2)


@pytest.mark.parametrize(
    ("id", "arguments", "name"),
    [
        ("functions.weather:12", "{}", "weather"),
        ("search:2", "{}", "search"),
        ("weather", "{}", "weather"),
        ("functions.weather", "{}", "weather"),
        ("functions.a.b-c:0", "{}", "a.b-c"),
        ("functions.unknown:0", "{}", "unknown"),
        ("3", '{"city": "Rome"}', "weather"),
        ("call_8f2", '{"query": "x", "limit": 1}', "search"),
    ],
)
def test_ids_come_back_verbatim_with_the_name_they_mean(id, arguments, name):
    assert answer(f"{SEC}{call(id, arguments)}{SEC_END}").calls == [ToolCall(id, name, arguments)]


def test_an_only_tool_is_meant_by_any_id():
    assert answer(SEC + call("call_1", '{"x'), tools=TOOLS[:1]).calls == [ToolCall("call_1", "weather", '{"x')]


def test_without_tools_markers_are_content_and_still_end_the_reasoning():
    section = f"{SEC}{call('functions.weather:0', '{}')}{SEC_END}"
    assert answer(f"r{section}", reasoning=True, tools=None) == Answer("r", section, [])
    assert answer(section, parse_tools=False) == Answer("", section, [])


def test_markers_typed_by_other_tokens_are_text():
    stream = AnswerStream(SMALL, tools=TOOLS, reasoning=True)
    events = stream.push(SMALL.encode(f"about {END} and {SEC}{CALL}")).events + stream.finish().events
    assert collect(events) == Answer(f"about {END} and {SEC}{CALL}", "", [])


@BOTH
def test_reasoning_opens_once_and_closes_once(by_id):
    assert answer(f"{THINK}r{END}c{END}{THINK}d", reasoning=True, by_id=by_id) == Answer("r", f"c{END}{THINK}d", [])
    assert answer(f"{THINK}r{END}c", by_id=by_id) == Answer("r", "c", [])
    assert answer(f"c{THINK}", by_id=by_id) == Answer("", f"c{THINK}", [])
    assert answer(f"{END}c", reasoning=True, by_id=by_id) == Answer("", "c", [])
    assert answer(f"r{THINK}s{END}c", reasoning=True, by_id=by_id) == Answer(f"r{THINK}s", "c", [])


@BOTH
def test_whitespace_ends_up_where_the_rules_say(by_id):
    assert answer(f" \n r \n{END}\n\nc \n", reasoning=True, by_id=by_id) == Answer(" \n r", "\n\nc \n", [])
    assert answer("r \n", reasoning=True, by_id=by_id, reason="length") == Answer("r \n", "", [])
    assert answer(" \n", by_id=by_id) == Answer("", " \n", [])
    section = f"{SEC}{call('weather:0', '{}')}{SEC_END}"
    assert answer(f"r{END}\n{section}\n", reasoning=True, by_id=by_id).content == ""
    assert answer(f"c\n{section}", by_id=by_id).content == "c\n"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_cut_by_the_end_is_complete_only_when_the_model_stopped(reason):
    text = f"{SEC}{CALL}functions.weather:0{ARG}"
    stream = AnswerStream(SMALL, tools=TOOLS)
    events = stream.push(encode(text)).events + stream.finish(reason).events
    stopped = reason == "stop"
    assert events[-1] == ToolEnd(0, stopped)
    assert collect(events).calls[0].arguments == ("{}" if stopped else "")
    assert stream.finish_reason(reason) == ("tool_calls" if stopped else "length")


def test_the_finish_reason_is_the_engines_without_calls_or_after_a_cut():
    def reason(text, given):
        stream = AnswerStream(SMALL, tools=TOOLS)
        stream.push(encode(text))
        stream.finish(given)
        return stream.finish_reason(given)

    section = f"{SEC}{call('weather:0', '{}')}{SEC_END}"
    assert reason("hello", "stop") == "stop"
    assert reason(f"{SEC}x", "stop") == "stop"
    assert reason(section, "stop") == "tool_calls"
    assert reason(section, "length") == "length"
    assert reason(section, "abort") == "abort"


def test_reasoning_tokens_count_up_to_the_token_that_closes():
    def count(text, reasoning=True):
        ids = encode(text)
        stream = AnswerStream(SMALL, reasoning=reasoning, tools=TOOLS)
        stream.push(ids)
        stream.finish()
        return stream.reasoning_tokens, len(ids)

    inside = len(encode("some reasoning"))
    assert count(f"some reasoning{END}content")[0] == inside + 1
    assert count(f"some reasoning{SEC}{call('weather:0', '{}')}")[0] == inside
    assert count("content", reasoning=False)[0] == 0
    assert count("some reasoning") == (inside, inside)


def test_a_prompt_that_ends_with_think_opens_reasoning():
    assert opens_reasoning(encode(f"x{THINK}"), SMALL)
    assert not opens_reasoning(encode(f"x{THINK}{END}"), SMALL)
    assert not opens_reasoning([], SMALL)


def test_stop_strings_cut_tokens_and_events_together():
    text = f"think{END}one two three"
    ids = encode(text)
    stream = AnswerStream(SMALL, stops=["two"], reasoning=True)
    part = stream.push(ids)
    assert part.stop == "two" and part.used < len(ids)
    got = collect(part.events + stream.finish("stop").events)
    assert got == Answer("think", "one ", [])
    assert stream.push(ids).used == 0
    assert "two" in SMALL.decode(ids[: part.used]) and "two" not in SMALL.decode(ids[: part.used - 1])


def test_a_stop_string_inside_a_marker_shows_the_part_before_it_as_text():
    stream = AnswerStream(SMALL, stops=["calls_sec"], tools=TOOLS)
    part = stream.push(encode(f"a{SEC}b"))
    assert collect(part.events + stream.finish("stop").events) == Answer("", "a<|tool_", [])


def test_incomplete_characters_wait_and_end_as_replacement():
    first = next(id for id in range(256) if SMALL.token_bytes(id) == b"\xc3")
    stream = AnswerStream(SMALL, tools=TOOLS)
    assert stream.push([first]).events == []
    assert stream.finish().events == [Content("\ufffd")]


WORDS = ["functions.weather:0", "call_1", '{"city": "x"}', " ", "\n", "<|tool_", "<", "é", "日本"]
pieces = st.lists(
    st.one_of(
        st.sampled_from([*MARKERS, *MARKERS, *WORDS]),
        st.text(max_size=4),
    ),
    max_size=14,
)


@given(pieces, st.booleans(), st.lists(st.integers(1, 7), max_size=30), st.sampled_from(["stop", "length"]))
@settings(max_examples=400, deadline=None)
def test_any_split_of_the_text_gives_the_same_events(parts, reasoning, sizes, reason):
    text = "".join(parts)
    whole = AnswerParser(None, reasoning, TOOLS)
    expected = joined(whole.push(None, text) + whole.finish(reason))
    parser, events, at = AnswerParser(None, reasoning, TOOLS), [], 0
    for size in [*sizes, len(text)]:
        events += parser.push(None, text[at : at + size])
        at += size
    events += parser.finish(reason)
    assert joined(events) == expected
    assert parser.finish_reason(reason) == whole.finish_reason(reason)


@given(pieces, st.booleans(), st.lists(st.integers(1, 5), max_size=20), st.sampled_from([(), ("city",), ("<|", "x\n")]))
@settings(max_examples=400, deadline=None)
def test_any_split_of_the_tokens_gives_the_same_events_and_usage(parts, reasoning, sizes, stops):
    ids = [id for part in parts for id in (encode(part) if part in MARKERS else SMALL.encode(part))]

    def run(sizes):
        stream, events, used, at = AnswerStream(SMALL, stops, reasoning, TOOLS), [], 0, 0
        for size in sizes:
            part = stream.push(ids[at : at + size])
            events += part.events
            used += part.used
            at += size
        events += stream.finish("stop").events
        assert stream.reasoning_tokens <= used
        return joined(events), used, stream.reasoning_tokens, stream.finish_reason("stop")

    assert run([*sizes, len(ids)]) == run([1] * len(ids))


@given(pieces, st.booleans())
@settings(max_examples=400, deadline=None)
def test_nothing_is_lost_but_markers_and_whitespace(parts, reasoning):
    text = "".join(parts)
    parser = AnswerParser(None, reasoning, TOOLS)
    events = parser.push(None, text) + parser.finish()
    rest = iter("".join(text.split()))
    shown = []
    for event in joined(events):
        shown.append(event.id if isinstance(event, ToolStart) else getattr(event, "text", ""))
    if "{}" not in shown:  # empty arguments are written as {}, which is not in the text
        assert all(c in rest for c in "".join("".join(shown).split())), "in order, from the text"
    plain = "".join(shown)
    for marker in MARKERS:
        text, plain = text.replace(marker, " "), plain.replace(marker, " ")
    lost = sorted("".join(text.split()).replace("{}", ""))
    assert lost == sorted("".join(plain.split()).replace("{}", ""))


def test_a_long_answer_costs_linear_time():
    parser = AnswerParser(None, True, TOOLS)
    for _ in range(20_000):
        parser.push(None, "<\n")
    parser.push(None, END)
    assert len(parser.push(None, json.dumps("x" * 100_000))) == 1
