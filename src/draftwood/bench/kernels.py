"""Measure the CUDA kernels: time, bytes, GB/s, share of the read peak measured in the same run, error against float64.

With --compile-only nothing runs and no GPU is needed: every variant is compiled for the named architectures and its
registers, spills and shared memory are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from draftwood import report
from draftwood.errors import ConfigError

COLUMNS = ("kernel", "case", "us", "MB", "GB/s", "of peak", "TFLOP/s", "error", "rival us", "x rival")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `draftwood bench kernels`."""
    parser.add_argument("kernels", nargs="*", help="kernel names (default: all)")
    parser.add_argument("--compile-only", action="store_true", help="compile and report registers, spills, shared memory")
    parser.add_argument("--arch", default="sm_90a,sm_103a,sm_120a", help="architectures of --compile-only, with commas")
    parser.add_argument("--only", default="", help="measure the cases whose label contains this")
    parser.add_argument("--seconds", type=float, default=600, help="start no case after this long (default 600)")
    parser.add_argument("--out", type=Path, help="append each case's JSON line to this file as soon as it is known")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Compile or measure; return 1 if a case failed."""
    return _compile(args) if args.compile_only else _measure(args)


def _compile(args: argparse.Namespace) -> int:
    from draftwood.kernels import check, jit

    archs = tuple(args.arch.split(","))
    for arch in archs:
        if arch not in jit.ARCHS:
            raise ConfigError(f"--arch {arch!r} is not one of {', '.join(jit.ARCHS)}")
    kernels = args.kernels or check.kernel_names()
    total = sum(arch in v.archs for kernel in kernels for v in check.variants(kernel) for arch in archs)
    rows = []
    with report.progress(total, "compile", " variants") as bar:
        for built in check.compile_all(archs, kernels):
            rows.append(built)
            bar.update()
    cells = [[b.kernel, b.variant, b.arch, b.registers, b.spill_bytes, b.shared] for b in rows]
    report.show(report.table(("kernel", "variant", "arch", "registers", "spill B", "shared B"), cells))
    if args.json:
        report.show(report.json_line({"nvrtc": jit.nvrtc_version(), "variants": [vars(b) for b in rows]}))
    return 0


def _measure(args: argparse.Namespace) -> int:
    import torch

    from draftwood.kernels import case

    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device to measure on; use --compile-only, or a machine with one")
    known = case.names_with_cases()
    for name in args.kernels:
        if name not in known:
            raise ConfigError(f"kernel {name!r} has no cases; there are {', '.join(known)}")
    device = torch.device("cuda", torch.cuda.current_device())
    lines: list[dict[str, Any]] = []
    with report.progress(None, "bench kernels", " cases") as bar:
        for line in case.run_cases(args.kernels or known, device, args.only, args.seconds):
            lines.append(line)
            bar.update()
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(report.json_line(line) + "\n")
    machine, cases = lines[0], lines[1:]
    report.show(f"{machine['device']}: read peak {machine['read_peak_gb_s']:.0f} GB/s")
    report.show(report.table(COLUMNS, [_cells(line) for line in cases]))
    if args.json:
        report.show(report.json_line({**machine, "cases": cases}))
    return int(any("failed" in line for line in cases))


def _cells(line: dict[str, Any]) -> list[Any]:
    """One row of the table; a case that did not run says why in its place."""
    if "us" not in line:
        why = line.get("failed") or line.get("skipped")
        return [line["kernel"], f"{line.get('case', '')}: {why}", *[None] * (len(COLUMNS) - 2)]
    rival = line.get("rival_us")
    return [
        line["kernel"], line["case"], line["us"], line["bytes"] / 1e6, line["gb_s"], line["of_peak"], line["tflop_s"],
        line["error"], rival, rival / line["us"] if rival else None,
    ]  # fmt: skip
