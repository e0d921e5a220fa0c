"""The CUDA target and drafter do not ask which mode of autograd they are made in, and in which one they run."""

from __future__ import annotations

import pytest
import torch

from draftwood.model.cuda.bucket import Bucket, DraftBucket
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.dummy import dummy_drafter, dummy_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.cuda_tools import Memory, Row, Step, chain
from tests.model.test_cuda_work import NARROW, NARROW_DRAFT

MODES = [(made, used) for made in (False, True) for used in (False, True)]


@pytest.mark.parametrize(("made", "used"), MODES, ids=[f"made {a}, used {b}" for a, b in MODES])
def test_what_is_made_in_inference_mode_runs_outside_of_it_and_the_reverse(cuda_refs: Calls, made: bool, used: bool) -> None:  # noqa: F811
    """At a bucket that routes in parts, whose counters are written on the way."""
    bucket, drafted = Bucket(32, 64, 1100, 1, 100), DraftBucket(2, 4, 3, 16)
    with torch.inference_mode(made):
        target = CudaTarget(NARROW, dummy_target(NARROW, Layout(), "cpu"), Layout(), Local(), NARROW_DRAFT.taps)
        drafter = CudaDrafter(NARROW_DRAFT, dummy_drafter(NARROW_DRAFT, Layout(), "cpu"), Layout(), Local(), target)
        target.reserve([bucket])
        drafter.reserve([drafted])
        forward, draft = target.bind(bucket), drafter.bind(drafted)
        step = Step.make(bucket, [Row(0, 0, [5, 6, 7], chain(3))], memory := Memory(NARROW, 1, 2, "cpu"))
    with torch.inference_mode(used):
        longs, live = torch.tensor([0, 1]), torch.tensor([1], dtype=torch.int32)
        keys, values = (torch.zeros(2, 2, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        cache = memory.cache.clone()
        logits, taps = forward(step.flat, step.lengths, step.counts, step.table, cache, (longs[1:], live))
        draft.observe(taps, torch.arange(3).repeat(2, 1), longs * 0, longs, longs + 3, longs, keys, values, live)
        guesses = draft.propose(longs, longs + 3, longs, keys, values, live)
        assert bool(logits[0].isfinite().all()) and bool(guesses[0].isfinite().all()) and bool(keys[:, 0, :3].any())
