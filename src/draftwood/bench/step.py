"""Measure decoding by tree budget: accept length, time of each stage, tokens per second, and bytes.

Budgets take turns, several times over, on the same prompts, and medians are reported, so that a machine that slows
down meanwhile slows all of them. A step's time by stage leaves the prompts out; tokens per second counts everything.

On a GPU a step is one graph: `bench.device` times it, its stages and what lies between steps, for every number of rows and every
budget; with weights that mean something the built-in prompts are decoded too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood import plan, report, samples
from draftwood.config import MAX_BUDGET, STAGES, add_options, options_from
from draftwood.engine.request import SamplingParams
from draftwood.errors import ConfigError
from draftwood.model import costs
from draftwood.parallel import launch

if TYPE_CHECKING:
    from draftwood.llm import LLM, Completion

ENGINE = (
    "model", "draft", "draft_block", "draft_window", "topk_cap", "tree_spine", "noise", "bigram", "draft_rope", "tp", "ep",
    "dtype", "device", "load_format", "routed_experts", "layers", "synthetic_accept", "max_num_batched_tokens",
)  # fmt: skip
CONTEXT = 512
"""Tokens of each row when a GPU's steps are timed, unless --context says otherwise."""
ROOM = 1536
"""Tokens of each row beyond them: steps of up to a block that are run before and while it is timed."""
Budget = int | str


@dataclasses.dataclass(frozen=True)
class Pass:
    """All prompts decoded once with one budget."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(c.completion_tokens for c in self.completions)

    @property
    def steps(self) -> int:
        """Decoding steps of all answers."""
        return sum(c.steps for c in self.completions)

    @property
    def accept_length(self) -> float:
        """Tokens per decoding step, over all answers together."""
        return sum(c.accept_length * c.steps for c in self.completions) / max(1, self.steps)

    def stage(self, name: str) -> float:
        """Milliseconds of decoding spent in a stage, summed over the answers."""
        return sum(c.stage_ms[name] for c in self.completions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `draftwood bench step`."""
    add_options(parser, only=ENGINE)
    group = parser.add_argument_group("bench")
    group.add_argument("--budgets", default="0,7,8,16,32", help="tree budgets or auto, with commas (default 0,7,8,16,32)")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default 0)")
    group.add_argument("--rows", default="1", help="requests that run together; on a GPU several numbers with commas (default 1)")
    group.add_argument("--context", type=int, default=None, help=f"tokens of a row whose steps are timed (cuda; default {CONTEXT})")
    group.add_argument("--prompts", type=int, default=8, help=f"built-in prompts, 1..{len(samples.SAMPLES)} (default 8)")
    group.add_argument("--max-tokens", type=int, default=96, help="most new tokens of an answer (default 96)")
    group.add_argument("--repeat", type=int, default=3, help="times every budget is measured (default 3)")
    group.add_argument("--seed", type=int, default=1, help="seed of the first prompt; the others follow (default 1)")
    group.add_argument("--out", type=Path, help="append each line of a GPU's steps to this file as soon as it is known")
    group.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return 1 if a case could not run."""
    budgets = parse_budgets(args.budgets)
    rows = report.numbers("--rows", args.rows, int, 1, 1024)
    if not 1 <= args.repeat <= 100:
        raise ConfigError(f"--repeat {args.repeat} is outside 1..100; choose a value in that range")
    chosen = samples.first(args.prompts)
    each = [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed + i) for i in range(len(chosen))
    ]
    largest = MAX_BUDGET if "auto" in budgets else max(b for b in budgets if isinstance(b, int))
    options = dataclasses.replace(options_from(args), tree_budget=largest, max_num_seqs=max(rows))
    if options.device == "cuda":
        sizes = "auto" if "auto" in budgets else largest
        options = dataclasses.replace(options, max_model_len=_context(args) + ROOM, tree_budget=sizes)
    elif len(rows) > 1 or args.context is not None or args.out is not None:
        flag = next(
            f"--{name} {v}" for name, v in (("context", args.context), ("out", args.out), ("rows", args.rows)) if v is not None
        )
        raise ConfigError(f"{flag}: only steps of a GPU are timed like that; add --device cuda, or leave it at one number of rows")
    world = options.tp * options.ep
    anywhere = dataclasses.replace(options, device="cpu", synthetic_accept=None)  # whether drafts are possible is a matter of files
    checkpoint = plan.find(options)
    positions = checkpoint.config.max_position
    if options.max_model_len is not None and options.max_model_len > positions:
        fault = f"--context {_context(args)} and the {ROOM} tokens of the steps are above the {positions} positions of this model"
        raise ConfigError(f"{fault}; ask for {max(1, positions - ROOM)} or less")
    drafter = plan.decide(anywhere, checkpoint, plan.Device("cpu", "any device", 1 << 60), strict=False).block > 0
    if largest > 0 and not drafter:
        raise ConfigError(f"{options.model} has no drafter for --budgets {args.budgets}; give one with --draft, or --budgets 0")
    if world > 1 and not launch.is_rank():
        return launch.run_ranks(args.argv, world)
    from draftwood.llm import leading

    with leading(options) as llm:
        if llm is None:
            return 0
        for remark in llm.plan.notes:
            report.note(f"note: {remark}")
        failed = False
        if options.device == "cuda":
            failed = _measure_device(llm, rows, budgets, args)
        if llm.tokenizer is not None:
            _measure_text(llm, chosen, each, budgets, args)
    return int(failed)


def _context(args: argparse.Namespace) -> int:
    if args.context is not None and not 1 <= args.context <= 1 << 18:
        raise ConfigError(f"--context {args.context} is outside 1..{1 << 18}; choose a value in that range")
    return CONTEXT if args.context is None else args.context


def _measure_device(llm: LLM, rows: Sequence[int], budgets: Sequence[Budget], args: argparse.Namespace) -> bool:
    """Time a GPU's steps; return whether a case could not run."""
    from draftwood.bench import device

    lines = []
    for line in device.measure(llm, rows, budgets, _context(args), args.seed):
        lines.append(line)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(report.json_line(line) + "\n")
    with report.closed_pipe_is_fine():
        report.show(device.show(lines))
        if args.json:
            shape = {"model": llm.options.model, "routed_experts": llm.checkpoint.config.num_experts,
                     "layers": llm.checkpoint.config.num_layers, "load_format": llm.options.load_format}  # fmt: skip
            report.show(report.json_line({**shape, "memory": dict(llm.plan.memory), "cases": lines}))
    return any("failed" in line for line in lines)


def _measure_text(
    llm: LLM, chosen: Sequence[samples.Sample], each: Sequence[SamplingParams], budgets: Sequence[Budget], args: argparse.Namespace
) -> None:
    """Decode the built-in prompts."""
    bench = Bench(llm, [samples.encode(sample, llm) for sample in chosen], each)
    found = bench.measure(budgets, args.repeat)
    on_cpu = llm.plan.device == "cpu"
    if args.temperature > 0 and llm.plan.world == 1 and llm.options.noise != "none" and on_cpu:
        bench.compare_noise(found)
    with report.closed_pipe_is_fine():
        _tell(llm, found, args)


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Return the budgets of a comma-separated text. Raises ConfigError for anything but 0..64 and auto."""
    words = text.split(",")
    return tuple(
        dict.fromkeys("auto" if word == "auto" else report.numbers("--budgets", word, int, 0, MAX_BUDGET)[0] for word in words)
    )


class Bench:
    """One loaded model and the prompts that every budget decodes."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        self.llm = llm
        self.prompts = list(prompts)
        self.params = list(params)

    def once(self, budget: Budget, max_tokens: int | None = None) -> Pass:
        """Decode all prompts with one budget."""
        changes: dict[str, Any] = {"tree_budget": budget} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        params = [dataclasses.replace(p, **changes) for p in self.params]
        began = time.perf_counter()
        completions = self.llm.generate(self.prompts, params)
        return Pass(completions, time.perf_counter() - began)

    def measure(self, budgets: Sequence[Budget], repeat: int) -> list[dict[str, Any]]:
        """Return a row for each budget. The first round warms up with a few tokens and is not counted."""
        with report.progress((repeat + 1) * len(budgets), "bench step", " passes") as bar:

            def counted(budget: Budget, max_tokens: int | None = None) -> Pass:
                found = self.once(budget, max_tokens)
                bar.update()
                return found

            for budget in budgets:
                counted(budget, 8)
            passes: dict[Budget, list[Pass]] = {budget: [] for budget in budgets}
            for _ in range(repeat):
                for budget in budgets:
                    passes[budget].append(counted(budget))
        return [self._row(budget, passes[budget], passes.get(0)) for budget in budgets]

    def _row(self, budget: Budget, passes: list[Pass], plain: list[Pass] | None) -> dict[str, Any]:
        """Medians of a budget's passes; `plain`: those of budget 0, taken in the same rounds."""
        first = passes[0]
        steps = max(1, first.steps)
        stage_ms = {name: statistics.median(p.stage(name) for p in passes) / steps for name in STAGES}
        rounds = zip(passes, plain or (), strict=False)
        ratios = [theirs.seconds / ours.seconds for ours, theirs in rounds]
        step_ms = sum(stage_ms.values())
        moved = self._bytes(budget)
        bandwidth = self.llm.plan.bandwidth
        return {
            "budget": budget,
            "accept_length": round(first.accept_length, 4),
            "tokens": first.tokens,
            "steps": first.steps,
            # A GPU's steps are one graph, whose stages `bench.device` times.
            "stage_ms": {name: round(ms, 3) if step_ms else None for name, ms in stage_ms.items()},
            "step_ms": round(step_ms, 3) if step_ms else None,
            "tok_s": round(statistics.median(p.tokens / p.seconds for p in passes), 2),
            "ratio": round(statistics.median(ratios), 3) if ratios else None,
            "same_tokens": None if plain is None else _ids(first) == _ids(plain[0]),
            "distinct_bigrams": round(distinct_bigrams(first.completions), 3),
            "step_bytes": moved,
            "floor_share": round(moved / bandwidth / (step_ms / 1e3), 3) if bandwidth and moved and step_ms else None,
        }

    def _bytes(self, budget: Budget) -> int | None:
        """Bytes one rank must move in a step with all rows busy, from the shapes; None for auto sizes."""
        made, checkpoint = self.llm.plan, self.llm.checkpoint
        if isinstance(budget, str):
            return None
        length = sum(map(len, self.prompts)) // len(self.prompts) + (self.params[0].max_tokens or 0) // 2
        rows = min(made.max_num_seqs, len(self.prompts))
        drafter = checkpoint.drafter if budget and made.block else None
        size = plan.ITEMSIZE[made.dtype]
        table = costs.step_bytes(
            checkpoint.config, rows, budget + 1, length, made.world, size, drafter, made.block, made.window
        )  # fmt: skip
        return costs.total(table)

    def compare_noise(self, rows: list[dict[str, Any]]) -> None:
        """Add to each row the accept length with the drafter's noise shared and its own, and their ratio. On a CPU."""
        from draftwood.engine.step import Parts

        parts = self.llm.engine.parts
        assert isinstance(parts, Parts)
        asked = parts.noise
        other = "own" if asked == "shared" else "shared"
        try:
            parts.noise = other
            for row in rows:
                if row["budget"] != 0:
                    lengths = {asked: row["accept_length"], other: round(self.once(row["budget"]).accept_length, 4)}
                    row["noise"] = {**lengths, "ratio": round(lengths["shared"] / lengths["own"], 3)}
        finally:
            parts.noise = asked


def _ids(one: Pass) -> list[list[int]]:
    return [c.token_ids for c in one.completions]


def distinct_bigrams(completions: Sequence[Completion]) -> float:
    """Return the share of different token pairs among all pairs of each answer; a text in a loop is easy to draft."""
    pairs = [list(zip(c.token_ids, c.token_ids[1:], strict=False)) for c in completions]
    total = sum(map(len, pairs))
    return sum(len(set(p)) for p in pairs) / total if total else 1.0


def _tell(llm: LLM, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the table, then the JSON line."""
    import torch

    header = ["budget", "accept", "steps", *(f"{s} ms" for s in STAGES), "step ms", "tok/s", "ratio", "MB/step", "of floor"]
    cells = [
        [
            r["budget"], r["accept_length"], r["steps"], *r["stage_ms"].values(), r["step_ms"], r["tok_s"], r["ratio"],
            r["step_bytes"] and r["step_bytes"] / 1e6, r["floor_share"],
        ]
        for r in rows
    ]  # fmt: skip
    if any("noise" in r for r in rows):
        header += ["shared noise", "own noise", "shared/own"]
        for cell, row in zip(cells, rows, strict=True):
            noise = row.get("noise", {})
            cell += [noise.get("shared"), noise.get("own"), noise.get("ratio")]
    report.show(report.table(header, cells))
    if any(r["same_tokens"] is False for r in rows):
        report.note("some tokens differ from budget 0's; `draftwood check` tells near-ties from faults")
    setting = {
        "model": llm.options.model,
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "rows": llm.plan.max_num_seqs,
        "repeat": args.repeat,
        "block": llm.plan.block,
        "noise": llm.options.noise,
        "device": llm.plan.device,
        "dtype": llm.plan.dtype,
        "world": llm.plan.world,
        "threads": torch.get_num_threads(),
    }
    if args.json:
        report.show(report.json_line({**setting, "budgets": rows}))
