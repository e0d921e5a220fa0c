"""Time the forms of `linear` at K2.6's projections, unattended: what tuned.py is filled from.

`python -m draftwood.kernels.linear.sweep FOLDER [--seconds S]` writes one JSON line per measured form to
FOLDER/linear_sweep.jsonl: the shape, the rows, the form, microseconds, share of the read peak, whether its bits are those of the
form in use, and the library's time. The first of a shape and number of rows is the one in use. A kernel that breaks the device's
context is left out: the sweep goes on in a new process without it. `--choose` prints tuned.py from what was
measured, `--build ARCH` only compiles; neither needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import KernelBuildError
from draftwood.kernels import case, jit
from draftwood.kernels.linear import bench, op, plan
from draftwood.kernels.linear.plan import Form, Shape
from draftwood.kernels.sweep import Sweep, supervise

NAME = "linear_sweep"
ROWS = (65, 288, 128, 512, 144, 576, 256, 1024, 33, 9, 17, 1)
GAIN = 0.02
"""How much faster than the cheapest form by the plan's counting one must be to get a line in tuned.py."""
tell = functools.partial(print, flush=True)


def shapes() -> dict[str, Shape]:
    """K2.6's different projections on one rank, then those that eight ranks add."""
    found: dict[Shape, str] = {}
    for world in (1, 8):
        for name, shape in plan.k26_shapes(world).items():
            found.setdefault(shape, f"tp{world} {name}")
    return {name: shape for shape, name in found.items()}


def build(arch: str, workers: int = 16) -> int:
    """Compile everything that the sweep measures; return how many kernels."""
    different = {(f.entry, f.macros): f for shape in shapes().values() for n in ROWS for f in plan.candidates(shape, n)}
    first, *rest = [op.source(form) for form in different.values()]
    jit.build(first, arch)  # imports the compiler, which threads must not do at once

    def one(source: jit.Source) -> bool:
        try:
            jit.build(source, arch)
        except KernelBuildError as error:
            tell(str(error)[:300])
            return False
        return True

    with ThreadPoolExecutor(workers) as pool:
        return 1 + sum(pool.map(one, rest))


class Forms(Sweep):
    """The sweep's cases."""

    wrong = 0

    def measure(self, name: str, shape: Shape, n: int, device: torch.device, peak: float) -> None:
        """One shape and number of rows with every form that is not measured yet."""
        label = {form: f"{name}, {n} rows: {form.entry} {dict(form.macros)}" for form in plan.candidates(shape, n)}
        if self.done.issuperset(label.values()):
            return
        run = bench.setup(shape, n, torch.bfloat16, device)
        weights = bench.weights(shape, device)
        made = torch.Generator(device=device).manual_seed(2)
        x = torch.randn((n, shape.heads, shape.inputs) if shape.heads > 1 else (n, shape.inputs), device=device, generator=made)
        x = x.to(torch.bfloat16)
        want = op.linear(x, weights[-1])
        rival = case.time_graph(run.rival, run.calls, 5) if run.rival else None
        for form, key in label.items():
            if not self.start(f"{form.entry} {form.tokens}", key):
                continue
            out = torch.empty_like(want)

            def launch(form: Form = form, out: torch.Tensor = out) -> None:
                for weight in weights:
                    op.linear(x, weight, out, form=form)

            us = case.time_graph(launch, len(weights), 5)
            same = torch.equal(out.view(torch.int16), want.view(torch.int16))
            self.wrong += not same
            share = op.bytes_moved(shape, n) / (us * 1e-6) / peak
            line = {"case": name, "rows": n, "entry": form.entry, **dict(form.macros), "shared": form.shared}
            self.say(key=key, **line, us=us, of_peak=share, same_bits=same, rival_us=rival)


def _made(entry: str, macros: Mapping[str, Any]) -> tuple[Any, ...]:
    """A form as TUNED has it."""
    kernel = entry.removeprefix("linear_")
    return kernel, *(macros[knob] for knob in plan.KNOBS[kernel])


def choose(lines: Iterable[dict[str, Any]]) -> str:
    """Return tuned.py's table from measured lines: the fastest form of the right bits where it is not the cheapest by the plan."""
    times: dict[tuple[int, str], dict[tuple[Any, ...], float]] = {}
    for line in lines:
        if line["same_bits"] and line["rows"] > plan.STREAM_ROWS:
            times.setdefault((line["rows"], line["case"]), {})[_made(line["entry"], line)] = line["us"]
    names, found = list(shapes()), {}
    for n, name in sorted(times, key=lambda key: (key[0], names.index(key[1]))):
        measured, shape = times[n, name], shapes()[name]
        cheapest = plan.computed(shape, n)[0]
        usual = measured.get(_made(cheapest.entry, dict(cheapest.macros)), float("inf"))
        fastest = min(measured, key=measured.__getitem__)
        if measured[fastest] < (1 - GAIN) * usual:
            found[plan.tuning_key(shape, n)] = fastest
    return "".join(f'    {key}: ("{form[0]}", {", ".join(map(str, form[1:]))}),\n' for key, form in found.items())


def child(folder: Path, seconds: float) -> int:
    """One process of the sweep; 1 if some form's bits differ."""
    sweep = Forms(folder, NAME, seconds, tell)
    device = torch.device("cuda", torch.cuda.current_device())
    began, kernels = time.monotonic(), build(jit.arch_of(torch.cuda.get_device_capability(device)))
    peak = case.read_peak(device)
    sweep.say(read_peak_gb_s=peak / 1e9, kernels=kernels, ready_s=round(time.monotonic() - began, 1))
    for n, (name, shape) in itertools.product(ROWS, shapes().items()):
        if time.time() > sweep.end:
            break
        sweep.measure(name, shape, n, device, peak)
    sweep.say(wrong=sweep.wrong, finished=time.time() < sweep.end)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run children until one ends well or nothing new breaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=85, help="start no form after this long")
    parser.add_argument("--build", metavar="ARCH", choices=jit.ARCHS, help="compile only")
    parser.add_argument("--choose", action="store_true", help="print the table of tuned.py from what was measured")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.build:
        tell(f"{build(asked.build)} kernels")
        return 0
    if asked.choose:
        text = (asked.folder / f"{NAME}.jsonl").read_text(encoding="utf-8")
        tell(choose(line for line in map(json.loads, text.splitlines()) if "case" in line))
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.child:
        return child(asked.folder, asked.seconds)
    return supervise("draftwood.kernels.linear.sweep", asked.folder, NAME, asked.seconds, tell)


if __name__ == "__main__":
    raise SystemExit(main())
