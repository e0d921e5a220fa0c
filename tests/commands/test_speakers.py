"""`chat --base-url`: a server's answers are those of the model here, and what a server says wrong is one line."""

import io
import json
import sys

import httpx
import pytest

from draftwood import cli, nano
from draftwood.commands.chat import Conversation
from draftwood.commands.speakers import Distant, Local
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.llm import LLM
from draftwood.remote import Remote
from tests.server.serving import serving


@pytest.fixture(scope="module")
def llm():
    with LLM(str(nano.path()), max_num_seqs=2, max_model_len=512, device="cpu") as loaded:
        yield loaded


def speak(speaker, messages):
    parts = list(speaker.answer(messages))
    assert isinstance(parts[-1], str)
    return "".join(text for text, thought in parts[:-1] if not thought), parts[-1]


def test_a_server_answers_as_the_model_here_would(llm, capsys, monkeypatch):
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
    here = Conversation(Local(llm, params, None), "Be brief.")
    here.turn("Write a function that reverses a string.")
    here.turn("And one that counts words.")
    shown = capsys.readouterr().out
    load = lambda: LLM(str(nano.path()), max_num_seqs=2, max_model_len=512, device="cpu")  # noqa: E731
    with serving(load, api_keys=("key",)) as running:
        asked = "Write a function that reverses a string.\nAnd one that counts words.\n"
        monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
        words = ["--base-url", f"{running.url}/v1", "--api-key", "key", "--system", "Be brief."]
        assert cli.main(["chat", *words, "--max-tokens", "24", "--temperature", "0.7", "--seed", "3"]) == 0
    there = capsys.readouterr()
    assert there.out == shown
    assert there.err.count("accept length") == 2
    assert "seed 3" in there.err


class TestWhatAServerMaySay:
    def ask(self, text: str, status: int = 200, ours: bool = False, **sampling):
        self.bodies = []

        def answer(request: httpx.Request) -> httpx.Response:
            self.bodies.append(json.loads(request.content))
            return httpx.Response(status, text=text)

        server = Remote("http://server", {}, "m", ours)
        with httpx.Client(transport=httpx.MockTransport(answer), base_url=server.url) as client:
            return speak(Distant(client, server, SamplingParams(**sampling), True), [{"role": "user", "content": "hi"}])

    def stream(self, *chunks) -> str:
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def test_text_then_what_it_cost(self):
        chunks = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"reasoning": "hm"}}]},
            {"choices": [{"delta": {"content": "hello"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
        ]
        assert self.ask(": comment\n" + self.stream(*chunks)) == ("hello", "2 tokens (stopped by itself)")

    def test_only_sampling_that_was_asked_for_is_sent(self):
        self.ask(self.stream())
        assert set(self.bodies[0]) == {
            "model", "stream", "stream_options", "max_tokens", "temperature", "messages", "chat_template_kwargs",
        }  # fmt: skip
        self.ask(self.stream(), ours=True, top_k=5, stop=("end",), seed=1)
        assert self.bodies[0].items() >= {"top_k": 5, "stop": ["end"], "seed": 1, "timings": True}.items()

    @pytest.mark.parametrize(
        ("text", "status", "said"),
        [
            ('{"error": {"message": "no such model"}}', 404, "no such model"),
            ("<html>", 502, "answers 502: <html>"),
            ("data: {", 200, "does not answer as one"),
            ('data: {"error": "out of memory"}\n', 200, "out of memory"),
            ("data: 7\n", 200, "does not answer as one"),
            ('data: {"choices": [3]}\n', 200, "does not answer as one"),
            ('data: {"choices": [{"delta": {"content": 3}}]}\n', 200, "does not answer as one"),
            ('data: {"usage": {"completion_tokens": 3}, "choices": 3}\n', 200, "does not answer as one"),
            ('data: {"choices": [{"finish_reason": "stop", "timings": 3}], "usage": {"completion_tokens": 3}}\n', 200, "as one"),
        ],
    )
    def test_anything_else_is_told(self, text, status, said):
        with pytest.raises(RequestError, match=said):
            self.ask(text, status)


@pytest.mark.parametrize("words", [["--base-url", "http://127.0.0.1:9"], ["--base-url", "x"], ["k2.6", "--base-url", "http://x"]])
def test_a_server_that_is_none_is_one_line(words, capsys):
    assert cli.main(["chat", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "caching" not in said


@pytest.mark.parametrize("words", [["chat", "--api-key", "k"], ["bench", "serve", "--served-model-name", "nano"]])
def test_a_flag_for_a_server_elsewhere_is_refused_with_the_model_here(words, capsys):
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--base-url" in said and words[-2] in said


@pytest.mark.parametrize("words", [["--noise", "shared"], ["--tree-budget", "8"], ["--tree-spine"]])
def test_a_flag_with_its_own_default_is_refused_with_a_server_elsewhere(words, capsys):
    assert cli.main(["chat", "--base-url", "http://127.0.0.1:9", *words]) == 2
    assert f"{words[0]} has no effect" in capsys.readouterr().err


def test_a_flag_for_the_model_here_is_refused_with_a_server_elsewhere(capsys):
    assert cli.main(["chat", "--base-url", "http://127.0.0.1:9", "--no-enable-prefix-caching"]) == 2
    assert "--enable-prefix-caching has no effect" in capsys.readouterr().err
