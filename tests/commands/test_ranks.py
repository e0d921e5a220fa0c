import io
import subprocess
import sys

import pytest

from draftwood import cli, ranks
from draftwood.parallel import launch
from tests.commands.tiny import checkpoint


@pytest.fixture
def started(monkeypatch):
    """Note what would have been started as ranks."""
    calls = []
    monkeypatch.setattr(launch, "run_ranks", lambda argv, world, drains=False: calls.append((list(argv), world)) or 7)
    return calls


@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["chat"]])
def test_several_ranks_run_the_same_command_line(started, tmp_path, command):
    argv = [*command, "--tp", "2", "--ep", "2", "--load-format", "dummy"]
    argv.insert(1, checkpoint(tmp_path))
    assert cli.main(argv) == 7
    assert started == [(argv, 4)]


@pytest.mark.parametrize("extra", [["--tp", "3"], ["--tp", "2", "--draft-block", "16"], ["--ep", "8"]])
def test_no_rank_starts_with_options_that_cannot_work(started, tmp_path, capsys, extra):
    assert cli.main(["generate", checkpoint(tmp_path), "--load-format", "dummy", "-p", "a", *extra]) == 2
    assert started == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("size", [None, "1"])
def test_a_rank_without_others_is_the_first_whatever_its_number_says(monkeypatch, size):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert ranks.is_first()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not ranks.is_first()
    monkeypatch.setenv("RANK", "0")
    assert ranks.is_first()


def test_stdin_is_left_to_rank_0(started, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"prompt")))
    assert cli.main(["generate", checkpoint(tmp_path), "--load-format", "dummy", "-p", "-", "--tp", "2"]) == 7
    assert sys.stdin.read() == "prompt"


def test_a_reader_that_stops_reading_ends_the_command_quietly(tmp_path):
    command = [sys.executable, "-m", "draftwood", "generate", checkpoint(tmp_path), "--load-format", "dummy"]
    command += ["-p", "Hi", "--max-tokens", "300", "--ignore-eos"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.read(1)
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait(60) == 0
