"""Where a forward's time goes, on a CUDA device: `python -m tests.model.time_forward [FILE] [--layers 9] [--cases 1x0,1x8]`.

A forward of full-width K2.6 with random weights is captured whole, and again without one family of kernels at a time (results are
then wrong; times are not): the difference is what that family costs between its neighbours, prefetching and gaps included. The
router's other form and two other orders of kernels are timed whole. `--trace` shows instead how long after its predecessor each
kernel of a replay ended, which is what it costs where it stands. One line of JSON each on stdout.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from draftwood.kernels.case import read_peak, time_graph
from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.norm_rope import op as norm_op
from draftwood.model.config import K2_6, K2_6_DRAFT, read_drafter_config, read_model_config, resized
from draftwood.model.costs import total
from draftwood.model.cuda import work
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.dummy import dummy_target
from draftwood.model.cuda.target import CudaTarget, Forward
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_tools import Memory, Row, Step
from tests.model.tools import random_tree

PARTS = {
    "add_norm": (norm_op, "add_norm"), "turn_and_store": (norm_op, "turn_and_store"),
    "moe_route": (route_op, "route"), "moe_int4": (moe_op, "moe_int4"),
    "attention": (attention_op.MlaAttention, "__call__"), "fold": (attention_op.MlaAttention, "fold"),
}  # fmt: skip


def _nothing(*args: Any, **given: Any) -> Any:
    return given.get("out")


@contextmanager
def without(family: str, names: dict[Any, str]) -> Iterator[None]:
    """Leave out the launches of a family: one of PARTS, a linear operation's name, or "" for none. Or run in another order."""
    if family in OTHERWISE:
        with mock.patch.object(Forward, "_moe", OTHERWISE[family]):
            yield
        return
    if family in PARTS:
        owner, name = PARTS[family]
        with mock.patch.object(owner, name, _nothing):
            yield
        return
    real = linear_op.linear

    def linear(x: Any, weight: Any, *args: Any, **given: Any) -> Any:
        return None if names[weight.shape] == family else real(x, weight, *args, **given)

    with mock.patch.object(linear_op, "linear", linear):
        yield


def _shared_first(self: Forward, index: int, mlp: Any, nodes: Any) -> None:
    """Shared expert, router, experts: the other order."""
    w, plan = self.work, self.plans[0]
    self._dense(mlp.shared, w.shared, nodes.total)
    route_op.route(w.normed, mlp.router, nodes.total, w.lists, plan.tile)
    moe_op.moe_int4(w.normed, mlp.experts, w.lists, nodes.total, w.shared, w.delta, w.experts, plan, summed=not self.norms_sum)


def _shared_beside(self: Forward, index: int, mlp: Any, nodes: Any) -> None:
    """The shared expert on a stream of its own, beside the router."""
    w, plan, main, side = self.work, self.plans[0], torch.cuda.current_stream(), _side()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        self._dense(mlp.shared, w.shared, nodes.total)
    route_op.route(w.normed, mlp.router, nodes.total, w.lists, plan.tile)
    main.wait_stream(side)
    moe_op.moe_int4(w.normed, mlp.experts, w.lists, nodes.total, w.shared, w.delta, w.experts, plan, summed=not self.norms_sum)


@functools.cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


OTHERWISE = {"shared first": _shared_first, "shared beside": _shared_beside}
"""Other orders of a layer's kernels that give the same results; for up to 1024 nodes."""


def distinct(run: Callable[[], Any]) -> float:
    """Experts that a layer's nodes choose, on average over the layers."""
    found, real = [], moe_op.moe_int4

    def counted(x: Any, weights: Any, lists: Any, live: Any, *args: Any, **given: Any) -> None:
        found.append(len(lists.experts[: int(live)].unique()))
        real(x, weights, lists, live, *args, **given)

    with mock.patch.object(moe_op, "moe_int4", counted):
        run()
    return sum(found) / len(found)


def timed(run: Callable[[], Any], family: str, names: dict[Any, str]) -> float:
    """Seconds of a replay with one change."""
    with without(family, names):
        return time_graph(run, 1) * 1e-6


def replayed(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels of one replay of a graph of the call, as the profiler's trace has them."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


def case(target: CudaTarget, rows: int, budget: int, context: int) -> tuple[Forward, Callable[[], Any]]:
    """A forward of random trees after `context` tokens of random latents, and a call of it."""
    bucket, g = Bucket.of(rows, budget, context + 512), torch.Generator().manual_seed(rows * 100 + budget)
    target.reserve([bucket])
    forward = target.bind(bucket)
    memory = Memory(target.config, rows, -(-(context + budget + 1) // 64), "cuda")
    memory.cache.normal_(generator=torch.Generator("cuda").manual_seed(rows))
    trees = [
        Row(r, context, torch.randint(0, 160000, (1 + budget,), generator=g).tolist(), random_tree(1 + budget, r))
        for r in range(rows)
    ]
    step = Step.make(bucket, trees, memory)
    return forward, functools.partial(forward, step.flat, step.lengths, step.counts, step.table, memory.cache)


class Report:
    """Lines of JSON on stdout, and in a file if there is one; and the time that is left."""

    def __init__(self, file: str | None, seconds: float) -> None:
        self.file, self.end = file, time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end

    def line(self, **shown: Any) -> None:
        text = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in shown.items()})
        print(text, flush=True)
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as out:
                out.write(text + "\n")


class Bench:
    """A target with random weights, and what its cases are held against."""

    def __init__(self, asked: argparse.Namespace, report: Report) -> None:
        self.report, self.context = report, asked.context
        config, draft = resized(read_model_config(K2_6), read_drafter_config(K2_6_DRAFT), asked.experts, asked.layers)
        assert draft is not None
        began = time.monotonic()
        packed = dummy_target(config, Layout(), "cuda")
        torch.cuda.synchronize()
        made = time.monotonic() - began
        self.peak = read_peak(torch.device("cuda"))
        report.line(read_peak_gb_s=self.peak / 1e9, weights_s=made, layers=asked.layers, experts=asked.experts)
        self.target = CudaTarget(config, packed, Layout(), Local(), draft.taps, 8192)
        self.names = {shape: name for name, shape in self.target.sizes.linears().items()}
        self.layers = asked.layers

    def whole(self, rows: int, budget: int) -> None:
        """As it is, beside its bytes; then with other choices, whose bits must be the same."""
        forward, run = case(self.target, rows, budget, self.context)
        experts = distinct(run)
        floor = total(work.traffic(self.target.sizes, [1 + budget] * rows, self.context, experts)) / self.peak
        took = timed(run, "", self.names)
        self.report.line(
            rows=rows, budget=budget, ms=took * 1e3, floor_ms=floor * 1e3, x_floor=took / floor, experts=experts,
            launches=total(work.launches(self.target.sizes, forward.bucket, attention_op.arch(self.target.device))),
        )  # fmt: skip
        want = run()[0].clone()
        few = forward.bucket.tokens <= route_op.WHOLE_ROWS
        for router in [form for form in route_op.FORMS if few or form != "beside"]:
            if self.report.late:
                return
            with mock.patch.object(route_op, "best_form", lambda rows, router=router: router):
                other = case(self.target, rows, budget, self.context)[1]
            took = timed(other, "", self.names)
            same = bool(torch.equal(other()[0], want))
            self.report.line(rows=rows, budget=budget, router=router, ms=took * 1e3, same_bits=same)

    def families(self, rows: int, budget: int) -> None:
        """Without one family of kernels at a time."""
        run = case(self.target, rows, budget, self.context)[1]
        whole = timed(run, "", self.names)
        for family in (*PARTS, *self.target.sizes.times()):
            if not self.report.late:
                cost = (whole - timed(run, family, self.names)) * 1e6
                self.report.line(rows=rows, budget=budget, without=family, us=cost, us_per_layer=cost / self.layers)

    def trace(self, rows: int, budget: int) -> None:
        """By kernel, blocks and what ran before: how many, microseconds from the predecessor's end to its own, and its own length
        (which holds what it waited for, for kernels start early)."""
        run = case(self.target, rows, budget, self.context)[1]
        found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        events = sorted(replayed(run), key=lambda e: e["ts"] + e["dur"])
        for before, event in pairwise(events):
            end, last = event["ts"] + event["dur"], before["ts"] + before["dur"]
            grid = "x".join(map(str, (g for g in event["args"]["grid"] if g > 1))) or "1"
            found.setdefault((event["name"], grid, before["name"]), []).append((end - last, event["dur"]))
        whole = sum(cost for each in found.values() for cost, _ in each)
        self.report.line(rows=rows, budget=budget, trace_ms=whole * 1e-3, kernels=len(events))
        for (name, grid, before), each in sorted(found.items(), key=lambda item: -sum(cost for cost, _ in item[1])):
            cost, took = (statistics.median(column) for column in zip(*each, strict=True))
            total_ms = sum(c for c, _ in each) * 1e-3
            self.report.line(kernel=name, grid=grid, after=before, times=len(each), us=cost, took_us=took, ms=total_ms)

    def orders(self, rows: int, budget: int) -> None:
        """In other orders."""
        forward, run = case(self.target, rows, budget, self.context)
        for family in OTHERWISE:
            if forward.bucket.tokens <= 1024 and not self.report.late:
                self.report.line(rows=rows, budget=budget, order=family, ms=timed(run, family, self.names) * 1e3)


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="file to which the lines are added too")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cases", default="1x0,1x8,1x32,64x0,32x8", help="rows x budget")
    parser.add_argument("--whole-only", action="store_true", help="no families and no orders")
    parser.add_argument("--trace", action="store_true", help="what each kernel of a replay costs, and nothing else")
    parser.add_argument("--seconds", type=float, default=45, help="nothing is begun later")
    asked = parser.parse_args()
    bench = Bench(asked, Report(asked.out, asked.seconds))
    cases = [tuple(map(int, c.split("x"))) for c in asked.cases.split(",")]
    for rows, budget in cases if asked.trace else ():
        bench.trace(rows, budget)
    if asked.trace:
        return
    for rows, budget in cases:
        bench.whole(rows, budget)
    if asked.whole_only:
        return
    for rows, budget in cases:
        bench.families(rows, budget)
    for rows, budget in cases:  # last, for a device may refuse to capture them
        bench.orders(rows, budget)


if __name__ == "__main__":
    main()
