"""Test and measure kernels on a GPU unattended: `python tests/kernels/on_device.py FOLDER KERNEL...`

Every kernel's tests and cases run in processes of their own with a time limit, so that a crash or a hang costs that kernel only.
FOLDER/summary.json has the outcome and each failure's last lines, FOLDER/cases.jsonl the measured cases, FOLDER/log.txt all output.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _run(command: list[str], limit: float, log: Path) -> tuple[int, str, float]:
    """Return (exit status, -1 after the limit; output; seconds)."""
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = -1, (late.stdout or b"").decode(errors="replace")
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{output}\nstatus {status}\n\n")
    return status, output, time.monotonic() - began


def _test(kernel: str, limit: float, log: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short", "--durations=4"]
    command += ["--timeout", "60", "--timeout-method", "thread", f"src/draftwood/kernels/{kernel}"]
    status, output, seconds = _run(command, limit, log)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", output[-400:])}
    failures = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    result = {"kernel": kernel, "status": status, "seconds": round(seconds, 1), **counts, "failures": failures[:40]}
    if status not in (0, 1):
        result["end"] = output[-1500:]
    return result


def main() -> int:
    """Run everything; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--seconds", type=float, default=100, help="limit of each kernel's tests, and of its cases")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-cases", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    folder, log, results = asked.folder.resolve(), asked.folder.resolve() / "log.txt", []
    for kernel in asked.kernels:
        if not asked.skip_tests:
            results.append({"tests": _test(kernel, asked.seconds, log)})
            (folder / "summary.json").write_text(json.dumps(results, indent=1))
            print(json.dumps(results[-1]), flush=True)
        if not asked.skip_cases:
            command = [sys.executable, "-m", "draftwood", "bench", "kernels", kernel, "--seconds", str(asked.seconds - 20)]
            command += ["--out", str(folder / "cases.jsonl")]
            status, output, seconds = _run(command, asked.seconds, log)
            results.append({"cases": {"kernel": kernel, "status": status, "seconds": round(seconds, 1), "end": output[-600:]}})
            (folder / "summary.json").write_text(json.dumps(results, indent=1))
            print(json.dumps(results[-1])[:700], flush=True)
    return int(any(part["status"] != 0 for result in results for part in result.values()))


if __name__ == "__main__":
    raise SystemExit(main())
