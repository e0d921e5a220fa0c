"""Two thousand requests of all kinds: every good answer is its solo answer, and nothing is left behind."""

import ctypes
import gc
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.serving import until

REQUESTS, WARM, CLIENTS, KINDS = 2000, 500, 24, 200
USED, GROWTH, OBJECTS = 4 << 20, 64 << 20, 1000
"""Bytes in use, bytes held and Python objects that the process may gain after the first WARM requests: latencies of metrics,
connections that are kept. malloc holds more than is used, as much as the fullest step so far has needed: `held` gives that back."""
PROMPTS = ("def add(a, b):\n", "class Stack:\n", "import os\n", "x = [1, ", "for i in ", "# Sort a list\n", "def f(", "while ")


def body(kind: random.Random) -> dict:
    """A good request."""
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


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def held() -> tuple[int, int, int]:
    """Bytes that are allocated and bytes of memory that this process holds (0 where that cannot be told), Python objects."""
    gc.collect()
    used, resident, libc = 0, 0, ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Malloc
        libc.malloc_trim(0)
        info = libc.mallinfo2()
        used = info.uordblks + info.hblkhd
    file = Path("/proc/self/statm")
    if file.exists():
        resident = int(file.read_text().split()[1]) * 4096
    return used, resident, len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_requests_leave_nothing_behind(server):
    alone: dict[str, object] = {}
    kinds = random.Random(5)
    several = [body(kinds) for _ in range(KINDS)]
    plan = [(kinds.random(), kinds.choice(several)) for _ in range(REQUESTS)]
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

    def work(part):
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(many, [part[i::CLIENTS] for i in range(CLIENTS)]))
        until(lambda: not server.runner.open and server.runner.llm.state().running == 0)
        return held()

    before, after = work(plan[:WARM]), work(plan[WARM:])
    gained = [b - a for a, b in zip(before, after, strict=True)]
    assert all(one < most for one, most in zip(gained, (USED, GROWTH, OBJECTS), strict=True)), gained
    assert wrong == []
    state = server.runner.llm.state()
    assert state.free_pages == state.pages and state.waiting == 0
    assert state.totals.prefix_hits > 0
    assert server.metric("http_responses_total", status="500") == 0
