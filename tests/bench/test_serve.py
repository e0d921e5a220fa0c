"""`bench serve`: what it counts is what the server counted, and whatever a server answers becomes a result or a line."""

import argparse
import asyncio
import json
import sys

import httpx
import openai
import pytest

from draftwood import cli, nano
from draftwood.bench import load, local, serve
from draftwood.bench.load import CHAT, Answer, Load
from draftwood.config import Options, add_options, options_from
from draftwood.errors import ConfigError
from draftwood.llm import LLM
from tests.server.serving import serving

VLLM_KEYS = {
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "total_token_throughput", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "std", "p99")),
}  # fmt: skip
"""Of `vllm bench serve --save-result` (0.11), but for those of single percentiles that are asked for."""


@pytest.fixture(scope="module")
def server():
    with serving(lambda: LLM(str(nano.path()), tree_budget=8, max_num_seqs=8, max_model_len=512, device="cpu")) as running:
        yield running


def bench(*words: str) -> int:
    return cli.main(["bench", "serve", *words])


class TestAgainstAServer:
    def test_token_counts_are_the_servers_own_and_the_openai_clients(self, server, capsys, tmp_path):
        before = [server.metric(f"{name}_tokens_total") for name in ("prompt", "generation")]
        saved = tmp_path / "result.json"
        words = ["--base-url", server.url, "--concurrency", "1,3", "--num-prompts", "5", "--max-tokens", "12", "--num-warmups", "0"]
        assert bench(*words, "--seed", "7", "--json", "--save-result", str(saved)) == 0
        runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
        after = [server.metric(f"{name}_tokens_total") for name in ("prompt", "generation")]
        assert [a - b for a, b in zip(after, before, strict=True)] == [
            sum(run[f"total_{kind}_tokens"] for run in runs) for kind in ("input", "output")
        ]
        assert [(run["completed"], run["failed"], run["max_concurrent_requests"]) for run in runs] == [(5, 0, 1), (5, 0, 3)]
        for run in runs:
            assert (
                run["spec_decode_acceptance_length"] == 1 + run["spec_decode_accepted_tokens"] / run["spec_decode_num_drafts"] > 1
            )
            assert 0 < run["spec_decode_acceptance_rate"] < 100
        kept = [json.loads(line) for line in saved.read_text().splitlines()]
        assert [sum(run[f"{kind}_lens"]) for run in kept for kind in ("input", "output")] == [
            run[f"total_{kind}_tokens"] for run in runs for kind in ("input", "output")
        ]
        assert [1e3 * sum(run["ttfts"]) / 5 for run in kept] == pytest.approx([run["mean_ttft_ms"] for run in runs])
        assert kept[0]["generated_texts"] == kept[1]["generated_texts"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for i, body in enumerate(serve._built_in("chat")[:5]):
                answer = client.chat.completions.create(model="nano", **body, max_tokens=12, temperature=0, seed=7 + i)
                assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
                    kept[0]["input_lens"][i],
                    kept[0]["output_lens"][i],
                )
                assert answer.choices[0].message.content == kept[0]["generated_texts"][i]

    def test_a_run_has_vllms_keys(self, server, capsys):
        words = [
            "--base-url",
            server.url,
            "--concurrency",
            "",
            "--request-rate",
            "50",
            "--endpoint",
            "completions",
            "--num-prompts",
            "3",
        ]
        assert bench(*words, "--max-tokens", "4", "--ignore-eos", "--json") == 0
        (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
        assert set(found) >= VLLM_KEYS
        assert found["total_output_tokens"] == 12
        assert found["request_rate"] == 50

    def test_refused_requests_are_failures_with_their_reason(self, server, capsys, tmp_path):
        lines = [{"prompt": "a " * 2000}, {"prompt": "import os"}]
        asked = tmp_path / "prompts.jsonl"
        asked.write_text("\n".join(map(json.dumps, lines)))
        words = [
            "--base-url",
            server.url,
            "--dataset",
            str(asked),
            "--concurrency",
            "2",
            "--num-prompts",
            "4",
            "--num-warmups",
            "0",
        ]
        assert bench(*words, "--max-tokens", "4", "--json") == 1
        shown = capsys.readouterr()
        (found,) = json.loads(shown.out.splitlines()[-1])["runs"]
        assert (found["completed"], found["failed"]) == (2, 2)
        assert "HTTP 400" in shown.err

    def test_a_key_that_is_missing_is_one_line(self, capsys):
        with serving(lambda: LLM(str(nano.path()), max_num_seqs=1, device="cpu"), api_keys=("secret",)) as guarded:
            assert bench("--base-url", guarded.url, "--concurrency", "1") == 2
            assert "--api-key" in capsys.readouterr().err
            words = ("--api-key", "secret", "--concurrency", "1", "--num-prompts", "1", "--max-tokens", "2")
            assert bench("--base-url", f"{guarded.url}/v1/", *words) == 0

    def test_a_server_of_its_own_lives_as_long_as_the_benchmark(self, capsys):
        assert bench("--concurrency", "2", "--num-prompts", "2", "--max-tokens", "4", "--max-num-seqs", "2", "--json") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["completed"] == 2


class TestAServerThatLoads:
    def wait(self, *statuses: int, seconds: float = 5.0) -> int:
        asked: list[str] = []

        def answer(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            return httpx.Response(statuses[min(len(asked), len(statuses)) - 1])

        async def go() -> None:
            async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
                await load.ready(client, seconds, poll=0.001)

        asyncio.run(go())
        assert set(asked) == {"/health"}
        return len(asked)

    def test_is_waited_for(self, capsys):
        assert self.wait(503, 503, 503, 200) == 4
        assert capsys.readouterr().err.count("is not ready; waiting at most 5 s") == 1

    def test_without_health_is_taken_as_ready(self):
        assert self.wait(404) == 1

    def test_has_a_limit(self):
        with pytest.raises(ConfigError, match=r"http://server is not ready after 0.01 s; .*--ready-check-timeout-sec"):
            self.wait(503, seconds=0.01)

    def test_that_cannot_be_reached_is_left_to_the_requests(self):
        def refuse(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

        async def go() -> None:
            async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://server") as client:
                await load.ready(client, 5.0)

        asyncio.run(go())


class TestOneRequest:
    def ask(self, *lines: str, status: int = 200) -> Answer:
        body = "".join(f"{line}\n\n" for line in lines)

        async def go() -> Answer:
            transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await load.send(client, CHAT, {})

        return asyncio.run(go())

    def test_text_reasoning_and_tool_calls_are_pieces_and_roles_are_not(self):
        deltas = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "hm"},
            {"content": "yes"},
            {"tool_calls": [{"index": 0}]},
        ]
        lines = [f"data: {json.dumps({'choices': [{'delta': delta}]})}" for delta in deltas]
        usage = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
        answer = self.ask(": keep-alive", *lines, usage, "data: [DONE]")
        assert (answer.error, answer.text, len(answer.gaps)) == ("", "hmyes", 2)
        assert (answer.prompt_tokens, answer.completion_tokens) == (3, 4)
        assert answer.per_token == pytest.approx((answer.latency - answer.first) / 3)

    @pytest.mark.parametrize(
        ("lines", "status", "said"),
        [
            (["nothing"], 200, "without [DONE]"),
            (["data: [DONE]"], 200, "no usage"),
            (["data: {broken"], 200, "JSONDecodeError"),
            (["data: 7"], 200, "AttributeError"),
            (['data: {"usage": {"total_tokens": 3}}'], 200, "KeyError"),
            (['data: {"choices": [{"delta": {"content": 3}}]}'], 200, "TypeError"),
            (['data: {"error": {"message": "engine failed"}}', "data: [DONE]"], 200, "engine failed"),
            (["slow down"], 429, "HTTP 429: slow down"),
        ],
    )
    def test_whatever_else_comes_back_is_an_error_that_says_what(self, lines, status, said):
        assert said in self.ask(*lines, status=status).error

    def test_the_most_open_requests_are_the_concurrency(self):
        opened = []

        async def answer(request: httpx.Request) -> httpx.Response:
            opened.append(len(opened))
            await asyncio.sleep(0.01)
            return httpx.Response(200, text="data: [DONE]\n\n")

        async def go() -> load.Result:
            async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
                return await load.run(client, CHAT, [{}] * 9, Load(4, None), 0, lambda: None)

        result = asyncio.run(go())
        assert (result.most_open, len(opened), len(result.answers)) == (4, 9, 9)


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--concurrency", "0"], "--concurrency 0"),
            (["--concurrency", ""], "both empty"),
            (["--request-rate", "fast"], "--request-rate 'fast'"),
            (["--num-prompts", "0"], "--num-prompts 0"),
            (["--max-tokens", "0"], "--max-tokens 0"),
            (["--temperature", "nan"], "--temperature nan"),
            (["--base-url", "localhost:1"], "http://HOST:PORT"),
            (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
            (["--base-url", "http://127.0.0.1:9", "--tp", "2"], "--tp has no effect"),
            (["other", "--base-url", "http://127.0.0.1:9"], "MODEL has no effect"),
            (["--dataset", "/no/file"], "/no/file"),
            (["/no/model"], "/no/model"),
        ],
    )
    def test_it_is_one_line(self, words, said, capsys):
        assert bench(*words) == 2
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("text", ["", "[1]", '{"prompt": 3}', '{"messages": "hi"}', "\x00"])
    def test_a_dataset_names_its_bad_line(self, text, tmp_path):
        file = tmp_path / "asked.jsonl"
        file.write_text('{"prompt": "good"}\n' * bool(text) + text)
        with pytest.raises(ConfigError, match="line 2" if text else "holds no prompts"):
            serve.read_dataset(file, "chat")

    def test_conversations_are_only_for_chat(self, tmp_path):
        file = tmp_path / "asked.jsonl"
        file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
        assert serve.read_dataset(file, "chat")[0]["messages"]
        with pytest.raises(ConfigError, match="line 1"):
            serve.read_dataset(file, "completions")


def test_the_command_line_of_options_asks_for_the_same_options():
    options = Options(model="k2.6", tree_budget="auto", load_format="dummy", tree_spine=True, tp=2, max_model_len=128)
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert options_from(parser.parse_args(local.flags(options))) == options


def test_percentiles_and_acceptance_of_nothing_are_unknown():
    assert set(serve.acceptance({}, {}).values()) == {None}
    assert set(serve._percentiles("tpot", []).values()) == {None}
    assert serve._percentiles("tpot", [0.001, 0.003])["mean_tpot_ms"] == pytest.approx(2)


def test_without_httpx_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench("--concurrency", "1") == 2
    assert "draftwood[serve]" in capsys.readouterr().err
    assert "httpx" in sys.modules
