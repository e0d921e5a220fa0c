"""The `draftwood` command: a table of sub-commands, imported when used. No logic lives here.

A command module has `add_arguments(parser)` and `run(args) -> int`; `args.argv` is the command line after `draftwood`,
for a command that starts itself again as several ranks.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from draftwood import __version__
from draftwood.errors import ConfigError, DraftwoodError
from draftwood.report import closed_pipe_is_fine

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("draftwood.commands.generate", "write a continuation of a prompt to stdout"),
    "chat": ("draftwood.commands.chat", "talk with the model in the terminal"),
    "serve": ("draftwood.server.serve", "serve the model over HTTP with OpenAI's API"),
    "check": ("draftwood.commands.check", "prove that trees and plain decoding give the same tokens"),
    "bench step": ("draftwood.bench.step", "accept length, stage times and tok/s by tree budget"),
    "bench serve": ("draftwood.bench.serve", "throughput and latency of a server under load"),
    "bench kernels": ("draftwood.bench.kernels", "time, bytes and error of the CUDA kernels, or compile them"),
    "plan": ("draftwood.commands.plan", "show the memory, pages and predicted step time"),
    "train corpus": ("draftwood.train.corpus", "collect training text from packages"),
    "train pack": ("draftwood.train.pack", "train the tokenizer and pack the corpus to tokens"),
    "train target": ("draftwood.train.target", "train a small target model"),
    "train capture": ("draftwood.train.capture", "write the target's own text for the drafter"),
    "train drafter": ("draftwood.train.drafter", "train a DFlash drafter for a target"),
    "train bigram": ("draftwood.train.bigram", "count a previous-token table from text"),
    "train card": ("draftwood.train.card", "write the model card of a trained pair"),
    "train evaluate": ("draftwood.train.evaluate", "held-out loss and accept lengths of a trained pair"),
    "env": ("draftwood.commands.env", "show what was found on this machine"),
}


class _Parser(argparse.ArgumentParser):
    """Bad usage is one line, like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` explains")


def _table() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())


def _usage() -> str:
    return f"usage: draftwood COMMAND [options]\n\n{_table()}\n\n`draftwood COMMAND --help` explains one."


def _find(argv: Sequence[str]) -> tuple[str, list[str]] | None:
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return name, list(argv[words:])
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 failed, 2 bad usage or bad input."""
    with closed_pipe_is_fine():
        return _run(sys.argv[1:] if argv is None else list(argv))
    return 0


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"draftwood {__version__}")
        return 0
    found = _find(argv)
    if found is None:
        print(f"draftwood: no command {' '.join(argv[:2])!r}; `draftwood --help` lists them", file=sys.stderr)
        return 2
    name, rest = found
    module = importlib.import_module(COMMANDS[name][0])
    parser = _Parser(prog=f"draftwood {name}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args(rest, argparse.Namespace(argv=argv))))
    except DraftwoodError as error:
        print(f"draftwood {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
