"""Layout: slices cover everything exactly once and never cut an INT4 group."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import ConfigError
from draftwood.parallel.layout import GROUP, Layout, check_layout, cut

sizes = st.integers(1, 6)


def layouts(tp: int, ep: int) -> list[Layout]:
    return [Layout(tp, ep, rank) for rank in range(tp * ep)]


def shape(heads=8, experts=16, intermediate=128, vocab=8192):
    return SimpleNamespace(
        num_heads=heads, num_experts=experts, moe_intermediate_size=intermediate, vocab_size=vocab
    )


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 64))
def test_cut_covers_everything_once_in_order_and_in_whole_multiples(units, parts, multiple):
    pieces = [cut(units * multiple, parts, i, multiple) for i in range(parts)]
    assert [i for piece in pieces for i in piece] == list(range(units * multiple))
    assert all(p.start % multiple == 0 and p.stop % multiple == 0 for p in pieces)
    lengths = [len(p) for p in pieces]
    assert max(lengths) - min(lengths) <= multiple


@given(sizes, sizes, st.integers(1, 8), st.integers(1, 64))
def test_heads_vocabulary_and_columns_are_held_once(tp, ep, per_rank, groups):
    world = tp * ep
    for name, n in (("heads", per_rank * world), ("vocab", per_rank * world), ("columns", groups * GROUP)):
        held = [i for layout in layouts(tp, ep) for i in getattr(layout, name)(n)]
        assert held == list(range(n))


@given(sizes, sizes, st.integers(1, 40), st.integers(1, 24))
def test_each_column_of_each_expert_is_held_by_exactly_one_rank(tp, ep, experts, groups):
    held: dict[tuple[int, int], int] = {}
    for layout in layouts(tp, ep):
        columns = layout.expert_columns(groups * GROUP)
        assert columns.start % GROUP == 0 and columns.stop % GROUP == 0
        for expert in layout.experts(experts):
            for column in columns[::GROUP]:
                held[expert, column] = held.get((expert, column), 0) + 1
    assert held == {(e, g * GROUP): 1 for e in range(experts) for g in range(groups)}


@given(sizes, sizes, st.integers(1, 8), st.integers(1, 8))
def test_every_query_head_finds_its_key_value_head_on_its_rank(tp, ep, kv_heads, ratio):
    q_heads = kv_heads * ratio * tp * ep
    for layout in layouts(tp, ep):
        kv = layout.kv_heads(q_heads, kv_heads)
        assert {h * kv_heads // q_heads for h in layout.heads(q_heads)} == set(kv)


def test_key_value_heads_are_replicated_when_there_are_fewer_than_ranks():
    assert [list(layout.kv_heads(8, 2)) for layout in layouts(4, 1)] == [[0], [0], [1], [1]]


def test_k2_shapes_split_cleanly_over_eight_ranks():
    k2 = shape(64, 384, 2048, 163840)
    check_layout(k2, SimpleNamespace(num_heads=64, num_kv_heads=8), 8, 1)
    check_layout(k2, SimpleNamespace(num_heads=64, num_kv_heads=8), 2, 4)
    assert {len(layout.expert_columns(2048)) for layout in layouts(8, 1)} == {256}
    assert {len(layout.experts(384)) for layout in layouts(1, 8)} == {48}


@pytest.mark.parametrize(
    ("tp", "ep", "parts"),
    [
        (3, 1, ("--tp 3", "8 heads", "1, 2, 4, 8")),
        (1, 3, ("--ep 3", "8 heads")),
        (3, 2, ("--tp 3 --ep 2", "6 ranks", "8 heads")),
        (8, 1, ("--tp 8", "4 INT4 groups", "--tp 4 or less")),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_what_to_choose(tp, ep, parts):
    with pytest.raises(ConfigError) as caught:
        check_layout(shape(), None, tp, ep)
    text = str(caught.value)
    assert all(part in text for part in parts) and "\n" not in text


def test_more_expert_groups_of_ranks_than_experts_is_refused():
    with pytest.raises(ConfigError, match="16 experts"):
        check_layout(shape(heads=64), None, 1, 32)


def test_drafter_heads_that_straddle_ranks_are_refused():
    with pytest.raises(ConfigError, match="key-value heads"):
        check_layout(shape(heads=12, vocab=12 * 64), SimpleNamespace(num_heads=12, num_kv_heads=4), 6, 1)
    with pytest.raises(ConfigError, match="drafter heads"):
        check_layout(shape(heads=8), SimpleNamespace(num_heads=12, num_kv_heads=4), 8, 1)


def test_a_rank_outside_the_world_is_a_programming_error():
    with pytest.raises(ValueError, match="no rank 2"):
        Layout(2, 1, 2)
