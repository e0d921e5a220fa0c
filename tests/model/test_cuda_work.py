"""The formulas of model.cuda.work against what is allocated and launched, on the CPU; and dummy weights."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from draftwood.kernels.draft_attention import op as draft_op
from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear import plan as linear_plan
from draftwood.kernels.moe_int4 import repack
from draftwood.kernels.moe_route import op as route_op
from draftwood.model.config import K2_6, K2_6_DRAFT, ModelConfig, read_drafter_config, read_model_config
from draftwood.model.costs import total
from draftwood.model.cuda import dummy, pack, work
from draftwood.model.cuda.bucket import Bucket, DraftBucket
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.dummy import dummy_drafter, dummy_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.cuda_tools import Memory, Row, Step, chain

FULL, FULL_DRAFT = read_model_config(K2_6), read_drafter_config(K2_6_DRAFT)
NARROW = replace(
    FULL, hidden_size=256, num_layers=3, num_heads=8, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16,
    v_head_dim=32, num_experts=16, experts_per_token=2, moe_intermediate_size=96, intermediate_size=320, vocab_size=512,
    max_position=2048,
)  # fmt: skip
NARROW_DRAFT = replace(
    FULL_DRAFT, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=192, taps=(0, 2),
    vocab_size=512, num_target_layers=3, mask_token_id=500, block_size=8, max_position=2048,
)  # fmt: skip


def held(x: object) -> int:
    """Bytes of all tensors in a record."""
    if isinstance(x, Tensor):
        return x.nbytes
    return sum(held(getattr(x, f.name)) for f in fields(x)) if is_dataclass(x) else 0


def made(config: ModelConfig = NARROW, layout: Layout | None = None) -> CudaTarget:
    layout = layout or Layout()
    return CudaTarget(config, dummy_target(config, layout, "cpu"), layout, Local(), (0, 2))


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 3)], ids=["alone", "one of four"])
def test_weights_are_what_the_formulas_say(layout: Layout) -> None:
    target = dummy_target(NARROW, layout, "cpu")
    table = dict(work.target_bytes(NARROW, layout, positions=100))
    assert table.pop("rotations") == 100 * 8 * 8
    assert pack.nbytes(target) == sum(table.values())
    drafter = dummy_drafter(NARROW_DRAFT, layout, "cpu")
    table = dict(work.drafter_bytes(NARROW_DRAFT, layout, positions=100))
    assert table.pop("drafter rotations") == 100 * 32 * 8
    assert pack.nbytes(drafter) == sum(table.values())


@pytest.mark.parametrize("fed", [True, False])
def test_workspaces_are_what_the_formulas_say(cuda_refs: Calls, monkeypatch: pytest.MonkeyPatch, fed: bool) -> None:  # noqa: F811
    monkeypatch.setattr(linear_plan, "FED", fed)
    ours = made()
    buckets = [Bucket.of(3, 8, 900), Bucket(2, 64, 70, 2, 1500), Bucket.of(16, 0, 100)]
    ours.reserve(buckets)
    assert held(ours.work) == total(work.workspace_bytes(ours.sizes, buckets, "sm_90a"))
    drafter = CudaDrafter(NARROW_DRAFT, dummy_drafter(NARROW_DRAFT, Layout(), "cpu"), Layout(), Local(), ours)
    drafts = [DraftBucket(2, 8, 8, 512), DraftBucket(5, 4, 3, 512), DraftBucket(1, 5, 65, 2048)]
    drafter.reserve(drafts)
    assert held(drafter.work) == total(work.draft_workspace_bytes(drafter.sizes, drafts, "sm_90a"))


@pytest.mark.parametrize("bucket", [Bucket.of(1, 0, 64), Bucket.of(2, 8, 64), Bucket(3, 60, 60, 2, 64)], ids=str)
def test_launches_are_what_the_formula_says(cuda_refs: Calls, bucket: Bucket) -> None:  # noqa: F811
    ours, chosen = made(), bucket.verified < bucket.tokens
    ours.reserve([bucket])
    memory = Memory(NARROW, 1, 2, "cpu")
    index = (torch.zeros(bucket.verified, dtype=torch.int64), torch.ones(1, dtype=torch.int32)) if chosen else None
    forward = ours.bind(bucket)
    cuda_refs.clear()
    Step.make(bucket, [Row(0, 0, [5], chain(1))], memory).run(forward, memory.cache, index)
    assert dict(cuda_refs.launches) == dict(work.launches(ours.sizes, bucket, "sm_90a", chosen))


@pytest.mark.parametrize(("rows", "want"), [(n, "up route down" if n <= 128 else "route up route down") for n in (1, 128, 129)])
def test_a_router_beside_the_shared_expert_follows_what_waits_for_the_norm(
    cuda_refs: Calls, monkeypatch: pytest.MonkeyPatch, rows: int, want: str  # noqa: F811
) -> None:
    """Between its two products, the second of which waits for the router and so for the first; scores of many rows go ahead."""
    ours, seen = made(), []
    shared = ours.packed.layers[1].mlp.shared
    names = {id(shared.gate_up): "up", id(shared.down): "down"}
    linear, route = linear_op.linear, route_op.route

    def watched(x: Tensor, weight: linear_op.Weight, *args: object, **given: object) -> Tensor:
        seen.append(names.get(id(weight), "-"))
        return linear(x, weight, *args, **given)

    def routed(x: Tensor, given: route_op.Router, *args: object, **more: object) -> None:
        seen.append("route" if given is ours.packed.layers[1].mlp.router else "-")
        route(x, given, *args, **more)

    monkeypatch.setattr(linear_op, "linear", watched)
    monkeypatch.setattr(route_op, "route", routed)
    bucket, memory = Bucket.of(rows, 0, 64), Memory(NARROW, 1, 2, "cpu")
    ours.reserve([bucket])
    Step.make(bucket, [Row(0, 0, [5], chain(1))], memory).run(ours.bind(bucket), memory.cache)
    assert [name for name in seen if name != "-"] == want.split()
    at = [i for i, name in enumerate(seen) if name != "-"]
    assert at == list(range(at[0], at[0] + len(at)))  # nothing that waits comes between


def test_draft_launches_are_what_the_formula_says(cuda_refs: Calls) -> None:  # noqa: F811
    ours = made()
    drafter = CudaDrafter(NARROW_DRAFT, dummy_drafter(NARROW_DRAFT, Layout(), "cpu"), Layout(), Local(), ours)
    for bucket in (DraftBucket(2, 8, 8, 512), DraftBucket(2, 8, 8, 128)):
        drafter.reserve([bucket])
        draft = drafter.bind(bucket)
        shape = (2, 3, bucket.capacity, 2, 64)
        keys, values = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
        longs = torch.zeros(2, dtype=torch.int64)
        cuda_refs.clear()
        live = torch.ones(1, dtype=torch.int32)
        draft.propose(longs, longs, longs, keys, values, live)
        features = torch.zeros(9, 2 * 256, dtype=torch.bfloat16)
        draft.observe(features, torch.zeros(2, 8, dtype=torch.int64), longs, longs, longs + 1, longs, keys, values, live)
        want = dict(work.draft_launches(drafter.sizes, bucket, "sm_90a"))
        assert want.pop("torch") == 6
        assert dict(cuda_refs.launches) == want


def test_constants_are_the_kernels() -> None:
    assert (work.MOST_ROUTED, work.WHOLE_ROWS) == (route_op.MOST_ROWS, route_op.WHOLE_ROWS)
    assert (work.MOST_ROUTED_TO_FEW, work.FEW_HELD) == (route_op.MOST_ROWS_TO_FEW, route_op.FEW_HELD)
    assert work.TICKETS == 1 + route_op.WHOLE_ROWS // route_op.WHOLE_BLOCK
    assert work.padded(1) == repack.WIDTH_MULTIPLE
    assert (draft_op.CHUNK, draft_op.QUERIES, draft_op.SPLITS[-1][0]) == (work.DRAFT_CHUNK, work.DRAFT_QUERIES, work.DRAFT_SPLIT)
    for world in (1, 8):
        sizes = work.DraftSizes(FULL_DRAFT, Layout(world, 1, 0), 1)
        for rows in (1, 4, 8, 64):
            for capacity in (256, 2048):
                share = sizes.q_heads // sizes.kv_heads
                want = draft_op.workspace_numel(rows, sizes.kv_heads, share, 8, capacity, 128)
                assert sizes.partial_floats(DraftBucket(rows, 8, 8, capacity)) == want


@pytest.mark.parametrize("tokens", [1, 7, 1024, 1025, 4224, 8320])
def test_chunks_cover_all_nodes_once(tokens: int) -> None:
    for held, most in ((48, 2304), (96, 2304), (97, 1024), (384, 1024)):
        parts = work.chunks(tokens, held)
        assert [i for part in parts for i in part] == list(range(tokens)) and max(map(len, parts)) <= most
        assert len(parts) == -(-tokens // most) and {len(part) for part in parts[:-1]} <= {len(parts[0])}


def test_k26_on_one_gpu() -> None:
    """48 of 384 experts: what issue 4 measures. Experts 71 GB, the rest 23 GB; a layer of one row 15 launches."""
    config = replace(FULL, num_experts=48)
    table = dict(work.target_bytes(config, Layout(), 8192))
    assert table["experts"] == 60 * 48 * 24_772_608
    assert 94e9 < sum(table.values()) < 95e9
    sizes = work.Sizes(config, Layout(), 6)
    one = dict(work.launches(sizes, Bucket.of(1, 0, 4096), "sm_90a"))
    assert sum(one.values()) == 60 * 15 + 12 + 3


def test_dummy_weights_have_the_variance_of_their_inputs_and_do_not_repeat() -> None:
    target = dummy_target(NARROW, Layout(), "cpu", seed=3)
    mlp = target.layers[2].mlp
    assert isinstance(mlp, pack.PackedMoE)
    gate, up, down = repack.expert(mlp.experts, 5, torch.float32)
    for weight, size in ((gate, 1.0), (up, 1.0), (down, dummy._ADDED)):
        assert abs(float(weight.square().mean()) * weight.shape[1] / size**2 - 1) < 0.05
        assert len(weight.unique()) == 15
    assert not torch.equal(mlp.experts.gate_up[0], mlp.experts.gate_up[1])
    other = dummy_target(NARROW, Layout(2, 2, 3), "cpu", seed=3)
    assert torch.equal(other.embed, target.embed) and torch.equal(other.layers[1].down.data, target.layers[1].down.data)
