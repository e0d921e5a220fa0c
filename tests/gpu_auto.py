"""Automatic trees beside fixed budgets on a GPU: `python tests/gpu_auto.py MODEL [--rows 1,4,16,64] [--accept 2.2,4.2]`

One engine for each mean acceptance (none for a real model), the same prompts for every budget: the running loop as requests see it.
With synthetic acceptance few steps of each; a real model decodes the same tokens with each, since a stretch of text that is easy
would flatter the budget that met it. Budgets rise until one gives less than LOST of the best: what is larger gives less still. A
line of JSON for each number of rows says how much of the best fixed budget's tokens per second automatic trees gave; the promise is
.97.

Device seconds planned for K2.6's width with 48 experts, by the steps measured so far (docs/LOG.md): start 30, timing steps for
automatic trees and recording about 40 graphs 60; fixed budgets 3 at 1 row, 5 at 4, 12 at 16 and 20 at 64; automatic ones 3, 6, 12
and 25. In all about 170 for one acceptance. nano: 40.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from draftwood import samples
from draftwood.config import Options
from draftwood.engine.cuda.stepper import CudaStepper
from draftwood.engine.loop import Engine
from draftwood.engine.request import SamplingParams
from draftwood.llm import LLM

BUDGETS = (0, 4, 8, 16, 32, 64)
SETTLE, STEPS = 3, 12
AUTO_SETTLE, AUTO_STEPS = 48, 48
SECONDS, LEAST = 3.0, 6
"""About how long the steps of one budget may take, and how many are timed however long they take."""
LOST = 0.6
TOKENS = 192
"""Of a prompt, at most."""
DECODED, EACH, ROUNDS = 192, 6, 7
"""Tokens that each request to a real model decodes, how often each prompt is asked, and how often all that; the median counts."""


def prompts(llm: LLM, rows: int) -> list[list[int]]:
    """The built-in prompts one after another, cut into as many texts; random tokens where a model has no words."""
    if llm.tokenizer is None:
        g, vocab = torch.Generator().manual_seed(1), llm.engine.parts.vocab
        return [torch.randint(0, vocab, (64,), generator=g).tolist() for _ in range(rows)]
    texts = [samples.encode(sample, llm) for sample in samples.SAMPLES]
    return [texts[i % len(texts)][i // len(texts) :][:TOKENS] for i in range(rows)]


def admitted(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams) -> list[int]:
    """Give the engine the texts and let it read them; their requests."""
    ids = [engine.add(text, params) for text in texts]
    while engine.scheduler.waiting or any(seq.prompting for seq in engine.scheduler.running.values()):
        engine.step()
    return ids


def timed(engine: Engine, texts: Sequence[Sequence[int]], budget: int | str, settle: int, steps: int) -> dict[str, Any]:
    """Decode the texts together, for some steps."""
    params = SamplingParams(max_tokens=engine.plan.max_model_len, ignore_eos=True, tree_budget=budget, seed=1)
    ids = admitted(engine, texts, params)
    for _ in range(settle):
        engine.step()
    before, began, ends = counted(engine), time.monotonic(), list[float]()
    while len(ends) < steps and (not ends or ends[-1] - began < SECONDS or len(ends) < min(LEAST, steps)):
        engine.step()
        ends.append(time.monotonic())
    line = figures(engine, before, began, ends)
    for i in ids:
        engine.abort(i)
    while not engine.idle:
        engine.step()
    return {"rows": len(texts), "budget": budget, **line}


def served(engine: Engine, texts: Sequence[Sequence[int]], budget: int | str, temperature: float) -> dict[str, Any]:
    """Decode DECODED tokens behind each text EACH times, as many at once as there are texts: the next begins where one ends. Timed
    until there is no next one, so that all steps have as many rows."""
    params = SamplingParams(max_tokens=DECODED, ignore_eos=True, tree_budget=budget, seed=1, temperature=temperature)
    waiting = [text for _ in range(EACH - 1) for text in texts]
    admitted(engine, texts, params)
    before, began, ends, line = counted(engine), time.monotonic(), list[float](), dict[str, Any]()
    while not engine.idle:
        ended = sum(output.finish_reason is not None for output in engine.step())
        ends.append(time.monotonic())
        if ended > len(waiting) and not line:
            line = {"rows": len(texts), "budget": budget, **figures(engine, before, began, ends)}
        for _ in range(min(ended, len(waiting))):
            engine.add(waiting.pop(), params)
    return line


def counted(engine: Engine) -> tuple[int, int, int]:
    """Tokens, steps of a row and their nodes so far."""
    totals = engine.totals
    return totals.decoded, totals.row_steps, sum(place * count for place, count in enumerate(totals.trees))


def figures(engine: Engine, before: tuple[int, int, int], began: float, ends: Sequence[float]) -> dict[str, Any]:
    """Tokens per second of all, tokens and nodes of a row's step, and milliseconds of a step, since `before`. ends: when each step
    ended, in seconds of the clock of `began`."""
    walls = [end - start for start, end in pairwise([began, *ends])]
    tokens, row_steps, nodes = (now - then for now, then in zip(counted(engine), before, strict=True))
    return {
        "tok_s": round(tokens / (ends[-1] - began), 1), "steps": len(ends), "step_ms": round(1e3 * statistics.median(walls), 3),
        "tokens_per_row": round(tokens / max(1, row_steps), 3), "nodes_per_row": round(nodes / max(1, row_steps), 2),
    }  # fmt: skip


def compared_served(engine: Engine, texts: Sequence[Sequence[int]], temperature: float) -> Iterator[dict[str, Any]]:
    """As `compared`, for a real model, in turn; what the first automatic trees learn stays with the engine."""
    served(engine, texts, "auto", temperature)
    rounds = [[served(engine, texts, budget, temperature) for budget in (*BUDGETS, "auto")] for _ in range(ROUNDS)]
    median = [sorted(lines, key=lambda line: line["tok_s"])[ROUNDS // 2] for lines in zip(*rounds, strict=True)]
    yield from median
    best = max(median[:-1], key=lambda line: line["tok_s"])
    yield {"rows": len(texts), "best": best["budget"], "auto_over_best": round(median[-1]["tok_s"] / best["tok_s"], 3)}


def compared(engine: Engine, texts: Sequence[Sequence[int]], budgets: Sequence[int] = BUDGETS) -> Iterator[dict[str, Any]]:
    """A line for each budget, one for automatic trees, and how much of the best these gave."""
    found = dict[int, float]()
    for budget in budgets:
        line = timed(engine, texts, budget, SETTLE, STEPS)
        found[budget] = line["tok_s"]
        yield line
        if budget and line["tok_s"] < LOST * max(found.values()):
            break
    line = timed(engine, texts, "auto", AUTO_SETTLE, AUTO_STEPS)
    best = max(found, key=lambda budget: found[budget])
    yield line
    yield {"rows": len(texts), "best": best, "auto_over_best": round(line["tok_s"] / found[best], 3)}


def main() -> int:
    """Measure; return 1 where automatic trees gave less than .97 of the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--temperature", type=float, default=0.0, help="of a real model's tokens (default 0)")
    parser.add_argument("--accept", default="", help="mean tokens of a step, with commas: K2.6's width with random weights")
    asked = parser.parse_args()
    rows = [int(r) for r in asked.rows.split(",")]
    lost = 0
    for mean in [float(x) for x in asked.accept.split(",") if x] or [None]:
        dummy = {} if mean is None else {"load_format": "dummy", "routed_experts": 48, "tree_spine": True}
        options = Options(
            asked.model,
            device="cuda",
            tree_budget="auto",
            max_num_seqs=max(rows),
            max_model_len=2048,
            synthetic_accept=mean,
            **dummy,
        )
        began = time.monotonic()
        with LLM(options) as llm:
            assert isinstance(llm.engine.stepper, CudaStepper)
            print(json.dumps({"accept": mean, "start_s": round(time.monotonic() - began, 1)}), flush=True)
            for count in rows:
                texts = prompts(llm, count)
                lines = compared(llm.engine, texts) if mean else compared_served(llm.engine, texts, asked.temperature)
                for line in lines:
                    lost += line.get("auto_over_best", 1.0) < 0.97
                    print(json.dumps({"accept": mean, **line}), flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    raise SystemExit(main())
