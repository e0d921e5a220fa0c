"""`norm_rope`: limits by compiling, refusals, and on a GPU rounding, positions, slots and the law of the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood.kernels import check, jit
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.norm_rope import op, ref

EPS = 1e-5
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_variant_stays_within_limits(arch: str) -> None:
    for variant in op.variants():
        check.check("norm_rope", variant, arch)


def test_turning_pairs_and_halves_are_the_same_rotation_of_reordered_values() -> None:
    x, angles = torch.randn(5, 3, 16), torch.rand(5, 1, 8)
    turns = torch.stack((angles.cos(), angles.sin()), -1)
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    turned = ref.turn_pairs(x, turns)
    assert torch.equal(ref.turn_halves(apart, turns), torch.cat((turned[..., 0::2], turned[..., 1::2]), -1))


def test_unfit_tensors_are_refused_in_one_line() -> None:
    x, weight = torch.zeros(2, 384, dtype=BF16), torch.zeros(384, dtype=BF16)
    with pytest.raises(ValueError, match="delta must be bf16"):
        op.add_norm(x, weight, EPS, delta=torch.zeros(3, 384, dtype=BF16))
    parts = op.Parts(torch.empty(7, 384), torch.empty(2, 4), x)
    with pytest.raises(ValueError, match="x as the residual, no index and a count of rows"):
        op.add_norm(x, weight, EPS, parts)
    with pytest.raises(ValueError, match=r"y must be float32 \[8, 384\]"):
        op.add_norm(x, weight, EPS, parts, residual=x, rows=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="index must be int64"):
        op.add_norm(x, weight, EPS, index=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="turns must be float32"):
        at, low, cache = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 112, dtype=BF16), torch.zeros(4, 112, dtype=BF16)
        op.turn_and_store(torch.zeros(2, 1, 16, dtype=BF16), low, low[0, :96], torch.zeros(4, 4, 2), at, at, cache, EPS)
    with pytest.raises(ValueError, match="heads of 48 values"):
        turns, one = torch.zeros(4, 24, 2), torch.zeros(48, dtype=BF16)
        op.head_norm_rope(torch.zeros(1, 2, 3, 48, dtype=BF16), one, one, turns, torch.zeros(1, dtype=torch.int64), 1, EPS)


# --------------------------------------------------------------------------------------------------------- on a device


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(seed)).to(BF16)


def _turns(positions: int, width: int) -> Tensor:
    angles = torch.arange(positions, device="cuda")[:, None] * 50000.0 ** -(torch.arange(0, width, 2, device="cuda") / width)
    return torch.stack((angles.cos(), angles.sin()), -1)


def _same(got: Tensor, want: Tensor) -> None:
    """Equal but for the order of one float32 sum: at most a unit in the last place, and rarely."""
    assert got.shape == want.shape
    close = (got.double() - want.double()).abs() <= 2.0**-7 * want.double().abs() + 1e-6
    assert bool(close.all())
    assert float((got != want).double().mean()) < 0.02


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def _count(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device="cuda")


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("width", op.WIDTHS)
    @pytest.mark.parametrize("n", [1, 7, 8, 9, 33, 65, 128])
    def test_norms_with_their_residual(self, width: int, n: int) -> None:
        x, delta, weight = _random(n, width), _random(n, width, seed=1), _random(width, seed=2)
        kept, taps = torch.empty_like(x), torch.zeros(n, 3 * width, dtype=BF16, device="cuda")
        got = op.add_norm(x, weight, EPS, delta, residual=kept, tap=taps[:, width : 2 * width])
        h, want = ref.add_norm(x, weight, EPS, delta)
        _same(got, want)
        assert torch.equal(kept, h) and torch.equal(taps[:, width : 2 * width], h)
        assert not taps[:, :width].any() and not taps[:, 2 * width :].any()
        alone = torch.cat([op.add_norm(x[i : i + 1], weight, EPS, delta[i : i + 1]) for i in range(n)])
        assert torch.equal(_bits(alone), _bits(got))
        again = x.clone()
        assert torch.equal(_bits(op.add_norm(again, weight, EPS, delta, residual=again)), _bits(got))
        assert torch.equal(again, h)

    @pytest.mark.parametrize("n", [1, 33, 132, 300])
    @pytest.mark.parametrize(("width", "topk"), op.SUMMED)
    def test_a_sum_over_experts_and_the_norm_after_it_have_the_bits_of_the_two(self, width: int, topk: int, n: int) -> None:
        y, weights = _random(n * topk, width).float() * 1.1, _random(n, topk, seed=1).float().abs()
        y[n * topk // 2], weights[n // 2, n * topk // 2 % topk] = float("nan"), 0
        x, shared, weight, rows = _random(n, width, seed=2), _random(n, width, seed=3), _random(width, seed=4), _count(n)
        combine = jit.Kernel(moe_op._combine_variant(moe_op.Shape(width, 128, topk)).source, 0)
        delta, kept, mine = torch.empty_like(x), x.clone(), x.clone()
        combine((n, -(-width // 1024)), 256, (y, weights, shared, rows, delta), pdl=True)
        want = op.add_norm(kept, weight, EPS, delta, residual=kept, rows=rows)
        tap = torch.zeros(n, 2 * width, dtype=BF16, device="cuda")
        got = op.add_norm(mine, weight, EPS, op.Parts(y, weights, shared), residual=mine, tap=tap[:, width:], rows=rows)
        assert torch.equal(_bits(got), _bits(want)) and torch.equal(_bits(mine), _bits(kept))
        assert torch.equal(tap[:, width:], kept) and not tap[:, :width].any()

    def test_rows_of_an_embedding_are_gathered_past_two_to_the_31(self) -> None:
        table = torch.empty(1 << 19, 7168, dtype=BF16, device="cuda")
        index = torch.tensor([(1 << 19) - 1, 0, 5, (1 << 19) - 1], device="cuda")
        table[index] = _random(4, 7168)
        weight = _random(7168, seed=1)
        _same(op.add_norm(table, weight, EPS, index=index), ref.add_norm(table, weight, EPS, index=index)[1])

    def test_rows_beyond_the_devices_count_do_not_matter_and_are_not_written(self) -> None:
        x, weight = _random(9, 7168), _random(7168)
        x[4:] = float("nan")
        out = torch.full_like(x, 7)
        op.add_norm(x, weight, EPS, out=out, rows=_count(4))
        assert not out[:4].isnan().any() and bool((out[4:] == 7).all())

    @pytest.mark.parametrize("widths", op.LATENTS)
    def test_latents_reach_their_slots_and_nothing_else(self, widths: tuple[int, int]) -> None:
        l, p = widths
        n = 65
        x, weight, turns, queries = _random(n, 40 + l + p)[:, 40:], _random(l, seed=2), _turns(4096, p), _random(n, 3, p)
        at = torch.randint(0, 4096, (n,), device="cuda")
        slots = torch.randperm(1000, device="cuda")[:n].clone()
        cache = torch.full((1000, l + p), 7, dtype=BF16, device="cuda")
        want = ref.latent(x, weight, turns, at, EPS)
        hidden = slots.clone()
        hidden[3] = -1
        op.turn_and_store(queries, x, weight, turns, at, hidden, cache, EPS)
        live = [i for i in range(n) if i != 3]
        _same(cache[slots[live]], want[live])
        untouched = torch.ones(1000, dtype=torch.bool, device="cuda")
        untouched[slots[live]] = False
        assert bool((cache[untouched] == 7).all())
        for i in (0, 5, 64):
            other = torch.zeros_like(cache)
            op.turn_and_store(queries[:1], x[i : i + 1], weight, turns, at[i : i + 1], slots[:1], other, EPS)
            assert torch.equal(_bits(other[slots[0]]), _bits(cache[slots[i]]))

    def test_slots_past_two_to_the_31(self) -> None:
        l, p = 512, 64
        x, weight, turns = _random(2, l + p), _random(l, seed=2), _turns(64, p)
        cache = torch.empty(4_000_000, l + p, dtype=BF16, device="cuda")
        slots, at = torch.tensor([3_999_999, 0], device="cuda"), torch.tensor([63, 1], device="cuda")
        op.turn_and_store(_random(2, 64, p), x, weight, turns, at, slots, cache, EPS)
        _same(cache[slots], ref.latent(x, weight, turns, at, EPS))

    def test_rotary_parts_of_queries_are_turned_exactly(self) -> None:
        for heads, nope, latent, p in ((64, 128, 512, 64), (8, 128, 512, 64), (1, 32, 96, 16), (8, 32, 96, 16)):
            x, turns, at = _random(33, heads, nope + p), _turns(512, p), torch.randint(0, 512, (33,), device="cuda")
            low, weight, cache = _random(33, latent + p), _random(latent), torch.zeros(33, latent + p, dtype=BF16, device="cuda")
            want = ref.turn_pairs(x[..., nope:], ref.at_positions(turns, at).unsqueeze(1))
            rest, last = x[..., :nope].clone(), x[30:].clone()
            slots = torch.arange(33, device="cuda")
            op.turn_and_store(x[..., nope:], low, weight, turns, at, slots, cache, EPS, rows=_count(30))
            assert torch.equal(x[:30, :, nope:], want[:30]) and torch.equal(x[..., :nope], rest) and torch.equal(x[30:], last)
            assert not cache[30:].any() and bool(cache[:30].any(1).all())

    @pytest.mark.parametrize("pairs", [False, True])
    @pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(64, 8, 128), (8, 1, 128), (8, 2, 64), (1, 1, 64)])
    def test_heads_are_normed_and_turned_by_their_own_positions(self, q_heads: int, kv_heads: int, d: int, pairs: bool) -> None:
        r, block = 5, 7
        qkv, wq, wk, turns = _random(r, block, q_heads + 2 * kv_heads, d), _random(d, seed=1), _random(d, seed=2), _turns(100, d)
        lengths = torch.tensor([0, 1, 50, 95, 99], device="cuda")
        at = (lengths[:, None] + torch.arange(block, device="cuda")).flatten()
        flat = qkv.flatten(0, 1)
        queries = ref.heads(flat[:, :q_heads], wq, turns, at, EPS, pairs)
        keys = ref.heads(flat[:, q_heads : q_heads + kv_heads], wk, turns, at, EPS, pairs)
        got = op.head_norm_rope(qkv.clone(), wq, wk, turns, lengths, kv_heads, EPS, pairs)
        _same(got.flatten(0, 1), torch.cat((queries, keys, flat[:, q_heads + kv_heads :]), 1))
        alone = op.head_norm_rope(qkv[2:3].clone(), wq, wk, turns, lengths[2:3].contiguous(), kv_heads, EPS, pairs)
        assert torch.equal(_bits(alone[0]), _bits(got[2]))

    @pytest.mark.parametrize("pairs", [False, True])
    @pytest.mark.parametrize(("layers", "kv_heads", "d", "capacity"), [(6, 8, 128, 32), (6, 1, 128, 7), (3, 2, 64, 32)])
    def test_accepted_tokens_reach_the_ring_and_nothing_else(
        self, layers: int, kv_heads: int, d: int, capacity: int, pairs: bool
    ) -> None:
        r, path = 4, 9
        kv, weights, turns = _random(r, path, 2, layers, kv_heads, d), _random(layers, d, seed=1), _turns(200, d)
        kv[1, 3:] = float("nan")
        lengths, counts = torch.tensor([0, 30, 100, 191], device="cuda"), torch.tensor([9, 3, 0, 9], device="cuda")
        ids = torch.tensor([5, 0, 3, 2], device="cuda")
        keys = torch.full((layers, 6, capacity, kv_heads, d), 7, dtype=BF16, device="cuda")
        values = keys.clone()
        want_k, want_v = keys.clone(), values.clone()
        ref.ring_write(kv, weights, turns, lengths, counts, ids, want_k, want_v, EPS, pairs)
        op.ring_write(kv, weights, turns, lengths, counts, ids, keys, values, EPS, pairs)
        _same(keys, want_k)
        assert torch.equal(values, want_v)
        op.ring_write(kv, weights, turns, lengths, counts, ids, want_k, want_v, EPS, pairs, rows=_count(0))

    def test_a_thousand_replays_are_bitwise_equal(self) -> None:
        x, weight, turns, queries = _random(33, 2112), _random(1536, seed=1), _turns(64, 64), _random(33, 64, 192)
        lw, at, slots = _random(512, seed=2), torch.arange(33, device="cuda"), torch.arange(33, device="cuda")
        cache, turned, out = torch.zeros(33, 576, dtype=BF16, device="cuda"), queries.clone(), torch.zeros_like(x[:, :1536])

        def run() -> Tensor:
            turned.copy_(queries)
            op.add_norm(x[:, :1536], weight, EPS, out=out)
            op.turn_and_store(turned[..., 128:], x[:, 1536:], lw, turns, at, slots, cache, EPS)
            return torch.cat((out, cache, turned.flatten(1)), 1)

        want = run().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            cache.zero_()
            graph.replay()
            wrong += (_bits(got) != _bits(want)).sum()
        assert int(wrong) == 0
