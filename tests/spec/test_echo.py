"""The row's own text as a guess: what followed an earlier place, and what a tree makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.spec import echo
from draftwood.spec.bigram import Bigram
from draftwood.spec.echo import BONUS, LONGEST, MOST, WINDOW, Echo
from draftwood.spec.tree import GrowOptions, Tree, grow


def test_the_longest_known_end_decides_and_the_newest_follower_comes_first():
    text = Echo([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6])
    assert text.tail == (5, 8, 3, 6)
    assert text.after((7, 7, 2, 3)) == ((5, 4), BONUS)
    assert text.after((7, 1, 2, 3)) == ((4,), 2 * BONUS)
    assert text.after((3, 4, 9, 2)) == ((3,), 3 * BONUS)
    assert text.after((2, 3)) == ((5, 4), BONUS)
    assert text.after((3,)) == text.after((3, 6)) == text.after(()) == ((), 0.0)
    text.extend([7])
    assert text.after((0, 0, 3, 6)) == ((7,), BONUS)
    text.extend([2, 3, 4, 0])
    assert text.after((2, 3))[0] == (4, 5)


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 60))
def test_a_text_is_the_same_in_one_piece_and_in_two_and_says_what_a_search_finds(tokens, cut):
    whole, parts = Echo(tokens), Echo(tokens[:cut])
    parts.extend(tokens[cut:])
    assert (whole.tail, whole._followers) == (parts.tail, parts._followers) and whole.tail == tuple(tokens[-LONGEST:])
    want: tuple[list[int], float] = ([], 0.0)
    for length in range(2, min(LONGEST, len(tokens)) + 1):
        ends = [i for i in range(length, len(tokens)) if tokens[i - length : i] == tokens[-length:]]
        if ends:
            want = (list(dict.fromkeys(tokens[i] for i in reversed(ends)))[:MOST], BONUS * (length - 1))
    found = whole.after(whole.tail)
    assert (list(found[0]), found[1]) == want


def test_of_a_long_prompt_the_end_is_read():
    text = Echo([1, 2, 3] + [0] * WINDOW + [5, 6])
    assert text.after((1, 2)) == ((), 0.0) and text.after((0, 0))[0][-1] == 0 and text.tail == (0, 0, 5, 6)


def plain_table(vocab: int) -> Bigram:
    """A table that says nothing."""
    return Bigram(np.zeros(vocab + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(vocab, np.float32))


def planted(logits: torch.Tensor, text: Echo | None, heat: float = 0.0, table: Bigram | None = None) -> Tree:
    root, noise = text.tail[-1] if text else 9, torch.zeros(1, 4, logits.shape[-1]) if heat else None
    return grow(logits, torch.tensor([root]), [3], [heat], noise, GrowOptions(), table or plain_table(10), [text])


def test_a_tree_repeats_what_the_text_did_from_the_root_on():
    flat = torch.zeros(1, 3, 10)
    assert planted(flat, Echo([7, 9])).tokens[0].tolist() == [9, 0, 1, 2]
    again = planted(flat, Echo([7, 9, 4, 5, 6, 1, 7, 9]))
    assert again.tokens[0].tolist() == [9, 4, 5, 6] and again.parents[0].tolist() == [-1, 0, 1, 2]
    assert (again.logprob[0] <= 0).all()
    first = np.log(np.exp(BONUS) / (9 + np.exp(BONUS)))
    assert again.logprob[0, 1].item() == pytest.approx(first, abs=1e-5)


def test_a_likelier_token_and_a_table_count_beside_the_text():
    logits = torch.zeros(1, 3, 10)
    logits[0, 0, 2] = 5.0
    assert planted(logits, Echo([7, 9, 4, 5, 6, 1, 7, 9])).tokens[0, 1] == 2
    vals = np.full(1, 9.0, np.float32)
    pmi = Bigram(np.array([0] * 5 + [1] * 6), np.array([3]), vals, np.zeros(10, np.float32))
    assert planted(torch.zeros(1, 3, 10), Echo([7, 9, 4, 7, 9]), table=pmi).tokens[0, :3].tolist() == [9, 4, 3]


def test_a_token_that_is_no_candidate_stays_none():
    logits = torch.zeros(1, 3, 10)
    logits[0, :, 4] = -torch.inf
    assert 4 not in planted(logits, Echo([7, 9, 4, 5, 6, 1, 7, 9])).tokens[0].tolist()


def test_a_hot_row_listens_less_and_no_text_changes_nothing():
    loud = [planted(torch.zeros(1, 3, 10), Echo([7, 9, 4, 7, 9]), heat).logprob[0, 1].item() for heat in (0.5, 1.0, 1.9)]
    assert loud == sorted(loud, reverse=True)
    assert echo.loudness(0) == 1 and echo.loudness(2) == echo.loudness(5) == 0
    logits = torch.randn(1, 3, 10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(planted(logits, None).logprob, planted(logits, Echo([3, 9])).logprob)
