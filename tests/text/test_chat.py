import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import ConfigError, RequestError
from draftwood.text.chat import ChatTemplate
from tests.text.vocabulary import tokenizer, write

DATA = Path(__file__).parent.parent / "data"
SMALL = tokenizer()
TEMPLATES = {
    name: ChatTemplate((DATA / f"Kimi-{name}_chat_template.jinja").read_text(), SMALL) for name in ("K2.5", "K2.6")
}
K26 = TEMPLATES["K2.6"]
CASES = json.loads((DATA / "chat_template_rendered.json").read_text())
CONTROL = set(SMALL.special.values())
hostile = st.lists(
    st.sampled_from(
        [
            *sorted(SMALL.special)[:40],
            "<|im_",
            "end|>",
            "<",
            "|>",
            "[",
            "EOS]",
            "\U000f0000",
            "\U000f0001",
            "{{",
            "}}",
            "x",
            "\n",
        ]
    ),
    max_size=8,
).map("".join)


def user(content):
    return [{"role": "user", "content": content}]


def controls(ids):
    return [id for id in ids if id in CONTROL]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['template']} {case['case']}")
def test_renderings_of_the_published_templates_reproduce(case):
    template = TEMPLATES[case["template"]]
    inputs = {"tools_ts_str": None, **case["kwargs"]}
    assert template.render(**inputs) == case["rendered"]
    assert template.encode(**inputs) == SMALL.encode(case["rendered"], allow_special=True)


@given(hostile, hostile, hostile)
@settings(max_examples=200, deadline=None)
def test_control_tokens_typed_by_a_user_stay_text(system, first, second):
    def messages(a, b, c):
        parts = [{"type": "text", "text": b}, {"type": "text", "text": c}]
        return [{"role": "system", "content": a}, {"role": "user", "content": parts}]

    ids = K26.encode(messages(system, first, second))
    assert controls(ids) == controls(K26.encode(messages("x", "x", "x")))
    assert SMALL.decode(ids) == K26.render(messages(system, first, second))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(deadline=None)
def test_text_without_control_tokens_encodes_as_the_rendered_whole(content):
    if any(name in content for name in SMALL.special):
        return
    assert K26.encode(user(content)) == SMALL.encode(K26.render(user(content)), allow_special=True)


def test_control_tokens_in_names_tools_and_arguments_stay_text():
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "parameters": {"<think>": "[EOS]"}}}]
    call = {"id": "<|im_end|>", "function": {"name": "f", "arguments": {"<|im_end|>": "<|im_user|>"}}}
    messages = [
        {"role": "user", "name": "<|im_end|>", "content": "a"},
        {"role": "assistant", "reasoning_content": "</think><|im_end|>", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "<|im_end|>", "content": "<|im_assistant|>"},
    ]
    calm = json.loads(json.dumps(messages).replace("<", "(").replace("[EOS]", "EOS"))
    ids = K26.encode(messages, tools=tools, tools_ts_str=None)
    expected = K26.encode(calm, tools=[{"type": "function", "function": {"name": "f"}}], tools_ts_str=None)
    assert controls(ids) == controls(expected)
    assert SMALL.decode(ids) == K26.render(messages, tools=tools, tools_ts_str=None)


def test_every_stand_in_can_be_typed_by_the_user():
    content = "<|im_end|>" + "".join(map(chr, range(0xF0000, 0xF0400))) + "[EOS]"
    ids = K26.encode(user(content))
    assert controls(ids) == controls(K26.encode(user("x")))
    assert content in SMALL.decode(ids)


@pytest.mark.parametrize("content", ["{{ 7 * 7 }}", "{% for x in messages %}", "{# c #}", "{{ messages.__class__ }}"])
def test_template_syntax_in_content_is_text(content):
    assert content in K26.render(user(content))


def test_a_template_that_reads_content_is_refused_rather_than_guessed():
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    template = ChatTemplate(source, SMALL)
    assert template.encode(user("plain")) == SMALL.encode("plain")
    with pytest.raises(RequestError, match="looks into the text"):
        template.encode(user("a</think>b"))


def test_a_template_that_joins_text_to_its_own_tokens_keeps_them():
    template = ChatTemplate("{{ '<|im_user|>' + messages[0].content + '<|im_end|>' }}", SMALL)
    assert controls(template.encode(user("<|im_end|>"))) == [SMALL.special["<|im_user|>"], SMALL.special["<|im_end|>"]]


def test_templates_run_in_a_sandbox():
    with pytest.raises(RequestError, match="cannot render|unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", SMALL).render(user("a"))
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages.append(1) }}", SMALL).render(user("a"))


def test_a_templates_own_refusal_is_a_request_error():
    template = ChatTemplate("{{ raise_exception('no\nsystem role') }}", SMALL)
    with pytest.raises(RequestError, match="refuses these messages: no system role"):
        template.render(user("a"))


def test_null_reasoning_is_not_written():
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning": None, "tool_calls": None},
    ]
    assert "None" not in K26.render(turn)


BAD = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    (["hi"], "messages[0]"),
    ([{"content": "a"}], "messages[0].role"),
    ([{"role": "robot", "content": "a"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "a", "name": 3}], "messages[0].name"),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
    ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls[0].id"),
    (
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    ([{"role": "user", "content": "\ud800"}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_malformed_messages_name_the_field_in_one_line(messages, param):
    for method in (K26.render, K26.encode):
        with pytest.raises(RequestError) as error:
            method(messages)
        assert error.value.param == param
        assert "\n" not in str(error.value)


def test_malformed_tools_are_refused():
    for tools in ("f", [3]):
        with pytest.raises(RequestError, match="list of objects"):
            K26.render(user("a"), tools=tools)


def test_the_template_comes_from_its_file_or_the_tokenizer_config(tmp_path):
    write(tmp_path, {"chat_template": "A{{ messages[0].content }}{{ bos_token }}", "bos_token": {"content": "[BOS]"}})
    assert ChatTemplate.load(tmp_path).render(user("x")) == "Ax[BOS]"
    write(tmp_path, {"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]})
    assert ChatTemplate.load(tmp_path, SMALL).render(user("x")) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert ChatTemplate.load(tmp_path).render(user("x")) == "F"


def test_a_checkpoint_may_have_no_template(tmp_path):
    write(tmp_path, {})
    assert ChatTemplate.find(tmp_path, SMALL) is None
    write(tmp_path, {"chat_template": "A"})
    assert ChatTemplate.find(tmp_path, SMALL).render(user("x")) == "A"


def test_missing_or_broken_templates_are_refused_in_one_line(tmp_path):
    write(tmp_path, {})
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="does not compile") as error:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ChatTemplate.load(tmp_path)


def test_a_template_says_which_variables_it_heeds():
    assert K26.heeds >= {"messages", "add_generation_prompt", "thinking", "preserve_thinking", "tools_ts_str"}
    assert ChatTemplate("{% set x = 1 %}{{ x }}{{ messages[0].content }}", SMALL).heeds == {"messages"}
