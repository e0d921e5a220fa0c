"""Answers as OpenAI's objects, whole or in chunks. Fields of ours: token_ids, stop_reason, timings."""

from __future__ import annotations

import abc
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwood.llm import Delta
from draftwood.server.runner import Ticket, Update
from draftwood.text.tokenizer import Tokenizer
from draftwood.text.tools import Content, Event, Reasoning, ToolArguments, ToolStart, collect

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (vLLM's number)."""


@dataclass
class Choice:
    """All that came of one ticket."""

    ticket: Ticket
    text: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    first: float = 0.0
    """Monotonic seconds of the first update."""
    last: Update = field(default_factory=lambda: Update(0.0))
    offset: int = 0
    """Characters of the tokens already given out (text_offset)."""

    def add(self, update: Update, keep: bool = True) -> None:
        """Take an update; a stream gives it out at once and need not keep its parts."""
        self.last = update
        self.first = self.first or update.time
        if keep and update.delta is not None:
            self.text.append(update.delta.text)
            self.events += update.delta.events
            self.token_ids += update.delta.token_ids
            self.logprobs += update.delta.logprobs
            self.top_logprobs += update.delta.top_logprobs

    def whole(self) -> Delta:
        """Everything that was kept."""
        return Delta("".join(self.text), self.events, self.token_ids, self.logprobs, self.top_logprobs)

    @property
    def finish_reason(self) -> str | None:
        reason = self.last.finish_reason
        reader = self.ticket.reader
        return reader.finish_reason(reason) if reason is not None and reader is not None else reason


class Shape(abc.ABC):
    """What a response of one request looks like. `prompts`: token ids of each prompt; choices follow them in order."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: str,
        prompts: Sequence[Sequence[int]],
        timings: bool = False,
        token_ids: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.timings = timings
        self.token_ids = token_ids
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def response(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the whole response."""
        return {**self.head, "choices": [self._choice(c) for c in choices], "usage": self.usage(choices)}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, with_usage: bool) -> dict[str, Any]:
        """Return one chunk of a stream; `usage` stands in it only where it was asked for."""
        body = {**self.head, "object": self.chunk_kind, "choices": choices}
        if with_usage:
            body["usage"] = usage
        return body

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        """Return what a stream says of a choice before anything else."""
        return []

    @abc.abstractmethod
    def pieces(self, choice: Choice, update: Update) -> list[dict[str, Any]]:
        """Return the choices of the chunks that an update becomes."""

    @abc.abstractmethod
    def closing(self, choice: Choice) -> dict[str, Any]:
        """Return the choice of the last chunk, which has the finish reason."""

    @abc.abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """Return a whole choice."""

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens of all prompts, each counted once, and of all answers."""
        prompt = sum(map(len, self.prompts))
        spent = sum(c.last.usage.completion_tokens for c in choices)
        found = {
            "prompt_tokens": prompt,
            "completion_tokens": spent,
            "total_tokens": prompt + spent,
            "prompt_tokens_details": {"cached_tokens": self._cached(choices)},
        }
        reasoned = sum(c.last.reasoning_tokens for c in choices)
        if any(c.ticket.reader is not None for c in choices):
            found["completion_tokens_details"] = {"reasoning_tokens": reasoned}
        return found

    def _cached(self, choices: Sequence[Choice]) -> int:
        """Prompt tokens that were not computed anew: of each prompt, those its first choice found."""
        each = max(1, len(choices) // max(1, len(self.prompts)))
        return sum(c.last.usage.cached_tokens for c in choices[::each])

    def _extras(self, choice: Choice, ids: Sequence[int] | None) -> dict[str, Any]:
        stop = choice.last.stop
        extras: dict[str, Any] = {"stop_reason": None if stop in choice.ticket.ends else stop}
        if self.timings:
            extras["timings"] = timings(choice)
        if self.token_ids and ids is not None:
            extras["prompt_token_ids"] = list(choice.ticket.ids)
            extras["token_ids"] = list(ids)
        return extras

    def _token(self, id: int) -> bytes:
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(id)


class ChatShape(Shape):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        head = _piece(choice, {"role": "assistant", "content": ""})
        if self.token_ids:
            head["prompt_token_ids"] = list(choice.ticket.ids)
        return [head]

    def pieces(self, choice: Choice, update: Update) -> list[dict[str, Any]]:
        delta = update.delta
        if delta is None:
            return []
        found = [_piece(choice, change) for change in map(_change, _joined(delta.events)) if change is not None]
        wanted = choice.ticket.params.logprobs is not None
        if not found and delta.token_ids and (wanted or self.token_ids):
            found = [_piece(choice, {})]
        if found and wanted:
            found[0]["logprobs"] = self._logprobs(delta)
        if found and self.token_ids:
            found[0]["token_ids"] = delta.token_ids
        return found

    def closing(self, choice: Choice) -> dict[str, Any]:
        return {**_piece(choice, {}), "finish_reason": choice.finish_reason, **self._extras(choice, None)}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = choice.whole()
        answer = collect(delta.events)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in answer.calls
            ]
        if answer.reasoning:
            message["reasoning"] = message["reasoning_content"] = answer.reasoning
        wanted = choice.ticket.params.logprobs is not None
        return {
            "index": choice.ticket.index,
            "message": message,
            "logprobs": self._logprobs(delta) if wanted else None,
            "finish_reason": choice.finish_reason,
            **self._extras(choice, delta.token_ids),
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        content = []
        for i, (id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
            top = delta.top_logprobs[i] if delta.top_logprobs else []
            content.append({**self._scored(id, logprob), "top_logprobs": [self._scored(*one) for one in top]})
        return {"content": content, "refusal": None}

    def _scored(self, id: int, logprob: float) -> dict[str, Any]:
        raw = self._token(id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class TextShape(Shape):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def pieces(self, choice: Choice, update: Update) -> list[dict[str, Any]]:
        delta = update.delta
        if delta is None or not delta.text and not delta.token_ids:
            return []
        wanted = choice.ticket.params.logprobs is not None
        if not delta.text and not wanted and not self.token_ids:
            return []
        piece = {
            "index": choice.ticket.index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta) if wanted else None,
            "finish_reason": None,
        }
        if self.token_ids:
            piece["token_ids"] = delta.token_ids
        return [piece]

    def closing(self, choice: Choice) -> dict[str, Any]:
        end = {"index": choice.ticket.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        return {**end, **self._extras(choice, None)}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = choice.whole()
        wanted = choice.ticket.params.logprobs is not None
        return {
            "index": choice.ticket.index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, delta) if wanted else None,
            "finish_reason": choice.finish_reason,
            **self._extras(choice, delta.token_ids),
        }

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The form of completions: parallel lists. Equal texts of different tokens keep the likeliest one."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, (id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
            text = self._token(id).decode("utf-8", "replace")
            found["tokens"].append(text)
            found["token_logprobs"].append(max(logprob, LEAST_LOGPROB))
            found["text_offset"].append(choice.offset)
            choice.offset += len(text)
            top = delta.top_logprobs[i] if delta.top_logprobs else []
            likely: dict[str, float] = {}
            for other, value in top:
                likely.setdefault(self._token(other).decode("utf-8", "replace"), max(value, LEAST_LOGPROB))
            found["top_logprobs"].append({**likely, text: max(logprob, LEAST_LOGPROB)})
        return found


def timings(choice: Choice) -> dict[str, Any]:
    """What one answer cost. Milliseconds are from the request's arrival; rates are tokens per second."""
    usage, ticket = choice.last.usage, choice.ticket
    tokens, decoding = usage.completion_tokens, choice.last.time - choice.first
    return {
        "queue_ms": _ms(usage.started - ticket.created),
        "first_token_ms": _ms(choice.first - ticket.created),
        "total_ms": _ms(choice.last.time - ticket.created),
        "tok_s": round((tokens - 1) / decoding, 2) if decoding > 0 and tokens > 1 else 0.0,
        "prompt_steps": usage.prompt_steps,
        "steps": usage.steps,
        "accept_length": round(usage.accept_length, 4),
        "nodes": usage.nodes,
        "stage_ms": {stage: _ms(seconds) for stage, seconds in usage.stage_seconds.items()},
        "seed": choice.ticket.params.seed,
    }


def _ms(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)


def _piece(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.ticket.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _joined(events: Sequence[Event]) -> list[Event]:
    """Join neighbours that say more of the same."""
    found: list[Event] = []
    for event in events:
        before = found[-1] if found else None
        if isinstance(event, Reasoning) and isinstance(before, Reasoning):
            found[-1] = Reasoning(before.text + event.text)
        elif isinstance(event, Content) and isinstance(before, Content):
            found[-1] = Content(before.text + event.text)
        elif (
            isinstance(event, ToolArguments) and isinstance(before, ToolArguments) and event.index == before.index
        ):
            found[-1] = ToolArguments(event.index, before.text + event.text)
        else:
            found.append(event)
    return found


def _change(event: Event) -> dict[str, Any] | None:
    """Return an event as the delta of a chunk; None for what clients are not told."""
    if isinstance(event, Reasoning):
        return {"reasoning": event.text, "reasoning_content": event.text} if event.text else None
    if isinstance(event, Content):
        return {"content": event.text} if event.text else None
    if isinstance(event, ToolStart):
        call = {"index": event.index, "id": event.id, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
