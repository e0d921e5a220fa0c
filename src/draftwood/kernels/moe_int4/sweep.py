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
    "st": Form("stream", 1, 4, 4, depth=8),
    "st.x2": Form("stream", 1, 4, 4, depth=8, ahead=2),
    "sp": Form("split", 1, 8, 3, ahead=2, rows=4),
    "sp.x1": Form("split", 1, 8, 3, rows=4),
    "sp.w14": Form("split", 1, 14, 2, ahead=2, rows=4),
    "sh": Form("share", 1, 4, 4, depth=8, ahead=2),
    "sh.w8": Form("share", 1, 8, 2, depth=8, ahead=2),
    "sh.w16": Form("share", 1, 16, 1, depth=8, ahead=2),
    "sh.d16": Form("share", 1, 4, 4, depth=16, ahead=2),
    "few": Form("stream", 1, 4, 4, depth=8, rows=4),
    "few.b6": Form("stream", 1, 4, 6, depth=8, ahead=2, rows=4),
    "rows": Form("stream", 1, 4, 4, depth=8, ahead=2, rows=40),
    "rows.x4": Form("stream", 1, 4, 4, depth=8, ahead=4, rows=40),
    "rows.d4": Form("stream", 1, 4, 4, depth=4, ahead=4, rows=72),
    "one": Form("one", 1, 4, 8, rows=1),
    "duo": Form("duo", 1, 16, 1, depth=8, ahead=2, rows=72),
    "duo.x4": Form("duo", 1, 16, 1, depth=8, ahead=4, rows=72),
    "thin": Form("ring", 1, 8, 2, stages=6, span=4),
    "t1": Form("staged", 1, 8, 2, stages=4, span=2),
    "t1.w4": Form("staged", 1, 4, 4, stages=4, span=2),
    "t2": Form("staged", 2, 4, 4, stages=4, span=2),
    "t3": Form("staged", 3, 4, 4, stages=3, span=2),
    "t4": Form("staged", 4, 4, 3, stages=4, span=2),
    "t4.b4": Form("staged", 4, 4, 4, stages=3, span=2),
    "t4.b5": Form("staged", 4, 4, 5, stages=5, span=1),
    "t4.s1": Form("staged", 4, 4, 4, stages=6, span=1),
    "t4.w2": Form("staged", 4, 2, 6, stages=3, span=2),
    "t5": Form("staged", 5, 4, 4, stages=4, span=1),
    "t6.b4": Form("staged", 6, 4, 4, stages=4, span=1),
    "t6": Form("staged", 6, 4, 3, stages=3, span=2, unroll=1),
    "t8.b3": Form("staged", 8, 4, 3, stages=4, span=1),
    "t12": Form("staged", 12, 4, 2, stages=3, span=2, unroll=1),
    "t12.u2": Form("staged", 12, 4, 2, stages=3, span=2),
    "t12.s1": Form("staged", 12, 4, 2, stages=5, span=1),
    "t12.b3": Form("staged", 12, 4, 3, stages=4, span=1),
    "g4": Form("group", 4, 8, 3, stages=6, chains=(True,)),
    "g4.w4": Form("group", 4, 4, 5, stages=6, chains=(True,)),
    "g4.w16": Form("group", 4, 16, 1, stages=8, chains=(True,)),
    "g6": Form("group", 6, 8, 3, stages=6, chains=(True,)),
    "g8": Form("group", 8, 8, 2, stages=6, chains=(True,)),
    "g12": Form("group", 12, 8, 2, stages=6, chains=(True,)),
    "g12.w16": Form("group", 12, 16, 1, stages=6, chains=(True,)),
}
"""Candidates, and what they are compared with."""
CASES: list[tuple[op.Shape, int, int, list[str]]] = [
    (bench.TP8, 384, 9, ["sh rows", "sh duo", "sh.w8 duo", "sh.w16 duo", "sh duo.x4", "sh.d16 duo", "t1.w4 duo", "st.x2 rows"]),
    (bench.TP8, 384, 33, ["sh rows", "sh duo", "sh.w8 duo", "sh.w16 duo", "t4 duo", "t1.w4 duo.x4", "st.x2 thin", "sh.w8 t1.w4"]),
    (bench.TP8, 384, 1, ["sp few", "sp one", "sp.x1 one", "sp.w14 one", "sp duo", "st.x2 one", "sh one"]),
    (bench.EP8, 48, 128, ["t4.b4 t4.b4", "g4 g4", "g4.w4 g4.w4", "g6 g6", "t4.b5 t4.b5", "g4.w16 g4.w16", "t4 t4"]),
    (bench.EP8, 48, 512, ["t12 t12", "g12 g12", "g12.w16 g12.w16", "g8 g8", "t12.b3 t12.b3", "t8.b3 t8.b3", "t6.b4 t6.b4"]),
    (bench.K26, 384, 1, ["st few", "st.x2 few", "st few.b6"]),
    (bench.K26, 384, 9, ["st.x2 t1", "t2 t2", "t1 t1", "t1.w4 t1.w4"]),
    (bench.K26, 384, 17, ["st.x2 t1", "t2 t2", "t1.w4 t1.w4"]),
    (bench.TP8, 384, 4, ["sp few", "sp duo", "sh duo", "sh few", "st.x2 rows"]),
    (bench.TP8, 384, 65, ["sh thin", "sh duo", "sh.w8 duo", "t4 duo", "t1.w4 t1.w4", "sh.w8 rows.d4"]),
    (bench.K26, 384, 33, ["t2 t2", "st.x2 t1", "t1.w4 t1.w4"]),
    (bench.K26, 384, 65, ["t2 t2", "t1.w4 t1.w4", "t3 t3"]),
    (bench.EP8, 48, 9, ["t2 t2", "t1.w4 t1.w4", "t4.b4 t4.b4", "st.x2 t1"]),
    (bench.EP8, 48, 33, ["t2 t2", "t3 t3", "t4.b4 t4.b4"]),
    (bench.EP8, 48, 65, ["t2 t2", "t3 t3", "t4.b4 t4.b4", "g4 g4"]),
    (bench.K26, 384, 128, ["t2 t2", "t3 t3", "t4 t4"]),
    (bench.K26, 384, 512, ["t2 t2", "t3 t3", "t4 t4"]),
]
"""(shape, experts, rows, pairs of forms for gate_up and down); the most wanted first."""
GOALS = 11
"""How many of them come before the times under load."""
BUSY = [(9, ["st.x2 t1", "t2 t2"]), (33, ["t2 t2", "t4 t4"]), (65, ["t2 t2"]), (1, ["st few"])]
"""(rows, pairs of forms) timed under load, with all 384 experts."""
LOAD = 0.4


def register() -> None:
    """Make the candidates known to the launcher of this process."""
    op.HOPPER.update(FORMS)


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
