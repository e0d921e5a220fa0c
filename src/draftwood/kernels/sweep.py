"""Unattended measurements that outlive a kernel that breaks the device: children, and what is done and broken kept in files.

A child says a line as soon as it knows it and notes what it begins. When it dies or does not come back, what it had begun counts
as broken, and another child goes on without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAST, GRACE = 10.0, 20.0
"""Seconds for which a child is worth starting, and that it may take beyond its time."""


class Sweep:
    """Progress of one process: what is done already is read from the file, what broke is left out."""

    def __init__(self, folder: Path, name: str, seconds: float, tell: Callable[[str], None]) -> None:
        """Lines are in FOLDER/NAME.jsonl; `tell` also gets each new one."""
        self.tell = tell
        self.file, self.current, self.end = folder / f"{name}.jsonl", folder / f"{name}.current", time.time() + seconds
        lines = [json.loads(x) for x in self.file.read_text().splitlines()] if self.file.exists() else []
        self.done = {x["key"] for x in lines if "key" in x}
        self.broken = {x["broken"] for x in lines if "broken" in x}

    def say(self, **line: Any) -> None:
        """Write a line at once."""
        self.tell(json.dumps(line))
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def start(self, form: str, key: str) -> bool:
        """Whether to do `key` with `form`; if so the form counts as broken until the next start."""
        if form in self.broken or key in self.done or time.time() > self.end:
            return False
        self.current.write_text(form)
        return True


def supervise(module: str, folder: Path, name: str, seconds: float, tell: Callable[[str], None]) -> int:
    """Run `python -m MODULE FOLDER --child --seconds S` until one ends well (0) or nothing new breaks (1)."""
    end = time.time() + seconds
    while (left := end - time.time()) > LEAST:
        try:
            again = [sys.executable, "-m", module, str(folder), "--child", "--seconds", str(left)]
            if subprocess.run(again, timeout=left + GRACE, check=False).returncode == 0:
                return 0
        except subprocess.TimeoutExpired:
            tell("a form did not come back")
        progress = Sweep(folder, name, left, tell)
        broken = progress.current.read_text() if progress.current.exists() else ""
        if not broken or broken in progress.broken:
            return 1
        progress.say(broken=broken)
    return 1
