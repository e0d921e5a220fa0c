"""What a step leaves in the cache: a chain's latents in the row's own pages, and nothing anywhere else."""

import pytest
import torch

from draftwood.engine.request import SamplingParams
from tests.fakes import FakeDrafter, Toy, fake_engine, fake_plan

PROMPT = list(range(5, 26))


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5, 16, 17, 33, 63, 64])
@pytest.mark.parametrize("kind", FakeDrafter.KINDS)
def test_committed_latents_equal_a_chains_and_foreign_pages_are_untouched(kind, budget):
    engine = fake_engine(kind, fake_plan(budget, prefill_chunk=16))
    cache, size = engine.parts.kv.cache, engine.plan.page_size
    engine.add(PROMPT, SamplingParams(max_tokens=30))
    text = PROMPT + Toy().greedy(PROMPT, 30)
    pages = None
    while not engine.idle:
        before = cache.clone()
        engine.step()
        running = list(engine.scheduler.running.values())
        pages = running[0].pages if running else pages
        own = torch.zeros(cache.shape[1], dtype=torch.bool)
        for page in [*pages, engine.parts.kv.sink]:
            own[page * size : (page + 1) * size] = True
        assert torch.equal(cache[:, ~own], before[:, ~own])
        if running:
            length = running[0].length
            slots = [pages[p // size] * size + p % size for p in range(length)]
            assert cache[0, slots, 0].tolist() == text[:length]
            assert cache[0, slots, 1].tolist() == list(range(length))
            last = length // size  # the page of the root: committed latents before it never move again
            kept = slots[: last * size]
            assert torch.equal(cache[:, kept][..., 0], torch.tensor(text[: len(kept)]).float().expand(2, -1))


def recorded(scheduler):
    """Return a list that every plan of the scheduler is appended to."""
    plans, next_step = [], scheduler.next_step
    scheduler.next_step = lambda: plans.append(next_step()) or plans[-1]
    return plans


def test_scratch_of_the_largest_tree_at_the_very_end_fits_the_rows_pages():
    for limit in range(1, 40):
        engine = fake_engine("blurred", fake_plan(64))
        engine.add(PROMPT, SamplingParams(max_tokens=limit))
        planned = recorded(engine.scheduler)
        sizes = dict.fromkeys(range(engine.plan.max_num_seqs), 0)
        while not engine.idle:
            lengths = {seq.row: seq.length for seq in engine.scheduler.running.values()}
            engine.step()
            if planned[-1] is None:
                continue
            for start in planned[-1].starts:
                sizes[start.row] = len(start.pages)
            for growth in planned[-1].growths:
                sizes[growth.row] += len(growth.pages)
            for row, budget in zip(planned[-1].rows, planned[-1].budgets, strict=True):
                assert sizes[row] * engine.plan.page_size > lengths.get(row, 0) + budget
