"""Time the forms of `linear` at K2.6's projections, unattended: `python -m draftwood.kernels.linear.sweep FILE --seconds S`

FILE gets one JSON line per measured form: the shape, the rows, the form, microseconds, share of the read peak, whether
its bits are those of the form in use, and the library's time. The first of a shape and
number of rows is the one in use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from draftwood.kernels import case, jit
from draftwood.kernels.linear import bench, op, plan
from draftwood.kernels.linear.plan import Form, Shape

ROWS = (9, 65, 1, 33, 17, 128)


def shapes() -> dict[str, Shape]:
    """K2.6's different projections on one rank, then those that eight ranks add."""
    found: dict[Shape, str] = {}
    for world in (1, 8):
        for name, shape in plan.k26_shapes(world).items():
            found.setdefault(shape, f"tp{world} {name}")
    return {name: shape for shape, name in found.items()}


def build(arch: str, workers: int = 16) -> int:
    """Compile everything that the sweep measures; return how many kernels."""
    different = {(f.entry, f.macros): f for shape in shapes().values() for n in ROWS for f in plan.forms_for(shape, n)}
    first, *rest = [op.source(form) for form in different.values()]
    jit.build(first, arch)  # imports the compiler, which threads must not do at once
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda source: jit.build(source, arch), rest))
    return len(different)


def measure(name: str, shape: Shape, n: int, device: torch.device, peak: float) -> list[dict[str, Any]]:
    """Lines of one shape and number of rows."""
    run = bench.setup(shape, n, torch.bfloat16, device)
    weights = bench.weights(shape, device)
    made = torch.Generator(device=device).manual_seed(2)
    x = torch.randn((n, shape.heads, shape.inputs) if shape.heads > 1 else (n, shape.inputs), device=device, generator=made)
    x = x.to(torch.bfloat16)
    want = op.linear(x, weights[-1])
    rival = case.time_graph(run.rival, run.calls, 5) if run.rival else None
    lines = []
    for form in plan.forms_for(shape, n):
        out = torch.empty_like(want)

        def launch(form: Form = form, out: torch.Tensor = out) -> None:
            for weight in weights:
                op.linear(x, weight, out, form=form)

        us = case.time_graph(launch, len(weights), 5)
        same = torch.equal(out.view(torch.int16), want.view(torch.int16))
        share = op.bytes_moved(shape, n) / (us * 1e-6) / peak
        line = {"case": name, "rows": n, "entry": form.entry, **dict(form.macros), "shared": form.shared}
        lines.append(line | {"us": us, "of_peak": share, "same_bits": same, "rival_us": rival})
    return lines


def main() -> int:
    """Return 1 if any form's bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="start no shape after this long")
    asked = parser.parse_args()
    began, device, wrong = time.monotonic(), torch.device("cuda", torch.cuda.current_device()), 0
    kernels = build(jit.arch_of(torch.cuda.get_device_capability(device)))
    peak = case.read_peak(device)
    with asked.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"read_peak_gb_s": peak / 1e9, "kernels": kernels, "ready_s": time.monotonic() - began}) + "\n")
        for n, (name, shape) in itertools.product(ROWS, shapes().items()):
            if time.monotonic() - began > asked.seconds:
                break
            for line in measure(name, shape, n, device, peak):
                wrong += not line["same_bits"]
                file.write(json.dumps(line) + "\n")
            file.flush()
    print(f"{wrong} forms differ, {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
