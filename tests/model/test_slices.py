"""Ranks that hold slices of target and drafter compute together what one rank computes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood.model.drafter import Drafter
from draftwood.model.kimi import Target
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.model.tools import (
    SMALL,
    SMALL_DRAFT,
    TAPS,
    Exchange,
    Pages,
    ThreadComm,
    Window,
    chain,
    drafter_weights,
    make_step,
    random_tokens,
    random_tree,
    small_target,
    target_weights,
)  # fmt: skip

LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 4)]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def decode(target: Target) -> Tensor:
    """Logits and taps of a prompt, then of a tree and a single token over it, as one flat tensor."""
    pages, found = Pages.make(SMALL, 2, 80), []
    for row in range(2):
        found += make_step(pages, [(row, 0, random_tokens(33, row), chain(33))]).run(target)
    rows = [(0, 33, random_tokens(17, 5), random_tree(17, 5)), (1, 33, [3], [-1])]
    found += make_step(pages, rows).run(target)
    return torch.cat([part.flatten() for part in found])


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_target(tp: int, ep: int) -> None:
    def work(comm: ThreadComm) -> Tensor:
        layout = Layout(tp, ep, comm.rank)
        return decode(Target(SMALL, target_weights(layout=layout), layout, comm, TAPS, torch.float32))

    results = Exchange(tp * ep).run(work)
    torch.testing.assert_close(results[0], decode(small_target()), **CLOSE)
    assert all(torch.equal(results[0], other) for other in results)


def propose(drafter: Drafter) -> Tensor:
    """Logits after an observed prompt and an observed path."""
    taps = torch.randn(2, 20, SMALL.hidden_size * len(TAPS), generator=torch.Generator().manual_seed(2))
    window = Window.make(drafter, [1, 0], [0, 0], 32)
    drafter.observe(taps, torch.arange(20).expand(2, -1), torch.arange(20).expand(2, -1), window)
    window.lengths += 20
    first = drafter.propose(torch.tensor([4, 5]), window, 8)
    return torch.cat([first.flatten(), drafter.propose(torch.tensor([4, 5]), window, 16).flatten()])


@pytest.mark.parametrize(("tp", "ep"), [*LAYOUTS, (8, 1)])
def test_drafter_also_with_more_ranks_than_key_heads(tp: int, ep: int) -> None:
    embed = torch.randn(128, SMALL.hidden_size, generator=torch.Generator().manual_seed(1))
    head = torch.randn(128, SMALL.hidden_size, generator=torch.Generator().manual_seed(2))

    def work(comm: ThreadComm) -> Tensor:
        layout = Layout(tp, ep, comm.rank)
        mine = layout.vocab(128)
        weights = drafter_weights(layout=layout)
        return propose(Drafter(SMALL_DRAFT, weights, layout, comm, embed, head[mine.start : mine.stop], torch.float32))

    whole = Drafter(SMALL_DRAFT, drafter_weights(), Layout(), Local(), embed, head, torch.float32)
    results = Exchange(tp * ep).run(work)
    torch.testing.assert_close(results[0], propose(whole), **CLOSE)
    assert all(torch.equal(results[0], other) for other in results)


def test_a_layout_that_does_not_fit_the_connection_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks does not fit 1"):
        Target(SMALL, target_weights(layout=Layout(2, 1, 0)), Layout(2, 1, 0), Local(), TAPS, torch.float32)
