"""`draftwood serve` as a process: what it says, how signals end it, and with which code."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from draftwood import cli, nano
from draftwood.config import Options
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.server import serve
from tests.server.serving import until


@contextlib.contextmanager
def process(*flags, program=("-m", "draftwood", "serve")):
    """A serving process of nano and its address, as soon as it listens."""
    command = [sys.executable, *program, str(nano.path()), "--port", "0", "--max-model-len", "512", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            line = running.stderr.readline()
            found = re.search(r"listening on (http://\S+),", line)
            assert found, line + running.stderr.read()
            yield running, found[1]
        finally:
            running.kill()


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=30).status_code == 200


@pytest.mark.parametrize("flags", [(), pytest.param(("--tp", "2"), marks=pytest.mark.slow)])
def test_sigterm_lets_open_answers_end_and_exits_with_0(flags):
    with process(*flags) as (running, url), ThreadPoolExecutor(1) as pool:
        until(lambda: is_ready(url), 60)
        body = {"prompt": "def f(", "max_tokens": 120, "ignore_eos": True}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        until(lambda: "draftwood:num_requests_open{model_name=\"nano\"} 1.0" in httpx.get(f"{url}/metrics").text)
        running.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health", timeout=30).json()["status"] == "draining")
        assert answer.result().json()["usage"]["completion_tokens"] == 120
        assert running.wait(30) == 0
        out, err = running.communicate()
    assert out == "" and "ready: http" in err and "shutting down: 1 open" in err and "Traceback" not in err


def test_a_shutdown_timeout_of_0_ends_open_answers_at_once():
    with process("--shutdown-timeout", "0") as (running, url), ThreadPoolExecutor(1) as pool:
        until(lambda: is_ready(url), 60)
        body = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "stream": True}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        until(lambda: "draftwood:num_requests_open{model_name=\"nano\"} 1.0" in httpx.get(f"{url}/metrics").text)
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert '"shutdown"' in answer.result().text
        assert running.wait(30) == 0 and time.monotonic() - began < 8


LOADING = """
import sys, time
from draftwood import cli, llm
llm.build = lambda *parts: time.sleep(100)
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_sigterm_while_loading_ends_the_process_soon():
    with process(program=("-c", LOADING)) as (running, url):
        until(lambda: httpx.get(f"{url}/health", timeout=30).json()["status"] == "loading", 30)
        running.send_signal(signal.SIGTERM)
        assert running.wait(8) == 0
        assert "leaving while the model loads" in running.communicate()[1]


CRASHING = """
import os, sys
from draftwood import cli
from draftwood.engine.loop import Engine
from draftwood.errors import DeviceLost
class Lost(DeviceLost): pass
def step(self):
    raise Lost("rank 1 is gone")
Engine.step = step
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


def test_a_crash_answers_with_500_and_exits_with_1_and_one_line():
    with process(program=("-c", CRASHING)) as (running, url):
        until(lambda: is_ready(url), 60)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 500
        assert running.wait(30) == 1
        err = running.communicate()[1]
    assert err.splitlines()[-1] == "draftwood serve: rank 1 is gone" and "Traceback" not in err


def test_a_server_that_is_ready_tries_grammars_at_once(monkeypatch):
    pytest.importorskip("xgrammar")
    with serve._load(Options(str(nano.path()), max_num_seqs=1, device="cpu")) as llm:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("the first request waits for a process"))
        bomb = {"type": "regex", "regex": "(((a{1,999}){1,999}){1,999}){1,999}"}
        with pytest.raises(RequestError, match="response_format cannot be used"):
            llm.check([1], SamplingParams(response_format=bomb))


def test_a_taken_port_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(nano.path()), "--port", port]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and port in err and "choose another" in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--port", "-1"],
        ["--host", "no.such.host.invalid"],
        ["--max-queue", "-1"],
        ["--shutdown-timeout", "nan"],
        ["--shutdown-timeout", "-3"],
        ["--max-request-bytes", "5"],
        ["--sse-keep-alive", "0"],
        ["--api-key", ""],
        ["--tree-budget", "1000"],
    ],
)
def test_bad_flags_are_one_line_before_anything_starts(flags, capsys):
    assert cli.main(["serve", str(nano.path()), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("draftwood serve: ") and err.count("\n") == 1


def test_a_model_that_is_none_is_one_line(tmp_path, capfd):
    command = [sys.executable, "-m", "draftwood", "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr.splitlines()[-1]
