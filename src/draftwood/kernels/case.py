"""Benchmark cases of the kernels, and how one is measured: correctness first, then time in a CUDA graph.

Each kernel folder's `bench.py` has `cases() -> list[Case]`. `python -m draftwood.kernels.case FOLDER [KERNEL ...]` runs
them unattended and writes one JSON line per case to FOLDER/cases.jsonl as soon as it is known.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import ConfigError, KernelBuildError
from draftwood.kernels import check, jit


@dataclass(frozen=True)
class Run:
    """One case on a device.

    launch: launches the operation `calls` times, graph-capturable, each call on other weights so that no cache holds
    them. error: largest difference from float64 relative to the largest reference value, of the last call's result.
    rival: the same number of calls of a library's operation, if there is one.
    """

    launch: Callable[[], None]
    error: Callable[[], float]
    calls: int = 1
    rival: Callable[[], None] | None = None

    def __call__(self) -> None:
        self.launch()


@dataclass(frozen=True)
class Case:
    """One line of the benchmark. bytes and flops count one call; `setup(device)` allocates and returns a Run."""

    kernel: str
    label: str
    setup: Callable[[torch.device], Run]
    bytes: int
    flops: int = 0


def time_graph(run: Callable[[], None], calls: int, repeats: int = 7) -> float:
    """Return the median time of one of `calls` operations in microseconds, from replays of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
    stream.synchronize()
    times = sorted(float(start.elapsed_time(end)) for start, end in marks)
    return times[repeats // 2] * 1e3 / calls


def read_peak(device: torch.device, gigabytes: float = 4.0) -> float:
    """Return the bytes per second at which this device sums a large tensor: the ceiling of every ratio."""
    data = torch.empty(int(gigabytes * 2**30) // 4, dtype=torch.float32, device=device).fill_(1.0)
    out = torch.empty((), dtype=torch.float32, device=device)

    def read() -> None:
        torch.sum(data, 0, out=out)

    return data.nbytes / (time_graph(read, 1) * 1e-6)


def measure(case: Case, device: torch.device, peak: float) -> dict[str, Any]:
    """Check one case, time it and its rival, and return the line of the report."""
    run = case.setup(device)
    run()
    torch.cuda.synchronize(device)
    error = run.error()
    us = time_graph(run.launch, run.calls)
    line = {
        "kernel": case.kernel, "case": case.label, "us": us, "bytes": case.bytes, "flops": case.flops,
        "gb_s": case.bytes / us / 1e3, "of_peak": case.bytes / (us * 1e-6) / peak, "tflop_s": case.flops / us / 1e6,
        "error": error,
    }  # fmt: skip
    if run.rival is not None:
        line["rival_us"] = time_graph(run.rival, run.calls)
    return line


def compile_parallel(kernels: list[str], arch: str, workers: int = 16) -> list[check.Built]:
    """Build every variant of the kernels for `arch` in threads (NVRTC releases the interpreter lock)."""
    jobs = [(kernel, variant) for kernel in kernels for variant in check.variants(kernel) if arch in variant.archs]
    first = [check.check(job[0], job[1], arch) for job in jobs[:1]]  # imports the compiler, which threads must not do at once
    with ThreadPoolExecutor(workers) as pool:
        return first + list(pool.map(lambda job: check.check(job[0], job[1], arch), jobs[1:]))


def _alive(device: torch.device) -> bool:
    """Whether the device still runs anything after an error."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Run cases and write FOLDER/cases.jsonl; return 1 if a case failed to run, 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where cases.jsonl goes")
    parser.add_argument("kernels", nargs="*", help="kernel names (default: all that have cases)")
    parser.add_argument("--seconds", type=float, default=240, help="start no case after this long")
    parser.add_argument("--only", default="", help="run cases whose label contains this")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; cases are measured on one")
    began = time.monotonic()
    here = Path(__file__).parent
    kernels = asked.kernels or [name for name in check.kernel_names() if (here / name / "bench.py").exists()]
    device = torch.device("cuda", torch.cuda.current_device())
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with (asked.folder / "cases.jsonl").open("a", encoding="utf-8") as out:

        def say(line: dict[str, Any]) -> None:
            print(json.dumps(line), flush=True)
            out.write(json.dumps(line) + "\n")
            out.flush()

        arch = jit.arch_of(torch.cuda.get_device_capability(device))
        built = compile_parallel(kernels, arch)
        peak = read_peak(device)
        say({"device": torch.cuda.get_device_name(device), "read_peak_gb_s": peak / 1e9, "variants": len(built),
             "ready_s": time.monotonic() - began})  # fmt: skip
        for kernel in kernels:
            for case in importlib.import_module(f"draftwood.kernels.{kernel}.bench").cases():
                if asked.only not in case.label:
                    continue
                if time.monotonic() - began > asked.seconds:
                    say({"kernel": kernel, "case": case.label, "skipped": "out of time"})
                    continue
                try:
                    say(measure(case, device, peak))
                except (RuntimeError, ValueError, ConfigError, KernelBuildError) as error:
                    failed = True
                    say({"kernel": kernel, "case": case.label, "failed": str(error).splitlines()[0][:300]})
                    if not _alive(device):
                        say({"kernel": kernel, "failed": "the device is lost to this process; nothing more runs"})
                        return 1
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
