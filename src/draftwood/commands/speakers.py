"""Who answers in `chat`: the model of this process, or a server. Answers come in pieces that are reasoning or not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from draftwood.commands.generate import ENDINGS, summary
from draftwood.engine.request import SamplingParams
from draftwood.errors import RequestError
from draftwood.remote import DONE, Remote, event

if TYPE_CHECKING:
    import httpx

    from draftwood.llm import LLM

OPEN, CLOSE = "<think>", "</think>"
Part = tuple[str, bool]
"""Text, and whether it is reasoning."""


class Speaker(Protocol):
    """Answers a conversation."""

    def answer(self, messages: list[dict[str, Any]]) -> Generator[Part | str]:
        """Yield the answer's parts, then one line on what it cost. Raises RequestError for messages it cannot answer."""


class Local:
    """The model of this process."""

    def __init__(self, llm: LLM, params: SamplingParams, thinking: bool | None) -> None:
        self.llm, self.params = llm, params
        self.template: dict[str, Any] = {} if thinking is None else {"thinking": thinking}

    def answer(self, messages: list[dict[str, Any]]) -> Generator[Part | str]:
        """See Speaker."""
        ids = self.llm.chat_ids(messages, **self.template)
        tokenizer = self.llm.tokenizer
        marks = Marks(tokenizer is not None and bool(ids) and ids[-1] == tokenizer.special.get(OPEN))
        with contextlib.closing(self.llm.stream(ids, self.params)) as pieces:
            for piece in pieces:
                if isinstance(piece, str):
                    yield from marks.split(piece)
                else:
                    yield summary(piece)


class Marks:
    """Tells an answer's reasoning from the rest while it streams. The closing marker is one token, so one piece."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def split(self, piece: str) -> list[Part]:
        """Return the piece's parts; markers are left out."""
        parts: list[Part] = []
        while piece:
            text, marker, piece = piece.partition(CLOSE if self.inside else OPEN)
            if text:
                parts.append((text, self.inside))
            if marker:
                self.inside = not self.inside
        return parts


class Distant:
    """A server. Tool calls are not asked for, so answers are text."""

    def __init__(self, client: httpx.Client, server: Remote, params: SamplingParams, thinking: bool | None) -> None:
        """client: open on the server, with its headers."""
        self.client = client
        self.body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
        self.body |= {"max_tokens": params.max_tokens, "temperature": params.temperature, **_asked(params)}
        if thinking is not None:
            self.body["chat_template_kwargs"] = {"thinking": thinking}
        if server.ours:
            self.body["timings"] = True

    def answer(self, messages: list[dict[str, Any]]) -> Generator[Part | str]:
        """See Speaker."""
        import httpx

        cost = "the server told no usage"
        try:
            with self.client.stream("POST", "/v1/chat/completions", json={**self.body, "messages": messages}) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_refusal(response), "messages")
                end: dict[str, Any] = {}
                for chunk in _chunks(response):
                    if error := chunk.get("error"):
                        raise RequestError(f"the server failed: {json.dumps(error)[:200]}", "messages")
                    for choice in chunk.get("choices") or ():
                        if choice.get("finish_reason"):
                            end = choice
                        yield from _parts(choice.get("delta") or {})
                    if usage := chunk.get("usage"):
                        cost = _cost(usage["completion_tokens"], end)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RequestError(f"the server does not answer as one: {str(error) or type(error).__name__}", "messages") from None
        yield cost


def _asked(params: SamplingParams) -> dict[str, Any]:
    """Sampling that was asked for, as fields of a request; those that OpenAI's API lacks too, for servers that know them."""
    flags = [f for f in dataclasses.fields(SamplingParams) if "help" in f.metadata]
    values = {f.name: getattr(params, f.name) for f in flags if getattr(params, f.name) != f.default}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if (data := event(line)) not in (None, DONE):
            yield json.loads(data)


def _parts(delta: dict[str, Any]) -> Iterator[Part]:
    """Raises TypeError for parts that are no texts."""
    for part, thought in ((delta.get("reasoning_content") or delta.get("reasoning"), True), (delta.get("content"), False)):
        if part and not isinstance(part, str):
            raise TypeError(f"part of its answer is {str(part)[:60]!r}, no text")
        if part:
            yield part, thought


def _refusal(response: httpx.Response) -> str:
    """What a server says of a request it refuses."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answers {response.status_code}: {response.text[:200]}"


def _cost(tokens: int, end: dict[str, Any]) -> str:
    """One line on an answer of `tokens` tokens; `end`: its last choice, with our server's timings if it is one of ours."""
    reason = str(end.get("finish_reason"))
    ending, timings = ENDINGS.get(reason, reason), end.get("timings")
    if timings is None:
        return f"{tokens} tokens ({ending})"
    return (
        f"accept length {timings['accept_length']:.2f}, {tokens} tokens in {timings['steps']} steps, {timings['tok_s']:.1f} tok/s "
        f"(seed {timings['seed']}, {ending})"
    )
