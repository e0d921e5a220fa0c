"""Write a continuation of a prompt to stdout, as it grows; accept length, steps and speed go to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from draftwood import ranks
from draftwood.commands import console
from draftwood.commands.prompts import read_prompts
from draftwood.commands.trees import Drawing, draw
from draftwood.config import add_options, options_from
from draftwood.engine.request import SamplingParams, add_sampling, sampling_from
from draftwood.report import closed_pipe_is_fine, json_line

if TYPE_CHECKING:
    from draftwood.llm import LLM, Completion

OPTIONAL = ("logprobs", "top_logprobs")
ENDINGS = {"stop": "stopped by itself", "length": "cut at the length limit"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt, how to show the answer, and all options of engine and sampling."""
    parser.add_argument("-p", "--prompt", action="append", metavar="TEXT", help="prompt; - is stdin; may be given again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--show-tree", action="store_true", help="draw each step's tree on stderr, accepted path marked")
    parser.add_argument(
        "--allow-special", action="store_true", help="control tokens spelled in the prompt are those tokens, not text"
    )
    add_sampling(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate; return 0, or the code of the ranks that were started for it."""
    options, params = options_from(args), sampling_from(args)
    if not args.prompt:
        read_prompts(args.prompt)
    code = ranks.start(args, options)
    if code is not None:
        return code
    prompts = read_prompts(args.prompt) if ranks.is_first() else []
    from draftwood.llm import leading

    with leading(options) as llm:
        if llm is None:
            return 0
        with closed_pipe_is_fine():
            console.say_notes(llm.plan)
            _generate(llm, prompts, params, args)
    return 0


def _generate(llm: LLM, prompts: list[str], params: SamplingParams, args: argparse.Namespace) -> None:
    if args.show_tree:
        llm.engine.records = []
    if args.json:
        completions = llm.generate(prompts, params, args.allow_special)
        found = [record(c) for c in completions]
        console.write(json_line(found[0] if len(found) == 1 else {"completions": found}), end="\n")
    elif len(prompts) == 1:
        completions = [_stream(llm, prompts[0], params, args.allow_special)]
        console.say(summary(completions[0]))
    else:
        completions = llm.generate(prompts, params, args.allow_special)
        for number, completion in enumerate(completions, 1):
            _write_line(completion.text)
            console.say(f"prompt {number}: {summary(completion)}")
    if args.show_tree:
        for drawing in _drawings(llm, completions):
            console.say(drawing)


def _stream(llm: LLM, prompt: str, params: SamplingParams, allow_special: bool) -> Completion:
    """Write the answer piece by piece; return the whole."""
    last = ""
    for piece in llm.stream(prompt, params, allow_special):
        if not isinstance(piece, str):
            if not last.endswith("\n"):
                console.write("\n")
            return piece
        console.write(piece)
        last = piece
    raise AssertionError("a stream ended without its completion")


def _write_line(text: str) -> None:
    console.write(text, end="" if text.endswith("\n") else "\n")


def record(completion: Completion) -> dict[str, Any]:
    """Return the completion as an object for JSON; log-probabilities only where asked for."""
    fields = dataclasses.asdict(completion)
    return {k: v for k, v in fields.items() if k != "request_id" and (v is not None or k not in OPTIONAL)}


def summary(completion: Completion) -> str:
    """Return what the answer cost, on one line."""
    c = completion
    return (
        f"accept length {c.accept_length:.2f}, {c.completion_tokens} tokens in {c.steps} steps, {c.tok_s:.1f} tok/s "
        f"(tree budget {c.tree_budget}, seed {c.seed}, {ENDINGS.get(c.finish_reason, c.finish_reason)})"
    )


def _drawings(llm: LLM, completions: list[Completion]) -> list[str]:
    """Draw the steps that decoded, in order; the tokens of the prompt itself make no tree."""
    tokenizer = llm.tokenizer

    def text_of(token: int) -> str:
        return tokenizer.decode([token]) if tokenizer else str(token)

    numbers = {completion.request_id: number for number, completion in enumerate(completions, 1)}
    steps = dict.fromkeys(numbers, 0)
    drawn = []
    for step in llm.engine.records or []:
        for row in step.rows:
            if row.forced or row.request_id not in numbers:
                continue
            steps[row.request_id] += 1
            who = f"prompt {numbers[row.request_id]}, " if len(numbers) > 1 else ""
            tree = Drawing(row.tokens, row.parents, row.path, row.committed[-1])
            drawn.append(draw(tree, text_of, f"{who}step {steps[row.request_id]}", lambda line: console.bold(line, sys.stderr)))
    return drawn
