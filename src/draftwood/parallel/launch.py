"""Start the ranks of one command as processes of this machine, watch them, and end all when one fails.

The supervisor is the process the user started. It imports no torch and holds no weights: it starts the same command
once per rank, passes signals on, and says in one line which rank failed and how.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from draftwood import env
from draftwood.errors import ConfigError

_POLL = 0.05
_SAME_ERROR_GRACE = 1.5
"""Seconds the other ranks get, after one exits with an error, to report the same error themselves."""
_FINISH_GRACE = 5.0
"""Seconds the other ranks get to end after rank 0 is done."""
_TERMINATE_GRACE = 2.0
_TAIL_LINES = 40
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1


def is_rank() -> bool:
    """Tell whether this process was started as one of several ranks, by `run_ranks` or by torchrun."""
    return env.read("RANK") != "" and env.read("WORLD_SIZE") not in ("", "1")


def run_ranks(argv: Sequence[str], world: int, command: Sequence[str] | None = None, drains: bool = False) -> int:
    """Run `draftwood argv...` as `world` ranks; return the exit code of the whole.

    `argv` is the command line after `draftwood`; `command` replaces `python -m draftwood` (tests). Rank 0 has
    this process's stdin, stdout and stderr; what other ranks write is shown only when they fail. The code is rank 0's
    when all end well, 2 when a rank refused its input, 1 when a rank failed or was killed, 130 after Ctrl-C.
    SIGTERM ends all ranks; with `drains`, the first one is rank 0's own, which ends when it is ready to.
    Raises ConfigError inside a rank: ranks do not start ranks.
    """
    if is_rank():
        raise ConfigError(f"RANK={env.read('RANK')} is set: this process is a rank already and starts no others; unset RANK")
    prefix = list(command) if command is not None else [sys.executable, "-m", "draftwood"]
    port = _free_port()
    ranks = [_Rank(rank, [*prefix, *argv], _environment(rank, world, port)) for rank in range(world)]
    for rank in ranks:
        rank.listen()  # a thread each: only after the last fork
    try:
        with _signals(ranks[0], drains) as interrupts:
            failed = _watch(ranks, interrupts)
    finally:
        _end(ranks)
    return _report(ranks, failed, bool(interrupts))


class _Rank:
    """One process, and the end of what it wrote to stderr (ranks above 0)."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.ended_by_us = False
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_prepare_first if rank == 0 else _prepare_other,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)

    def listen(self) -> None:
        """Begin to collect what the process writes."""
        self._reader.start()

    def _read(self, stream: IO[str] | None) -> None:
        for line in stream or ():
            self.tail.append(line.rstrip("\n"))

    def code(self) -> int | None:
        """Return the exit code, negative for a signal, None while the process runs."""
        return self.process.poll()

    def output(self) -> list[str]:
        """Return the last lines the ended process wrote."""
        self._reader.join(timeout=1.0)
        return [line for line in self.tail if line.strip()]


def _watch(ranks: list[_Rank], interrupts: list[int]) -> _Rank | None:
    """Wait until all ranks end, one fails, or the user insists; return the rank that failed first, if any."""
    done_since: float | None = None
    while True:
        codes = [r.code() for r in ranks]
        failed = _first_failed(ranks, codes)
        if failed is not None:
            if (failed.code() or 0) > 0:
                _wait_all(ranks, _SAME_ERROR_GRACE)
                failed = _first_failed(ranks, [r.code() for r in ranks])
            return failed
        if all(code is not None for code in codes) or len(interrupts) > 1:
            return None
        if codes[0] is not None:
            done_since = done_since or time.monotonic()
            if time.monotonic() - done_since > _FINISH_GRACE:
                return None
        time.sleep(_POLL)


def _first_failed(ranks: list[_Rank], codes: list[int | None]) -> _Rank | None:
    """Pick the rank to blame: one that died of a signal, then one that refused its input, then any other failure.

    The ranks that only lost a peer fail too, a moment later; a signal or a refusal is never the consequence.
    """
    failures = [(rank, code) for rank, code in zip(ranks, codes, strict=True) if code]
    order = sorted(failures, key=lambda f: (f[1] > 0, f[1] != 2, f[0].rank))
    return order[0][0] if order else None


def _wait_all(ranks: list[_Rank], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(r.code() is None for r in ranks):
        time.sleep(_POLL)


def _end(ranks: list[_Rank]) -> None:
    """End every rank that still runs: SIGTERM, then SIGKILL after a moment; reap all."""
    for send in ("terminate", "kill"):
        for rank in ranks:
            if rank.code() is None:
                rank.ended_by_us = True
                getattr(rank.process, send)()
        _wait_all(ranks, _TERMINATE_GRACE)
    for rank in ranks:
        rank.process.wait()


def _report(ranks: list[_Rank], failed: _Rank | None, interrupted: bool) -> int:
    """Say on stderr, in one line after the failed rank's own output, what ended the run; return its exit code."""
    if failed is None and not ranks[0].ended_by_us:
        return 0
    if failed is None or interrupted:
        return 130
    code = failed.code() or 0
    if failed.rank == 0 and code > 0:
        return code
    lines = failed.output()
    if code == 2:
        _say(f"rank {failed.rank}: {lines[-1] if lines else 'exited with code 2'}")
        return 2
    for line in lines:
        _say(f"rank {failed.rank}: {line}")
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    _say(f"draftwood: rank {failed.rank} of {len(ranks)} {how}; all ranks were ended")
    return 1


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    threads = env.read("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // world))
    return env.inherit(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=threads,
        DRAFTWOOD_SUPERVISED="1",
    )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _prepare_first() -> None:
    """Runs in rank 0 before the command: a rank ends when its supervisor dies."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _prepare_other() -> None:
    """As rank 0; and Ctrl-C is rank 0's to handle, for it may mean to stop one answer only."""
    _prepare_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _signals(first: _Rank, drains: bool) -> Iterator[list[int]]:
    """While inside, SIGINT goes to rank 0 and SIGTERM ends the supervisor (and with it all ranks). With `drains`, the
    first SIGTERM goes to rank 0, too.

    Yields the list of SIGINTs received. A terminal sends Ctrl-C to rank 0 by itself.
    """
    interrupts: list[int] = []
    passed: list[int] = []

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if not sys.stdin.isatty() and first.code() is None:
            first.process.send_signal(signal.SIGINT)

    def on_terminate(number: int, frame: FrameType | None) -> None:
        if not drains or passed or first.code() is not None:
            raise SystemExit(128 + number)
        passed.append(number)
        first.process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    handlers = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
