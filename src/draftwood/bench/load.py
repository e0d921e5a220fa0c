"""Load on an OpenAI-compatible server: requests at a concurrency or a rate, each timed as it streams back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftwood import report
from draftwood.errors import ConfigError
from draftwood.remote import DONE, event

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Load:
    """One run: at most `concurrency` requests open (None: no limit), arriving at `rate` per second (None: at once)."""

    concurrency: int | None
    rate: float | None

    @property
    def label(self) -> str:
        """How the run is called in tables."""
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g}/s"


@dataclass
class Answer:
    """What came back for one request. Times in seconds; `error` is empty when it ended well.

    gaps: between one piece of text and the next. Token counts are the server's own `usage`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    first: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None for one token."""
        return (self.latency - self.first) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None


async def ready(client: httpx.AsyncClient, seconds: float, poll: float = 0.5) -> None:
    """Wait while the server's /health says 503, as this project's does until its model is loaded.

    Any other answer, and none, are left for the requests to meet. Raises ConfigError after `seconds`.
    """
    ends, told = time.monotonic() + seconds, False
    while True:
        try:
            response = await client.get("/health")
        except httpx.HTTPError:
            return
        if response.status_code != 503:
            return
        if not told:
            report.note(f"the server at {client.base_url} is not ready; waiting at most {seconds:g} s")
            told = True
        if time.monotonic() + poll > ends:
            raise ConfigError(
                f"the server at {client.base_url} is not ready after {seconds:g} s; wait for it, or raise --ready-check-timeout-sec"
            )
        await asyncio.sleep(poll)


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Post one streaming request and read it to its end. Failures of any kind are told in the answer's `error`."""
    answer, began = Answer(), time.perf_counter()
    last, done = began, False
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=streamed) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                answer.error = f"HTTP {response.status_code}: {text[:_LONGEST_ERROR]}"
                return answer
            async for line in response.aiter_lines():
                if (data := event(line)) is None:
                    continue
                if data == DONE:
                    done = True
                    break
                now = time.perf_counter()
                if _take(answer, json.loads(data)):
                    if answer.first:
                        answer.gaps.append(now - last)
                    else:
                        answer.first = now - began
                    last = now
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:  # the latter: no JSON, or another form
        answer.error = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        return answer
    answer.latency = time.perf_counter() - began
    if not done and not answer.error:
        answer.error = "the stream ended without [DONE]"
    elif not answer.error and not answer.completion_tokens:
        answer.error = "the stream had no usage, so its tokens cannot be counted"
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> bool:
    """Add a chunk to the answer; return whether it held text or part of a tool call."""
    if chunk.get("error"):
        answer.error = json.dumps(chunk["error"])[:_LONGEST_ERROR]
    if usage := chunk.get("usage"):
        answer.prompt_tokens = int(usage["prompt_tokens"])
        answer.completion_tokens = int(usage["completion_tokens"])
    found = False
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.text += piece
        found = found or bool(piece) or bool(delta.get("tool_calls"))
    return found


@dataclass(frozen=True)
class Result:
    """Answers of one run, in the order of the requests, and its seconds from the first request to the last byte."""

    load: Load
    answers: list[Answer]
    seconds: float
    most_open: int
    """Most requests that were open together."""


async def run(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    seed: int,
    ended: Callable[[], object],
) -> Result:
    """Send all bodies under one load. Arrivals at a rate are a Poisson process drawn from `seed`; `ended` is told of each end."""
    gate = asyncio.Semaphore(load.concurrency or len(bodies))
    chance, count = random.Random(seed), [0, 0]

    async def one(body: dict[str, Any]) -> Answer:
        async with gate:
            count[0] += 1
            count[1] = max(count)
            answer = await send(client, path, body)
            count[0] -= 1
            ended()
            return answer

    began, tasks = time.perf_counter(), []
    due = began
    for body in bodies:
        tasks.append(asyncio.create_task(one(body)))
        if load.rate is not None:
            due += chance.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    answers = await asyncio.gather(*tasks)
    return Result(load, answers, time.perf_counter() - began, count[1])
