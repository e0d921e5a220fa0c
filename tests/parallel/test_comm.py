"""Collectives over real processes equal the in-process reference, bit for bit, on every rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftwood.errors import ConfigError
from draftwood.parallel.comm import Local, connect
from draftwood.parallel.launch import run_ranks
from tests.parallel.ranks_program import part

PROGRAM = [sys.executable, str(Path(__file__).with_name("ranks_program.py"))]


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def environment(rank: int, world: int, port: int, timeout: int = 60) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DRAFTWOOD_RANK_TIMEOUT": str(timeout),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_equal_the_reference_on_every_rank_and_rank_0_alone_owns_stdout(tmp_path, world, capfd):
    assert run_ranks(["collectives", str(tmp_path)], world, command=PROGRAM) == 0
    said = capfd.readouterr()
    assert (json.loads(said.out), said.err) == ({"rank": 0, "world": world}, "")
    parts = [part(r) for r in range(world)]
    total = parts[0].clone()
    for p in parts[1:]:
        total = total + p
    half = sum((p.bfloat16().float() for p in parts[1:]), parts[0].bfloat16().float()).bfloat16()
    for rank in range(world):
        got, small, large_equal = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(got["sum"], total)
        assert torch.equal(got["sum16"], half)
        assert torch.equal(got["strided"], total.t())
        assert torch.equal(got["rows"], torch.cat(parts, 0))
        assert torch.equal(got["columns"], torch.cat(parts, 1))
        assert got["integers"].tolist() == list(range(world))
        assert torch.equal(got["tensor"], parts[-1])
        assert torch.equal(got["untouched"], parts[rank])
        assert small == {"step": 3, "rows": (1, 2)}
        assert large_equal


def test_one_rank_is_the_identity():
    comm, x = Local(), torch.randn(3)
    assert comm.all_reduce(x) is x and comm.all_gather(x, 0) is x and comm.broadcast(x) is x
    assert comm.broadcast([1]) == [1]
    assert isinstance(connect(1), Local)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "start with the draftwood command or torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4 but --tp x --ep is 2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is outside 0..1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "DRAFTWOOD_RANK_TIMEOUT": "0"}, "DRAFTWOOD_RANK_TIMEOUT=0 is outside"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is outside"),
    ],
)
def test_ranks_that_do_not_fit_are_one_line_config_errors(monkeypatch, changes, words):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        connect(2)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_a_config_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in environment(0, 2, port, timeout=5).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port}: the port is in use") as caught:
            connect(2)
    assert "\n" not in str(caught.value)


def run_pair(mode: str, folder: Path, timeout: int) -> list[tuple[int, str]]:
    """Run two ranks without a supervisor; return their exit codes and stderr."""
    port = free_port()
    pair = [
        subprocess.Popen([*PROGRAM, mode, str(folder)], env=environment(r, 2, port, timeout), stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        text = pair[0].communicate(timeout=40)[1]
        if pair[0].returncode:
            pair[1].terminate()
        return [(pair[0].returncode, text), (pair[1].wait(timeout=40), "")]
    finally:
        for p in pair:
            p.kill()
            p.wait()


def test_a_dead_peer_is_device_lost_naming_the_rank(tmp_path):
    (code, text), _ = run_pair("die", tmp_path, timeout=60)
    assert code == 1
    assert "DeviceLost: rank 1 is gone" in text


def test_a_peer_that_hangs_is_device_lost_after_the_timeout(tmp_path):
    (code, text), _ = run_pair("late", tmp_path, timeout=4)
    assert code == 1
    assert "DeviceLost: rank 1 did not answer rank 0 within 4 s" in text


def test_an_idle_engine_may_wait_longer_than_a_collective(tmp_path):
    (code, text), (other, _) = run_pair("idle", tmp_path, timeout=2)
    assert (code, other) == (0, 0), text
