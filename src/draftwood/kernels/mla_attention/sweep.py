"""Times every shape, and other laws, at the benchmark's sizes: what `choose`, `COLUMNS` and `law_for` of sizes.py are filled from,
and how many columns a block of combine has for how many lines (sizes.fold_columns).

`python -m draftwood.kernels.mla_attention.sweep FOLDER [--seconds S]` runs unattended. It first checks that shapes of a family
agree and that a node equals it decoded alone; then it writes one JSON line per measurement to FOLDER/mla_sweep.jsonl. A shape that
breaks the device's context is skipped: the sweep goes on in a new process without it.
"""

from __future__ import annotations

import argparse
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import ConfigError
from draftwood.kernels import jit
from draftwood.kernels.case import read_peak, time_graph
from draftwood.kernels.mla_attention import bench, op, scenario, sizes
from draftwood.kernels.mla_attention.scenario import attend, reference, same
from draftwood.kernels.sweep import Sweep, supervise

NAME = "mla_sweep"
tell = functools.partial(print, flush=True)
OTHER_LAWS = {
    op.FEW: [op.Law(128, 4, (2048, 8192, 32768)), op.Law(128, 8, (2048, 32768, 65536))],
    op.MANY: [op.Law(128, 4, (2048, 8192, 32768)), op.Law(512, 4, (8192, 32768, 131072))],
}
"""By the law that holds: others, tried with the forms of columns.cu."""
CHECKED = [(8, 2500, 9, "near"), (64, 2049, 33, "wide"), (64, 63, 65, "chain"), (8, 1090, 65, "near"), (64, 0, 9, "wide")]
"""(heads, length, nodes, kind of tree)"""


def near_best(shape: op.Form, lines: int, rows: int) -> bool:
    """Whether the shape can be near the best for so many lines of each row."""
    if isinstance(shape, op.Nodes):
        return rows * lines >= 16 * shape.lines
    if shape.columns:
        return lines <= 16 * shape.lines if shape.walk else (lines <= 16) == (shape.lines == 8)
    wasted = shape.lines >= 2 * max(lines, 16) or shape.shared_bytes(576) <= jit.SHARED_LIMIT["sm_120a"]
    return not (wasted or shape.lines == 16 and lines > 160 or shape.lines == 32 and lines > 600)


def candidates(heads: int, nodes: int, context: int, rows: int) -> list[tuple[str, op.Law]]:
    """Shapes that can be near the best with the law that holds, columns first; then columns with other laws."""
    lines, law = heads * nodes, op.law_for(heads)
    known = {n: s for n, s in op.SHAPES.items() if sizes.takes(s, heads) and near_best(s, lines, rows)}
    names = sorted(known, key=lambda n: not known[n].columns)
    found = [(name, law) for name in names]
    if context > 2048:
        found += [(name, other) for other in OTHER_LAWS[law] for name in names if op.SHAPES[name].columns]
    return [(n, w) for n, w in found if op.SHAPES[n].walk or rows * lines * w.pieces(context, w.unit) * 2056 <= 1 << 30]


def sources(arch: str) -> list[jit.Source]:
    """Everything the sweep loads."""
    found: dict[str, jit.Source] = {}
    for holds, law in [(True, op.FEW), (True, op.MANY), *((False, law) for laws in OTHER_LAWS.values() for law in laws)]:
        given = op.sizes(512, 64, law)
        for shape in op.SHAPES.values():
            if op.fits(shape, arch, 576) and (holds or shape.columns):
                more = given | {"COLUMNS": int(shape.columns)}
                one = [jit.Source(op.FOLDER / "plan.cu", "mla_plan", more)]
                one += [jit.Source(op.FOLDER / "nodes_plan.cu", "mla_plan_nodes", more)] if shape.columns else []
                one += [jit.Source(op.FOLDER / "combine.cu", "mla_combine", more | {"FOLDED": cols}) for cols in (0, 32, 64, 128)]
                one.append(jit.Source(op.FOLDER / shape.file, "mla_attend", shape.macros(512, 64, law)))
                found |= {f"{s.file}{s.label()}": s for s in one}
    return list(found.values())


def compile_all(arch: str) -> None:
    """Build everything that the sweep loads."""
    first, *rest = sources(arch)
    jit.build(first, arch)  # imports the compiler, which threads must not do at once
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda source: jit.build(source, arch), rest))


def check(sweep: Sweep, device: torch.device, arch: str) -> None:
    """All shapes of a family give the bits of its first; those are near float64; nodes alone give the same bits."""
    for heads, length, count, kind in CHECKED:
        step = scenario.make([length], [count], heads, device, seed=length, kind=kind)
        want = reference(step)
        first: dict[bool, torch.Tensor] = {}
        line: dict[str, Any] = {}
        for name, shape in op.SHAPES.items():
            key = f"check {heads} {length} {count} {name}"
            if not (op.fits(shape, arch, 576) and sizes.takes(shape, heads) and sweep.start(name, key)):
                continue
            outs = [attend(step, name, parts) for parts in (op.PARTIAL_BYTES, 0) if shape.walk or parts]
            alone = attend(scenario.alone(step, 0, count - 1), name)
            torch.cuda.synchronize()
            like = first.setdefault(shape.columns, outs[0])
            error = float((outs[0].double() - want).abs().max() / want.abs().max())
            line[name] = [f"{error:.1e}", all(same(o, like) for o in outs), same(alone[0], outs[0][count - 1])]
        sweep.say(
            check=f"{heads} heads, {length} + {count} {kind}", result=line, meaning="error, as first of its family, node as alone"
        )


def times(sweep: Sweep, device: torch.device, arch: str) -> None:
    """Every case with every candidate."""
    for rows, heads, nodes, context in [(1, *goal) for goal in bench.GOALS + bench.MORE] + bench.BATCHES:
        best: tuple[float, str, str, op.Law] | None = None
        for name, law in candidates(heads, nodes, context, rows):
            key = f"{rows}x{nodes} {heads}h {context} {name}/{law.unit}x{law.per}/{law.grow[0]}/{law.grow[1]}"
            if not op.fits(op.SHAPES[name], arch, 576) or not sweep.start(name, key):
                continue
            try:
                case = bench.Bench(rows, heads, nodes, context, device, name, law)
            except ConfigError as error:
                sweep.say(key=key, refused=str(error))
                continue
            us = time_graph(case.launch, len(case.tables), 5)
            wrong = None if best and not op.SHAPES[name].columns else case.error()
            if best is None or us < best[0]:
                best = us, key, name, law
            rate = op.flops(heads, [context] * rows, [nodes] * rows) / us / 1e6
            sweep.say(key=key, us=round(us, 2), tflop_s=round(rate, 1), gb_s=round(rows * context * 1152 / us / 1e3), error=wrong)
        if best and time.time() < sweep.end:
            case = bench.Bench(rows, heads, nodes, context, device, best[2], best[3])
            took: dict[str, Any] = {"attend_us": round(time_graph(case.partials, len(case.tables), 5), 2)}
            took["plan_us"] = round(time_graph(case.plan, 1, 5), 2)
            took["combine_us"] = {}
            for cols in (0,) if case.op.spare else (0, 32, 64, 128):
                case.op.fold_with(cols)
                took["combine_us"][cols] = round(time_graph(case.fold, len(case.tables), 5), 2)
            sweep.say(best=best[1], us=round(best[0], 2), **took)


def child(folder: Path, seconds: float) -> None:
    """One process of the sweep."""
    sweep = Sweep(folder, NAME, seconds, tell)
    device = torch.device("cuda", torch.cuda.current_device())
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    began = time.time()
    compile_all(arch)
    name, compiled = torch.cuda.get_device_name(device), round(time.time() - began, 1)
    sweep.say(device=name, compiled_s=compiled, read_peak_gb_s=read_peak(device) / 1e9)
    check(sweep, device, arch)
    times(sweep, device, arch)


def main(argv: list[str] | None = None) -> int:
    """Run children until one ends well or nothing new breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.child:
        child(asked.folder, asked.seconds)
        return 0
    return supervise("draftwood.kernels.mla_attention.sweep", asked.folder, NAME, asked.seconds, tell)


if __name__ == "__main__":
    raise SystemExit(main())
