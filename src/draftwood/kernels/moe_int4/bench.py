"""Benchmark cases of the experts: both GEMMs and the combine, with job lists in device memory.

Random routing, uniform over the experts; each call of a case takes other experts, so the weights of few rows are cold (a rank
of 48 experts is read again every call, from memory: it is larger than any L2). x is the same for all: a router has just read it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.kernels.case import Case, Run
from draftwood.kernels.moe_int4 import op, ref, repack
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.kernels.moe_route.op import Lists, most_jobs

K26, EP8, TP8 = op.shape_of(7168, 2048, 8, 384), op.shape_of(7168, 2048, 8, 48), op.shape_of(7168, 256, 8, 384)
CHOSEN = [(K26, 384, n) for n in (1, 9, 17, 33, 65, 128, 512)] + [(EP8, 48, n) for n in (9, 33, 65, 128, 288, 512)]
CHOSEN += [(TP8, 384, n) for n in (1, 4, 9, 33, 65)]
RIVALS = [
    (K26, 384, 9, "narrow", "narrow"), (K26, 384, 33, "stream", "slim"), (K26, 384, 65, "wide", "wide"),
    (EP8, 48, 9, "narrow", "narrow"), (EP8, 48, 65, "wider", "wider"), (EP8, 48, 128, "widest", "widest"),
    (EP8, 48, 512, "wider", "wider"), (TP8, 384, 1, "stream", "few"), (TP8, 384, 9, "stream", "duo"),
    (TP8, 384, 33, "share", "duo"), (TP8, 384, 65, "wide", "wide"),
]  # fmt: skip
"""Plans that `choose` does not make: the evidence for its limits."""
ROUTES = 4
POOL = 512


@dataclass(frozen=True)
class Routing:
    """The experts of one call's rows."""

    chosen: Tensor

    @property
    def distinct(self) -> int:
        """Experts that are read."""
        return int(self.chosen.unique().numel())


@functools.cache
def routings(experts: int, n: int, topk: int) -> tuple[Routing, ...]:
    """The calls of a case: 16 for one row, else 4."""
    pool = torch.rand(POOL, experts, generator=torch.Generator().manual_seed(7)).argsort(-1)[:, :topk].contiguous()
    picks = [[(i + 131 * r) % POOL for i in range(n)] for r in range(16 if n == 1 else ROUTES)]
    return tuple(Routing(pool[rows]) for rows in picks)


@functools.cache
def _weights(shape: op.Shape, experts: int, device: torch.device) -> repack.Packed:
    """Random codes and scales in fragment order; fewer experts are a part of the 384."""
    if experts < 384:
        whole = _weights(shape, 384, device)
        return repack.Packed(
            whole.gate_up[:experts], whole.gate_up_scale[:experts], whole.down[:experts], whole.down_scale[:experts]
        )
    made = torch.Generator(device).manual_seed(1)
    weights = repack.empty(experts, shape.hidden, shape.width, device)
    for codes, scales in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale)):
        for e in range(experts):
            codes[e].random_(-(2**31), 2**31 - 1, generator=made)
            scales[e].copy_(torch.rand(scales[e].shape, device=device, generator=made) * 0.01)
    return weights


@functools.cache
def _lists(experts: int, n: int, topk: int, tile: int, device: torch.device) -> list[Lists]:
    """The lists of every call of a case, as the router makes them."""
    found, ints = [], functools.partial(torch.tensor, dtype=torch.int32, device=device)
    made = torch.Generator(device).manual_seed(3)
    for routing in routings(experts, n, topk):
        pairs, jobs = route_ref.lists(routing.chosen.tolist(), 0, experts, tile)
        count = ints([len(jobs)])
        jobs += [(0, 0, 0, 0)] * (most_jobs(n, topk, experts, tile) - len(jobs))
        weights = torch.rand(n, topk, device=device, generator=made)
        lists = Lists(n, 0, experts, routing.chosen.int().to(device), weights, ints(pairs), ints(jobs), count, torch.empty(0))
        found.append(lists)
    return found


@dataclass(frozen=True)
class Prepared:
    """A case on a device: its calls, which write the same `out`."""

    calls: list[op.Call]
    routing: Routing

    def launch(self) -> None:
        """Both parts of every call."""
        for call in self.calls:
            call.gate_up()
            call.down()

    def gate_up(self) -> None:
        """The first part of every call; one that joins both follows its own lists here, and so must wait."""
        for call in self.calls:
            joined = op.HOPPER[call.plan.gate_up].file == "joined"
            (replace(call, early=False) if joined else call).gate_up()

    def down(self) -> None:
        """The second part of every call."""
        for call in self.calls:
            call.down()

    def error(self) -> float:
        """Largest difference from float64 in the last call's first and last row, relative to the largest value there."""
        worst, call = 0.0, self.calls[-1]
        assert call.shared is not None
        for t in {0, call.rows - 1}:
            one = slice(t, t + 1)
            want = ref.experts(
                call.x[one], lambda e: repack.expert(call.weights, e), self.routing.chosen[one], call.lists.weights[one],
                0, call.lists.held, call.shared[one],
            )  # fmt: skip
            worst = max(worst, float((call.out[one].double() - want).abs().max() / want.abs().max()))
        return worst


def prepare(shape: op.Shape, experts: int, n: int, plan: op.Plan, device: torch.device, early: bool = True) -> Prepared:
    """Make the calls of a case, whose lists are older than the kernel before, as in a layer with a shared expert. Raises ValueError
    where the plan cannot serve it."""
    packed = _weights(shape, experts, device)
    made = torch.Generator(device).manual_seed(2)
    x = torch.randn(n, shape.hidden, device=device, generator=made).to(torch.bfloat16)
    shared = torch.randn(n, shape.hidden, device=device, generator=made).to(torch.bfloat16)
    live = torch.tensor([n], dtype=torch.int32, device=device)
    works, out = [op.workspace(shape, n, device) for _ in range(2)], torch.empty_like(shared)  # early: not that of the call before
    found, lists = routings(experts, n, shape.topk), _lists(experts, n, shape.topk, plan.tile, device)
    calls = [op.Call(x, packed, lists[i], live, shared, out, works[i % 2], plan, n, early=early) for i in range(len(lists))]
    for call in calls:
        call.check()
    return Prepared(calls, found[-1])


def _setup(shape: op.Shape, experts: int, n: int, plan: op.Plan, device: torch.device) -> Run:
    made = prepare(shape, experts, n, plan, device)
    return Run(made.launch, made.error, len(made.calls))


def work_of(shape: op.Shape, experts: int, n: int) -> tuple[int, int]:
    """(bytes, flops) of one call."""
    calls = routings(experts, n, shape.topk)
    distinct = sum(c.distinct for c in calls) / len(calls)
    return op.bytes_moved(shape, distinct, n, n * shape.topk), 2 * 3 * n * shape.topk * shape.hidden * shape.width


def _case(shape: op.Shape, experts: int, n: int, plan: op.Plan, label: str) -> Case:
    size, flops = work_of(shape, experts, n)
    return Case("moe_int4", label, functools.partial(_setup, shape, experts, n, plan), size, flops)


def cases() -> list[Case]:
    """What `choose` picks, then its rivals."""
    found = []
    for shape, experts, n in CHOSEN:
        plan = op.choose(shape, n, experts)
        found.append(_case(shape, experts, n, plan, f"{experts} experts x {shape.width}, {n} rows"))
    for shape, experts, n, gate_up, down in RIVALS:
        label = f"rival {gate_up}+{down}: {experts} experts x {shape.width}, {n} rows"
        found.append(_case(shape, experts, n, op.Plan(gate_up, down), label))
    return found
