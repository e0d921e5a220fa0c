"""Tokens per second of nano on one device: draftwood, and the same pair in Hugging Face's modules, plain and with DDTree.

`python -m tests.peer.measure FOLDER` decodes the same greedy prompts one by one with every system, in turns, several rounds; only
decoding counts: from the first token, which the prompt's forward gives, to the last, both on the host. draftwood's time includes
turning tokens into text. FOLDER/peer.jsonl gets a line for each system and round as it comes, FOLDER/peer.json the one line that
also ends the output.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from draftwood import samples
from draftwood.engine.request import SamplingParams
from draftwood.llm import LLM
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.layout import Layout
from tests.peer import ddtree, modules

ROOM = 512
"""Tokens of context beyond an answer's: the longest prompt and a tree."""
BASE = "hf plain"
"""The system whose tokens the others' are compared with."""


@dataclass
class System:
    """A way to decode a prompt, and what its rounds gave."""

    name: str
    decode: Callable[[Sequence[int], int], ddtree.Answer]
    rounds: list[list[ddtree.Answer]] = field(default_factory=list)

    def speeds(self) -> list[float]:
        """Tokens per second of every round, the first token of an answer not counted."""
        return [sum(len(a.tokens) - 1 for a in answers) / seconds(answers) for answers in self.rounds]

    def line(self, base: System) -> dict[str, Any]:
        """What is reported; the middle round's times."""
        speeds, first = self.speeds(), self.rounds[0]
        steps, made = sum(a.steps for a in first), sum(len(a.tokens) - 1 for a in first)
        agree = [common(a.tokens, b.tokens) for a, b in zip(first, base.rounds[0], strict=True)]
        return {
            "system": self.name, "tok_s": round(statistics.median(speeds), 2), "tok_s_best": round(max(speeds), 2),
            "accept_length": round(made / steps, 3), "steps": steps, "tokens": made, "rounds": len(speeds),
            "ms_per_step": round(1000 * statistics.median(map(seconds, self.rounds)) / steps, 3),
            "agree_tokens": sum(agree), "of_tokens": sum(len(b.tokens) for b in base.rounds[0]),
            "agree_answers": sum(a.tokens == b.tokens for a, b in zip(first, base.rounds[0], strict=True)),
        }  # fmt: skip


def seconds(answers: Sequence[ddtree.Answer]) -> float:
    """Time of a round."""
    return sum(a.ended - a.began for a in answers)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def ours(llm: LLM, budget: int, prompt: Sequence[int], most: int) -> ddtree.Answer:
    """Decode with draftwood. The last `advance` ends when the device has nothing left to do, so that is in the time too."""
    answer = llm.start(list(prompt), SamplingParams(max_tokens=most, tree_budget=budget))
    while not answer.token_ids:
        llm.advance()
    found = ddtree.Answer([])  # the clock starts
    while answer.reason is None:
        llm.advance()
    found.ended, found.tokens, found.steps = time.perf_counter(), answer.token_ids, answer.usage.steps
    return found


@torch.inference_mode()
def gaps(target: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Lead of the target's best token over the next one, in logits, at every token of an answer."""
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    best = target(ids).logits[0, len(prompt) - 1 : -1].float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def near_ties(target: torch.nn.Module, prompts: Sequence[Sequence[int]], system: System, base: System) -> list[float]:
    """The base's lead where each differing answer first differs."""
    found = []
    for prompt, a, b in zip(prompts, system.rounds[0], base.rounds[0], strict=True):
        place = common(a.tokens, b.tokens)
        if place < min(len(a.tokens), len(b.tokens)):
            found.append(round(gaps(target, prompt, b.tokens)[place], 4))
    return found


def load(asked: argparse.Namespace, budgets: Sequence[int]) -> tuple[LLM, torch.nn.Module, torch.nn.Module | None]:
    """Return draftwood's nano, transformers' target, and the published drafter, None where package dflash is not there."""
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    llm = LLM(model="nano", device=asked.device, tree_budget=max(budgets), max_num_seqs=1, max_model_len=ROOM + asked.max_tokens)
    found = llm.checkpoint
    assert found.folder is not None and found.draft_folder is not None and found.drafter is not None
    weights = load_target(found.folder, found.config, Layout(), torch.float32, "cpu")
    target = modules.place(modules.huggingface(found.config, weights, "sdpa"), asked.device, dtype)
    try:
        drafter = modules.dflash(found.drafter, load_drafter(found.draft_folder, found.drafter, Layout(), torch.float32, "cpu"))
    except ImportError as error:
        print(f"hf ddtree is left out: {error}; put the folder that holds the unpacked dflash==0.1.0 on PYTHONPATH", flush=True)
        return llm, target, None
    return llm, target, modules.place(drafter, asked.device, dtype)


def systems(llm: LLM, target: torch.nn.Module, drafter: torch.nn.Module | None, budgets: Sequence[int]) -> list[System]:
    """All that are measured, in the order of their turns."""
    stop = llm.checkpoint.config.stop_ids
    found = [
        System("draftwood plain", functools.partial(ours, llm, 0)),
        System(BASE, lambda prompt, most: ddtree.plain(target, prompt, most, stop)),
    ]
    for budget in budgets:
        found.append(System(f"draftwood trees {budget}", functools.partial(ours, llm, budget)))
        if drafter is not None:
            decode = functools.partial(ddtree.ddtree, target, drafter, stop=stop, budget=budget)
            found.append(System(f"hf ddtree {budget}", decode))
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the report for people."""
    head = f"{'system':<20} {'tok/s':>8} {'best':>8} {'accept':>7} {'steps':>6} {'ms/step':>8} {'same tokens':>12}"
    rows = [
        f"{x['system']:<20} {x['tok_s']:8.1f} {x['tok_s_best']:8.1f} {x['accept_length']:7.2f} {x['steps']:6d} "
        f"{x['ms_per_step']:8.3f} {x['agree_tokens']:5d} / {x['of_tokens']:<5d} {' '.join(map(str, x['leads']))}"
        for x in lines
    ]
    return "\n".join([f"{head} leads where they differ", *rows])


def main() -> int:
    """Measure; return 0, or 1 where a system had to be left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    asked = parser.parse_args()
    began, budgets = time.monotonic(), [int(word) for word in asked.budgets.split(",")]
    asked.folder.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    llm, target, drafter = load(asked, budgets)
    prompts = [samples.encode(sample, llm) for sample in samples.first(asked.prompts)]
    measured = systems(llm, target, drafter, budgets)
    for system in measured:
        for prompt in prompts:
            system.decode(prompt, min(16, asked.max_tokens))
    warm = time.monotonic() - began
    with (asked.folder / "peer.jsonl").open("w", encoding="utf-8") as log:
        for number in range(asked.rounds):
            if number and (time.monotonic() - began) + (time.monotonic() - began - warm) / number > asked.seconds:
                break
            for system in measured:
                system.rounds.append([system.decode(prompt, asked.max_tokens) for prompt in prompts])
                line = {"round": number, "system": system.name, "tok_s": round(system.speeds()[-1], 2)}
                print(json.dumps(line), file=log, flush=True)
    base = next(system for system in measured if system.name == BASE)
    lines = [{**s.line(base), "leads": near_ties(target, prompts, s, base)} for s in measured]
    shown = {
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu", "dtype": str(target.dtype),
        "torch": torch.__version__, "transformers": transformers.__version__, "prompts": len(prompts),
        "max_tokens": asked.max_tokens, "draftwood_block": llm.plan.block, "draftwood_bigram": llm.engine.parts.bigram is not None,
        "published_block": None if drafter is None else drafter.block_size, "ready_s": round(warm, 1),
        "seconds": round(time.monotonic() - began, 1), "systems": lines,
    }  # fmt: skip
    (asked.folder / "peer.json").write_text(json.dumps(shown) + "\n", encoding="utf-8")
    print(table(lines))
    print(json.dumps(shown), flush=True)
    return 0 if drafter is not None else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be asked."""
    parser.add_argument("folder", type=Path, help="where results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--prompts", type=int, default=8, help="built-in prompts (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer (default 128)")
    parser.add_argument("--budgets", default="8,16", help="tree budgets (default 8,16)")
    parser.add_argument("--rounds", type=int, default=3, help="most rounds (default 3)")
    parser.add_argument("--seconds", type=float, default=75.0, help="begin no round that would end later than this (default 75)")


if __name__ == "__main__":
    sys.exit(main())
