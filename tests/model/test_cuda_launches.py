"""Whole forwards through the real launchers on the CPU: every launch is held against its kernel's signature and limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.linear import plan as linear_plan
from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.moe_route import op as route_op
from draftwood.model.config import resized
from draftwood.model.costs import total
from draftwood.model.cuda import dummy, work
from draftwood.model.cuda.bucket import Bucket, DraftBucket
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.dummy import dummy_drafter, dummy_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_tools import Memory, Row, Step, chain
from tests.model.test_cuda_work import FULL, FULL_DRAFT, NARROW, NARROW_DRAFT

WIDTHS = {"int": np.int32, "long long": np.int64, "float": np.float32, "unsigned": np.uint32, "double": np.float64}
MOST_GRID = (2**31 - 1, 65535, 65535)


class Recorder:
    """Stands in for a loaded kernel."""

    launched: Counter[str] = Counter()

    def __init__(self, source: jit.Source, device: int, dynamic_shared: int = 0) -> None:
        self.source, self.shared = source, dynamic_shared
        assert dynamic_shared <= jit.SHARED_LIMIT["sm_90a"]
        text = jit._with_headers(Path(source.file))  # some files of one kernel share its body, under the name ENTRY
        found = re.search(rf"\b(?:{source.entry}|ENTRY)\s*\(([^{{]*?)\)\s*\{{", text)
        assert found is not None, source
        text = re.sub(r"//[^\n]*", "", found[1])
        self.parameters = [" ".join(p.replace("__restrict__", "").split()) for p in text.split(",")]

    def __call__(
        self, grid: int | tuple[int, ...], block: int, args: Sequence[Any], shared: int | None = None, pdl: bool = False
    ) -> None:
        assert pdl and 0 < block <= 1024 and len(args) == len(self.parameters), self.source
        sizes = (grid,) if isinstance(grid, int) else grid
        assert all(0 < n <= most for n, most in zip(sizes, MOST_GRID, strict=False)), (self.source, grid)
        for arg, parameter in zip(args, self.parameters, strict=True):
            kind = parameter.rsplit(" ", 1)[0].replace("const ", "")
            if "*" in parameter:
                assert isinstance(arg, Tensor) or (type(arg) is np.uint64 and arg == 0), (self.source, parameter)
            else:
                assert type(arg) is WIDTHS[kind], (self.source, parameter, type(arg))
        self.launched[self.source.entry] += 1


@pytest.fixture(params=[False, True], ids=["", "fed"])
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches by entry, of launchers that believe in an H200; with and without linear's fed forms."""
    monkeypatch.setattr(linear_plan, "FED", request.param)
    monkeypatch.setattr(jit, "Kernel", Recorder)
    monkeypatch.setattr(attention_op, "Kernel", Recorder)
    monkeypatch.setattr(attention_op, "arch", lambda device: "sm_90a")
    monkeypatch.setattr(attention_op, "processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Recorder, "launched", Counter())
    return Recorder.launched


@pytest.mark.parametrize(
    "bucket", [Bucket.of(1, 0, 64), Bucket.of(2, 8, 5000), Bucket(64, 60, 2000, 5, 100)], ids=["one", "trees", "chunks"]
)
def test_a_forward_s_launches_fit_their_kernels(recorded: Counter[str], bucket: Bucket) -> None:
    target = CudaTarget(NARROW, dummy_target(NARROW, Layout(), "cpu"), Layout(), Local(), (0, 2))
    target.reserve([bucket, Bucket.of(8, 16, 2000)])
    memory = Memory(NARROW, 1, 2, "cpu")
    chosen = bucket.verified < bucket.tokens
    index = (torch.zeros(bucket.verified, dtype=torch.int64), torch.ones(1, dtype=torch.int32)) if chosen else None
    step = Step.make(bucket, [Row(0, 0, [5], chain(1))], memory)
    forward = target.bind(bucket)
    recorded.clear()
    step.run(forward, memory.cache, index)
    said = dict(work.launches(target.sizes, bucket, "sm_90a", chosen))
    said.pop("router parts", None)
    assert recorded.total() == total(tuple(said.items()))


@pytest.mark.parametrize("world", [1, 8])
@pytest.mark.parametrize("rows", [1, 4, 128])
@pytest.mark.parametrize("budget", [0, 8, 32, 64])
def test_a_forward_of_k26_fits_its_kernels(
    recorded: Counter[str], monkeypatch: pytest.MonkeyPatch, rows: int, budget: int, world: int
) -> None:
    """On the meta device, which has shapes and no memory; two layers at full width, whole and an eighth."""
    monkeypatch.setattr(dummy._Maker, "generator", lambda self, name, whole: None)
    monkeypatch.setattr(route_op, "repack", lambda w: w.new_empty(1, w.shape[0] // 16, w.shape[1] // 16, 32, 4, dtype=torch.int32))
    config, draft = resized(FULL, FULL_DRAFT, 384, 2)
    assert draft is not None
    layout, comm = Layout(world, 1, 0), Local()
    monkeypatch.setattr(comm, "world", world, raising=False)
    target = CudaTarget(config, dummy_target(config, layout, "meta"), layout, comm, draft.taps, 4096)
    bucket = Bucket.of(rows, budget, 4096)
    target.reserve([bucket])
    memory = Memory(config, 1, 2, "meta")
    memory.table = torch.zeros(1, 2, dtype=torch.int32)
    step = Step.make(bucket, [Row(0, 0, [5], chain(1))], memory).to("meta")
    step.run(target.bind(bucket), memory.cache)
    parts = work.chunks(bucket.tokens, len(target.sizes.experts))
    assert recorded.total() == total(work.launches(target.sizes, bucket, "sm_90a")) - 2 * (len(parts) > 1)
    drafter = CudaDrafter(draft, dummy_drafter(draft, layout, "meta"), layout, comm, target, 4096)
    at = DraftBucket(rows, 8, min(8, 1 + budget), 2048)
    drafter.reserve([at])
    recorded.clear()
    longs, live = torch.zeros(rows, dtype=torch.int64, device="meta"), torch.ones(1, dtype=torch.int32, device="meta")
    keys, values = (torch.empty(6, 2, 2048, drafter.kv_heads, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    drafter.bind(at).propose(longs, longs, longs, keys, values, live)
    path = torch.zeros(rows, at.path, dtype=torch.int64, device="meta")
    assert target.work is not None
    drafter.bind(at).observe(target.work.taps, path, longs, longs, longs, longs, keys, values, live)
    # On several ranks the head's norm waits for the last layer's sum.
    assert recorded.total() == total(work.draft_launches(drafter.sizes, at, "sm_90a")) - 6 + (world > 1)


@pytest.mark.parametrize("capacity", [128, 2048])
def test_a_draft_s_launches_fit_their_kernels(recorded: Counter[str], capacity: int) -> None:
    target = CudaTarget(NARROW, dummy_target(NARROW, Layout(), "cpu"), Layout(), Local())
    drafter = CudaDrafter(NARROW_DRAFT, dummy_drafter(NARROW_DRAFT, Layout(), "cpu"), Layout(), Local(), target)
    bucket = DraftBucket(2, 8, 8, capacity)
    drafter.reserve([bucket])
    draft, longs, live = drafter.bind(bucket), torch.zeros(2, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    keys, values = (torch.zeros(2, 3, capacity, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    recorded.clear()
    draft.propose(longs, longs, longs, keys, values, live)
    features = torch.zeros(9, 2 * 256, dtype=torch.bfloat16)
    draft.observe(features, torch.zeros(2, 8, dtype=torch.int64), longs, longs, longs + 1, longs, keys, values, live)
    assert recorded.total() == total(work.draft_launches(drafter.sizes, bucket, "sm_90a")) - 6
