"""Talk with the model. /reset begins anew, /exit or end of input ends; Ctrl-C stops an answer."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from draftwood import ranks
from draftwood.commands import console
from draftwood.commands.generate import summary
from draftwood.config import add_options, options_from
from draftwood.engine.request import SamplingParams, add_sampling, sampling_from
from draftwood.errors import RequestError
from draftwood.report import closed_pipe_is_fine

if TYPE_CHECKING:
    from draftwood.llm import LLM

OPEN, CLOSE = "<think>", "</think>"
HELP = "/reset: forget the conversation   /exit: leave   Ctrl-C: stop an answer"
PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The system prompt, thinking, and all options of engine and sampling."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="reason before the answer (default: what the checkpoint's template does)",
    )
    add_sampling(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Converse until the user leaves; return 0, or the code of the ranks that were started for it."""
    options, params = options_from(args), sampling_from(args)
    code = ranks.start(args, options)
    if code is not None:
        return code
    from draftwood.llm import LLM

    with LLM(options) as llm:
        if llm.rank > 0:
            llm.follow()
            return 0
        with closed_pipe_is_fine():
            console.say_notes(llm.plan)
            if sys.stdin.isatty():
                console.say(console.dim(f"{llm.plan.model_path}   {HELP}", sys.stderr))
            Conversation(llm, params, args.system, args.thinking).run(_read)
    return 0


def _read() -> str | None:
    """Return the next line of input without its end; None at the end of input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing, where the system has it
            import readline  # noqa: F401
        try:
            return input(PROMPT)
        except EOFError:
            console.say("")
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C while an answer streams: a step is never left half done. A second one ends the command."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far and how the next answer is made."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, thinking: bool | None) -> None:
        self.llm = llm
        self.params = params
        self.template: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
        self.start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.start)

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer each line that `read` returns until it returns None or /exit."""
        while (line := read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self.start)
                console.say(console.dim("(forgotten)", sys.stderr))
            elif text.startswith("/") and len(text.split()) == 1:
                console.say(console.dim(f"{text} is no command. {HELP}", sys.stderr))
            elif text:
                self.turn(line)

    def turn(self, text: str) -> None:
        """Answer one message. A message that cannot be answered is told and forgotten."""
        question = {"role": "user", "content": text}
        try:
            ids = self.llm.chat_ids([*self.messages, question], **self.template)
            answer = self._answer(ids)
        except RequestError as error:
            console.say(f"{error} (/reset begins anew)")
            return
        self.messages += [question, answer]

    def _answer(self, ids: list[int]) -> dict[str, Any]:
        """Stream an answer to the terminal, its reasoning dimmed; return it as a message. Ctrl-C ends it early."""
        shown = Reasoning(self._opens_with_reasoning(ids))
        ending = "stopped"
        with _interrupts() as interrupts:
            for piece in self.llm.stream(ids, self.params):
                if isinstance(piece, str):
                    for text, thought in shown.split(piece):
                        console.write(console.dim(text, sys.stdout) if thought else text)
                else:
                    ending = summary(piece)
                if interrupts:
                    break
        console.write("\n")
        console.say(console.dim(ending, sys.stderr))
        return {"role": "assistant", "content": shown.answer, "reasoning_content": shown.reasoning}

    def _opens_with_reasoning(self, ids: list[int]) -> bool:
        tokenizer = self.llm.tokenizer
        return tokenizer is not None and bool(ids) and ids[-1] == tokenizer.special.get(OPEN)


class Reasoning:
    """Tells an answer's reasoning from the rest while it streams. The closing marker is one token, so one piece."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside
        self.reasoning = ""
        self.answer = ""

    def split(self, piece: str) -> list[tuple[str, bool]]:
        """Return the piece's parts as (text, is reasoning); markers are left out."""
        parts: list[tuple[str, bool]] = []
        while piece:
            text, marker, piece = piece.partition(CLOSE if self.inside else OPEN)
            if self.inside:
                self.reasoning += text
            else:
                self.answer += text
            if text:
                parts.append((text, self.inside))
            if marker:
                if self.inside:
                    parts.append(("\n", False))
                self.inside = not self.inside
        return parts
