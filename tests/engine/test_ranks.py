"""Ranks above 0 follow rank 0's plans and come to the same state, token for token."""

import queue
import threading

import pytest
import torch

from draftwood.engine import loop
from draftwood.engine.request import SamplingParams
from tests.fakes import fake_engine, fake_plan


class Pair:
    """Two ranks in two threads: rank 0 sends what it broadcasts."""

    def __init__(self, rank, line):
        self.rank, self.world, self.line = rank, 2, line

    def broadcast(self, x, src=0):
        if self.rank == 0:
            self.line.put(x)
            return x
        return self.line.get(timeout=60)

    def close(self):
        pass


@pytest.mark.parametrize("budget", [0, 9, "auto"])
def test_a_follower_ends_in_the_same_state(budget, monkeypatch):
    monkeypatch.setattr(loop, "measure", lambda parts, probe: 1.0 + 0.1 * probe.nodes * (probe.depth > 0))
    line = queue.Queue()
    engines = []
    for rank in range(2):
        engine = fake_engine("blurred", fake_plan(budget, prefill_chunk=8, max_num_seqs=3))
        engine.parts.comm = Pair(rank, line)
        engines.append(engine)
    first, second = engines
    follower = threading.Thread(target=second.follow)
    follower.start()
    try:
        ids = [first.add([n, 2, 3] * n, SamplingParams(max_tokens=12, temperature=n % 2, seed=n, presence_penalty=1))
               for n in range(1, 7)]  # fmt: skip
        for _ in range(4):
            first.step()
        first.abort(ids[1])
        while not first.idle:
            first.step()
    finally:
        first.close()
        follower.join(timeout=60)
    assert not follower.is_alive()
    size = first.plan.page_size
    assert torch.equal(first.stepper.rows.lengths, second.stepper.rows.lengths)
    assert torch.equal(first.stepper.rows.roots, second.stepper.rows.roots)
    assert torch.equal(first.stepper.rows.tables, second.stepper.rows.tables)
    kept = first.plan.num_pages * size
    same = first.parts.kv.cache[:, :kept] == second.parts.kv.cache[:, :kept]
    assert bool(same.all())
