"""The supervisor starts ranks, ends all when one fails, and says which and how in one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftwood.errors import ConfigError
from draftwood.parallel import launch

PROGRAM = str(Path(__file__).with_name("ranks_program.py"))
SUPERVISE = (
    "import sys; from draftwood.parallel.launch import run_ranks; "
    f"sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1]), command=[sys.executable, {PROGRAM!r}]))"
)


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}


def start(world: int, *argv: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", SUPERVISE, str(world), *argv], env=clean(), text=True, **pipes)


def finish(supervisor: subprocess.Popen, limit: float = 30.0) -> tuple[int, str, str]:
    try:
        out, err = supervisor.communicate(timeout=limit)
        return supervisor.returncode, out, err
    finally:
        supervisor.kill()


def pids(folder: Path, world: int) -> list[int]:
    """Wait until every rank has written its process id."""
    end = time.monotonic() + 30
    files = [folder / f"{r}.pid" for r in range(world)]
    while time.monotonic() < end and not all(f.exists() and f.read_text() for f in files):
        time.sleep(0.05)
    return [int(f.read_text()) for f in files]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(ids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, ids)):
        time.sleep(0.05)
    return not any(map(alive, ids))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_within_seconds_and_is_named(tmp_path, victim):
    supervisor = start(2, "sleep", str(tmp_path))
    ids = pids(tmp_path, 2)
    before = time.monotonic()
    os.kill(ids[victim], signal.SIGKILL)
    code, out, err = finish(supervisor)
    assert time.monotonic() - before < 10
    assert (code, out) == (1, "")
    assert err == f"draftwood: rank {victim} of 2 was killed by SIGKILL; all ranks were ended\n"
    assert gone(ids, 0.5)


def test_a_rank_killed_during_a_collective_is_named_once(tmp_path):
    code, _, err = finish(start(2, "die", str(tmp_path)))
    assert code == 1
    assert err == "draftwood: rank 1 of 2 was killed by SIGKILL; all ranks were ended\n"


def test_input_that_every_rank_refuses_is_reported_once_with_code_2(tmp_path):
    code, out, err = finish(start(2, "refuse", str(tmp_path)))
    assert (code, out, err) == (2, "", "draftwood test: --tp 2 is refused\n")


def test_input_that_one_rank_refuses_is_its_line_and_code_2(tmp_path):
    code, _, err = finish(start(2, "one-refuses", str(tmp_path)))
    assert (code, err) == (2, "rank 1: draftwood test: --tp 2 is refused\n")


def test_a_crash_in_a_rank_shows_its_traceback_and_its_name(tmp_path):
    code, _, err = finish(start(2, "crash", str(tmp_path)))
    assert code == 1
    assert "rank 1: ValueError: a bug in rank 1" in err
    assert err.endswith("draftwood: rank 1 of 2 exited with code 1; all ranks were ended\n")


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_supervisor_ends_all(tmp_path, number, expected):
    supervisor = start(2, "sleep", str(tmp_path))
    ids = pids(tmp_path, 2)
    supervisor.send_signal(number)
    code, _, _ = finish(supervisor, limit=10)
    assert code == expected
    assert gone(ids, 0.5)


def test_ranks_end_when_their_supervisor_is_killed(tmp_path):
    supervisor = start(2, "sleep", str(tmp_path))
    ids = pids(tmp_path, 2)
    supervisor.kill()
    supervisor.communicate()
    assert gone(ids, 5)


def test_torchrun_with_the_wrong_number_of_ranks_is_refused_by_name(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command, env = [*torchrun, PROGRAM, "collectives", str(tmp_path), "4"], clean() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ConfigError: WORLD_SIZE=2 but --tp x --ep is 4; start 4 processes or change --tp and --ep" in done.stderr


def test_ranks_do_not_start_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.is_rank()
    with pytest.raises(ConfigError, match="is a rank already"):
        launch.run_ranks(["generate"], 2)
