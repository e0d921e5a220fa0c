"""A step writes only into its own row's scratch; commit leaves exactly what a chain would have left."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kv.store import DraftStore, LatentStore

LAYERS, PAGE, WIDTH = 3, 4, 5


def _store(pages):
    store = LatentStore(LAYERS, pages, PAGE, WIDTH, torch.float32, "cpu")
    store.cache.copy_(torch.arange(store.cache.numel(), dtype=torch.float32).view_as(store.cache))
    return store


def _slot(table, position):
    return table[position // PAGE] * PAGE + position % PAGE


def test_scratch_places_follow_the_page_table_and_padding_goes_to_the_sink():
    store = _store(9)
    tables = torch.tensor([[7, 2, 5, 9], [0, 9, 9, 9]])
    lengths, counts = torch.tensor([5, 0]), torch.tensor([4, 2])
    slots = store.scratch(tables, lengths, counts, 4, 5)
    assert slots.prefix[0].tolist() == [_slot([7, 2, 5], p) for p in range(5)]
    assert slots.nodes[0].tolist() == [_slot([7, 2, 5], p) for p in range(5, 9)]
    assert slots.nodes[1, :2].tolist() == [0, 1]
    assert (slots.nodes[1, 2:] // PAGE == store.sink).all()
    assert slots.prefix.shape == (2, 5) and int(slots.prefix.max()) < store.cache.shape[1]


def test_a_table_narrower_than_the_padding_is_no_error():
    store = _store(3)
    slots = store.scratch(torch.tensor([[1]]), torch.tensor([3]), torch.tensor([1]), 9, 3)
    assert slots.nodes[0, 0] == 7 and (slots.nodes[0, 1:] // PAGE == store.sink).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_commit_equals_a_chain_and_touches_nothing_else(data):
    rows = data.draw(st.integers(1, 3))
    nodes = data.draw(st.integers(1, 9))
    store = _store(24)
    order = data.draw(st.permutations(range(24)))
    tables = torch.tensor([order[8 * r : 8 * r + 8] for r in range(rows)])
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows)))
    others = st.sets(st.integers(1, max(nodes - 1, 1)), max_size=nodes - 1)
    paths = [[0, *sorted(data.draw(others))] for _ in range(rows)]
    width = max(map(len, paths))
    path = torch.tensor([p + [-1] * (width - len(p)) for p in paths])
    counts = torch.tensor([len(p) for p in paths])
    slots = store.scratch(tables, lengths, torch.full((rows,), nodes), nodes, int(lengths.max()))
    before = store.cache.clone()
    store.commit(slots, path, counts)
    expected = before.clone()
    for r in range(rows):
        for j, node in enumerate(paths[r]):
            at = int(lengths[r])
            expected[:, _slot(tables[r], at + j)] = before[:, _slot(tables[r], at + node)]
    assert torch.equal(store.cache, expected)


def test_sizes_are_what_is_allocated():
    store, window = _store(6), DraftStore(2, 3, 7, 2, 8, torch.bfloat16, "cpu")
    assert LatentStore.nbytes(LAYERS, 6, PAGE, WIDTH, 4) == store.cache.numel() * 4
    assert DraftStore.nbytes(2, 3, 7, 2, 8, 2) == (window.keys.numel() + window.values.numel()) * 2
