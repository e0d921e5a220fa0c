"""Measure nano against the published procedure unattended: `python tests/gpu_peer.py FOLDER [--prompts N --max-tokens M ...]`

Runs tests.peer.measure, which takes the same arguments, in a process that is ended when it hangs. The published drafter, package
dflash (`pip install --no-deps dflash==0.1.0`, or its unpacked folder's parent on PYTHONPATH), is needed for the DDTree part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run and show it; return its status, 124 where it was ended."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=75.0)
    asked, others = parser.parse_known_args()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.peer.measure", asked.folder, "--seconds", str(asked.seconds), *others]
    try:
        return subprocess.run(command, env=environment, timeout=1.5 * asked.seconds + 30).returncode
    except subprocess.TimeoutExpired as error:
        print(f"ended after {error.timeout:g} s; finished rounds are in {asked.folder}/peer.jsonl")
        return 124


if __name__ == "__main__":
    sys.exit(main())
