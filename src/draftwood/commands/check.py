"""Prove that trees and plain decoding give the same tokens.

Every built-in prompt is decoded once without trees, alone, at every temperature. Then it is decoded again with every
tree budget, in batches of every size, and the token ids are compared. A difference passes only as a near-tie: at the
first token that differs, the plain run's best two scores (noise included) lay within NEAR_TIES logits of each other,
which sums in another order may swap; a CPU has no kernels that promise the same bits for any number of rows. A GPU has:
there every difference counts, and with --bitwise the logits behind every token are compared too, to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from draftwood import plan, ranks, report, samples
from draftwood.commands import workers
from draftwood.config import MAX_BUDGET, Options, add_options, options_from
from draftwood.engine.request import SamplingParams
from draftwood.errors import ConfigError

if TYPE_CHECKING:
    from draftwood.llm import LLM

NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""Most logits between the best two scores of a token that two runs may choose differently, by type. A bfloat16 logit between 16 and
32 is known to an eighth, and either score may be off by one such step."""
SHOWN = 20
"""Differences shown one by one."""
MAX_JOBS = 256
_SHARE = 4
"""Prompts of a task, about: small, so that no worker waits long for another."""
ENGINE = (
    "model", "draft", "draft_block", "draft_window", "topk_cap", "tree_spine", "noise", "bigram", "draft_rope", "tp", "ep",
    "dtype", "device", "load_format",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Task:
    """Some of the prompts, by their place among the built-in ones, decoded in one way."""

    temperature: float
    budget: int
    batch: int
    indexes: tuple[int, ...]
    max_tokens: int
    seed: int
    plain: bool = False
    bitwise: bool = False
    """Whether logits are compared too."""

    def params(self, index: int) -> SamplingParams:
        """How the prompt at `index` is sampled: the same whatever the budget and batch."""
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed + index, tree_budget=self.budget
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one run of a prompt generated. `gaps`: the lead of each token over the next best, plain runs only."""

    token_ids: tuple[int, ...]
    finish_reason: str
    steps: int
    gaps: tuple[float, ...] = ()
    prints: tuple[int, ...] = ()
    """Of the logits behind each token, bitwise runs only."""


@dataclasses.dataclass
class Tally:
    """Runs of all prompts at one temperature, budget and batch size."""

    temperature: float
    budget: int
    batch: int
    runs: int = 0
    tokens: int = 0
    steps: int = 0
    identical: int = 0
    near_ties: int = 0
    different: int = 0
    widest: float = 0.0
    """Widest gap that was let pass."""

    @property
    def accept_length(self) -> float:
        """Tokens per decoding step; the first token of an answer comes from the prompt's own step."""
        return round((self.tokens - self.runs) / self.steps, 4) if self.steps else 1.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a run left the plain one: the number of equal tokens before, and what came then (None: the end)."""

    place: int
    plain: int | None
    other: int | None
    gap: float | None
    """The plain run's gap there; None where no choice of a token explains the difference."""
    logits: bool = False
    """True where the logits behind a token have other bits, whatever was chosen."""
    bound: float = NEAR_TIES["float32"]
    """Widest gap of a near-tie."""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap <= self.bound

    def describe(self) -> str:
        """Return the difference in words."""
        if self.logits:
            return f"after {self.place} equal tokens the logits behind the next one have other bits"
        names = ["the end" if token is None else f"token {token}" for token in (self.plain, self.other)]
        gap = "no choice" if self.gap is None else f"{'near-tie, ' if self.near_tie else ''}gap {self.gap:.3g} logits"
        return f"after {self.place} equal tokens plain has {names[0]}, trees have {names[1]} ({gap})"


def compare(plain: Answer, other: Answer, bound: float = NEAR_TIES["float32"]) -> Difference | None:
    """Return the first difference of a run from the plain run of the same prompt, None when they are identical. bound: widest gap
    of a near-tie, in logits.

    A run that ended without the other is explained by a choice only where it ended at a stop token.
    """
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(other.token_ids)))
    bits = next((i for i, (a, b) in enumerate(zip(plain.prints, other.prints, strict=False)) if a != b), len(plain.prints))
    if bits < min(place + 1, len(plain.prints), len(other.prints)):
        return Difference(bits, plain.token_ids[bits], other.token_ids[bits], None, logits=True)
    first, second = (run.token_ids[place] if place < len(run.token_ids) else None for run in (plain, other))
    if first is None and second is None and plain.finish_reason == other.finish_reason:
        return None
    ended = plain if first is None else other if second is None else None
    chosen = first != second and place < len(plain.gaps) and (ended is None or ended.finish_reason == "stop")
    return Difference(place, first, second, plain.gaps[place] if chosen else None, bound=bound)


def count(tally: Tally, plain: Answer, other: Answer, bound: float = NEAR_TIES["float32"]) -> Difference | None:
    """Add one run to its tally; return the difference, if any."""
    found = compare(plain, other, bound)
    tally.runs += 1
    tally.tokens += len(other.token_ids)
    tally.steps += other.steps
    tally.identical += found is None
    if found is not None and found.near_tie:
        tally.near_ties += 1
        tally.widest = max(tally.widest, found.gap or 0.0)
    elif found is not None:
        tally.different += 1
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `draftwood check`."""
    add_options(parser, only=ENGINE)
    group = parser.add_argument_group("check")
    group.add_argument("--prompts", type=int, default=16, help=f"built-in prompts, 1..{len(samples.SAMPLES)} (default 16)")
    group.add_argument("--max-tokens", type=int, default=128, help="most new tokens of a run (default 128)")
    group.add_argument("--budgets", default="1,4,8,16,32,64", help="tree budgets, with commas (default 1,4,8,16,32,64)")
    group.add_argument("--temperatures", default="0,0.6,1", help="temperatures, with commas (default 0,0.6,1)")
    group.add_argument("--batch", default="1,4", help="requests that run together, with commas (default 1,4)")
    group.add_argument("--seed", type=int, default=1, help="seed of the first prompt; the others follow (default 1)")
    group.add_argument("--jobs", type=int, default=0, help="processes that share the work (default: one for each core)")
    group.add_argument("--bitwise", action="store_true", help="compare the logits behind every token too, bit by bit (cuda)")
    group.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Run the check; return 0 when nothing differs, else 1."""
    budgets = report.numbers("--budgets", args.budgets, int, 0, MAX_BUDGET)
    temperatures = report.numbers("--temperatures", args.temperatures, float, 0.0, 100.0)
    batches = report.numbers("--batch", args.batch, int, 1, 64)
    if not 0 <= args.jobs <= MAX_JOBS:
        raise ConfigError(f"--jobs {args.jobs} is outside 0..{MAX_JOBS}; choose a value in that range")
    chosen = samples.first(args.prompts)
    for temperature in temperatures:
        SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=args.seed)
    options = dataclasses.replace(options_from(args), tree_budget=max(budgets), max_num_seqs=max(batches))
    if args.jobs and options.tp * options.ep > 1:
        raise ConfigError(f"--jobs {args.jobs}: the ranks of --tp and --ep work as one; leave --jobs out")
    if args.bitwise and options.device != "cuda":
        raise ConfigError(f"--bitwise is a promise of the CUDA kernels and --device is {options.device}; add --device cuda")
    code = ranks.start(args, options)
    if code is not None:
        return code
    if max(budgets) > 0 and plan.find(options).drafter is None:
        raise ConfigError(f"{options.model} has no drafter, so there are no trees to check; give one with --draft")
    began = time.monotonic()
    tasks = list(plan_tasks(len(chosen), budgets, temperatures, batches, args.max_tokens, args.seed))
    tasks = [dataclasses.replace(task, bitwise=args.bitwise) for task in tasks]
    if options.tp * options.ep > 1:
        from draftwood.llm import leading

        with leading(options) as llm:
            if llm is None:
                return 0
            done = _collect(((task, answers(llm, task)) for task in tasks), tasks)
    else:
        jobs = args.jobs or workers.fitting(options)
        done = _collect(workers.spread(options, min(jobs, len(tasks)), answers, tasks), tasks)
    bound = near_tie(options)
    tallies, lines = tally(chosen, done, bound)
    setting = {"model": options.model, "prompts": len(chosen), "max_tokens": args.max_tokens, "seed": args.seed}
    with report.closed_pipe_is_fine():
        _tell(tallies, lines, setting, bound, time.monotonic() - began, args.json)
    return 0 if not any(t.different for t in tallies) else 1


def near_tie(options: Options) -> float:
    """The widest gap of a near-tie for the type that the model is run in."""
    auto = "bfloat16" if options.device == "cuda" else "float32"
    return NEAR_TIES[auto if options.dtype == "auto" else options.dtype]


def plan_tasks(
    prompts: int, budgets: Sequence[int], temperatures: Sequence[float], batches: Sequence[int], max_tokens: int, seed: int
) -> Iterator[Task]:
    """Yield all work: every plain run once, then every budget and batch size on shares of the prompts."""
    for temperature in temperatures:
        for index in range(prompts):
            yield Task(temperature, 0, 1, (index,), max_tokens, seed, plain=True)
    for temperature in temperatures:
        for batch in batches:
            share = batch * max(1, _SHARE // batch)
            for budget in budgets:
                for start in range(0, prompts, share):
                    indexes = tuple(range(start, min(start + share, prompts)))
                    yield Task(temperature, budget, batch, indexes, max_tokens, seed)


def answers(llm: LLM, task: Task) -> list[Answer]:
    """Return the answers of a task's prompts, `batch` of them running together; a plain run's with its gaps."""
    found = []
    llm.engine.stepper.tell_bits(task.bitwise)
    for start in range(0, len(task.indexes), task.batch):
        indexes = task.indexes[start : start + task.batch]
        llm.engine.records = [] if task.plain or task.bitwise else None
        completions = llm.generate([samples.encode(samples.SAMPLES[i], llm) for i in indexes], [task.params(i) for i in indexes])
        for completion in completions:
            rows = [row for step in llm.engine.records or () for row in step.rows if row.request_id == completion.request_id]
            gaps = tuple(gap for row in rows for gap in row.gaps)
            prints = tuple(value for row in rows for value in row.prints)[: len(completion.token_ids)]
            if task.bitwise and len(prints) < len(completion.token_ids):
                raise AssertionError(f"{len(completion.token_ids)} tokens have the bits of {len(prints)} logits")
            found.append(Answer(tuple(completion.token_ids), completion.finish_reason, completion.steps, gaps, prints))
    return found


def _collect(results: Iterable[tuple[Task, list[Answer]]], tasks: Sequence[Task]) -> list[tuple[Task, list[Answer]]]:
    """Gather all results under a bar of progress, in the order of the tasks."""
    done = {}
    bar = None
    for task, found in results:
        # The bar begins with the first result, so that a model that cannot be loaded is one line.
        bar = bar or report.progress(sum(len(t.indexes) for t in tasks), "check", " runs")
        done[task] = found
        bar.update(len(found))
    if bar:
        bar.close()
    return [(task, done[task]) for task in tasks]


def tally(
    chosen: Sequence[samples.Sample], done: Sequence[tuple[Task, list[Answer]]], bound: float = NEAR_TIES["float32"]
) -> tuple[list[Tally], list[str]]:
    """Compare every run with the plain one of its prompt; return the counts and a line for each difference."""
    plain = {(task.temperature, task.indexes[0]): found[0] for task, found in done if task.plain}
    tallies: dict[tuple[float, int, int], Tally] = {}
    lines = []
    for task, found in done:
        if task.plain:
            continue
        into = tallies.setdefault((task.temperature, task.batch, task.budget), Tally(task.temperature, task.budget, task.batch))
        for index, answer in zip(task.indexes, found, strict=True):
            difference = count(into, plain[task.temperature, index], answer, bound)
            if difference is not None:
                where = f"{chosen[index].name}, T {task.temperature:g}, budget {task.budget}, batch {task.batch}"
                lines.append(f"{where}: {difference.describe()}")
    return list(tallies.values()), lines


def _tell(tallies: list[Tally], lines: list[str], setting: dict[str, Any], bound: float, seconds: float, json: bool) -> None:
    """Print the differences, the table and the sum."""
    for line in lines[:SHOWN]:
        report.note(line)
    if len(lines) > SHOWN:
        report.note(f"and {len(lines) - SHOWN} more")
    fields = ("temperature", "batch", "budget", "runs", "tokens", "accept_length", "identical", "near_ties", "different")
    rows = [{name: getattr(t, name) for name in fields} for t in tallies]
    sums = {name: sum(row[name] for row in rows) for name in ("runs", "tokens", "identical", "near_ties", "different")}
    report.show(report.table([name.replace("_", " ") for name in fields], [list(row.values()) for row in rows]))
    report.show(
        f"{sums['runs']} runs, {sums['tokens']} tokens in {seconds:.0f} s: {sums['identical']} identical, {sums['near_ties']} "
        f"near-ties (best two scores within {bound:g} logits in the plain run), {sums['different']} different"
    )
    if json:
        widest = max((t.widest for t in tallies), default=0.0)
        bounds = {"near_tie_bound": bound, "widest_near_tie": widest, "seconds": round(seconds, 1)}
        report.show(report.json_line({**sums, **setting, **bounds, "rows": rows}))
