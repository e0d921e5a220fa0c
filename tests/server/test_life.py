"""From loading to the end: who is answered, who is refused and why, and what is left behind."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from draftwood.errors import ConfigError, DeviceLost
from draftwood.llm import LLM
from tests.server.fake import FakeLLM
from tests.server.serving import serving, until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def ask(server, **more) -> httpx.Response:
    return server.post(TEXT, {"prompt": "a", "max_tokens": 3, **more})


def test_until_it_has_loaded_everything_but_facts_is_503_with_a_reason():
    may_load = threading.Event()

    def load():
        assert may_load.wait(30)
        return FakeLLM()

    with serving(load, ready=False) as server:
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading" and health.json()["reason"]
        for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {}), ("/tokenize", {}), ("/detokenize", {})):
            refused = server.post(path, body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
            assert int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/version").status_code == server.http.get("/metrics").status_code == 200
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "nano"
        may_load.set()
        until(lambda: server.http.get("/health").status_code == 200)
        assert ask(server).json()["choices"][0]["text"] == "aaa"


def test_a_model_that_does_not_load_ends_the_server_with_its_error():
    def load() -> LLM:
        raise ConfigError("no such folder")

    with serving(load, ready=False) as server:
        until(server.runner.ended.is_set)
        assert str(server.runner.error) == "no such folder"
        assert ask(server).status_code == 503


@pytest.mark.parametrize("crash", [DeviceLost("rank 3 is gone"), ZeroDivisionError("a bug")])
def test_a_crash_of_the_engine_answers_open_requests_with_500(crash):
    llm = FakeLLM()
    llm.go.clear()
    with serving(lambda: llm) as server, ThreadPoolExecutor(4) as pool:
        whole = [pool.submit(ask, server) for _ in range(2)]
        streamed = [pool.submit(ask, server, stream=True) for _ in range(2)]
        until(lambda: len(llm.live) == 4)
        llm.crash = crash
        llm.go.set()
        for answer in whole:
            assert answer.result().status_code == 500 and answer.result().json()["error"]["code"] == "engine_failed"
        for answer in streamed:
            events = answer.result().text.strip().split("\n\n")
            assert '"engine_failed"' in events[-1] and "[DONE]" not in events[-1]
        until(server.runner.ended.is_set)
        assert server.runner.error is crash and llm.closed
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert ask(server).status_code == 503 and not server.runner.open


def test_draining_ends_open_answers_and_takes_no_new_ones():
    llm = FakeLLM()
    llm.go.clear()
    with serving(lambda: llm) as server, ThreadPoolExecutor(2) as pool:
        open_one = pool.submit(ask, server, max_tokens=5)
        until(lambda: llm.live)
        drained = pool.submit(drain, server, 20.0)
        until(lambda: server.runner.phase == "draining")
        assert ask(server).json()["error"]["code"] == "draining" and server.http.get("/health").status_code == 503
        llm.go.set()
        assert open_one.result().json()["choices"][0]["text"] == "aaaaa"
        drained.result()
        assert server.runner.ended.is_set() and server.runner.error is None and llm.closed


def test_answers_that_outlast_the_shutdown_timeout_are_told():
    llm = FakeLLM()
    llm.go.clear()
    with serving(lambda: llm) as server, ThreadPoolExecutor(3) as pool:
        whole, streamed = pool.submit(ask, server), pool.submit(ask, server, stream=True)
        until(lambda: len(llm.live) == 2)
        began = time.monotonic()
        drain(server, 0.3)
        assert 0.3 <= time.monotonic() - began < 3
        assert whole.result().status_code == 503 and whole.result().json()["error"]["code"] == "shutdown"
        assert '"shutdown"' in streamed.result().text
        assert not llm.live and llm.closed


def drain(server, seconds: float) -> None:
    asyncio.run_coroutine_threadsafe(server.runner.drain(seconds), server.runner.loop).result(30)


def test_more_than_rows_and_queue_hold_is_429_with_a_time_to_come_back():
    llm = FakeLLM(rows=2)
    llm.go.clear()
    with serving(lambda: llm, max_queue=3) as server, ThreadPoolExecutor(8) as pool:
        held = [pool.submit(ask, server) for _ in range(5)]
        until(lambda: len(server.runner.open) == 5)
        full = ask(server)
        assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(full.headers["retry-after"]) <= 60
        until(lambda: server.metric("num_requests_running") == 2 and server.metric("num_requests_waiting") == 3)
        llm.go.set()
        assert all(one.result().status_code == 200 for one in held)
        assert ask(server, n=5).status_code == 200
        never = ask(server, n=6)
        assert never.status_code == 400 and never.json()["error"]["param"] == "n", "coming back would not help"


def test_all_answers_of_a_request_are_queued_or_none():
    llm = FakeLLM(rows=2)
    llm.go.clear()
    with serving(lambda: llm, max_queue=3) as server, ThreadPoolExecutor(2) as pool:
        held = pool.submit(ask, server, n=3)
        until(lambda: len(server.runner.open) == 3)
        assert ask(server, n=3).status_code == 429 and len(server.runner.open) == 3
        llm.go.set()
        assert held.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_requests_at_once(stream):
    llm = FakeLLM(seconds=0.01)
    with serving(lambda: llm) as server:
        with httpx.Client(base_url=server.url) as client:
            body = {"prompt": "a", "max_tokens": 400, "n": 3, "stream": stream}
            if stream:
                with client.stream("POST", TEXT, json=body) as response:
                    next(response.iter_raw())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(TEXT, json=body, timeout=0.3)
        until(lambda: len(llm.dropped) == 3, 1.0)
        assert not server.runner.open and not llm.live
        assert server.metric("request_aborts_total") == 3
        assert ask(server).status_code == 200


def test_a_key_is_asked_for_everywhere_but_at_health():
    with serving(FakeLLM, api_keys=("one", "zwei")) as server:
        assert server.http.get("/health").status_code == 200
        paths = ["/v1/models", "/v1/models/nano", "/metrics", "/version", "/openapi.json", "/nowhere"]
        asks = [("GET", path) for path in paths] + [("POST", path) for path in (TEXT, CHAT, "/tokenize", "/detokenize")]
        for headers in ({}, {"authorization": "Bearer on"}, {"authorization": "one"}, {"authorization": "Basic one"},
                        {"authorization": "Bearer"}, {"authorization": b"Bearer \xff"}):  # fmt: skip
            for method, path in asks:
                refused = server.http.request(method, path, headers=headers)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "zwei"):
            server.http.headers["authorization"] = f"Bearer {key}"
            assert ask(server).status_code == 200 and server.http.get("/metrics").status_code == 200


def test_comments_keep_a_silent_stream_alive():
    llm = FakeLLM()
    llm.go.clear()
    with serving(lambda: llm, keep_alive=0.05) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, server, stream=True)
        time.sleep(0.4)
        llm.go.set()
        events = stream.result().text.split("\n\n")
    assert events.count(": keep-alive") >= 3 and events[-2] == "data: [DONE]"
    assert [event for event in events if event.startswith("data: {")][0].count('"text":"a"') == 1


def test_a_body_above_the_limit_is_refused_unread():
    with serving(FakeLLM, max_request_bytes=2000) as server:
        assert ask(server, user="u" * 3000).status_code == 413

        def parts():
            for _ in range(50):
                yield b" " * 1000

        refused = server.http.post(TEXT, content=parts(), headers={"content-type": "application/json"})
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"


def test_a_request_has_a_name_in_the_response():
    with serving(FakeLLM) as server:
        given = server.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
        assert given == "mine-1"
        made = {server.http.get("/version").headers["x-request-id"] for _ in range(5)}
        assert len(made) == 5
        odd = server.http.get("/version", headers={"x-request-id": "a b" * 100}).headers["x-request-id"]
        assert odd.startswith("req-")


def test_idle_ranks_are_told_to_wait_on(monkeypatch):
    llm = FakeLLM()
    from draftwood.server import service

    made = service.Runner
    monkeypatch.setattr(service, "Runner", lambda load, most: made(load, most, rest_seconds=0.02))
    with serving(lambda: llm) as server:
        until(lambda: llm.rests >= 3)
        assert ask(server).status_code == 200


def test_pages_of_other_origins_may_call_only_where_allowed():
    ask_first = {"origin": "http://page", "access-control-request-method": "POST"}
    with serving(FakeLLM) as server:
        assert "access-control-allow-origin" not in server.http.options(TEXT, headers=ask_first).headers
    with serving(FakeLLM, origins=("http://page",), api_keys=("k",)) as server:
        assert server.http.options(TEXT, headers=ask_first).headers["access-control-allow-origin"] == "http://page"
        assert server.post(TEXT, {"prompt": "a"}, headers={"origin": "http://page"}).status_code == 401
