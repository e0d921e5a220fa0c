"""A server of one's own for the length of a benchmark: `draftwood serve` in a process beside this one."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from draftwood.config import Options
from draftwood.errors import ConfigError

_READY = re.compile(r"ready: (http://\S+)/v1")
_PATIENCE = 3600.0
"""Seconds that loading may take: a terabyte from a slow disk."""
_FAREWELL = 30.0


@contextlib.contextmanager
def served(options: Options) -> Iterator[str]:
    """Serve `options.model` on a free port of this machine and yield its address. Raises ConfigError when it does not start."""
    command = [sys.executable, "-m", "draftwood", "serve", *flags(options), "--port", "0", "--max-queue", "1000000"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        try:
            yield _address(process, said)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL)
            process.kill()
            process.wait()


def flags(options: Options) -> list[str]:
    """Return the command line that asks for `options`."""
    found = [options.model]
    for f in dataclasses.fields(options):
        value, flag = getattr(options, f.name), f"--{f.name.replace('_', '-')}"
        if f.metadata.get("pair"):  # serve may have a default of its own
            found.append(flag if value else f"--no-{flag[2:]}")
        elif not f.metadata.get("positional") and value != f.default:
            found += [flag] if value is True else [flag, str(value)]
    return found


def _address(process: subprocess.Popen[bytes], said: IO[str]) -> str:
    """Wait until the server says that it is ready."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        said.seek(0)
        text = said.read()
        if found := _READY.search(text):
            return found[1]
        if process.poll() is not None:
            last = text.strip().splitlines()[-1:] or ["it said nothing"]
            raise ConfigError(f"the server for the benchmark did not start: {last[0].removeprefix('draftwood: ')}")
        time.sleep(0.05)
    raise ConfigError(f"the server for the benchmark was not ready within {_PATIENCE:g} s; start it by hand and give --base-url")
