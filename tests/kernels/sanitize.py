"""Small GPU tests of every kernel under compute-sanitizer: `python tests/kernels/sanitize.py FOLDER [KERNEL...]`

Each kernel and tool is a process of its own with a time limit; several run at once. A line of JSON each on stdout and in
FOLDER/sanitize.jsonl; FOLDER/<kernel>.<tool>.txt has the output. Exit status 0 only if all tests passed and nothing was reported.
torch asks the driver for features that a device may lack, which is no fault of a kernel: API errors are not reported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "accept": "test_choices_are_the_references_to_the_bit[8192 or test_walks_are_the_references[1]",
    "draft_attention": "test_results_are_the_float64 and 8-8-128-8",
    "kv_commit": "test_latents_are_the_references and 2-7-61",
    "linear": "test_results_are_the_float64 and (q_b or w_uv)",
    "mla_attention": "test_edge_sizes and [9-",
    "moe_int4": "test_result_matches_float64 and (256 or 128) and ([1- or [9-)",
    "moe_route": "test_choice_and_weights_match_float64 or (test_one_launch and shape0)",
    "norm_rope": "test_latents_reach_their_slots or test_rotary_parts or test_norms_with_their_residual[9-",
    "rows": "test_places_become_lengths and 5-8-13",
    "sizes": "test_sizes_are_the_references and 1-1-flat-1",
    "tree": "test_candidates_are_the_references and 8192 or test_trees_are_the_references and options0-True-7",
}
"""By kernel: what `pytest -k` selects. Small, for racecheck makes a kernel a hundred times as slow."""
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ errors?|RACECHECK SUMMARY: .*)")


def examine(kernel: str, tool: str, folder: Path, seconds: float) -> dict[str, object]:
    """Run one kernel's small tests under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--report-api-errors", "no", "--print-limit", "20"]
    command += [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-q", "--tb=short", "-k", SMALL[kernel], f"src/draftwood/kernels/{kernel}"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    began, file = time.monotonic(), folder / f"{kernel}.{tool}.txt"
    with file.open("w", encoding="utf-8") as out:
        try:
            environment = {**os.environ, "PYTHONPATH": path}
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = 124
    text = file.read_text(encoding="utf-8", errors="replace")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)\b", text)}
    found = SUMMARY.findall(text)
    clean = status == 0 and counts.get("passed", 0) > 0 and bool(found) and " 0 " in found[-1]
    took = round(time.monotonic() - began, 1)
    return {"kernel": kernel, "tool": tool, "clean": clean, "status": status, "summary": found[-1:], **counts, "seconds": took}


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
    jobs = [(kernel, tool) for tool in asked.tools.split(",") for kernel in asked.kernels]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for result in pool.map(lambda job: examine(*job, folder, asked.seconds), jobs):
            wrong += not result["clean"]
            print(json.dumps(result), flush=True)
            with (folder / "sanitize.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(result) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
