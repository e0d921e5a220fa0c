"""`draft_attention`: limits by compiling, refusals, and on a GPU windows, poison and the law of the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood.kernels import check, jit
from draftwood.kernels.draft_attention import op, ref

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
LENGTHS = (0, 1, 7, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 319, 320, 321, 511, 512, 513, 1000, 2047, 2048, 2049, 70000)
SHAPES = [(8, 8, 128, 8), (1, 8, 128, 8), (8, 8, 128, 16), (1, 8, 128, 5), (2, 4, 64, 16), (1, 4, 64, 7), (2, 1, 128, 4)]
"""(kv heads, queries per kv head, head width, block)"""


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_variant_stays_within_limits(arch: str) -> None:
    mine = [variant for variant in op.variants() if arch in variant.archs]
    assert len(mine) == 2 * len(op.CLUSTERS)
    for variant in mine:
        check.check("draft_attention", variant, arch)


def test_a_launch_splits_only_when_it_is_small_and_says_what_it_needs() -> None:
    assert [op.cluster_of(rows, 8, 8, 8, 4096) for rows in (1, 2, 3, 4, 5)] == [8, 4, 4, 2, 1]
    assert op.cluster_of(1, 8, 8, 8, 128) == 1
    assert op.workspace_numel(1, 8, 8, 8, 2048, 128) == 8 * 16 * 64 * 130
    assert op.workspace_numel(128, 8, 8, 8, 2048, 128) == 0
    assert max(op.workspace_numel(r, 1, 8, 16, 4096, 128) for r in range(1, 129)) <= 64 * 32 * 64 * 2 * 130


def test_unfit_tensors_are_refused_in_one_line() -> None:
    ring, longs = torch.zeros(2, 64, 2, 64, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not divide into 2 groups"):
        op.draft_attention(torch.zeros(1, 4, 5, 64, dtype=BF16), ring, ring, longs, longs)
    with pytest.raises(ValueError, match="blocks of 17 have no kernel"):
        op.draft_attention(torch.zeros(1, 17, 12, 64, dtype=BF16), ring, ring, longs, longs)
    with pytest.raises(ValueError, match="lengths must be int64"):
        op.draft_attention(torch.zeros(1, 4, 12, 64, dtype=BF16), ring, ring, longs.int(), longs)


# --------------------------------------------------------------------------------------------------------- on a device


def _make(rows: int, kv_heads: int, share: int, d: int, block: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator(device="cuda").manual_seed(0)
    qkv = torch.randn(rows, block, (share + 2) * kv_heads, d, device="cuda", generator=made).to(BF16)
    rings = [torch.randn(rows + 3, capacity, kv_heads, d, device="cuda", generator=made).to(BF16) for _ in range(2)]
    return qkv, rings[0], rings[1]


def _poison(rings: tuple[Tensor, Tensor], lengths: Tensor, ids: Tensor) -> None:
    """NaN wherever no valid context is."""
    for ring in rings:
        kept = {int(i): ring[i, : int(n)].clone() for n, i in zip(lengths, ids, strict=True)}
        ring.fill_(float("nan"))
        for i, row in kept.items():
            ring[i, : row.shape[0]] = row


def _close(got: Tensor, want: Tensor) -> None:
    assert float((got.double() - want).abs().max() / want.abs().max()) < 1.2e-2


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(("kv_heads", "share", "d", "block"), SHAPES)
    @pytest.mark.parametrize("cluster", op.CLUSTERS)
    def test_results_are_the_float64_attention_whatever_unused_places_hold(
        self, kv_heads: int, share: int, d: int, block: int, cluster: int
    ) -> None:
        rows = len(LENGTHS)
        qkv, keys, values = _make(rows, kv_heads, share, d, block, 2048)
        lengths = torch.tensor(LENGTHS, device="cuda")
        ids = torch.randperm(rows + 3, device="cuda")[:rows].clone()
        _poison((keys, values), lengths.clamp(max=2048), ids)
        got = op.draft_attention(qkv, keys, values, lengths, ids, cluster=cluster)
        _close(got, ref.draft_attention(qkv.double(), keys, values, lengths, ids, torch.float64))

    @pytest.mark.parametrize(("kv_heads", "share", "d", "block"), SHAPES)
    def test_a_row_is_bitwise_the_same_alone_in_company_in_another_slot_and_split_or_not(
        self, kv_heads: int, share: int, d: int, block: int
    ) -> None:
        rows = len(LENGTHS)
        qkv, keys, values = _make(rows, kv_heads, share, d, block, 2048)
        lengths, ids = torch.tensor(LENGTHS, device="cuda"), torch.arange(rows, device="cuda")
        whole = op.draft_attention(qkv, keys, values, lengths, ids, cluster=1)
        for cluster in op.CLUSTERS[1:]:
            spread = op.draft_attention(qkv, keys, values, lengths, ids, cluster=cluster)
            assert torch.equal(spread.view(torch.int16), whole.view(torch.int16)), cluster
        order = torch.randperm(rows, device="cuda")
        moved_k, moved_v = keys.clone(), values.clone()
        moved_k[order], moved_v[order] = keys[:rows], values[:rows]
        again = op.draft_attention(qkv, moved_k, moved_v, lengths, order)
        assert torch.equal(again.view(torch.int16), whole.view(torch.int16))
        for row in range(rows):
            one = op.draft_attention(qkv[row : row + 1], keys, values, lengths[row : row + 1], ids[row : row + 1])
            assert torch.equal(one[0].view(torch.int16), whole[row].view(torch.int16)), LENGTHS[row]

    def test_a_query_does_not_depend_on_the_others_of_its_block(self) -> None:
        qkv, keys, values = _make(2, 8, 8, 128, 8, 2048)
        lengths, ids = torch.tensor([700, 5000], device="cuda"), torch.arange(2, device="cuda")
        want = op.draft_attention(qkv, keys, values, lengths, ids)
        changed = qkv.clone()
        changed[:, 1:, :64] = float("nan")
        got = op.draft_attention(changed, keys, values, lengths, ids)
        assert torch.equal(got[:, 0].view(torch.int16), want[:, 0].view(torch.int16))

    def test_rows_beyond_the_devices_count_are_neither_read_nor_written(self) -> None:
        qkv, keys, values = _make(4, 2, 4, 64, 16, 1024)
        lengths, ids = torch.tensor([[300, 2, 1 << 40, 1 << 40], [1, 0, 1 << 40, 1 << 40]], device="cuda")
        for cluster in op.CLUSTERS:
            out = torch.full((4, 16, 8, 64), 7, dtype=BF16, device="cuda")
            count = torch.tensor([2], dtype=torch.int32, device="cuda")
            op.draft_attention(qkv, keys, values, lengths, ids, out, rows=count, cluster=cluster)
            assert not out[:2].isnan().any() and bool((out[2:] == 7).all())

    def test_rings_past_two_to_the_31(self) -> None:
        qkv, _, _ = _make(1, 8, 8, 128, 8, 64)
        keys, values = (torch.empty(600, 4096, 8, 128, dtype=BF16, device="cuda") for _ in range(2))
        keys[599].normal_()
        values[599].normal_()
        lengths, ids = torch.tensor([4096], device="cuda"), torch.tensor([599], device="cuda")
        want = ref.draft_attention(qkv.double(), keys, values, lengths, ids, torch.float64)
        for cluster in op.CLUSTERS:
            _close(op.draft_attention(qkv, keys, values, lengths, ids, cluster=cluster), want)

    def test_a_thousand_replays_are_bitwise_equal(self) -> None:
        qkv, keys, values = _make(3, 8, 8, 128, 8, 2048)
        lengths, ids = torch.tensor([2000, 100, 9000], device="cuda"), torch.arange(3, device="cuda")
        scratch = torch.empty(op.workspace_numel(3, 8, 8, 8, 2048, 128), device="cuda")
        out = op.draft_attention(qkv, keys, values, lengths, ids, workspace=scratch)
        want = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.draft_attention(qkv, keys, values, lengths, ids, out, scratch)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            out.zero_()
            graph.replay()
            wrong += (out.view(torch.int16) != want.view(torch.int16)).sum()
        assert int(wrong) == 0
