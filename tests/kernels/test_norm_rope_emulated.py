"""`norm_rope`: the reference means what the model's layers mean; the kernels' own source, run on the CPU, is the reference."""

import functools

import pytest
import torch
from torch import Tensor

from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.norm_rope import op, ref
from draftwood.model import layers
from draftwood.model.config import RopeConfig
from tests.kernels.emulate import COMPILER, Emulated

BF16, EPS = torch.bfloat16, 1e-5
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
ROPE = RopeConfig(50000.0, 64.0, 4096, 32.0, 1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def rope_kernel(device: int, entry: str, macros: tuple[tuple[str, int], ...]) -> Emulated:
        return Emulated(op._rope_source(entry, **dict(macros)))

    monkeypatch.setattr(op, "_kernel", functools.cache(lambda device, make, *given: Emulated(make(*given))))
    monkeypatch.setattr(op, "_rope_kernel", functools.cache(rope_kernel))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _count(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32)


def _turns(positions: int, width: int, amplitude: float = 1.0) -> Tensor:
    return torch.view_as_real(layers.rope_table(ROPE, width, positions, amplitude, "cpu"))


def _same(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of one float32 sum: at most a unit in the last place, and rarely."""
    assert got.shape == want.shape
    assert bool(((got.double() - want.double()).abs() <= 2.0**-7 * want.double().abs() + 1e-6).all())
    assert float((got != want).double().mean()) < 0.02


# --------------------------------------------------------------------------------------------- the model's own meaning


def test_norms_and_rotations_are_the_models() -> None:
    for dtype in (BF16, torch.float32):
        x, weight = _random(9, 4, 64).to(dtype), _random(64, seed=1).to(dtype)
        assert torch.equal(ref.rms_norm(x, weight, EPS), layers.rms_norm(x, weight, EPS))
        table = layers.rope_table(ROPE, 64, 300_000, 1.4, "cpu")
        at = torch.tensor([0, 1, 5, 4095, 4096, 65_536, 262_143, 299_999, 77])
        turns, turn = torch.view_as_real(table)[at].unsqueeze(1), table[at].unsqueeze(1)
        torch.testing.assert_close(ref.turn_pairs(x, turns), layers.rotate_pairs_(x.clone(), turn), rtol=1e-2, atol=1e-6)
        torch.testing.assert_close(ref.turn_halves(x, turns), layers.rotate_half(x, turn), rtol=1e-2, atol=1e-6)


def test_heads_in_pairs_are_the_drafters_reordered_heads() -> None:
    x, weight, turns, at = _random(6, 3, 64), _random(64, seed=1), _turns(100, 64), torch.arange(6) * 9
    halves = ref.heads(x, weight, turns, at, EPS)
    order = layers.halves_to_pairs(torch.arange(64), 64)
    assert torch.equal(ref.heads(x[..., order], weight[order], turns, at, EPS, pairs=True), halves[..., order])


# ------------------------------------------------------------------------------------------------ the kernels' own source


@emulated
@pytest.mark.parametrize("width", [384, 7168])
def test_norm_adds_keeps_and_gathers(width: int) -> None:
    x, delta, weight = _random(3, width), _random(3, width, seed=1), _random(width, seed=2)
    kept, taps = torch.empty_like(x), torch.zeros(3, 2 * width, dtype=BF16)
    h, want = ref.add_norm(x, weight, EPS, delta)
    _same(op.add_norm(x, weight, EPS, delta, residual=kept, tap=taps[:, width:]), want)
    assert torch.equal(kept, h) and torch.equal(taps[:, width:], h) and not taps[:, :width].any()
    index = torch.tensor([2, 0, 2, 1])
    _same(op.add_norm(x, weight, EPS, index=index), ref.add_norm(x, weight, EPS, index=index)[1])
    again = x.clone()
    out = torch.full_like(x, 7)
    op.add_norm(again, weight, EPS, delta, residual=again, out=out, rows=torch.tensor([2], dtype=torch.int32))
    _same(out[:2], want[:2])
    assert torch.equal(again[:2], h[:2]) and torch.equal(again[2], x[2]) and bool((out[2] == 7).all())


@emulated
@pytest.mark.parametrize("widths", op.LATENTS)
def test_latents_reach_their_slots_and_nothing_else(widths: tuple[int, int]) -> None:
    l, p = widths
    x, weight, turns, queries = _random(5, 24 + l + p)[:, 24:], _random(l, seed=2), _turns(64, p), _random(5, 2, p)
    at, slots = torch.tensor([0, 63, 5, 9, 1 << 40]), torch.tensor([7, 0, -1, 3, 5])
    cache = torch.full((9, l + p), 7, dtype=BF16)
    want = ref.latent(x, weight, turns, at, EPS)
    op.turn_and_store(queries, x, weight, turns, at, slots, cache, EPS)
    live = [0, 1, 3, 4]
    _same(cache[slots[live]], want[live])
    assert bool((cache[[1, 2, 4, 6, 8]] == 7).all())


@emulated
def test_rotary_parts_of_queries_are_turned_exactly() -> None:
    for heads, nope, l, p in ((8, 32, 96, 16), (20, 8, 512, 64)):
        x, turns, at = _random(4, heads, nope + p), _turns(512, p), torch.tensor([0, 511, 9, 100])
        want = ref.turn_pairs(x[..., nope:], ref.at_positions(turns, at).unsqueeze(1))
        low, weight, cache = _random(4, l + p), _random(l, seed=1), torch.full((4, l + p), 7, dtype=BF16)
        turned, live = x.clone(), torch.tensor([3], dtype=torch.int32)
        op.turn_and_store(turned[..., nope:], low, weight, turns, at, torch.arange(4), cache, EPS, rows=live)
        assert torch.equal(turned[:3, :, nope:], want[:3]) and torch.equal(turned[3], x[3])
        assert torch.equal(turned[..., :nope], x[..., :nope])
        _same(cache[:3], ref.latent(low, weight, turns, at, EPS)[:3])
        assert bool((cache[3] == 7).all())


@emulated
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(8, 1, 128), (8, 2, 64), (1, 1, 64)])
def test_heads_are_normed_and_turned_by_their_own_positions(q_heads: int, kv_heads: int, d: int, pairs: bool) -> None:
    qkv, wq, wk, turns = _random(3, 5, q_heads + 2 * kv_heads, d), _random(d, seed=1), _random(d, seed=2), _turns(100, d)
    lengths = torch.tensor([0, 50, 97])
    at, flat = (lengths[:, None] + torch.arange(5)).flatten(), qkv.flatten(0, 1)
    queries = ref.heads(flat[:, :q_heads], wq, turns, at, EPS, pairs)
    keys = ref.heads(flat[:, q_heads : q_heads + kv_heads], wk, turns, at, EPS, pairs)
    got = op.head_norm_rope(qkv.clone(), wq, wk, turns, lengths, kv_heads, EPS, pairs)
    _same(got.flatten(0, 1), torch.cat((queries, keys, flat[:, q_heads + kv_heads :]), 1))


@emulated
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("layers_", "kv_heads", "d", "capacity"), [(2, 1, 128, 7), (3, 2, 64, 32)])
def test_accepted_tokens_reach_the_ring_and_nothing_else(layers_: int, kv_heads: int, d: int, capacity: int, pairs: bool) -> None:
    kv, weights, turns = _random(4, 9, 2, layers_, kv_heads, d), _random(layers_, d, seed=1), _turns(200, d)
    kv[1, 3:] = float("nan")
    lengths, counts, ids = torch.tensor([0, 30, 100, 191]), torch.tensor([9, 3, 0, 9]), torch.tensor([5, 0, 3, 2])
    keys = torch.full((layers_, 6, capacity, kv_heads, d), 7, dtype=BF16)
    values, want_k, want_v = keys.clone(), keys.clone(), keys.clone()
    ref.ring_write(kv, weights, turns, lengths, counts, ids, want_k, want_v, EPS, pairs)
    op.ring_write(kv, weights, turns, lengths, counts, ids, keys, values, EPS, pairs)
    _same(keys, want_k)
    assert torch.equal(values, want_v)


@emulated
@pytest.mark.parametrize(("width", "topk"), [*op.SUMMED, (1536, 3), (384, 10)])
def test_a_sum_over_experts_and_the_norm_after_it_have_the_bits_of_the_two(width: int, topk: int) -> None:
    n, live = 5, 4
    y, weights = _random(n * topk, width).float() * 1.1, _random(n, topk, seed=1).float().abs()
    y[2], weights[0, 2] = float("nan"), 0
    x, shared, weight, rows = _random(n, width, seed=2), _random(n, width, seed=3), _random(width, seed=4), _count(live)
    combine = Emulated(moe_op._combine_variant(moe_op.Shape(width, 128, topk)).source)
    delta = torch.full_like(x, 7)
    combine((n, -(-width // 1024)), 256, (y, weights, shared, rows, delta))
    kept, taps, want = x.clone(), torch.full((n, 2 * width), 7, dtype=BF16), torch.full_like(x, 7)
    op.add_norm(kept, weight, EPS, delta, residual=kept, tap=taps[:, :width], rows=rows, out=want)
    mine, tapped, got = x.clone(), torch.full_like(taps, 7), torch.full_like(x, 7)
    op.add_norm(mine, weight, EPS, op.Parts(y, weights, shared), residual=mine, tap=tapped[:, :width], rows=rows, out=got)
    assert torch.equal(mine, kept) and torch.equal(tapped, taps) and torch.equal(got, want)
