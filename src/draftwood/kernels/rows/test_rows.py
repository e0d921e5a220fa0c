"""What begins and ends a step: compile limits and refusals without a GPU; on a GPU, the reference's numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.rows import checks, op, ref, scenario
from draftwood.kernels.tree import op as tree_op

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("rows", variant, arch).spill_bytes == 0


def test_unfit_tensors_are_refused_in_one_line() -> None:
    places, state = scenario.places(2, 1, 4, "cpu"), scenario.state(4, "cpu")
    trees, longs, ints = tree_op.allocate_trees(4, "cpu"), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="roots must be"):
        op.begin(places, state, longs, longs.int(), ints, trees)
    with pytest.raises(ValueError, match="ids must be"):
        op.begin(places, state, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), ints, trees)
    with pytest.raises(ValueError, match="row_lengths must be"):
        op.advance(places, ref.State(state.lengths.int(), state.roots), longs, scenario.path(4, 8, "cpu"))
    with pytest.raises(ValueError, match="tokens of paths must be"):
        path = scenario.path(4, 8, "cpu")
        op.advance(places, state, longs, dataclasses.replace(path, tokens=path.tokens[:3]))
    for name, value in (
        ("logprob", trees.logprob.double()),
        ("ancestors", trees.ancestors[:, :, 0]),
        ("parents", trees.parents[:3]),
    ):
        with pytest.raises(ValueError, match=f"{name} of trees must be"):
            op.begin(places, state, longs, longs, ints, dataclasses.replace(trees, **{name: value}))
    with pytest.raises(ValueError, match="choices must be"):
        op.synthetic(places.free, longs, longs, trees, torch.zeros(4, 65, dtype=torch.int32), ints, 96, 2.0)
    with pytest.raises(ValueError, match="at least 1 token"):
        op.guesses(places.free, longs, longs, trees, 96, 0.5)
    with pytest.raises(ValueError, match="mean"):
        op.synthetic(places.free, longs, longs, trees, torch.zeros(4, 65, dtype=torch.int32), longs, 96, 0.5)


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(("free", "pieces", "room"), checks.CASES)
    def test_places_become_lengths_roots_trees_and_verified_nodes(self, free: int, pieces: int, room: int) -> None:
        checks.begin_and_select(free, pieces, room, "cuda")

    @pytest.mark.parametrize("history", [False, True])
    @pytest.mark.parametrize(("free", "pieces", "room"), checks.CASES)
    def test_rows_move_on_by_what_was_accepted(self, free: int, pieces: int, room: int, history: bool) -> None:
        checks.advance(free, pieces, room, "cuda", history)

    @pytest.mark.parametrize("mean", [1.0, 2.5, 4.0])
    def test_synthetic_guesses_are_those_of_the_walks_and_differ(self, mean: float) -> None:
        assert checks.guesses(mean, "cuda") == pytest.approx(mean, abs=1e-4)

    @pytest.mark.parametrize("mean", [1.0, 2.5, 60.0])
    def test_synthetic_choices_make_walks_as_long_as_asked(self, mean: float) -> None:
        checks.synthetic(mean, "cuda")
