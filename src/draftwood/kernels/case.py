"""Benchmark cases of the kernels, and how one is measured: correctness first, then time in a CUDA graph.

Each kernel folder's `bench.py` has `cases() -> list[Case]`; `draftwood bench kernels` runs them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import ConfigError, KernelBuildError
from draftwood.kernels import check, jit

REST = 0.1
"""Seconds of rest before a case: under sustained load an H200's clock falls and times rise by 10 to 20 %."""


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
    """Return the median time of one of `calls` operations in microseconds, from replays of a captured graph.

    They run on a stream of their own, after what the caller's has been given: that may use the same buffers still.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
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
    wanted = [(kernel, variant) for kernel in kernels for variant in check.variants(kernel) if arch in variant.archs]
    # Some variants differ in what they are launched with only: the same source need not be built twice at once.
    jobs = list({(kernel, v.source.label(), v.source.file): (kernel, v) for kernel, v in wanted}.values())
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


def run_cases(kernels: list[str], device: torch.device, only: str = "", seconds: float = 1e9) -> Iterator[dict[str, Any]]:
    """Yield the device's line, then one line per case whose label contains `only`, as soon as it is known.

    A case that cannot run has a line with `failed`; after a device error nothing more runs, and the last line says so.
    No case starts later than `seconds` after the call. Variants are compiled first, in threads.
    """
    began = time.monotonic()
    built = compile_parallel(kernels, jit.arch_of(torch.cuda.get_device_capability(device)))
    peak = read_peak(device)
    yield {
        "device": torch.cuda.get_device_name(device), "read_peak_gb_s": peak / 1e9, "variants": len(built),
        "ready_s": time.monotonic() - began,
    }  # fmt: skip
    for kernel in kernels:
        for case in importlib.import_module(f"draftwood.kernels.{kernel}.bench").cases():
            if only not in case.label:
                continue
            if time.monotonic() - began > seconds:
                yield {"kernel": kernel, "case": case.label, "skipped": "out of time"}
                continue
            time.sleep(REST)
            try:
                line = measure(case, device, peak)
            except (RuntimeError, ValueError, ConfigError, KernelBuildError) as error:
                line = {"kernel": kernel, "case": case.label, "failed": str(error).splitlines()[0][:300]}
            yield line
            if "failed" in line and not _alive(device):
                yield {"kernel": kernel, "failed": "the device is lost to this process; nothing more runs"}
                return


def names_with_cases() -> list[str]:
    """Return the kernels that have benchmark cases, sorted."""
    return [name for name in check.kernel_names() if (Path(__file__).parent / name / "bench.py").exists()]
