"""The sources of kernels/rows, run on the CPU: a step's places, its verified nodes, and what rows become after it."""

import functools

import pytest

from draftwood.kernels.rows import checks, op
from tests.kernels.emulate import COMPILER, Emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_kernel", functools.cache(lambda entry, device: Emulated(op._source(entry))))


@pytest.mark.parametrize(("free", "pieces", "room"), checks.CASES)
def test_places_become_lengths_roots_trees_and_verified_nodes(free: int, pieces: int, room: int) -> None:
    checks.begin_and_select(free, pieces, room, "cpu")


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("free", "pieces", "room"), checks.CASES)
def test_rows_move_on_by_what_was_accepted_and_others_stay(free: int, pieces: int, room: int, history: bool) -> None:
    checks.advance(free, pieces, room, "cpu", history)


@pytest.mark.parametrize("mean", [1.0, 2.5, 4.0, 4.3])
def test_synthetic_guesses_are_those_of_the_walks_and_differ(mean: float) -> None:
    assert checks.guesses(mean, "cpu") == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("mean", [1.0, 2.5, 4.3, 60.0])
def test_synthetic_choices_make_walks_as_long_as_asked(mean: float) -> None:
    found = checks.synthetic(mean, "cpu")
    assert found == 1.0 if mean == 1 else found > 1.5
