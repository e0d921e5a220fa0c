"""Talk with a model: of this machine, or of the server at --base-url.

/reset begins anew, /exit or end of input ends; Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from draftwood import ranks, remote
from draftwood.commands import console
from draftwood.commands.speakers import Distant, Local, Speaker
from draftwood.config import add_options, options_from
from draftwood.engine.request import SamplingParams, add_sampling, sampling_from
from draftwood.errors import ConfigError, RequestError
from draftwood.report import closed_pipe_is_fine

HELP = "/reset: forget the conversation   /exit: leave   Ctrl-C: stop an answer"
PROMPT = "> "
SILENCE = 600.0
"""Seconds without a word after which a server counts as gone."""
DEFAULTS = {"enable_prefix_caching": True}
"""Of the engine's options, where a conversation has its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The system prompt, thinking, and all options of engine and sampling."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="reason before the answer (default: what the checkpoint's template does)",
    )
    remote.add_arguments(parser, "the model runs here")
    add_sampling(parser)
    add_options(parser)
    parser.set_defaults(**DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Converse until the user leaves; return 0, or the code of the ranks that were started for it."""
    params = sampling_from(args)
    if args.base_url is not None:
        return _afar(args, params)
    remote.absent(args)
    options = options_from(args)
    code = ranks.start(args, options)
    if code is not None:
        return code
    from draftwood.llm import leading

    with leading(options) as llm:
        if llm is None:
            return 0
        if args.thinking is not None and llm.template is not None and "thinking" not in llm.template.heeds:
            flag = "--thinking" if args.thinking else "--no-thinking"
            raise ConfigError(f"{flag} has no effect: the chat template of {options.model} does not heed it; leave it out")
        with closed_pipe_is_fine():
            console.say_notes(llm.plan)
            _greet(str(llm.plan.model_path))
            Conversation(Local(llm, params, args.thinking), args.system).run(_read)
    return 0


def _afar(args: argparse.Namespace, params: SamplingParams) -> int:
    """Converse with a server."""
    remote.needs("httpx", command="chat with --base-url")
    import httpx

    server = remote.connect(args, **DEFAULTS)
    with (
        httpx.Client(base_url=server.url, headers=server.headers, timeout=SILENCE, trust_env=False) as client,
        closed_pipe_is_fine(),
    ):
        _greet(f"{server.model} at {server.url}")
        Conversation(Distant(client, server, params, args.thinking), args.system).run(_read)
    return 0


def _greet(whom: str) -> None:
    if sys.stdin.isatty():
        console.say(console.dim(f"{whom}   {HELP}", sys.stderr))


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
    """The messages so far and who answers them."""

    def __init__(self, speaker: Speaker, system: str | None) -> None:
        self.speaker = speaker
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
            answer = self._answer([*self.messages, question])
        except RequestError as error:
            console.say(f"{error} (/reset begins anew)")
            return
        self.messages += [question, answer]

    def _answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Stream an answer to the terminal, its reasoning dimmed; return it as a message. Ctrl-C ends it early."""
        said, ending, thinking = {True: "", False: ""}, "stopped", False
        with _interrupts() as interrupts, contextlib.closing(self.speaker.answer(messages)) as parts:
            for part in parts:
                if isinstance(part, str):
                    ending = part
                else:
                    text, thought = part
                    if thinking and not thought:
                        console.write("\n")
                    thinking = thought
                    said[thought] += text
                    console.write(console.dim(text, sys.stdout) if thought else text)
                if interrupts:
                    break
        console.write("\n")
        console.say(console.dim(ending, sys.stderr))
        return {"role": "assistant", "content": said[False], "reasoning_content": said[True]}
