"""`draft_attention`: the reference is the model's drafter; the kernels' own source, run on the CPU, is the reference."""

import functools

import pytest
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.draft_attention import op, ref
from draftwood.kernels.norm_rope import ref as norm_ref
from draftwood.kv.store import DraftStore
from draftwood.model import layers
from draftwood.model.config import DrafterConfig, RopeConfig
from draftwood.model.drafter import Context, DraftLayer
from draftwood.model.weights import DenseWeights, DrafterLayerWeights
from draftwood.parallel.comm import Local
from tests.kernels.emulate import COMPILER, Emulated

BF16 = torch.bfloat16
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
ROPE = RopeConfig(50000.0, 64.0, 4096, 32.0, 1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(device: int, d: int, cluster: int) -> tuple[op.Form, Emulated]:
        form = op.form(d, cluster, jit.SHARED_LIMIT["sm_90a"])
        return form, Emulated(form.source())

    monkeypatch.setattr(op, "_kernel", functools.cache(kernel))


def test_reference_is_the_models_layer_from_the_projection_to_the_heads_output() -> None:
    """Window of 8 places, three rows: empty, short and wrapped; float32 on both sides."""
    d, q_heads, kv_heads, block, capacity, hidden = 16, 4, 2, 5, 8, 32
    numbers = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=numbers)
    q, k, v = normal(q_heads * d, hidden), normal(kv_heads * d, hidden), normal(kv_heads * d, hidden)
    q_norm, k_norm, one = normal(d), normal(d), torch.ones(hidden)
    mlp = DenseWeights(normal(8, hidden), normal(8, hidden), normal(hidden, 8))
    weights = DrafterLayerWeights(one, one, q, k, v, torch.eye(q_heads * d), q_norm, k_norm, mlp)
    config = DrafterConfig(hidden, 1, q_heads, kv_heads, d, 8, 1e-5, ROPE, "yarn", 1.0, block, (0,), 1, 64, 2, 64)
    table = layers.rope_table(ROPE, d, 64, 1.0, "cpu")
    store = DraftStore(1, 4, capacity, kv_heads, d, torch.float32, "cpu")
    store.keys.normal_(generator=numbers)
    store.values.normal_(generator=numbers)
    lengths, ids = torch.tensor([0, 5, 19]), torch.tensor([3, 0, 1])
    x = normal(3 * block, hidden)
    at = (lengths[:, None] + torch.arange(block)).flatten()
    context = Context(store.rows(ids, lengths))
    layer = DraftLayer(weights, config, Local(), False)
    want = layer._attend(x, table[at].view(3, 1, block, -1), *context.layer(0), context)

    order = layers.halves_to_pairs(torch.arange(d), d).argsort()  # the model keeps its keys in pairs
    qkv = (x @ torch.cat((q, k, v)).T).view(3 * block, -1, d)
    turns = torch.view_as_real(table)
    queries = norm_ref.heads(qkv[:, :q_heads], q_norm, turns, at, 1e-5)
    keys = norm_ref.heads(qkv[:, q_heads : q_heads + kv_heads], k_norm, turns, at, 1e-5)
    joint = torch.cat((queries, keys, qkv[:, q_heads + kv_heads :]), 1).view(3, block, -1, d)
    got = ref.draft_attention(joint, store.keys[0][..., order], store.values[0], lengths, ids)
    torch.testing.assert_close(got.view(3 * block, -1), want, rtol=1e-4, atol=1e-5)


def _make(lengths: list[int], kv_heads: int, share: int, d: int, block: int, capacity: int) -> tuple[Tensor, ...]:
    """qkv, rings poisoned where no context is, lengths, ids."""
    numbers = torch.Generator().manual_seed(0)
    rows = len(lengths)
    qkv = torch.randn(rows, block, (share + 2) * kv_heads, d, generator=numbers).to(BF16)
    keys, values = (torch.full((rows + 2, capacity, kv_heads, d), float("nan"), dtype=BF16) for _ in range(2))
    ids = torch.randperm(rows + 2, generator=numbers)[:rows]
    for ring in (keys, values):
        for i, n in zip(ids.tolist(), lengths, strict=True):
            ring[i, :n] = torch.randn(min(n, capacity), kv_heads, d, generator=numbers).to(BF16)
    return qkv, keys, values, torch.tensor(lengths), ids


@emulated
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("kv_heads", "share", "d", "block"), [(1, 8, 128, 8), (2, 4, 64, 5), (1, 8, 64, 16), (1, 1, 64, 4)])
def test_split_and_whole_are_the_reference_and_give_the_same_bits(
    kv_heads: int, share: int, d: int, block: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if early:
        monkeypatch.setenv("EMULATED_EARLY", "1")
    lengths = [0, 1, 64, 257, 321, 1000] if early else [63, 256, 320, 513]
    inputs = _make(lengths, kv_heads, share, d, block, 600)
    qkv, keys, values, counts, ids = inputs
    whole = op.draft_attention(*inputs, cluster=1)
    want = ref.draft_attention(qkv.double(), keys, values, counts, ids, torch.float64)
    assert float((whole.double() - want).abs().max() / want.abs().max()) < 1.2e-2
    for cluster in (8, 2) if early else (8, 4):
        assert torch.equal(op.draft_attention(*inputs, cluster=cluster), whole), cluster
    for row in (1, len(lengths) - 1):
        alone = op.draft_attention(qkv[row : row + 1], keys, values, counts[row : row + 1], ids[row : row + 1])
        assert torch.equal(alone[0], whole[row])


@emulated
def test_rows_beyond_the_count_and_other_queries_do_not_matter() -> None:
    qkv, keys, values, lengths, ids = _make([300, 2, 5], 1, 4, 64, 6, 512)
    want = op.draft_attention(qkv, keys, values, lengths, ids)
    changed = qkv.clone()
    changed[:, 1:, :4] = float("nan")
    assert torch.equal(op.draft_attention(changed, keys, values, lengths, ids)[:, 0], want[:, 0])
    lengths[1:], ids[1:] = 1 << 40, 1 << 40
    for cluster in op.CLUSTERS:
        out = torch.full_like(want, 7)
        op.draft_attention(qkv, keys, values, lengths, ids, out, rows=torch.tensor([1], dtype=torch.int32), cluster=cluster)
        assert torch.equal(out[0], want[0]) and bool((out[1:] == 7).all())
