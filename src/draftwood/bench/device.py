"""Measure steps on a GPU by rows and budget: whole graphs, their stages, the gap between steps, and all of it beside the bytes.

Every row has `context` tokens of random text when its steps are timed. Graphs are timed by CUDA events, the state of rows set back
before each replay; the gap is what passes between the end of a graph and the start of the next in the running loop. The floor is
the bytes of `model/costs` at the speed at which this device reads a large tensor, measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftwood import report
from draftwood.config import STAGES
from draftwood.engine.cuda.graph import CudaStep
from draftwood.engine.cuda.record import Graphs, Launch
from draftwood.engine.cuda.stepper import CudaStepper
from draftwood.engine.request import SamplingParams
from draftwood.kernels.case import read_peak
from draftwood.model import costs

if TYPE_CHECKING:
    from draftwood.llm import LLM

REPLAYS, STEPS = 20, 24
"""Timed replays of a graph, and steps of the loop whose gaps are taken."""
SETTLE = 3
"""Decoding steps before anything is timed."""
CHUNKS = 3
"""Whole chunks of a prompt that are timed."""


def measure(llm: LLM, rows: Sequence[int], budgets: Sequence[int], context: int, seed: int) -> list[dict[str, Any]]:
    """Return the device's line, one for prompts, then one for each number of rows and budget."""
    bench = DeviceBench(llm, context, seed)
    lines = [bench.device_line(), bench.prompt_line()]
    with report.progress(len(rows) * len(budgets), "bench step", " cases") as bar:
        for count in rows:
            for budget in budgets:
                lines.append(bench.case(count, budget))
                bar.update()
    return lines


class DeviceBench:
    """One loaded engine."""

    def __init__(self, llm: LLM, context: int, seed: int) -> None:
        stepper = llm.engine.stepper
        assert isinstance(stepper, CudaStepper)
        self.llm, self.stepper, self.context = llm, stepper, context
        self.random = torch.Generator().manual_seed(seed)
        self.peak = read_peak(stepper.device)

    def device_line(self) -> dict[str, Any]:
        """What is measured on."""
        stepper = self.stepper
        return {
            "device": torch.cuda.get_device_name(stepper.device), "read_peak_tb_s": round(self.peak / 1e12, 3),
            "synthetic_accept": stepper.parts.synthetic, "context": self.context, "block": self.llm.plan.block,
        }  # fmt: skip

    def _start(self, rows: int, budget: int) -> list[int]:
        """Begin `rows` rows and decode a few steps."""
        engine, vocab = self.llm.engine, self.llm.engine.parts.vocab
        params = SamplingParams(max_tokens=self.llm.plan.max_model_len, ignore_eos=True, tree_budget=budget, seed=1)
        ids = []
        for _ in range(rows):
            prompt = torch.randint(0, vocab, (self.context,), generator=self.random).tolist()
            ids.append(engine.add(prompt, params))
        while any(seq.prompting for seq in engine.scheduler.running.values()) or engine.scheduler.waiting:
            engine.step()
        for _ in range(SETTLE):
            engine.step()
        return ids

    def _end(self, ids: Sequence[int]) -> None:
        for i in ids:
            self.llm.engine.abort(i)
        while not self.llm.engine.idle:
            self.llm.engine.step()

    def case(self, rows: int, budget: int) -> dict[str, Any]:
        """One number of rows and one budget."""
        ids = self._start(rows, budget)
        key = self.stepper.sizes.key(rows, budget, False)
        torch.cuda.synchronize()
        state = self.stepper.rows.state
        kept = (state.lengths.clone(), state.roots.clone())

        def reset() -> None:
            state.lengths.copy_(kept[0])
            state.roots.copy_(kept[1])

        whole = self._times([self.stepper.prepare(key)], reset)[0]
        reset()
        step = self.stepper.step_of(key)
        nodes = int(step.flat.total)
        stages = dict(zip(STAGES, self._times(self._stages(step), reset), strict=True))
        reset()
        gap, wall, tokens = self._loop(rows)
        self._end(ids)
        table = self._bytes(rows, nodes, budget)
        floor = costs.total(table) / self.peak * 1e3
        return {
            "rows": rows, "budget": budget, "nodes": nodes, "graph_ms": round(whole, 3), "floor_ms": round(floor, 3),
            "ratio": round(whole / floor, 3), "bytes": costs.total(table), "gap_ms": round(gap, 4), "step_ms": round(wall, 3),
            "tokens_per_row": round(tokens, 3), "tok_s": round(rows * tokens / wall * 1e3, 1),
            "stage_ms": {name: round(ms, 3) for name, ms in stages.items()}, "parts": dict(table),
        }  # fmt: skip

    def _stages(self, step: CudaStep) -> list[Launch]:
        """A graph for each stage: what is timed apart cannot be one graph."""
        recorder = Graphs(self.stepper.device)
        return [recorder.record(launch) for launch in step.stages.values()]

    def _times(self, launches: Sequence[Launch], reset: Launch) -> list[float]:
        """Median milliseconds of each launch, all of them run in order."""
        found: list[list[float]] = [[] for _ in launches]
        for turn in range(REPLAYS + 2):
            reset()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
            marks[0].record()
            for launch, mark in zip(launches, marks[1:], strict=True):
                launch()
                mark.record()
            torch.cuda.synchronize()
            if turn >= 2:
                for times, a, b in zip(found, marks, marks[1:], strict=False):
                    times.append(a.elapsed_time(b))
        return [statistics.median(times) for times in found]

    def _loop(self, rows: int) -> tuple[float, float, float]:
        """Return medians over the running loop: milliseconds between graphs and of whole steps, and tokens of a row's step."""
        engine, totals = self.llm.engine, self.llm.engine.totals
        engine.step()
        self.stepper.marks = []
        decoded, steps = totals.decoded, totals.row_steps
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
        marks, self.stepper.marks = self.stepper.marks, None
        pairs = list(zip(marks, marks[1:], strict=False))
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairs]
        walls = [a[0].elapsed_time(b[0]) for a, b in pairs]
        return statistics.median(gaps), statistics.median(walls), (totals.decoded - decoded) / (totals.row_steps - steps)

    def _bytes(self, rows: int, nodes: int, budget: int) -> costs.Table:
        """Bytes of a step by part, all nodes as they were counted."""
        made, checkpoint = self.llm.plan, self.llm.checkpoint
        drafter = checkpoint.drafter if budget and made.block else None
        table = costs.step_bytes(checkpoint.config, rows, 1, self.context, made.world, 2, drafter, made.block, made.window)
        more = costs.step_bytes(checkpoint.config, 1, nodes, self.context, made.world, 2)
        by_node = {name: n for name, n in more if name in ("experts", "embedding", "kv write")}
        return tuple((name, by_node.get(name, n)) for name, n in table)

    def prompt_line(self) -> dict[str, Any]:
        """A prompt of whole chunks, alone: tokens per second and floating point operations per second."""
        plan, engine = self.llm.plan, self.llm.engine
        size = min(CHUNKS * plan.prefill_chunk, (plan.max_model_len - 1) // plan.prefill_chunk * plan.prefill_chunk)
        if size == 0:
            return {"prompt": "the context holds no whole chunk"}
        found = []
        for turn in range(3):
            prompt = torch.randint(0, engine.parts.vocab, (size,), generator=self.random).tolist()
            i = engine.add(prompt, SamplingParams(max_tokens=1))
            self.stepper.marks = []
            while not engine.idle:
                engine.step()
            torch.cuda.synchronize()
            marks, self.stepper.marks = self.stepper.marks, None
            if turn:
                found.append(marks[0][0].elapsed_time(marks[-1][1]))
            engine.abort(i)
        ms = min(found)
        flops = costs.step_flops(self.llm.checkpoint.config, 1, size, size // 2)
        return {
            "prompt_tokens": size, "chunk": plan.prefill_chunk, "ms": round(ms, 3), "tok_s": round(size / ms * 1e3, 1),
            "tflop_s": round(flops / ms / 1e9, 2),
        }  # fmt: skip


def show(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as a table for people."""
    head = ["rows", "budget", "nodes", "graph ms", "floor ms", "ratio", "gap ms", "tok/s", "tok/row", *STAGES]
    cells = [
        [c["rows"], c["budget"], c["nodes"], c["graph_ms"], c["floor_ms"], c["ratio"], c["gap_ms"], c["tok_s"], c["tokens_per_row"],
         *c["stage_ms"].values()]
        for c in lines if "graph_ms" in c
    ]  # fmt: skip
    facts = [" ".join(f"{k} {v}" for k, v in line.items()) for line in lines if "graph_ms" not in line]
    return "\n".join(facts) + "\n\n" + report.table(head, cells)
