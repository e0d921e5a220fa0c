"""Where a forward's time goes, on a CUDA device: `python -m tests.model.time_forward [--layers 9] [--cases 1x0,1x8,64x0]`.

A forward of full-width K2.6 with random weights is captured whole, and again without one family of kernels at a time (results are
then wrong; times are not): the difference is what that family costs between its neighbours, prefetching and gaps included. Two
other orders of the kernels are timed whole. One JSON line per case and family on stdout.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "add_norm": (norm_op, "add_norm"), "latent_write": (norm_op, "latent_write"), "query_rope": (norm_op, "query_rope"),
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


def _shared_first(self: Forward, mlp: Any, nodes: Any) -> None:
    """Shared expert, router, experts: the other order."""
    w, plan = self.work, self.plans[0]
    self._dense(mlp.shared, w.shared, nodes.total)
    route_op.route(w.normed, mlp.router, nodes.total, w.lists, plan.tile)
    moe_op.moe_int4(w.normed, mlp.experts, w.lists, nodes.total, w.shared, w.delta, w.experts, plan)


def _shared_beside(self: Forward, mlp: Any, nodes: Any) -> None:
    """The shared expert on a stream of its own, beside the router."""
    w, plan, main, side = self.work, self.plans[0], torch.cuda.current_stream(), _side()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        self._dense(mlp.shared, w.shared, nodes.total)
    route_op.route(w.normed, mlp.router, nodes.total, w.lists, plan.tile)
    main.wait_stream(side)
    moe_op.moe_int4(w.normed, mlp.experts, w.lists, nodes.total, w.shared, w.delta, w.experts, plan)


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


def case(target: CudaTarget, rows: int, budget: int, context: int) -> tuple[Forward, Callable[[], Any]]:
    """A forward of random trees after `context` tokens of random latents, and a call of it."""
    bucket, g = Bucket.of(rows, budget, context + 512), torch.Generator().manual_seed(rows * 100 + budget)
    target.reserve([bucket])
    forward = target.bind(bucket)
    memory = Memory(target.config, rows, -(-(context + budget + 1) // 64), "cuda")
    memory.cache.normal_()
    trees = [
        Row(r, context, torch.randint(0, 160000, (1 + budget,), generator=g).tolist(), random_tree(1 + budget, r))
        for r in range(rows)
    ]
    step = Step.make(bucket, trees, memory)
    return forward, functools.partial(forward, step.flat, step.lengths, step.counts, step.table, memory.cache)


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cases", default="1x0,1x8,1x32,64x0,32x8", help="rows x budget")
    parser.add_argument("--whole-only", action="store_true", help="no families")
    asked = parser.parse_args()
    config, draft = resized(read_model_config(K2_6), read_drafter_config(K2_6_DRAFT), asked.experts, asked.layers)
    assert draft is not None
    began = time.monotonic()
    packed = dummy_target(config, Layout(), "cuda")
    torch.cuda.synchronize()
    made = time.monotonic() - began
    peak = read_peak(torch.device("cuda"))
    print(json.dumps({"read_peak_gb_s": peak / 1e9, "weights_s": made, "layers": asked.layers}), flush=True)
    target = CudaTarget(config, packed, Layout(), Local(), draft.taps, 8192)
    names = {shape: name for name, shape in target.sizes.linears().items()}
    cases = [tuple(map(int, c.split("x"))) for c in asked.cases.split(",")]
    for rows, budget in cases:
        forward, run = case(target, rows, budget, asked.context)
        experts = distinct(run)
        traffic = dict(work.traffic(target.sizes, [1 + budget] * rows, asked.context, experts))
        launches, floor = total(work.launches(target.sizes, forward.bucket)), sum(traffic.values()) / peak
        for family in [""] if asked.whole_only else ["", *PARTS, *target.sizes.times()]:
            took = timed(run, family, names)
            if not family:
                whole = took
                shown = {
                    "ms": took * 1000,
                    "floor_ms": floor * 1000,
                    "x_floor": took / floor,
                    "experts": experts,
                    "launches": launches,
                }
            else:
                shown = {"without": family, "costs_ms": (whole - took) * 1000, "mb": traffic.get(family, 0) / 1e6}
            print(json.dumps({"rows": rows, "budget": budget, **shown}), flush=True)
    for family in OTHERWISE:  # last, for a device may refuse to capture them
        for rows, budget in cases:
            forward, run = case(target, rows, budget, asked.context)
            if forward.bucket.tokens <= 1024:
                took = timed(run, family, names) * 1000
                print(json.dumps({"rows": rows, "budget": budget, "order": family, "ms": took}), flush=True)


if __name__ == "__main__":
    main()
