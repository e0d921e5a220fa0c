"""Several ranks give the same token ids as one, and end together."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from draftwood import nano
from draftwood.llm import LLM

PROMPT = "import os\n\n\nclass Store:\n"
FLAGS = ("-p", PROMPT, "--seed", "7", "--temperature", "0.8", "--max-tokens", "16", "--tree-budget", "12")


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "draftwood", "generate", str(nano.path()), *flags]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def one_rank() -> list[int]:
    with LLM(str(nano.path()), tree_budget=12) as llm:
        return llm.generate(PROMPT, {"seed": 7, "temperature": 0.8, "max_tokens": 16})[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("split", [("--tp", "2"), ("--ep", "2"), ("--tp", "2", "--ep", "2")], ids=" ".join)
def test_ranks_give_the_token_ids_of_one_rank(one_rank, split):
    done = subprocess.run(command(*FLAGS, *split, "--json"), env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == one_rank


@pytest.mark.slow
@pytest.mark.parametrize("split", [("--tp", "2"), ("--tp", "2", "--ep", "2")], ids=" ".join)
def test_ranks_share_pages_and_draft_from_them_as_one_rank_does(split):
    text = "".join(f"value_{i} = [{i}]\n" for i in range(24))
    flags = ("-p", text, "-p", text, *FLAGS[2:], "--enable-prefix-caching", "--max-num-seqs", "1", "--json")
    found = []
    for ranks in ((), split):
        done = subprocess.run(command(*flags, *ranks), env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found += json.loads(done.stdout)["completions"]
    assert all(one["token_ids"] == found[0]["token_ids"] and one["steps"] == found[0]["steps"] for one in found)
    assert [one["cached_tokens"] for one in found] == [0, (found[0]["prompt_tokens"] - 1) // 64 * 64] * 2


def test_torchrun_gives_the_token_ids_of_one_rank(one_rank):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    argv = [*start, *command(*FLAGS, "--tp", "2", "--json")[2:]]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == one_rank


def ranks_of(supervisor: int) -> dict[int, int]:
    """Process ids of a supervisor's ranks, from their environments."""
    found = {}
    with open(f"/proc/{supervisor}/task/{supervisor}/children") as children:
        for pid in map(int, children.read().split()):
            with open(f"/proc/{pid}/environ", "rb") as variables:
                for entry in variables.read().split(b"\0"):
                    if entry.startswith(b"RANK="):
                        found[int(entry[5:])] = pid
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks through /proc")
def test_a_rank_killed_while_generating_ends_all_within_seconds_and_is_named():
    flags = ("-p", PROMPT, "--temperature", "1", "--max-tokens", "3000", "--ignore-eos", "--tp", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command(*flags), env=environment(), text=True, **pipes) as running:
        try:
            assert running.stdout.read(1), running.stderr.read()
            ranks = ranks_of(running.pid)
            before = time.monotonic()
            os.kill(ranks[1], signal.SIGKILL)
            _, err = running.communicate(timeout=30)
        finally:
            running.kill()
    assert time.monotonic() - before < 10
    assert running.returncode == 1
    assert err == "draftwood: rank 1 of 2 was killed by SIGKILL; all ranks were ended\n"
    assert not os.path.exists(f"/proc/{ranks[0]}")


def test_a_split_that_does_not_fit_is_one_line_before_any_rank_starts():
    done = subprocess.run(command(*FLAGS, "--tp", "3"), env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("draftwood generate: --tp 3")
    assert len(done.stderr.splitlines()) == 1
