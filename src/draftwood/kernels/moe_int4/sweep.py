"""Times every form that can be near the best at the benchmark's sizes: what `op.choose` and the forms are filled from.

`python -m draftwood.kernels.moe_int4.sweep FOLDER [--seconds S]` runs unattended and writes one JSON line per measurement to
FOLDER/moe_sweep.jsonl: both parts together, and each alone. With `--build ARCH` it only compiles, without a GPU. All results of
a size must be the same bits. A form that breaks the device's context is skipped: the sweep goes on in a new
process without it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import ConfigError, KernelBuildError
from draftwood.kernels import jit
from draftwood.kernels.case import read_peak, time_graph
from draftwood.kernels.moe_int4 import bench, op
from draftwood.kernels.moe_int4.op import Form
from draftwood.kernels.sweep import Sweep, supervise

NAME = "moe_sweep"
tell = functools.partial(print, flush=True)
REST = 0.04
"""Seconds of rest before a measurement."""

FORMS = {
    "sh": Form("share", 1, 4, 4, depth=8, ahead=2),
    "rows": Form("stream", 1, 4, 4, depth=8, ahead=2, rows=40),
    "t1": Form("staged", 1, 4, 4, stages=4, span=2),
    "t2.w8": Form("staged", 2, 8, 3, stages=3, span=2),
    "t3": Form("staged", 3, 4, 4, stages=3, span=2, spill=112),
    "t4.w8": Form("staged", 4, 8, 2, stages=4, span=2),
    "t12": Form("staged", 12, 4, 2, stages=3, span=2, unroll=1),
    "c8": Form("crew", 8, 16, 1, stages=2, depth=4, spill=160, chains=(True,)),
}
"""Candidates beside the forms in use."""
CASES: list[tuple[op.Shape, int, int, list[str]]] = [
    (bench.TP8, 384, 1, ["split one", "split few", "stream few"]),
    (bench.TP8, 384, 9, ["share duo", "sh duo", "stream duo", "stream rows", "t1 duo"]),
    (bench.TP8, 384, 33, ["wide duo", "share duo"]),
    (bench.EP8, 48, 9, ["joined joined", "narrow narrow", "t1 t1"]),
    (bench.EP8, 48, 65, ["joined joined", "narrow narrow", "wider wider"]),
    (bench.EP8, 48, 128, ["wider wider", "joined joined", "t4.w8 t4.w8", "widest widest"]),
    (bench.EP8, 48, 288, ["widest widest", "c8 c8", "t12 t12"]),
    (bench.EP8, 48, 512, ["widest widest", "c8 c8", "t12 t12"]),
    (bench.K26, 384, 1, ["stream few"]),
    (bench.K26, 384, 9, ["stream slim", "narrow narrow", "slim slim"]),
    (bench.K26, 384, 33, ["narrow narrow", "stream slim"]),
    (bench.TP8, 384, 4, ["stream few", "stream rows", "share few"]),
    (bench.TP8, 384, 17, ["share duo", "wide duo"]),
    (bench.TP8, 384, 65, ["wide duo", "wide wide", "t1 t1"]),
    (bench.K26, 384, 17, ["narrow narrow", "stream slim"]),
    (bench.K26, 384, 65, ["narrow narrow", "wide wide"]),
    (bench.EP8, 48, 17, ["joined joined", "narrow narrow"]),
    (bench.EP8, 48, 33, ["joined joined", "narrow narrow", "t2.w8 t2.w8"]),
    (bench.EP8, 48, 192, ["wider wider", "widest widest"]),
    (bench.K26, 384, 128, ["narrow narrow", "wide wide"]),
    (bench.K26, 384, 512, ["wide wide", "t3 t3"]),
]
"""(shape, experts, rows, pairs of forms for gate_up and down); the most wanted first."""
GOALS = 11
"""How many of them come before the times under load."""
BUSY = [(9, ["stream slim", "narrow narrow"]), (33, ["narrow narrow"]), (65, ["narrow narrow"]), (1, ["stream few"])]
"""(rows, pairs of forms) timed under load, with all 384 experts."""
LOAD = 0.4


def register() -> None:
    """Make the candidates known to the launcher of this process."""
    op.HOPPER.update(FORMS)  # which is FORMS["sm_90a"]


def plans(pairs: list[str]) -> list[op.Plan]:
    """The plan of every pair."""
    return [op.Plan(*pair.split()) for pair in pairs]


def sources(arch: str) -> list[jit.Source]:
    """Everything the sweep loads."""
    found: dict[str, jit.Source] = {}
    for shape, _, _, pairs in CASES:
        for plan in plans(pairs):
            for part, name in (("gate_up", plan.gate_up), ("down", plan.down)):
                source = op._variant(name, part, shape, arch).source
                found[f"{source.file} {source.label()}"] = source
        combine = op._combine_variant(shape).source
        found[combine.label()] = combine
    return list(found.values())


class Forms(Sweep):
    """The sweep's cases."""

    def begin(self, plan: op.Plan, key: str) -> bool:
        """Whether to do `key`; if so its plan counts as broken until the next start."""
        return self.start(f"{plan.gate_up} {plan.down}", key)

    def times(self, shape: op.Shape, experts: int, rows: int, pairs: list[str], device: torch.device, peak: float) -> None:
        """One size with every candidate."""
        size, flops = bench.work_of(shape, experts, rows)
        first: torch.Tensor | None = None
        known: dict[str, float] = {}
        for plan in plans(pairs):
            key = f"{experts} x {shape.width}, {rows} rows: {plan.gate_up} {plan.down}"
            if not self.begin(plan, key):
                continue
            try:
                setup = bench.prepare(shape, experts, rows, plan, device)
                setup.launch()
            except (ValueError, ConfigError, KernelBuildError) as error:
                self.say(key=key, refused=str(error)[:300])
                continue
            torch.cuda.synchronize(device)
            out = setup.calls[-1].out
            line: dict[str, Any] = {"same": first is None or torch.equal(out, first)}
            if first is None:
                first = out.clone()
                line |= {"error": setup.error()} if rows in (9, 128) else {}
            time.sleep(REST)
            us = time_graph(setup.launch, len(setup.calls), 5)
            line |= {"us": round(us, 2), "of_peak": round(size / us / 1e-6 / peak, 4), "tflop_s": round(flops / us / 1e6, 1)}
            halves: tuple[tuple[str, str, Callable[[], None]], ...] = (
                ("gate_up", plan.gate_up, setup.gate_up), ("down", plan.down, setup.down),
            )  # fmt: skip
            for part, name, run in halves:
                if name + part not in known:
                    time.sleep(REST)
                    known[name + part] = round(time_graph(run, len(setup.calls), 5), 2)
                line[part] = known[name + part]
            self.say(key=key, **line)

    def loaded(self, shape: op.Shape, experts: int, rows: int, pairs: list[str], device: torch.device) -> None:
        """One size while the device has been busy with it for LOAD seconds: its clock is then lower."""
        for plan in plans(pairs):
            key = f"loaded {experts} x {shape.width}, {rows} rows: {plan.gate_up} {plan.down}"
            if self.begin(plan, key):
                setup = bench.prepare(shape, experts, rows, plan, device)
                us = busy_time(setup.launch) / len(setup.calls)
                self.say(key=key, us=round(us, 2))


def busy_time(run: Callable[[], None]) -> float:
    """Microseconds of a replay after LOAD seconds of replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    began, count = time.time(), 10
    while time.time() - began < LOAD:
        for _ in range(8):
            graph.replay()
        torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def build(arch: str) -> int:
    """Compile everything that the sweep loads; return how many."""
    everything = sources(arch)
    jit.build(everything[0], arch)  # imports the compiler, which threads must not do at once

    def one(source: jit.Source) -> bool:
        try:
            jit.build(source, arch)
        except KernelBuildError as error:
            print(str(error)[:300], flush=True)
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, everything))


def child(folder: Path, seconds: float) -> None:
    """One process of the sweep."""
    sweep = Forms(folder, NAME, seconds, tell)
    device = torch.device("cuda", torch.cuda.current_device())
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    began = time.time()
    built = build(arch)
    peak = read_peak(device)
    gc.freeze()  # every capture collects: what is there now stays
    name, compiled = torch.cuda.get_device_name(device), round(time.time() - began, 1)
    sweep.say(device=name, compiled=built, compiled_s=compiled, read_peak_gb_s=peak / 1e9)
    for shape, experts, rows, pairs in CASES[:GOALS]:
        sweep.times(shape, experts, rows, pairs, device, peak)
    for rows, pairs in BUSY:
        sweep.loaded(bench.K26, 384, rows, pairs, device)
    for shape, experts, rows, pairs in CASES[GOALS:]:
        sweep.times(shape, experts, rows, pairs, device, peak)
    sweep.say(finished=time.time() < sweep.end, left_s=round(sweep.end - time.time(), 1))


def main(argv: list[str] | None = None) -> int:
    """Run children until one ends well or nothing new breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--build", metavar="ARCH", choices=jit.ARCHS, help="compile only, which needs no GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    register()
    if asked.build:
        print(f"{build(asked.build)} kernels", flush=True)
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.child:
        child(asked.folder, asked.seconds)
        return 0
    return supervise("draftwood.kernels.moe_int4.sweep", asked.folder, NAME, asked.seconds, tell)


if __name__ == "__main__":
    raise SystemExit(main())
