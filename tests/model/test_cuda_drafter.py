"""The CUDA drafter on the CPU, by its kernels' references, beside `model.drafter`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood import nano
from draftwood.model.config import DrafterConfig, read_drafter_config, read_model_config
from draftwood.model.cuda.bucket import DraftBucket
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.pack import pack_drafter, pack_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.model.drafter import Drafter
from draftwood.model.weights import DrafterWeights, dummy_drafter, dummy_target, load_drafter, load_target
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.model.test_cuda_target import cast
from tests.model.test_cuda_work import NARROW, NARROW_DRAFT
from tests.model.tools import Window, shake

CAPACITY, RINGS = 24, 5


def pair(name: str = "nano") -> tuple[CudaDrafter, Drafter]:
    """The CUDA drafter in bfloat16, and model.drafter in float32 from the same weights: nano's, or random ones of a narrow K2."""
    config, draft = (NARROW, NARROW_DRAFT) if name == "narrow" else (read_model_config(nano.path()), nano_draft())
    if name == "narrow":
        weights = dummy_target(config, Layout(), torch.bfloat16, "cpu", seed=3)
    else:
        weights = load_target(nano.path(), config, Layout(), torch.bfloat16, "cpu")

    def own(dtype: torch.dtype) -> DrafterWeights:
        if name == "nano":
            return load_drafter(nano.path() / "draft", draft, Layout(), dtype, "cpu")
        made = dummy_drafter(draft, Layout(), torch.bfloat16, "cpu", seed=7)
        shake(made, 9)
        return cast(made, dtype)

    embed, head = weights.embed.float(), weights.lm_head.float()
    target = CudaTarget(config, pack_target(config, weights, "cpu"), Layout(), Local())
    ours = CudaDrafter(draft, pack_drafter(draft, own(torch.bfloat16), "cpu"), Layout(), Local(), target)
    return ours, Drafter(draft, own(torch.float32), Layout(), Local(), embed, head, torch.float32)


def nano_draft() -> DrafterConfig:
    return read_drafter_config(nano.path() / "draft")


def rings(drafter: CudaDrafter) -> tuple[Tensor, Tensor]:
    """Rings whose every place is NaN."""
    c = drafter.config
    shape = (c.num_layers, RINGS, CAPACITY, drafter.kv_heads, c.head_dim)
    return torch.full(shape, torch.nan, dtype=torch.bfloat16), torch.full(shape, torch.nan, dtype=torch.bfloat16)


def taps(n: int, drafter: CudaDrafter, seed: int) -> Tensor:
    width = len(drafter.config.taps) * drafter.config.hidden_size
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def poison(drafter: CudaDrafter) -> None:
    assert drafter.work is not None
    for value in vars(drafter.work).values():
        value.fill_(torch.nan)


def near(ours: Tensor, theirs: Tensor, share: float) -> None:
    distance = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    assert torch.isfinite(ours).all() and float(distance.max()) < share, distance


def observed(ours: CudaDrafter, bucket: DraftBucket, features: Tensor, keys: Tensor, values: Tensor, live: int = 2) -> None:
    """Two rows in rings 3 and 1: 30 nodes of a chain from position 0 on, and a path of 3 in a tree from position 2 on."""
    path = torch.full((bucket.rows, bucket.path), -1)
    path[0, :30], path[1, :3] = torch.arange(30), torch.tensor([0, 2, 5])
    starts, lengths, counts, ids = (
        torch.tensor([0, 30, 1 << 40]),
        torch.tensor([0, 2, 7]),
        torch.tensor([30, 3, 9]),
        torch.tensor([3, 1, 2]),
    )
    ours.bind(bucket).observe(features, path, starts, lengths, counts, ids, keys, values, torch.tensor([live], dtype=torch.int32))


@pytest.mark.parametrize("name", ["nano", "narrow"])
def test_observed_context_and_proposals_are_the_reference_s(cuda_refs: Calls, name: str) -> None:  # noqa: F811
    ours, theirs = pair(name)
    bucket = DraftBucket(3, 8, 32, CAPACITY)
    ours.reserve([bucket, DraftBucket(6, 8, 4, CAPACITY)])
    poison(ours)
    keys, values = rings(ours)
    features = taps(40, ours, 1)
    observed(ours, bucket, features, keys, values)
    window = Window.make(theirs, [3, 1], [0, 2], CAPACITY, RINGS)
    grid = torch.zeros(2, 30, features.shape[1])
    grid[0], grid[1, :10] = features[:30].float(), features[30:].float()
    positions = torch.stack((torch.arange(30), torch.tensor([2, 3, 3, 4, 4, 4] + [0] * 24)))
    path = torch.full((2, 30), -1)
    path[0], path[1, :3] = torch.arange(30), torch.tensor([0, 2, 5])
    theirs.observe(grid, positions, path, window)
    real = ~window.keys.isnan().any(-1)
    assert torch.equal(real, ~keys.isnan().any(-1)) and real.any()
    near(keys[real], window.keys[real], 0.03)
    near(values[real], window.values[real], 0.03)
    window.keys.nan_to_num_()
    window.values.nan_to_num_()
    lengths, roots, ids = torch.tensor([30, 5, 9]), torch.tensor([17, 400, 1 << 40]), torch.tensor([3, 1, 2])
    keys[:, 1, :2] = values[:, 1, :2] = 0
    live = torch.tensor([2], dtype=torch.int32)
    logits = ours.bind(bucket).propose(roots, lengths, ids, keys, values, live)
    window.lengths = lengths[:2]
    near(logits[:2], theirs.propose(roots[:2], window, 8), 0.05)
    assert logits[2].isnan().all()


def test_a_row_s_proposal_does_not_depend_on_the_others(cuda_refs: Calls) -> None:  # noqa: F811
    ours, _ = pair()
    wide, alone = DraftBucket(3, 8, 32, CAPACITY), DraftBucket(1, 8, 32, CAPACITY)
    ours.reserve([wide])
    keys, values = rings(ours)
    observed(ours, wide, taps(40, ours, 1), keys, values)
    roots, lengths, ids = torch.tensor([9, 17, 5]), torch.tensor([30, 30, 30]), torch.tensor([3, 3, 3])
    many = ours.bind(wide).propose(roots, lengths, ids, keys, values, torch.tensor([3], dtype=torch.int32)).clone()
    for row in range(3):
        part = slice(row, row + 1)
        one = ours.bind(alone).propose(roots[part], lengths[part], ids[part], keys, values, torch.tensor([1], dtype=torch.int32))
        assert torch.equal(one[0], many[row])


def test_a_block_beyond_the_trained_one_is_refused(cuda_refs: Calls) -> None:  # noqa: F811
    ours, _ = pair()
    with pytest.raises(ValueError, match="block 17"):
        ours.reserve([DraftBucket(1, 17, 17, CAPACITY)])
    ours.reserve([DraftBucket(1, 8, 8, CAPACITY)])
    with pytest.raises(ValueError, match="beyond the workspace"):
        ours.bind(DraftBucket(2, 8, 8, CAPACITY))
