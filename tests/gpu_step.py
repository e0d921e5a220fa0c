"""Test and measure the whole step on a GPU unattended: `python tests/gpu_step.py FOLDER [PART...]`

Every part runs in a process of its own with a time limit, so that a crash or a hang costs that part only. FOLDER/summary.json has
each part's status, seconds and last lines, as they come; FOLDER/<part>.txt all of its output; lines of JSON are in cases.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short", "--timeout", "200", "--durations=5")
BENCH = ("-m", "draftwood", "bench", "step", "k2.6", "--device", "cuda", "--load-format", "dummy", "--routed-experts", "48",
         "--tree-spine", "--json")  # fmt: skip
NANO = ("-m", "draftwood", "bench", "step", "nano", "--device", "cuda", "--json", "--prompts", "8", "--repeat", "2")
FORWARD = ("-m", "tests.model.time_forward")
COMPILE = """import torch; from draftwood.kernels import case, check, jit
print(len(case.compile_parallel(check.kernel_names(), jit.arch_of(torch.cuda.get_device_capability(0)))), "kernels")"""
AUTO = ("-m", "tests.gpu_auto")
CHECK = ("-m", "draftwood", "check", "nano", "--device", "cuda", "--bitwise", "--json")

PARTS: dict[str, tuple[float, tuple[str, ...]]] = {
    "compile": (300, ("-c", COMPILE)),
    "rows": (100, (*PYTEST, "src/draftwood/kernels/rows", "src/draftwood/kernels/sizes")),
    "model": (300, (*PYTEST, "tests/model")),
    "first": (150, ("-m", "draftwood", "generate", "nano", "--device", "cuda", "-p", "def fibonacci(n):", "--max-tokens", "64")),
    "engine": (420, (*PYTEST, "tests/engine/test_cuda_device.py")),
    "check-quick": (200, (*CHECK, "--prompts", "6", "--max-tokens", "48", "--budgets", "1,8,64", "--batch", "1,4")),
    "forward": (240, FORWARD),
    "forward-whole": (
        100,
        (*FORWARD, "--layers", "61", "--whole-only", "--cases", "1x0,1x8,64x0,8x8,1x32,1x64"),
    ),
    "k26-small": (150, (*BENCH, "--layers", "4", "--rows", "1,2", "--budgets", "0,8")),
    "k26-plain": (240, (*BENCH, "--rows", "1,8,64,128", "--budgets", "0")),
    "k26-one": (260, (*BENCH, "--rows", "1", "--budgets", "0,8,16,32,64", "--synthetic-accept", "4.2")),
    "k26-many": (300, (*BENCH, "--rows", "8,32,64,128", "--budgets", "0,8", "--synthetic-accept", "4.2")),
    "k26-128x32": (240, (*BENCH, "--rows", "128", "--budgets", "32", "--synthetic-accept", "4.2")),
    "nano-one": (200, (*NANO, "--budgets", "0,8,16,32")),
    "nano-batch": (200, (*NANO, "--rows", "8", "--budgets", "0,8")),
    "nano-auto": (200, (*NANO, "--budgets", "0,8,auto")),
    "auto-nano": (150, (*AUTO, "nano")),
    "auto-k26": (300, (*AUTO, "k2.6", "--accept", "4.2")),
    "auto-k26-others": (560, (*AUTO, "k2.6", "--accept", "1.6,2.8,6", "--rows", "1,16")),
    "check": (600, (*CHECK, "--prompts", "16", "--max-tokens", "128", "--batch", "1,4,16")),
}
"""Seconds it may take, and arguments of Python."""


def run(name: str, folder: Path) -> dict[str, object]:
    """Run one part; return its line of the summary."""
    limit, command = PARTS[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    log = folder / f"{name}.txt"
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, timeout=limit, stdout=file, stderr=subprocess.STDOUT
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -1
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    with (folder / "cases.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"part": name, **json.loads(line)}) + "\n" for line in lines if line.startswith("{"))
    shown = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][:40] or lines[-12:]
    return {"part": name, "status": status, "seconds": round(time.monotonic() - began, 1), "end": [s[:400] for s in shown]}


def main() -> int:
    """Run the parts; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"of {', '.join(PARTS)} (default: all, in this order)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no part begins later than this")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    began, results = time.monotonic(), []
    for name in asked.parts or PARTS:
        if time.monotonic() - began > asked.seconds:
            results.append({"part": name, "status": None, "end": ["out of time"]})
        else:
            results.append(run(name, asked.folder.resolve()))
        (asked.folder / "summary.json").write_text(json.dumps(results, indent=1))
        print(json.dumps(results[-1])[:900], flush=True)
    return int(any(result["status"] != 0 for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
