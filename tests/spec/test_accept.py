"""The walk: batched, forced and free rows mixed, against one row and one node at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.spec.accept import accept
from draftwood.spec.tree import Tree, chain, grow, join, roots


def slow(tree: Tree, choice: dict[tuple[int, int], int], r: int) -> tuple[list[int], list[int]]:
    """(nodes of the path, committed tokens) of one row."""
    n = int(tree.counts[r])
    if tree.forced[r]:
        return list(range(n)), [choice[r, n - 1]]
    path = [0]
    while True:
        wanted = choice[r, path[-1]]
        child = [i for i in range(1, n) if tree.parents[r, i] == path[-1] and tree.tokens[r, i] == wanted]
        if not child:
            return path, [int(tree.tokens[r, i]) for i in path[1:]] + [wanted]
        path.append(child[0])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 6), budgets=st.lists(st.integers(0, 20), max_size=5), data=st.data())
def test_batched_walk_equals_the_walk_of_each_row(seed, vocab, budgets, data):
    g = torch.Generator().manual_seed(seed)
    parts = [roots(torch.randint(0, vocab, (1,), generator=g))]
    if budgets:
        logits = torch.randn(len(budgets), data.draw(st.integers(1, 6)), vocab, generator=g)
        parts.append(grow(logits, torch.zeros(len(budgets), dtype=torch.long), budgets, [0.0] * len(budgets), None))
    lengths = data.draw(st.lists(st.integers(1, 30), max_size=3))
    if lengths:
        parts.append(chain([torch.randint(0, vocab, (n,), generator=g).tolist() for n in lengths]))
    total = sum(len(p.counts) for p in parts)
    tree = join(parts, torch.randperm(total, generator=g).tolist())
    rows, nodes = tree.verified()
    choices = torch.randint(0, vocab, (len(rows),), generator=g)
    scores = -torch.rand(len(rows), generator=g)
    path = accept(tree, choices, (rows, nodes), scores)
    choice = {(r, n): c for r, n, c in zip(rows.tolist(), nodes.tolist(), choices.tolist(), strict=True)}
    for r in range(total):
        want, tokens = slow(tree, choice, r)
        width = path.nodes.shape[1]
        assert path.nodes[r].tolist() == want + [-1] * (width - len(want)) and int(path.counts[r]) == len(want)
        assert path.tokens[r].tolist() == tokens + [-1] * (width - len(tokens)) and int(path.emitted[r]) == len(tokens)
        assert int(path.final[r]) == tokens[-1]
        assert choices[path.chosen[r, : len(tokens)]].tolist() == tokens
        assert torch.equal(path.logprobs[r, : len(tokens)], scores[path.chosen[r, : len(tokens)]])
        assert not path.logprobs[r, len(tokens) :].any()


def test_plain_decoding_is_a_tree_of_one_node():
    tree = roots([4, 5])
    path = accept(tree, torch.tensor([8, 9]), tree.verified())
    assert path.nodes.tolist() == [[0], [0]] and path.tokens.tolist() == [[8], [9]] and path.final.tolist() == [8, 9]


def test_a_hand_made_tree_with_equal_siblings_takes_the_first():
    tree = Tree(
        tokens=torch.tensor([[1, 7, 7, 8]]),
        parents=torch.tensor([[-1, 0, 0, 2]]),
        depths=torch.tensor([[0, 1, 1, 2]]),
        counts=torch.tensor([4]),
        forced=torch.tensor([False]),
        logprob=torch.zeros(1, 4),
    )
    path = accept(tree, torch.tensor([7, 8, 8, 0]), tree.verified())
    assert path.nodes.tolist() == [[0, 1]] and path.tokens.tolist() == [[7, 8]]
