"""Launches steps on a GPU and reads them one later. The host sends what changed, replays a graph, and copies the results away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.config import Plan
from draftwood.engine.cuda.auto import AutoTrees
from draftwood.engine.cuda.forms import HostTrees
from draftwood.engine.cuda.graph import Buffers, CudaParts, CudaStep, Results
from draftwood.engine.cuda.record import Graphs, Immediate, Launch, Recorder
from draftwood.engine.cuda.state import DeviceRows, Staged, carve_host, pinned
from draftwood.engine.request import SamplingParams
from draftwood.engine.scheduler import Start, StepPlan
from draftwood.engine.step import StepResult
from draftwood.errors import ConfigError, RequestError
from draftwood.model.cuda.keys import Key, Sizes
from draftwood.spec.accept import Path
from draftwood.spec.grammar import Constraint
from draftwood.spec.tree import Tree

FEW = 16
"""Rows of logits whose likeliest tokens are looked for at once (50 MB for K2.6's)."""
REPEATS, LONG = 3, 0.1
"""How often a step is timed for automatic trees, the fastest counts; and seconds after which it is not timed again."""


def short_of_memory(plan: Plan) -> ConfigError:
    """What to say when a plan's memory is not there after all."""
    whole = sum(n for _, n in plan.memory) / 2**30
    return ConfigError(
        f"the GPU has less free memory than the {whole:.1f} GiB of the plan; end what uses it, or lower --max-num-seqs, "
        "--max-model-len or --tree-budget"
    )


class CudaStepper:
    """Steps of one engine on one GPU. With `graphs` off, on a CPU or to find a fault, launches are made one by one."""

    ahead = 1

    @torch.inference_mode(False)
    def __init__(self, parts: CudaParts, plan: Plan, graphs: bool = True) -> None:
        """Allocate what all steps share. Raises ConfigError for sizes that no kernel takes."""
        self.parts, self.plan, self.sizes = parts, plan, Sizes.of(plan)
        self.device = parts.target.device
        parts.target.reserve(self.sizes.buckets())
        if parts.drafter is not None and parts.draft_kv is not None:
            parts.drafter.reserve(self.sizes.all_draft_buckets(parts.draft_kv.keys.shape[2]))
        self.rows = DeviceRows(self.sizes, plan.max_num_seqs, parts.kv.sink, parts.vocab, self.device, parts.noise, parts.stop_ids)
        self.auto = parts.auto
        self.buffers = Buffers(self.sizes, parts.vocab, self.device, parts.grammars, parts.draft_kv)
        self.recorder: Recorder = Graphs(self.device) if graphs else Immediate()
        self._tells_bits = False
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        """Set to a list to collect events before and behind the graphs of each step."""
        self._steps: dict[Key, CudaStep] = {}
        self._launches: dict[Key, Launch] = {}
        self._masked: dict[Key, tuple[CudaStep, list[Launch]]] = {}
        """Steps with grammars: before the target, the target, and after it."""

    def refuse(self, params: SamplingParams) -> None:
        """Raise RequestError for what the kernels do not know yet."""
        if params.tree_budget == "auto" and self.auto is None and self.plan.block:
            raise RequestError("tree_budget auto needs an engine that was started with --tree-budget auto on a GPU", "tree_budget")

    def step_of(self, key: Key) -> CudaStep:
        """The launches of a key."""
        if key not in self._steps:
            self._steps[key] = CudaStep(self.parts, self.rows, self.buffers, self.sizes, key)
        return self._steps[key]

    @torch.inference_mode()
    def prepare(self, key: Key) -> Launch:
        """Record the graph of a key, if it was not yet. Rows keep their state: it runs once without any."""
        if key not in self._launches:
            self.rows.silence()
            self._launches[key] = self.recorder.record(self.step_of(key).run)
        return self._launches[key]

    def warm(self) -> None:
        """Record the graphs of all keys; those of steps with grammars come when they are needed. Raises ConfigError when the
        device's memory does not hold them."""
        try:
            for key in self.sizes.keys():  # noqa: SIM118
                self.prepare(key)
        except torch.OutOfMemoryError:
            raise short_of_memory(self.plan) from None

    def tell_bits(self, tell: bool) -> None:
        """Have results tell the bits of the logits behind every committed token, or no longer."""
        self._tells_bits = tell

    @torch.inference_mode()
    def launch(self, plan: StepPlan, trace: bool = False) -> Flying:
        """Send what changed, start the step's graph, and copy its results away behind it."""
        if self.auto is not None:
            self.auto.begins(plan, time.monotonic())
            plan = self.auto.sized(plan)
        for start in plan.starts:
            self._restore(start)
            self.buffers.forms.begin(start)
        formed = self.buffers.forms.of(plan)
        if formed:
            return self._launch_formed(self.buffers.forms.fitted(plan, list(formed)), formed, trace)
        staged = self.stage(plan)
        began, called = self._mark(), time.monotonic()
        self._launches[staged.key]()
        if self.auto is not None:  # a graph that still runs is not launched again before it has ended
            self.auto.pace.waited(time.monotonic() - called)
        self._marked(began)
        return self._fetch(plan, staged, self.step_of(staged.key), trace)

    def _launch_formed(self, plan: StepPlan, formed: dict[int, Constraint], trace: bool) -> Flying:
        """The same for a step with grammars: the host reads the trees and sends masks while the target runs."""
        key = self.rows.key(plan)
        step, (plant, verify, finish) = self._masked_step(key)
        staged = self.rows.stage(plan, key)
        live, began = max(staged.results) + 1, self._mark()
        plant()
        arrays = [
            self._copy(x[:live].reshape(-1).view(torch.uint8)) for x in (step.trees.tokens, step.trees.parents, step.trees.counts)
        ]
        grown = self._event()
        verify()
        if grown is not None:
            grown.synchronize()
        tokens, parents, counts = (x.numpy().view(np.int64).reshape(live, -1) for x in arrays)
        ended = self.rows.host_places(live)
        trees = HostTrees(tokens, parents, counts[:, 0], ended.forced)
        verified = np.where(ended.forced, ended.emits, counts[:, 0])
        self.buffers.forms.tell(formed, trees, np.cumsum(verified) - verified, staged.results)
        finish()
        self._marked(began)
        return self._fetch(plan, staged, step, trace, formed)

    def _mark(self) -> torch.cuda.Event | None:
        """An event where a step begins, if such are collected."""
        if self.marks is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _marked(self, began: torch.cuda.Event | None) -> None:
        """Keep the event of a step's beginning with one of its end."""
        ended = self._mark()
        if self.marks is not None and began is not None and ended is not None:
            self.marks.append((began, ended))

    def _masked_step(self, key: Key) -> tuple[CudaStep, list[Launch]]:
        if key not in self._masked:
            self.rows.silence()
            step = CudaStep(self.parts, self.rows, self.buffers, self.sizes, key, masked=True)
            self._masked[key] = step, [self.recorder.record(part) for part in (step.plant, step.verify, step.finish)]
        return self._masked[key]

    def stage(self, plan: StepPlan) -> Staged:
        """Make the device ready for a plan's graph."""
        key = self.rows.key(plan)
        self.prepare(key)
        return self.rows.stage(plan, key)

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Measure what steps cost, for automatic trees. Before the first request."""
        if self.auto is not None:
            self.auto.measure(self._time)

    def _time(self, rows: int, nodes: int, context: int, trees: int) -> tuple[float, int]:
        """Trees are grown as large as the graph's and cut, as they will be: growing costs what it does whatever is kept."""
        assert self.auto is not None
        key = self.sizes.key(rows, trees, False)
        launch = self.prepare(key)
        self.auto.keep(key.rows, rows * nodes)
        found = list[float]()
        while len(found) < REPEATS and sum(found) < LONG:
            self.rows.rehearse([trees] * rows, context, self.plan.num_pages, automatic=trees > 0)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            launch()
            marks[1].record()
            marks[1].synchronize()
            found.append(marks[0].elapsed_time(marks[1]) / 1e3)
        return min(found), int(self.step_of(key).flat.total)

    def _restore(self, start: Start) -> None:
        """Fill the drafter's window of a row that begins on shared pages."""
        window, page = self.parts.draft_kv, self.plan.page_size
        if not start.cached or window is None:
            return
        at = np.array(start.pages[: -(-start.cached // page)], np.int64)[:, None] * page + np.arange(page)
        staged = pinned(8 * start.cached, self.device).view(torch.int64)
        staged.copy_(torch.from_numpy(at.ravel()[: start.cached]))
        window.restore(start.row, staged.to(self.device, non_blocking=True))

    def _event(self) -> torch.cuda.Event | None:
        """A mark behind what was launched; None on a CPU, where it has been done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=False)
        event.record()
        return event

    def _fetch(
        self, plan: StepPlan, staged: Staged, step: CudaStep, trace: bool, formed: dict[int, Constraint] | None = None
    ) -> Flying:
        raw = self._copy(step.results.raw)
        live = max(staged.results) + 1
        trees = step.trees
        nodes = [trees.tokens, trees.parents, trees.depths, trees.logprob] if trace else []
        arrays = [self._copy(x[:live].reshape(-1).view(torch.uint8)) for x in nodes]
        prints = self._copy(self._prints(step).view(-1).view(torch.uint8)) if self._tells_bits else None
        top = self._likeliest(plan, staged, step)
        return Flying(self.auto, plan, staged, step.places, self.sizes.path, raw, arrays, prints, top, formed or {}, self._event())

    def _likeliest(self, plan: StepPlan, staged: Staged, step: CudaStep) -> Likeliest | None:
        """Look for the likeliest tokens of the rows that want them, a few rows of logits at a time; None where no row does. A row
        without a tree returns one token, so that one place is looked at."""
        wanted = self.rows.logprobs(plan.rows)
        if not wanted.any():
            return None
        wants = [(i, n) for i, n in enumerate(wanted.tolist()) if n and plan.emits[i]]
        most, path = max((n for _, n in wants), default=0), step.results.path
        width = self.sizes.path
        at = [(i, k) for i, _ in wants for k in range(width if plan.budgets[i] else 1)]
        if not at:
            return None
        staged_places = pinned(8 * len(at), self.device).view(torch.int64)
        staged_places.copy_(torch.tensor([staged.results[i] * width + k for i, k in at]))
        places = staged_places.to(self.device, non_blocking=True)
        chosen, tokens, scores = (x.flatten().index_select(0, places) for x in (path.chosen, path.tokens, path.logprobs))
        chosen = chosen.clamp(0, len(step.logits) - 1)
        whole = step.logits[chosen, tokens.clamp(min=0)] - scores
        ids = torch.cat([likeliest(step.logits[part], most) for part in chosen.split(FEW)])
        values = step.logits[chosen[:, None], ids] - whole[:, None]
        return Likeliest(at, most, *(self._copy(x.flatten().view(torch.uint8)) for x in (ids, values)))

    def _prints(self, step: CudaStep) -> Tensor:
        """[places, path] a sum over the bits of a row of logits, each times an odd number of its own, modulo 2^64."""
        chosen = step.results.path.chosen.clamp(0, len(step.logits) - 1)
        bits = step.logits[chosen].view(torch.int32).long()
        odd = (torch.arange(bits.shape[-1], device=bits.device) * 0x9E3779B97F4A7C1 + 0x5851F42D4C957F2D) | 1
        return (bits * odd).sum(-1)

    def _copy(self, x: Tensor) -> Tensor:
        """Bytes on their way to the host."""
        to = pinned(len(x), self.device)
        to.copy_(x, non_blocking=True)
        return to


def likeliest(logits: Tensor, most: int) -> Tensor:
    """The ids int64 [R, most] of the largest logits float32 [R, V], in order; equal ones by id, whatever else is asked for."""
    bits = (logits + 0.0).view(torch.int32)  # -0 is 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = ordered - torch.arange(logits.shape[1], device=logits.device)
    found: Tensor = -keys.topk(most, dim=-1).values & 0xFFFFFFFF
    return found


@dataclass(frozen=True)
class Likeliest:
    """ids int64 and log-probabilities float32 [len(at), most] on their way, of places `at`: (plan row, token of the step)."""

    at: list[tuple[int, int]]
    most: int
    ids: Tensor
    values: Tensor

    def of(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """The same [rows, width, most] for all rows of the plan; zeros where nothing was asked for."""
        shape = (rows, width, self.most)
        ids, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        at = tuple(torch.tensor(self.at).unbind(1))
        ids[at], values[at] = self.ids.view(torch.int64).view(-1, self.most), self.values.view(torch.float32).view(-1, self.most)
        return ids, values


@dataclass(frozen=True)
class Flying:
    """A step on its way. raw: its Results; arrays: tokens, parents, depths, logprob [places, 65] of its trees, when traced; prints
    int64 [places, width], when wanted."""

    auto: AutoTrees | None
    plan: StepPlan
    staged: Staged
    places: int
    width: int
    raw: Tensor
    arrays: list[Tensor]
    prints: Tensor | None
    top: Likeliest | None
    formed: dict[int, Constraint]
    """Grammars by place in the plan; they follow what was committed."""
    done: torch.cuda.Event | None

    def read(self) -> StepResult:
        """Wait for the copies and return the result in the plan's order."""
        began = time.monotonic()
        if self.done is not None:
            self.done.synchronize()
        if self.auto is not None:
            self.auto.pace.waited(time.monotonic() - began)
            self.auto.pace.read()
        views = carve_host(self.raw, Results.fields(self.places, self.width))
        at = np.array(self.staged.results, np.int64)
        chunks = np.array([len(chunk) for chunk in self.plan.chunks], np.int64)
        forced = chunks > 0
        if self.auto is not None:
            told = views["expected"].tolist(), views["sized"].tolist()
            self.auto.learn(self.plan, self.staged.key, *told, int(views["counts"][at].sum()))
        for i, constraint in self.formed.items():
            constraint.commit(views["tokens"][at[i], : views["emitted"][at[i]]].tolist())
        nodes, counts = np.where(forced, chunks, views["nodes"][at]), np.where(forced, chunks, views["counts"][at])
        path = Path(
            nodes=torch.from_numpy(self._paths(views["path"], at, chunks)),
            counts=torch.from_numpy(counts),
            tokens=torch.from_numpy(views["tokens"][at]),
            emitted=torch.from_numpy(views["emitted"][at]),
            final=torch.from_numpy(views["final"][at]),
            logprobs=torch.from_numpy(views["logprobs"][at]),
            chosen=torch.full((len(at), self.width), -1),
        )
        prints = None if self.prints is None else self.prints.view(torch.int64).view(self.places, self.width)[torch.from_numpy(at)]
        top = None if self.top is None else self.top.of(len(at), self.width)
        return StepResult(self._tree(at, nodes, chunks), path, {}, None, top, prints)

    def _paths(self, all_found: NDArray[np.int64], at: NDArray[np.int64], chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Paths as wide as the longest chunk, whose path is all of it; without nodes unless the trees were traced."""
        if not self.arrays:
            return np.zeros((len(at), 0), np.int64)
        found = all_found[at]
        if not chunks.any():
            return found
        out = np.full((len(chunks), max(found.shape[1], int(chunks.max()))), -1, np.int64)
        out[:, : found.shape[1]] = found
        order = np.arange(out.shape[1])
        return np.where(chunks[:, None] > 0, np.where(order < chunks[:, None], order, -1), out)

    def _tree(self, at: NDArray[np.int64], counts: NDArray[np.int64], chunks: NDArray[np.int64]) -> Tree:
        """The trees, without their nodes unless they were traced."""
        width = int(counts.max()) if self.arrays else 0
        tokens, parents, depths = (np.zeros((len(at), width), np.int64) for _ in range(3))
        logprob = np.zeros((len(at), width), np.float32)
        if self.arrays:
            outs: tuple[NDArray[Any], ...] = (tokens, parents, depths, logprob)
            for out, flat in zip(outs, self.arrays, strict=True):
                found = flat.numpy().view(out.dtype).reshape(max(self.staged.results) + 1, -1)[at]
                least = min(width, found.shape[1])
                out[:, :least] = found[:, :least]
            for i, chunk in enumerate(self.plan.chunks):
                if chunk:
                    n = len(chunk)
                    tokens[i, :n], parents[i, :n], depths[i, :n], logprob[i] = chunk, np.arange(-1, n - 1), np.arange(n), 0
        parts = (torch.from_numpy(x) for x in (tokens, parents, depths, counts, chunks > 0, logprob))
        return Tree(*parts)
