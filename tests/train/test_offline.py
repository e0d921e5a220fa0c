"""Offline scoring equals trees that are really grown and walked."""

from __future__ import annotations

import heapq

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.train import offline
from draftwood.train.offline import Guesses, Roots


def grown(
    log_q: torch.Tensor, ids: torch.Tensor, root: int, budget: int, bigram: torch.Tensor | None, alpha: float
) -> list[tuple[int, int]]:
    """A plain best-first tree: [(parent, token)] in pop order, node 0 is the root."""
    depth, width = log_q.shape

    def children(d: int, token: int) -> list[tuple[float, int]]:
        score = log_q[d]
        if bigram is not None and d > 0:
            score = torch.log_softmax(score + alpha * bigram[token, ids[d]].float(), -1)
        return sorted(((float(s), int(i)) for s, i in zip(score, ids[d], strict=True)), reverse=True)

    nodes: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, int, float, list[tuple[float, int]]]] = []
    first = children(0, root)
    heapq.heappush(heap, (-first[0][0], 0, 0, 0, 0.0, first))
    count = 1
    while heap and len(nodes) < budget:
        negative, _, rank, parent, base, options = heapq.heappop(heap)
        nodes.append((parent, options[rank][1]))
        here, d = len(nodes), 0
        walk = here
        while walk:
            walk, d = nodes[walk - 1][0], d + 1
        if rank + 1 < width:
            heapq.heappush(heap, (-(base + options[rank + 1][0]), count, rank + 1, parent, base, options))
            count += 1
        if d < depth:
            below = children(d, options[rank][1])
            heapq.heappush(heap, (negative - below[0][0], count, 0, here, -negative, below))
            count += 1
    return nodes


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.6]))
def test_scores_equal_trees_that_are_grown_and_walked(seed: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab, depth, width, count = 12, 4, 6, 3
    bigram = torch.randn(vocab, vocab, generator=generator)
    logits = torch.randn(count, depth, vocab, generator=generator) * 2
    log_q, ids = torch.log_softmax(logits, -1).topk(width, -1)
    truth = torch.where(torch.rand(count, depth, generator=generator) < 0.7, ids[..., 0], ids[..., 2])
    root = torch.randint(0, vocab, (count,), generator=generator)
    reached = offline.grow(Guesses(log_q, ids.int(), truth, root), 20, bigram, alpha)
    for n in range(count):
        nodes = grown(log_q[n], ids[n], int(root[n]), 20, bigram if alpha else None, alpha)
        for budget in (1, 3, 8, 20):
            children = {node: i for i, node in enumerate(nodes[:budget], 1)}
            at = found = 0
            while found < depth and (at, int(truth[n, found])) in children:
                at, found = children[(at, int(truth[n, found]))], found + 1
            assert offline.accepted(reached[n : n + 1], budget)[0] == found


def test_a_chain_is_the_best_token_of_each_depth() -> None:
    log_q = (
        torch.log_softmax(torch.randn(50, 5, 8, generator=torch.Generator().manual_seed(0)), -1).sort(-1, descending=True).values
    )
    ids = torch.arange(8).expand(50, 5, 8).int()
    truth = torch.randint(0, 2, (50, 5), generator=torch.Generator().manual_seed(1))
    reached = offline.grow(Guesses(log_q, ids, truth, truth[:, 0]), 5, chain=True)
    want = (truth == 0).int().cumprod(-1).sum(-1).numpy()
    assert (offline.accepted(reached, 5) == want).all()
    assert (offline.accepted(reached, 2) == np.minimum(want, 2)).all()


def test_walking_commits_accepted_drafts_and_one_more() -> None:
    roots = Roots(np.zeros(10, np.int64), np.arange(5, 15))
    count = np.array([2, 9, 9, 0, 3, 9, 9, 9, 1, 9])  # at positions 5, 8, 9, 13
    assert offline.walk(count, roots, np.array([5]), np.array([15])) == (10, 4)
    assert offline.walk(count, roots, np.array([5]), np.array([14])) == (9, 4)  # the last step is cut


def test_roots_come_back_in_their_order_from_chunks() -> None:
    roots = Roots(np.array([2, 0, 0, 0, 1]), np.array([7, 3, 4, 5, 9]))
    pieces = offline.chunks(roots, 2, 3)
    kept = np.concatenate([p[p[:, :, 2] >= 0] for p in pieces])
    assert sorted(kept[:, 2].tolist()) == [0, 1, 2, 3, 4]
    for row, position, number in kept:
        assert (roots.row[number], roots.position[number]) == (row, position)
