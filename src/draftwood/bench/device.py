"""Measure steps on a GPU by rows and budget: whole graphs, their stages, the gap between steps, and all of it beside a floor.

Every row has `context` committed tokens, of random latents, when its graph and the stages are timed: by CUDA events, the state of
rows set back before each replay. The gap is what passes between the end of a graph and the start of the next in the running loop,
and tokens per second are the loop's. The floor is by part of a step the longer of two times: its bytes at the speed at which this
device reads a large tensor, and its operations at that of a large bf16 product, both measured in the same run (`model/costs`). The
bytes of experts are those that the step's nodes did choose, counted in every layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from draftwood import report
from draftwood.config import STAGES
from draftwood.engine.cuda.graph import CudaStep
from draftwood.engine.cuda.record import Graphs, Launch
from draftwood.engine.cuda.stepper import CudaStepper
from draftwood.engine.request import SamplingParams
from draftwood.errors import ConfigError
from draftwood.kernels.case import read_peak, time_graph
from draftwood.model import costs

if TYPE_CHECKING:
    from draftwood.llm import LLM

REPLAYS, STEPS, AUTO_STEPS = 20, 24, 96
"""Most timed replays of a graph, and steps of the loop that are timed, with fixed and with automatic trees."""
SECONDS, LEAST = 1.0, 4
"""About how long replays, and steps of the loop, may take, and how many of each are timed however long they take."""
PRODUCT = (4096, 8192, 8192)
"""Rows, outputs and inputs of the product whose speed is the peak of operations."""
FEW = 8
"""Rows up to which those of the loop begin with whole contexts; more begin with SHORT tokens, for their prompts would take longest
and the first would decode for long while the last are read."""
SHORT = 16
SETTLE, AUTO_SETTLE = 3, 64
"""Decoding steps before anything is timed, with fixed and with automatic trees, which have to find out first what pays."""
CHUNKS = 3
"""Whole chunks of a prompt that are timed."""
COLUMNS = (
    "rows", "budget", "nodes", "experts", "graph_ms", "floor_ms", "ratio", "bytes_ms", "operations_ms", "gap_ms", "step_ms",
    "tok_s", "tokens_per_row",
)  # fmt: skip


@torch.inference_mode()
def measure(llm: LLM, rows: Sequence[int], budgets: Sequence[int | str], context: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the device's line, one for prompts, then one for each number of rows and budget; one that cannot run says `failed`."""
    bench = DeviceBench(llm, context, seed)
    yield bench.device_line()
    yield bench.prompt_line()
    with report.progress(len(rows) * len(budgets), "bench step", " cases") as bar:
        for count in rows:
            for budget in budgets:
                yield bench.tried(count, budget)
                bar.update()


class DeviceBench:
    """One loaded engine."""

    def __init__(self, llm: LLM, context: int, seed: int) -> None:
        stepper = llm.engine.stepper
        assert isinstance(stepper, CudaStepper)
        self.llm, self.stepper, self.context = llm, stepper, context
        self.random = torch.Generator().manual_seed(seed)
        self.peak, self.flops = read_peak(stepper.device), product_peak(stepper.device)
        stepper.parts.kv.cache.normal_()
        if stepper.parts.draft_kv is not None:
            stepper.parts.draft_kv.keys.normal_()
            stepper.parts.draft_kv.values.normal_()

    def device_line(self) -> dict[str, Any]:
        """What is measured on."""
        stepper = self.stepper
        return {
            "device": torch.cuda.get_device_name(stepper.device), "read_peak_tb_s": round(self.peak / 1e12, 3),
            "product_peak_tflop_s": round(self.flops / 1e12, 1),
            "synthetic_accept": stepper.parts.synthetic, "context": self.context, "block": self.llm.plan.block,
        }  # fmt: skip

    def _start(self, rows: int, budget: int | str) -> list[int]:
        """Begin `rows` rows and decode a few steps."""
        engine, vocab = self.llm.engine, self.llm.engine.parts.vocab
        params = SamplingParams(max_tokens=self.llm.plan.max_model_len, ignore_eos=True, tree_budget=budget, seed=1)
        size = self.context if rows <= FEW else min(self.context, SHORT)
        ids = [engine.add(torch.randint(0, vocab, (size,), generator=self.random).tolist(), params) for _ in range(rows)]
        while engine.scheduler.waiting or any(seq.prompting for seq in engine.scheduler.running.values()):
            engine.step()
        for _ in range(AUTO_SETTLE if budget == "auto" else SETTLE):
            engine.step()
        return ids

    def _end(self, ids: Sequence[int]) -> None:
        for i in ids:
            self.llm.engine.abort(i)
        while not self.llm.engine.idle:
            self.llm.engine.step()

    def tried(self, rows: int, budget: int | str) -> dict[str, Any]:
        """One number of rows and one budget, or why there is no number: too little memory for its graph, say."""
        try:
            return self.automatic(rows) if isinstance(budget, str) else self.case(rows, budget)
        except (ConfigError, torch.cuda.OutOfMemoryError) as error:
            return {"rows": rows, "budget": budget, "failed": str(error).splitlines()[0][:300]}

    def case(self, rows: int, budget: int) -> dict[str, Any]:
        """One number of rows and one budget."""
        key = self.stepper.sizes.key(rows, budget, False, observes=budget > 0)
        began = time.perf_counter()
        graph, step = self.stepper.prepare(key), self.stepper.step_of(key)
        prepared = time.perf_counter() - began

        def reset() -> None:
            self.stepper.rows.rehearse([budget] * rows, self.context, self.llm.plan.num_pages)

        reset()
        whole = self._times([graph], reset)[0]
        nodes, experts = int(step.flat.total), self._experts(step, reset)
        stages = dict(zip(STAGES, self._times(self._stages(step), reset), strict=True))
        moved, done = self._bytes(rows, nodes, budget, experts), self._operations(rows, nodes, budget)
        parts = costs.floor(moved, done, self.peak, self.flops)
        floor = 1e3 * sum(seconds for _, seconds in parts)
        config = self.llm.checkpoint.config
        measured = {
            "rows": rows, "budget": budget, "nodes": nodes, "graph_ms": round(whole, 3), "floor_ms": round(floor, 3),
            "ratio": round(whole / floor, 3), "bytes_ms": round(costs.total(moved) / self.peak * 1e3, 3),
            "operations_ms": round(costs.total(done) / self.flops * 1e3, 3), "experts": round(experts, 2),
            "experts_if_independent": round(costs.expected_experts(config, nodes), 2), "bytes": costs.total(moved),
            "operations": costs.total(done), "stage_ms": {name: round(ms, 3) for name, ms in stages.items()},
            "floor_parts_ms": {name: round(1e3 * seconds, 3) for name, seconds in parts}, "parts": dict(moved),
            "operation_parts": dict(done), "prepare_s": round(prepared, 2),
        }  # fmt: skip
        return measured | self._loop(rows, budget, _count(STEPS, whole))

    def _experts(self, step: CudaStep, reset: Launch) -> float:
        """Distinct experts that the nodes of a step choose in a layer, on average over the layers."""
        config = self.llm.checkpoint.config
        wanted = (config.num_moe_layers, step.forward.bucket.tokens, config.experts_per_token)
        reset()
        step.forward.routed = torch.zeros(wanted, dtype=torch.int32, device=self.stepper.device)
        try:
            step.run()
            chosen = step.forward.routed[:, : int(step.flat.total)]
        finally:
            step.forward.routed = None
        return statistics.mean(len(layer.unique()) for layer in chosen)

    def automatic(self, rows: int) -> dict[str, Any]:
        """One number of rows with trees of automatic size: the loop alone, whose steps differ."""
        return {"rows": rows, "budget": "auto"} | self._loop(rows, "auto", AUTO_STEPS)

    def _stages(self, step: CudaStep) -> list[Launch]:
        """A graph for each stage: what is timed apart cannot be one graph."""
        recorder = Graphs(self.stepper.device)
        return [recorder.record(launch) for launch in step.stages.values()]

    def _times(self, launches: Sequence[Launch], reset: Launch) -> list[float]:
        """Median milliseconds of each launch, all of them run in order."""
        found: list[list[float]] = [[] for _ in launches]
        count, turn = REPLAYS, -2
        while turn < count:
            reset()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
            marks[0].record()
            for launch, mark in zip(launches, marks[1:], strict=True):
                launch()
                mark.record()
            torch.cuda.synchronize()
            if turn >= 0:
                for times, a, b in zip(found, marks, marks[1:], strict=False):
                    times.append(a.elapsed_time(b))
            count = _count(REPLAYS, marks[0].elapsed_time(marks[-1]))
            turn += 1
        return [statistics.median(times) for times in found]

    def _loop(self, rows: int, budget: int | str, count: int) -> dict[str, Any]:
        """Medians over the running loop: milliseconds between graphs and of whole steps; means: tokens and nodes of a row's step,
        tokens per second."""
        ids = self._start(rows, budget)
        engine, totals = self.llm.engine, self.llm.engine.totals
        self.stepper.marks = []
        decoded, steps = totals.decoded, totals.row_steps
        nodes = _weighted(totals.trees)
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()
        marks, self.stepper.marks = self.stepper.marks, None
        pairs = list(zip(marks, marks[1:], strict=False))
        gaps = [a[1].elapsed_time(b[0]) for a, b in pairs]
        walls = [a[0].elapsed_time(b[0]) for a, b in pairs]
        row_steps = max(1, totals.row_steps - steps)
        tokens = (totals.decoded - decoded) / row_steps
        drafted = (_weighted(totals.trees) - nodes) / row_steps
        self._end(ids)
        return {
            "gap_ms": round(statistics.median(gaps), 4), "step_ms": round(statistics.median(walls), 3),
            "tokens_per_row": round(tokens, 3), "drafted_per_row": round(drafted, 2),
            "tok_s": round(rows * tokens / statistics.mean(walls) * 1e3, 1),
        }  # fmt: skip

    def _bytes(self, rows: int, nodes: int, budget: int, experts: float) -> costs.Table:
        """Bytes of a step by part, all nodes as they were counted."""
        made, checkpoint = self.llm.plan, self.llm.checkpoint
        drafter = checkpoint.drafter if budget and made.block else None
        table = costs.step_bytes(checkpoint.config, rows, 1, self.context, made.world, 2, drafter, made.block, made.window)
        more = costs.step_bytes(checkpoint.config, 1, nodes, self.context, made.world, 2, distinct=experts)
        by_node = {name: n for name, n in more if name in ("experts", "embedding", "kv write")}
        return tuple((name, by_node.get(name, n)) for name, n in table)

    def _operations(self, rows: int, nodes: int, budget: int) -> costs.Table:
        """Operations of a step by part."""
        made, checkpoint = self.llm.plan, self.llm.checkpoint
        drafter = checkpoint.drafter if budget and made.block else None
        return costs.step_operations(
            checkpoint.config, nodes, self.context, made.world, drafter, rows, made.block, made.window
        )  # fmt: skip

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
    head = [*(name.replace("_", " ") for name in COLUMNS), *STAGES]
    cases = [line for line in lines if "rows" in line]
    cells = [[*(c.get(name) for name in COLUMNS), *(c.get("stage_ms", {}).get(name) for name in STAGES)] for c in cases]
    facts = [" ".join(f"{k} {v}" for k, v in line.items()) for line in lines if "rows" not in line or "failed" in line]
    return "\n".join(facts) + "\n\n" + report.table(head, cells)


def _count(most: int, ms: float) -> int:
    """How many of something that takes `ms` are timed."""
    return max(min(LEAST, most), min(most, int(SECONDS * 1e3 / max(ms, 1e-3))))


def product_peak(device: torch.device) -> float:
    """Return the operations per second of a large bf16 product on this device, the fastest of some: the ceiling of arithmetic."""
    rows, outputs, inputs = PRODUCT
    x, weight = (torch.randn(n, inputs, dtype=torch.bfloat16, device=device) for n in (rows, outputs))
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        torch.matmul(x, weight.T, out=out)

    fastest = min(time_graph(multiply, 1) for _ in range(3))
    return 2 * rows * outputs * inputs / (fastest * 1e-6)


def _weighted(counts: Sequence[int]) -> int:
    """Sum of places, each as often as its count says."""
    return sum(place * count for place, count in enumerate(counts))
