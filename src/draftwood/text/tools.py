"""An answer's tokens to reasoning, content and tool calls, as they come.

K2 answers in up to three parts: reasoning, closed by `</think>`; content; and a section of tool calls,

    <|tool_calls_section_begin|><|tool_call_begin|>ID<|tool_call_argument_begin|>JSON<|tool_call_end|>...
    <|tool_calls_section_end|>

with ID = `functions.NAME:NUMBER`. Models write it imperfectly. What is read here:

- A section, or a call without one, that opens inside the reasoning ends it.
- A call ends with its own end, with the section's, with the next call's begin, or with the answer.
- A call begun twice before its arguments is restarted; the first attempt becomes content.
- Whatever cannot be read as a call becomes content, markers included. Only markers that were understood and the
  whitespace around them disappear: at the end of the reasoning, around ids and arguments, between calls, and where the
  content before a call is nothing but whitespace.

A marker that is a token of the vocabulary counts when that token comes; the same characters typed by other tokens are
text. Markers without a token (the singular `<|tool_call_section_begin|>`) are found in the text.

    stream = AnswerStream(tokenizer, stops=(), reasoning=opens_reasoning(prompt_ids, tokenizer), tools=tools)
    while ...:
        part = stream.push(output.token_ids)     # part.events, part.used, part.stop
    part = stream.finish(output.finish_reason)   # always, also after a stop string
    reason = stream.finish_reason(output.finish_reason); stream.reasoning_tokens
    message = collect(events)                    # for an answer in one piece
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from draftwood.text.calls import call_name, guess_name, signatures
from draftwood.text.stream import Detokenizer, StopStrings
from draftwood.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the content. It can also come after tool calls."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """A tool call begins. `index` counts the calls of this answer from 0; `id` is as the model wrote it."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of the arguments of call `index`: JSON as the model wrote it, which may be invalid."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolEnd:
    """Call `index` is over. `complete` is False when max_tokens or a stop string cut it."""

    index: int
    complete: bool = True


Event = Reasoning | Content | ToolStart | ToolArguments | ToolEnd


@dataclass(frozen=True)
class Part:
    """What a call to AnswerStream added.

    `used`: tokens that belong to the answer of those given, up to and including the one that completed a stop string;
    `stop`: that stop string, if any.
    """

    events: list[Event]
    used: int
    stop: str | None = None


@dataclass
class ToolCall:
    """One whole call."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Answer:
    """Return the answer that the events of one stream make."""
    answer = Answer()
    for event in events:
        if isinstance(event, Reasoning):
            answer.reasoning += event.text
        elif isinstance(event, Content):
            answer.content += event.text
        elif isinstance(event, ToolStart):
            answer.calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, ToolArguments):
            answer.calls[event.index].arguments += event.text
    return answer


def opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Say whether the answer to a prompt begins inside reasoning: the prompt ends with `<think>`."""
    return bool(prompt) and prompt[-1] == tokenizer.special.get(THINK)


THINK, END_THINK = "<think>", "</think>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENT_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
# Forms seen from real checkpoints beside the published ones.
_VARIANTS = {
    "<|tool_call_section_begin|>": SECTION_BEGIN,
    "<|tool_call_section_end|>": SECTION_END,
}
_MARKERS = {m: m for m in (THINK, END_THINK, SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)} | _VARIANTS
"""Each spelling and the marker it means."""
MAX_HELD = 512
"""Characters of a section or call that are held back in the hope of a call; beyond, they are content."""
_LONGEST = max(map(len, _MARKERS))


class _State(Enum):
    REASONING = 1
    CONTENT = 2
    SECTION = 3
    """In a section, outside its calls."""
    HEADER = 4
    """In a call, before its arguments."""
    ARGUMENTS = 5


class AnswerParser:
    """(token id, text) in, events out, however the text is split. One answer each."""

    def __init__(
        self,
        special: Mapping[str, int] | None = None,
        reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_tools: bool | None = None,
    ) -> None:
        """`special`: names and ids of the vocabulary's special tokens; None where only text is known.

        `reasoning`: the answer begins inside reasoning. `tools`: the request's, for calls whose id lacks a name.
        `parse_tools`: False leaves tool markers in the content; the default parses when there are tools.
        """
        special = special or {}
        self._by_id = {special[name]: name for name in _MARKERS if name in special}
        self._typed = [name for name in _MARKERS if name not in special]
        self._tools = signatures(tools or ())
        self._parses = bool(tools) if parse_tools is None else parse_tools
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._events: list[Event] = []
        self.reasoning_tokens = 0
        """Tokens of the reasoning, the one that closes it included; never more than were pushed."""
        self.calls = 0
        """Calls begun so far."""
        self._complete = True
        self._tail = ""
        """The end of the text, where it may begin a marker."""
        self._space = ""
        """Whitespace held back until it is known what follows it."""
        self._begun = False
        """True when there has been content other than whitespace."""
        self._thought = False
        """True when there has been reasoning: it opens only once."""
        self._raw: list[str] = []
        """What was read since the section or call began while no call has come of it: content if none does."""
        self._lost: list[str] = []
        """The part of it that is content even if a call comes: attempts that were restarted."""
        self._attempt = 0
        """Place in `_raw` where the latest attempt began."""
        self._open = False
        """True inside a section; `_answered`: it has had a call."""
        self._answered = False
        self._header = ""
        self._unnamed = ""
        """Id of a call whose name has to be guessed from its arguments."""
        self._arguments: list[str] | None = None
        """Those arguments, None for a call with a name."""
        self._argued = False
        """True when the running call has had an argument character."""

    def push(self, id: int | None, text: str) -> list[Event]:
        """Take one token with the text it completes, or text alone (id None); return what this makes certain."""
        marker = self._by_id.get(id) if id is not None else None
        if self._state is _State.REASONING and id is not None:
            self.reasoning_tokens += marker is None or _MARKERS[marker] not in (SECTION_BEGIN, CALL_BEGIN)
        if marker is not None:
            self._flush(text.removesuffix(marker))
            self._marker(_MARKERS[marker], marker)
        else:
            pieces, self._tail = _split(self._tail + text, list(_MARKERS) if id is None else self._typed)
            for piece in pieces:
                if piece in _MARKERS:
                    self._marker(_MARKERS[piece], piece)
                else:
                    self._text(piece)
        return self._drain()

    def finish(self, reason: str | None = "stop") -> list[Event]:
        """End the answer, for the engine's reason, None for a stop string; return what was held back. Once.

        Only a model that stops by itself ends a call that has begun its arguments.
        """
        self._flush("")
        if self._state is _State.ARGUMENTS:
            self._end_call(complete=reason == "stop")
        elif self._state is _State.REASONING:
            self._emit(Reasoning(self._space))
        elif self._raw or self._header:
            self._give_up(self._header)
        if self._state is not _State.REASONING and self._space and not self.calls:
            self._emit(Content(self._space))
        self._space = self._header = ""
        self._raw, self._state = [], _State.CONTENT
        return self._drain()

    def finish_reason(self, reason: str) -> str:
        """Return "tool_calls" where the model stopped after calling tools, else the engine's reason."""
        return "tool_calls" if reason == "stop" and self.calls and self._complete else reason

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        """Add an event, joined to the one before where both are text of the same part. Empty text is nothing."""
        if isinstance(event, Reasoning | Content | ToolArguments):
            if not event.text:
                return
            last = self._events[-1] if self._events else None
            if type(last) is type(event) and not isinstance(last, ToolStart | ToolEnd | None):
                self._events[-1] = dataclasses.replace(event, text=last.text + event.text)
                return
        self._events.append(event)

    def _flush(self, text: str) -> None:
        text, self._tail = self._tail + text, ""
        if text:
            self._text(text)

    # Text, by state.

    def _text(self, text: str) -> None:
        if self._state is _State.REASONING:
            self._thought = True
            body, self._space = _trailing(self._space + text)
            self._emit(Reasoning(body))
        elif self._state is _State.CONTENT:
            self._content(text)
        elif self._state is _State.ARGUMENTS:
            self._argument(text)
        elif self._state is _State.HEADER:
            self._header += text
            if self._held + len(self._header) > MAX_HELD:
                self._give_up(self._header)
        elif text.isspace() and self._held + len(text) <= MAX_HELD:
            self._raw.append(text)
        else:
            self._give_up(text)

    def _content(self, text: str) -> None:
        """Add content; whitespace at its start waits for what follows."""
        text, self._space = self._space + text, ""
        if self._begun or text.strip():
            self._begun = True
            self._emit(Content(text))
        else:
            self._space = text

    def _argument(self, text: str) -> None:
        if self._arguments is not None:
            self._arguments.append(text)
            self._raw.append(text)
            return
        body, self._space = _trailing(self._space + text)
        if not self._argued:
            body = body.lstrip()
            self._argued = bool(body)
            self._space = self._space if body else ""
        self._emit(ToolArguments(self.calls - 1, body))

    # Markers, by state. `kind` is what a marker means, `raw` how it was written.

    def _marker(self, kind: str, raw: str) -> None:
        match self._state:
            case _State.REASONING:
                self._in_reasoning(kind, raw)
            case _State.CONTENT:
                self._in_content(kind, raw)
            case _State.SECTION:
                self._in_section(kind, raw)
            case _State.HEADER:
                self._in_header(kind, raw)
            case _State.ARGUMENTS:
                self._in_arguments(kind, raw)

    def _in_reasoning(self, kind: str, raw: str) -> None:
        """The prompt opened it: a model that does so again at once says nothing."""
        if kind == END_THINK or kind in (SECTION_BEGIN, CALL_BEGIN):
            self._state, self._space = _State.CONTENT, ""
            if kind != END_THINK:
                self._in_content(kind, raw)
        elif kind != THINK or self._thought:
            self._text(raw)
        self._thought = True

    def _in_content(self, kind: str, raw: str) -> None:
        if kind == THINK and not (self._thought or self._begun or self.calls):
            self._state, self._space = _State.REASONING, ""
            self._thought = True
        elif kind == SECTION_BEGIN and self._parses:
            self._enter(raw)
        elif kind == CALL_BEGIN and self._parses:
            self._attempts(raw)
        elif kind == SECTION_END and self._open:
            self._close(raw)
        else:
            self._content(raw)

    def _in_section(self, kind: str, raw: str) -> None:
        if kind == CALL_BEGIN:
            self._attempts(raw)
        elif kind == SECTION_END:
            self._close(raw)
        else:
            self._give_up(raw)

    def _in_header(self, kind: str, raw: str) -> None:
        if kind == ARGUMENT_BEGIN:
            self._start_call(raw)
        elif kind == CALL_BEGIN:
            self._raw.append(self._header)
            self._lost += self._raw[self._attempt :]
            self._attempts(raw)
        elif kind == SECTION_END:
            self._raw.append(self._header)
            self._close(raw)
        else:
            self._give_up(self._header + raw)

    def _in_arguments(self, kind: str, raw: str) -> None:
        if kind == CALL_END:
            self._end_call(raw)
        elif kind == SECTION_END:
            self._end_call()
            self._close(raw)
        elif kind == CALL_BEGIN:
            self._end_call()
            self._attempts(raw)
        elif kind == SECTION_BEGIN:
            self._end_call()
            self._enter(raw)
        else:
            self._argument(raw)

    # Sections and calls.

    @property
    def _held(self) -> int:
        return sum(map(len, self._raw))

    def _enter(self, raw: str) -> None:
        self._state, self._open, self._answered = _State.SECTION, True, False
        self._raw, self._lost = [raw], []

    def _close(self, raw: str) -> None:
        """End the section: its marker disappears if there was a call, otherwise all of it is content."""
        pending = "".join(self._raw)
        if not self._answered:
            self._content(pending + raw)
        elif pending.strip():
            self._content(pending)
        self._raw, self._lost, self._header = [], [], ""
        self._state, self._open = _State.CONTENT, False

    def _give_up(self, text: str) -> None:
        """What was held is no call: it and `text` are content."""
        pending, self._raw, self._lost, self._header = "".join(self._raw), [], [], ""
        self._state = _State.CONTENT
        if pending.strip() or text:
            self._content(pending + text)

    def _attempts(self, raw: str) -> None:
        """A call begins, it seems."""
        if not "".join(self._raw).strip():
            self._raw = []
        self._attempt = len(self._raw)
        self._raw.append(raw)
        self._state, self._header = _State.HEADER, ""
        if self._held > MAX_HELD:
            self._give_up("")

    def _start_call(self, raw: str) -> None:
        self._raw += [self._header, raw]
        id, self._header = self._header.strip(), ""
        name = call_name(id, self._tools)
        if name:
            self._state = _State.ARGUMENTS
            self._announce(id, name)
        elif id and self._tools:
            self._state = _State.ARGUMENTS
            self._arguments, self._unnamed = [], id
        else:
            self._give_up("")

    def _announce(self, id: str, name: str) -> None:
        if self._lost:
            self._content("".join(self._lost))
        self._raw, self._lost = [], []
        self._space, self._argued, self._answered, self._complete = "", False, True, False
        self._emit(ToolStart(self.calls, id, name))
        self.calls += 1

    def _end_call(self, raw: str = "", complete: bool = True) -> None:
        """End the running call; `raw`: its own end marker, where that is what ended it."""
        self._state = _State.SECTION if self._open else _State.CONTENT
        if self._arguments is not None:
            text, self._arguments = "".join(self._arguments), None
            name = guess_name(text, self._tools)
            if name is None:
                self._give_up(raw)
                return
            self._announce(self._unnamed, name)
            self._argument(text)
        if not self._argued and complete:
            self._emit(ToolArguments(self.calls - 1, "{}"))
        self._space, self._complete = "", complete
        self._emit(ToolEnd(self.calls - 1, complete))


class AnswerStream:
    """Tokens in, events out: Detokenizer, StopStrings and AnswerParser in a row.

    Stop strings are looked for in the whole text of the answer, reasoning and markers included, as TextStream does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parse_tools: bool | None = None,
    ) -> None:
        """As AnswerParser. Raises RequestError for an empty stop string."""
        self._detokenizer = Detokenizer(tokenizer, tokenizer.silent)
        self._stops = StopStrings(stops)
        self._parser = AnswerParser(tokenizer.special, reasoning, tools, parse_tools)
        self._queue: deque[tuple[int, str]] = deque()
        """Tokens whose text stop strings hold back."""
        self._sure = 0
        """Characters at the start of the queue that may be shown."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, the one that closes it included."""
        return self._parser.reasoning_tokens

    @property
    def calls(self) -> int:
        """Tool calls begun so far."""
        return self._parser.calls

    def finish_reason(self, reason: str) -> str:
        """Return "tool_calls" where the model stopped after calling tools, else the engine's reason."""
        return self._parser.finish_reason(reason)

    def push(self, ids: Sequence[int]) -> Part:
        """Take a run of tokens. After a stop string was found, takes nothing."""
        events: list[Event] = []
        if self._stops.stop is not None:
            return Part(events, 0, self._stops.stop)
        for used, id in enumerate(ids, 1):
            text = self._detokenizer.push((id,))
            self._queue.append((id, text))
            self._show(self._stops.push(text), events)
            if self._stops.stop is not None:
                return Part(events, used, self._stops.stop)
        return Part(events, len(ids))

    def finish(self, reason: str | None = "stop") -> Part:
        """End of the answer, for the engine's reason: return what was held back. Call it after a stop string, too."""
        events: list[Event] = []
        if self._stops.stop is None:
            last = self._detokenizer.finish()
            shown = self._stops.push(last)
            if last:
                self._queue.append((-1, last))
            self._show(shown + self._stops.finish(), events)
        stop = self._stops.stop
        if self._queue and self._sure:  # a stop string cut these tokens
            text = "".join(text for _, text in self._queue)[: self._sure]
            events += self._parser.push(-1, text)
        self._queue.clear()
        events += self._parser.finish(reason if stop is None else None)
        return Part(events, 0, stop)

    def _show(self, text: str, events: list[Event]) -> None:
        """Hand the parser every token whose text is now certain."""
        self._sure += len(text)
        while self._queue and len(self._queue[0][1]) <= self._sure:
            id, whole = self._queue.popleft()
            self._sure -= len(whole)
            events += self._parser.push(id, whole)


def _split(text: str, markers: list[str]) -> tuple[list[str], str]:
    """Return the markers in `text` with the text between them, and the end that may begin a marker."""
    pieces, start = [], 0
    at = text.find("<")
    while at >= 0:
        found = next((m for m in markers if text.startswith(m, at)), None)
        if found is None:
            rest = text[at:]
            if len(rest) <= _LONGEST and any(m.startswith(rest) for m in markers):
                break
            at = text.find("<", at + 1)
            continue
        pieces += [text[start:at], found]
        start = at + len(found)
        at = text.find("<", start)
    end = at if at >= 0 else len(text)
    pieces.append(text[start:end])
    return [piece for piece in pieces if piece], text[end:]


def _trailing(text: str) -> tuple[str, str]:
    """Return (text without the whitespace at its end, that whitespace)."""
    body = text.rstrip()
    return body, text[len(body) :]
