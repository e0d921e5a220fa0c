"""Small GPU tests of every kernel under compute-sanitizer: `python tests/kernels/sanitize.py FOLDER [KERNEL...]`

Each kernel and tool is a process of its own with a time limit; several run at once. A line of JSON each on stdout and in
FOLDER/sanitize.jsonl; FOLDER/<kernel>.<tool>.txt has the output. Exit status 0 only if all tests passed and nothing was reported.
Only our kernels are examined, by their names: torch's, of the references, would take a hundred times as long. That the names were
examined is shown in two ways: a control launches a faulty kernel of every one of them, each of which the tool must report, and
every name must have been launched by the tests, but for those in UNREACHED. For memcheck every tensor is an allocation of its own.
torch asks the driver for features that a device may lack, which is no fault of a kernel: API errors are not reported.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "accept": "test_masks_and_floors and 8192 or test_nodes_beyond or test_walks_are_the_references[1] or "
    "test_only_nodes_of_a_walk and 8192-128",
    "draft_attention": "test_results_are_the_float64 and (1-8-128-5 or 2-4-64-16)",
    "kv_commit": "test_latents_are_the_references and 2-7-61",
    "linear": "test_results_are_the_float64 and (q_b or w_uv) or test_float32_results",
    "mla_attention": "test_edge_sizes and [9-",
    "moe_int4": "test_padding_rows and 384 or test_result_matches_float64 and [1- and 256 or test_small_experts",
    "moe_route": "test_padding_rows or test_one_launch and True-shape1",
    "norm_rope": "test_latents_reach_their_slots or test_rotary_parts or test_norms_with_their_residual[9- or "
    "test_heads_are_normed and 1-1-64 or test_accepted_tokens and 3-2-64-32 or test_a_sum_over and 384-4-33",
    "rows": "(test_places_become_lengths or test_rows_move_on) and 5-8-13 or test_synthetic and 2.5",
    "sizes": "test_sizes_are_the_references and 1-1-flat-1 or test_what_was_accepted and 3-5",
    "tree": "test_ties_and_hostile or test_flattened_nodes_are_the_references[1] or "
    "test_trees_are_the_references and (options0 or options1) and (True-7 or False-7)",
}
"""By kernel: what `pytest -k` selects. Small, for racecheck makes a kernel a hundred times as slow, and under memcheck every tensor
of a reference takes a millisecond."""
UNREACHED: dict[str, tuple[str, ...]] = {}
"""By kernel: entries that no small test launches."""
_TURNS = "columns.cu: bar.sync of all (TAKEN) and bar.arrive (PROBABILITIES)"
_SLOTS = "nodes.cu, heads.cu: mbarriers of the probabilities' slots (ready; then what gives back, by way of the copies)"
_STAGES = "x's stages: cp.async that arrives at an mbarrier, and one that says that all have read"
REVIEWED = {
    "mla_attend": {
        ("Acc::rescale", "score_role"): _TURNS, ("Walk::copy", "score_role"): _TURNS, ("Acc::store", "score_role"): _TURNS,
        ("Walk::add", "score_role"): _TURNS, ("copy16", "ldmatrix4"): "columns.cu: cp.async and a barrier for its slot",
        ("add_values", "weigh"): _SLOTS, ("value_role", "weigh"): _SLOTS, ("find_maxima", "value_role"): _SLOTS,
        ("of_lines", "weigh"): _SLOTS,
    },
    "experts_joined": {("copy16_if", "shared_load16"): _STAGES, ("copy16_if", "int4_weights"): _STAGES},
}  # fmt: skip
"""By entry: pairs of device functions between which racecheck reports hazards, since it does not follow what orders them (barriers
of a block at which some warps only arrive, mbarriers): each was read and is ordered. Any other pair is a finding."""
ALONE = {"experts_joined": "test_small_experts"}
"""By entry that racecheck examines apart, so that other entries with functions of the same names have no hazards excused: what
`pytest -k` selects then. Nothing in it may launch clusters of another entry: under racecheck (13.0) a kernel that is launched as
clusters and not examined ends in an illegal access, even one that does nothing but write a number."""
HAZARD = re.compile(r"Race reported between (.*)((?:\n=+\s+and .*)+)")
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ errors?|RACECHECK SUMMARY: .*)")
LAUNCHED = "launched by entry: "
FAULT = """extern "C" __global__ void NAME(int* out, int beyond, int turn) {
  __shared__ int room[64];
  const int tid = threadIdx.x;
  room[tid] = tid;
  out[tid] = room[(tid + turn) & 63];                  // another warp's, without a barrier
  if (beyond && tid == 0) out[beyond] = 1;
}
"""
"""With turn 32 a race, with beyond >= 64 a write beyond `out` of 64."""


def entries(kernel: str) -> list[str]:
    """Names of the kernel's entries that its launcher may choose on this device."""
    import torch

    from draftwood.kernels import check, jit

    arch = jit.arch_of(torch.cuda.get_device_capability())
    return sorted({variant.source.entry for variant in check.variants(kernel) if arch in variant.archs})


def launch_faults(folder: str, tool: str, names: list[str]) -> None:
    """Launch a faulty kernel of each name: for racecheck a race, for memcheck a write directly behind a tensor."""
    import numpy as np
    import torch

    from draftwood.kernels import jit

    out = torch.zeros(128, dtype=torch.int32, device="cuda")  # 512 bytes, so that no allocation is rounded up
    fault = (np.int32(0), np.int32(32)) if tool == "racecheck" else (np.int32(128), np.int32(0))
    for name in names:
        file = Path(folder) / f"{name}.cu"
        file.write_text(FAULT.replace("NAME", name), encoding="utf-8")
        jit.Kernel(jit.Source(file, name), 0)(1, 64, (out, *fault))
        torch.cuda.synchronize()


def pytest_configure(config: Any) -> None:
    """As a plugin of the tests: count launches by entry."""
    from draftwood.kernels import jit

    counts: collections.Counter[str] = collections.Counter()
    launch: Callable[..., None] = jit.Kernel.__call__

    def counted(self: jit.Kernel, *args: Any, **named: Any) -> None:
        counts[self._label.split("[")[0]] += 1
        launch(self, *args, **named)

    jit.Kernel.__call__ = counted  # type: ignore[method-assign]
    config.launch_counts = counts


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often each entry was launched."""
    terminalreporter.write_line(LAUNCHED + json.dumps(terminalreporter.config.launch_counts))


def run(tool: str, names: list[str], rest: list[str], file: Path, seconds: float) -> tuple[int, str, float]:
    """Run a Python command with kernels of these names under a tool: exit status (124: out of time), output, seconds."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--report-api-errors", "no", "--print-limit", "1000"]
    command += ["--destroy-on-device-error", "kernel"]
    for name in names:  # of several filters one is enough
        command += ["--kernel-name", f"kernel_name={name}"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    if tool == "memcheck":  # else a small overflow ends within the pool that torch allocates from
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    began = time.monotonic()
    with file.open("w", encoding="utf-8") as out:
        command += [sys.executable, *rest]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True) as process:
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it examines too
                status = 124
    return status, file.read_text(encoding="utf-8", errors="replace"), round(time.monotonic() - began, 1)


def control(tool: str, names: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Which faulty kernels of these names the tool does not report."""
    work = folder / f"control.{tool}"
    work.mkdir(exist_ok=True)
    code = f"from tests.kernels import sanitize; sanitize.launch_faults({str(work)!r}, {tool!r}, {names!r})"
    status, text, took = run(tool, names, ["-c", code], folder / f"control.{tool}.txt", seconds)
    missed = [name for name in names if not re.search(rf"\bat {name}\b", text)]
    return {"control": tool, "clean": status == 99 and not missed, "status": status, "missed": missed, "seconds": took}


def hazards(text: str) -> set[tuple[str, str]]:
    """Pairs of device functions, in alphabetical order, between which racecheck reported a hazard."""

    def name(access: str) -> str:
        plain = re.sub(r"<[^<>]*>", "", re.sub(r"\(anonymous namespace\)::", "", access))
        return re.sub(r".* at (?:[\w:]+ )*([\w:~]+)[(+].*", r"\1", plain)

    found = set()
    for one, others in HAZARD.findall(text):
        found |= {tuple(sorted((name(one), name(other)))) for other in others.splitlines() if other}
    return found  # type: ignore[return-value]


def examine(kernel: str, tool: str, names: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run one kernel's small tests under one tool, which examines these entries."""
    rest = ["-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "tests.kernels.sanitize"]
    apart = tool == "racecheck" and names[0] in ALONE
    chosen = ALONE[names[0]] if apart else SMALL[kernel]
    rest += ["-m", "gpu", "-q", "--tb=short", "-k", chosen, f"src/draftwood/kernels/{kernel}"]
    label = f"{kernel}.{tool}" + (f".{names[0]}" if apart else "")
    status, text, took = run(tool, names, rest, folder / f"{label}.txt", seconds)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed)\b", text)}
    found = SUMMARY.findall(text)
    line = re.search(f"{LAUNCHED}(.*)", text)
    launched: dict[str, int] = json.loads(line[1]) if line else {}
    unseen = sorted(set(names) - set(launched) - set(UNREACHED.get(kernel, ())))
    pairs = hazards(text)
    new = sorted(pairs.difference(*(REVIEWED.get(name, {}) for name in names)))
    ended = status == (99 if pairs else 0) and counts.get("passed", 0) > 0 and not counts.get("failed") and not unseen
    clean = ended and bool(found) and (bool(pairs) or ": 0 " in found[-1]) and not new
    return {
        "kernel": kernel, "tool": tool, "entries": names, "clean": clean, "status": status, "summary": found[-1:], **counts,
        "hazards": new, "reviewed": len(pairs) - len(new), "launched": launched, "unseen": unseen, "seconds": took,
    }  # fmt: skip


def main() -> int:
    """Examine every kernel asked for with every tool; 1 if anything is not clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kernels", nargs="*", default=list(SMALL), help="default: all")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--seconds", type=float, default=100, help="limit of one kernel and tool")
    parser.add_argument("--jobs", type=int, default=8, help="at once")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.kernels) - set(SMALL)):
        parser.error(f"no kernel named {', '.join(unknown)}; there are {', '.join(SMALL)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    folder, wrong = asked.folder.resolve(), 0
    names = {kernel: entries(kernel) for kernel in asked.kernels}
    every = sorted({name for some in names.values() for name in some})
    with ThreadPoolExecutor(asked.jobs) as pool:
        tools = asked.tools.split(",")
        jobs = []
        for tool, kernel in itertools.product(tools, names):
            apart = [[name] for name in names[kernel] if name in ALONE] if tool == "racecheck" else []
            rest = [name for name in names[kernel] if [name] not in apart]
            jobs += [pool.submit(examine, kernel, tool, group, folder, asked.seconds) for group in (rest, *apart) if group]
        jobs += [pool.submit(control, tool, every, folder, asked.seconds) for tool in tools]
        for job in as_completed(jobs):
            result = job.result()
            wrong += not result["clean"]
            print(json.dumps(result), flush=True)
            with (folder / "sanitize.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(result) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    raise SystemExit(main())
