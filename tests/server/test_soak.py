"""Two thousand requests of all kinds: every good answer is its solo answer, and nothing is left behind."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.serving import until

REQUESTS, CLIENTS = 2000, 24
GROWTH, OBJECTS = 128 << 20, 1000
"""Bytes and Python objects that the process may gain in the second half: caches touched late, connections kept."""
PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n", "x = [1, ", "for i in ", "# Sort a list\n", "def f(", "while ")


def body(kind: random.Random) -> dict:
    """One of a few hundred good requests."""
    return {
        "prompt": kind.choice(PROMPTS) * kind.choice((1, 1, 8, 30)),
        "max_tokens": kind.randint(1, 6),
        "temperature": kind.choice((0.0, 0.8)),
        "seed": kind.randint(0, 3),
        "tree_budget": kind.choice((0, 4, 16)),
        "return_token_ids": True,
    }


def name(good: dict) -> str:
    return repr({k: v for k, v in good.items() if k != "tree_budget"})


def answer(client: httpx.Client, good: dict):
    response = client.post("/v1/completions", json=good)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["token_ids"], choice["finish_reason"]


def leave(client: httpx.Client, good: dict) -> None:
    """Ask for much, read a little, and go."""
    much = {**good, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=much) as response:
        next(response.iter_bytes())


def held() -> tuple[int, int]:
    """Bytes of memory that this process holds (0 where that cannot be told) and Python objects."""
    file = Path("/proc/self/statm")
    gc.collect()
    return int(file.read_text().split()[1]) * 4096 if file.exists() else 0, len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_requests_leave_nothing_behind(server):
    alone: dict[str, object] = {}
    kinds = random.Random(5)
    plan = [(kinds.random(), body(kinds)) for _ in range(REQUESTS)]
    for chance, good in plan:
        if chance >= 0.25 and name(good) not in alone:
            alone[name(good)] = answer(server.http, good)
    wrong = []

    def one(client: httpx.Client, chance: float, good: dict) -> None:
        if chance < 0.10:
            leave(client, good)
        elif chance < 0.20:
            bad = client.post("/v1/completions", json={**good, "temperature": "hot"})
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "temperature"
        elif chance < 0.25:
            long = client.post("/v1/completions", json={**good, "prompt": "word " * 3000})
            assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        elif (found := answer(client, good)) != alone[name(good)]:
            wrong.append((good, found, alone[name(good)]))

    def many(part):
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for chance, good in part:
                one(client, chance, good)

    half = REQUESTS // 2
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(many, [plan[:half][i::CLIENTS] for i in range(CLIENTS)]))
        before = held()
        list(pool.map(many, [plan[half:][i::CLIENTS] for i in range(CLIENTS)]))
    after = held()
    assert after[0] - before[0] < GROWTH and after[1] - before[1] < OBJECTS
    assert wrong == []
    until(lambda: not server.runner.open and server.runner.llm.state().running == 0)
    state = server.runner.llm.state()
    assert state.free_pages == state.pages and state.waiting == 0
    assert state.totals.prefix_hits > 0
    assert server.metric("http_responses_total", status="500") == 0
