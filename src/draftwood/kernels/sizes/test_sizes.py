"""Tree sizes on the device: compile limits and refusals without a GPU; on a GPU, the reference's numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.rows import scenario
from draftwood.kernels.sizes import checks, op, ref
from draftwood.kernels.tree.ref import Trees

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("sizes", variant, arch).spill_bytes == 0


def _narrow(trees: Trees) -> Trees:
    """Trees with probabilities of one row alone."""
    return dataclasses.replace(trees, logprob=trees.logprob[:1])


def test_unfit_tensors_are_refused_in_one_line() -> None:
    trees, known, one = checks.grown(2, "cpu", 0), op.allocate("cpu"), torch.ones(1, dtype=torch.int32)
    heat, flags = torch.zeros(2), torch.ones(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="heat must be"):
        op.fit(one, one, flags, trees, heat.double(), known, checks.costs("flat", "cpu"), 0, op.allocate_fitted("cpu"))
    good = {
        "live": one, "free": one, "automatic": flags, "trees": trees, "heat": heat, "calibration": known,
        "costs": checks.costs("flat", "cpu"), "own": 3, "out": op.allocate_fitted("cpu"),
    }  # fmt: skip
    for name, fault in (
        ("automatic", {"automatic": flags[:1]}), ("heat", {"heat": heat[:1]}), ("logprob", {"trees": _narrow(trees)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be"):
            op.fit(**{**good, **fault})
    path = scenario.path(2, 8, "cpu")
    with pytest.raises(ValueError, match="path must be"):
        op.learn(one, trees, heat, dataclasses.replace(path, nodes=path.nodes[0]), known)
    many = ref.Costs(torch.arange(33, dtype=torch.int32).repeat(4, 1), torch.ones(4, 33))
    for fault in ({"costs": many}, {"own": 4}):
        with pytest.raises(ValueError, match="points of a cost table and one of 4 caps"):
            op.fit(**{**good, **fault})


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("own", [0, 1, 3])
    @pytest.mark.parametrize("kind", ["flat", "steep", "mixed"])
    @pytest.mark.parametrize(("free", "places"), checks.CASES)
    def test_sizes_are_the_references(self, free: int, places: int, kind: str, own: int) -> None:
        checks.fit(free, places, kind, "cuda", own)

    @pytest.mark.parametrize(("free", "places"), checks.CASES)
    def test_what_was_accepted_corrects_the_ratios(self, free: int, places: int) -> None:
        checks.learn(free, places, "cuda")
