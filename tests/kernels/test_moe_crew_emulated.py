"""The experts' crews (crew.cu) run on the CPU: both parts against the staged form, bit for bit."""

import functools

import numpy as np
import pytest
import torch

from draftwood.kernels import jit
from draftwood.kernels.moe_int4 import op, repack
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.model.int4 import pack_int4
from tests.kernels.emulate import COMPILER, Emulated

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.xdist_group("emulated")]
NAN = float("nan")
JUNK = (2**30, 2**30, 8, 0)
SMALL = op.Form("crew", 2, 16, 1, depth=2, chains=(True,))
"""The form with jobs of 16 tokens, so that few tokens make many jobs."""
SHAPE = op.Shape(512, 512, 4, True)


@functools.cache
def _kernel(form: op.Form, part: str) -> Emulated:
    return Emulated(jit.Source(op.FOLDER / f"{form.file}.cu", f"{part}_{form.file}", form.macros(SHAPE, part)))


class Experts:
    """Random experts, and tokens of which each expert has as many as `counts` says."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, total = counts, sum(counts)
        make = torch.Generator().manual_seed(3)
        parts = [t for _ in range(3) for t in pack_int4(torch.randn(len(counts), 512, 512, generator=make) * 0.1)]
        self.weights = repack.repack(*parts)
        self.x = torch.randn(-(-total // 4), 512, generator=make).to(torch.bfloat16)
        self.pairs = torch.randperm(total, generator=make).int()

    def run(self, form: op.Form, grid: int | None = None) -> torch.Tensor:
        """y of every pair; grid: blocks of crew.cu, and None for a form with a block for every job."""
        held = [[e] for e, count in enumerate(self.counts) for _ in range(count)]
        _, jobs = route_ref.lists(held, 0, len(self.counts), 8 * form.tokens)
        lists = (torch.tensor([*jobs, JUNK, JUNK], dtype=torch.int32), torch.tensor([len(jobs)], dtype=torch.int32), self.pairs)
        h = torch.full((len(held), 512), NAN, dtype=torch.bfloat16)
        y, x, w = torch.full((len(held), 512), NAN), self.x, self.weights
        if form.file == "crew":
            arrange = op._arrange_variant(SHAPE)
            Emulated(arrange.source)(len(x), arrange.threads, (self.x, x := torch.full_like(x, NAN)))
        for part, args in (("gate_up", (w.gate_up, w.gate_up_scale, x, *lists, h)), ("down", (w.down, w.down_scale, h, *lists, y))):
            blocks = grid or (SHAPE.rows(part) // form.block_rows, len(jobs))
            _kernel(form, part)(blocks, form.threads, (*args, np.int32(1)))
        assert not h.isnan().any() and not y.isnan().any()
        return y


@pytest.mark.parametrize("early", [False, True])
def test_units_of_any_number_of_blocks_give_the_staged_bits(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for all units, a few with unequally many, more blocks than units."""
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    experts = Experts([13, 40, 3, 0, 29])
    want = experts.run(op.HOPPER["wider"])
    for grid in (1, 5, 40):
        assert torch.equal(experts.run(SMALL, grid), want), grid


@pytest.mark.parametrize("early", [False, True])
def test_jobs_of_every_width_give_the_staged_bits(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    form = op.HOPPER["widest"]
    experts = Experts([8 * t - t % 3 for t in range(1, form.tokens + 1)])
    assert torch.equal(experts.run(form, 7), experts.run(op.HOPPER["wider"]))
