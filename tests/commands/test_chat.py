import io
import json
import os
import signal
import sys
from types import SimpleNamespace

from draftwood import cli, nano
from draftwood.commands.chat import Conversation
from draftwood.commands.speakers import Local, Marks
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.text.chat import ChatTemplate
from tests.commands.tiny import DATA, checkpoint
from tests.text.vocabulary import tokenizer

DONE = SimpleNamespace(accept_length=1.0, completion_tokens=1, steps=1, tok_s=5.0, tree_budget=8, seed=7, finish_reason="stop")


class Talker:
    """Stands in for LLM: answers with given pieces and keeps what it was asked."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.tokenizer = tokenizer()
        self.template = ChatTemplate((DATA / "Kimi-K2.6_chat_template.jinja").read_text(), self.tokenizer)
        self.asked = []
        self.closed = 0

    def chat_ids(self, messages, **template):
        if any("too long" in m["content"] for m in messages):
            raise RequestError("the prompt is too long", "prompt")
        self.asked.append(json.loads(json.dumps(messages)))
        return self.template.encode(messages, **template)

    def stream(self, ids, params):
        try:
            yield from self.pieces
            yield DONE
        finally:
            self.closed += 1


def talk(llm, *lines, system=None, thinking=None):
    rest = iter([*lines, None])
    conversation = Conversation(Local(llm, SamplingParams(), thinking), system)
    conversation.run(lambda: next(rest))
    return conversation


def test_each_turn_sees_the_turns_before_it(capsys):
    llm = Talker("rea", "son</think>", "ans", "wer")
    talk(llm, "one", "two", system="S")
    assert capsys.readouterr().out == "reason\nanswer\nreason\nanswer\n"
    assert [m["content"] for m in llm.asked[1]] == ["S", "one", "answer", "two"]
    assert llm.asked[1][2]["reasoning_content"] == "reason"
    assert llm.closed == 2


def test_without_thinking_everything_is_the_answer(capsys):
    talk(Talker("plain"), "one", thinking=False)
    assert capsys.readouterr().out == "plain\n"


def test_reset_forgets_all_but_the_system_prompt(capsys):
    llm = Talker("a")
    talk(llm, "one", "/reset", "two", system="S")
    assert [m["content"] for m in llm.asked[1]] == ["S", "two"]


def test_exit_ends_and_unknown_commands_are_told(capsys):
    llm = Talker("a")
    talk(llm, "", "/what", "/exit", "never")
    assert llm.asked == []
    assert "/what is no command" in capsys.readouterr().err


def test_a_message_that_does_not_fit_is_told_and_forgotten(capsys):
    llm = Talker("a")
    conversation = talk(llm, "too long", "short")
    assert "too long (/reset" in capsys.readouterr().err
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[0]["content"] == "short"


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(capsys):
    def pieces():
        yield "</think>one"
        os.kill(os.getpid(), signal.SIGINT)
        yield "two"
        yield "three"

    llm = Talker()
    llm.pieces = pieces()
    before = signal.getsignal(signal.SIGINT)
    conversation = talk(llm, "go")
    assert conversation.messages[-1]["content"] == "onetwo"
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.closed == 1


def test_reasoning_ends_at_its_marker_and_may_begin_again():
    marks = Marks(inside=True)
    parts = marks.split("why") + marks.split("</think>so") + marks.split("<think>hm</think>") + marks.split("!")
    assert "".join(text for text, thought in parts if thought) == "whyhm"
    assert "".join(text for text, thought in parts if not thought) == "so!"


def test_a_conversation_over_a_pipe_ends_with_its_input(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/reset\nthe end"))
    code = cli.main(["chat", checkpoint(tmp_path), "--load-format", "dummy", "--max-tokens", "4", "--ignore-eos"])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.err.count("accept length") == 2


def test_thinking_is_refused_where_the_template_does_not_heed_it(capsys):
    for flag in ("--thinking", "--no-thinking"):
        assert cli.main(["chat", str(nano.path()), flag]) == 2
        assert f"{flag} has no effect" in capsys.readouterr().err
