"""The experts' crews (crew.cu) and both parts in one launch (joined.cu) run on the CPU: against the staged form, bit for bit."""

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
SMALL, BROAD = (op.Form("crew", 2, 16, 1, stages=chunks, depth=2, chains=(True,)) for chunks in (2, 4))
"""The forms with jobs of 16 tokens, so that few tokens make many jobs."""
SHAPE, WIDE = op.Shape(512, 512, 4, True), op.Shape(1024, 1024, 4, True)


@functools.cache
def _kernel(form: op.Form, part: str, shape: op.Shape) -> Emulated:
    entry = f"{'experts' if form.file == 'joined' else part}_{form.file}"
    return Emulated(jit.Source(op.FOLDER / f"{form.file}.cu", entry, form.macros(shape, part)))


class Experts:
    """Random experts, and tokens of which each expert has as many as `counts` says."""

    def __init__(self, counts: list[int], shape: op.Shape = SHAPE) -> None:
        self.counts, self.shape, total, size = counts, shape, sum(counts), shape.hidden
        make = torch.Generator().manual_seed(3)
        parts = [t for _ in range(3) for t in pack_int4(torch.randn(len(counts), size, size, generator=make) * 0.1)]
        self.weights = repack.repack(*parts)
        self.x = torch.randn(-(-total // 4), size, generator=make).to(torch.bfloat16)
        self.pairs = torch.randperm(total, generator=make).int()

    def run(self, form: op.Form, grid: int | None = None, beside: bool = False) -> torch.Tensor:
        """y of every pair; grid: blocks of crew.cu, and None for a form with a block for every job; beside: of arrange.cu."""
        held = [[e] for e, count in enumerate(self.counts) for _ in range(count)]
        _, jobs = route_ref.lists(held, 0, len(self.counts), 8 * form.tokens)
        lists = (torch.tensor([*jobs, JUNK, JUNK], dtype=torch.int32), torch.tensor([len(jobs)], dtype=torch.int32), self.pairs)
        h = torch.full((len(held), self.shape.width), NAN, dtype=torch.bfloat16)
        y, x, w = torch.full((len(held), self.shape.hidden), NAN), self.x, self.weights
        if form.file == "joined":  # blocks run one after another, so the first one takes all units
            packed = (w.gate_up, w.gate_up_scale, w.down, w.down_scale)
            for blocks in (1, 3):  # as the one before left its counters
                y.fill_(NAN)
                _kernel(form, "gate_up", self.shape)(blocks, form.threads, (*packed, x, *lists, h, y, np.int32(1)))
            assert not lists[0][: len(jobs), 3].any() and not h.isnan().any()
            return y
        if form.file == "crew":
            arrange, pairs = op._arrange_variant(self.shape), len(held)
            x = torch.full((pairs + 1, self.shape.hidden), NAN, dtype=torch.bfloat16)
            room = (np.int32(pairs), np.int32(len(lists[0])), np.int32(beside))
            Emulated(arrange.source)(-(-pairs // op.ARRANGED), arrange.threads, (self.x, *lists, x, *room))
            assert not x[:pairs].isnan().any() and x[pairs:].isnan().all()
        for part, args in (("gate_up", (w.gate_up, w.gate_up_scale, x, *lists, h)), ("down", (w.down, w.down_scale, h, *lists, y))):
            blocks = grid or (self.shape.rows(part) // form.block_rows, len(jobs))
            _kernel(form, part, self.shape)(blocks, form.threads, (*args, np.int32(1)))
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
        assert torch.equal(experts.run(SMALL, grid, early), want), grid
    if not early:  # a step of the loop takes four chunks
        experts = Experts([9, 20], WIDE)
        assert torch.equal(experts.run(BROAD, 3), experts.run(op.HOPPER["wider"]))


@pytest.mark.parametrize("early", [False, True])
def test_one_launch_for_both_parts_gives_the_staged_bits(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of every width, an expert without tokens and one with several jobs; no tokens at all."""
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    experts, joined = Experts([13, 40, 3, 0, 24, 8]), op.HOPPER["joined"]
    assert torch.equal(experts.run(joined), experts.run(op.HOPPER["wider"]))
    assert not len(Experts([0, 0]).run(joined))


@pytest.mark.parametrize("early", [False, True])
def test_jobs_of_every_width_give_the_staged_bits(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    form = op.HOPPER["widest"]
    experts = Experts([8 * t - t % 3 for t in range(1, form.tokens + 1)])
    assert torch.equal(experts.run(form, 7), experts.run(op.HOPPER["wider"]))
