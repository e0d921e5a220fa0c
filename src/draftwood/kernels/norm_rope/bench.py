"""Benchmark cases of the norm and rotary kernels at K2.6's widths."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from draftwood.kernels.case import Case, Run
from draftwood.kernels.norm_rope import op, ref

ROWS = (1, 9, 33, 65, 128)
CALLS = 20
EPS = 1e-5
HIDDEN, Q, L, P, HEADS, NOPE = 7168, 1536, 512, 64, 64, 128
D, Q_HEADS, KV_HEADS, LAYERS, CAPACITY = 128, 64, 8, 6, 4096
POSITIONS = 1 << 18


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device=device).manual_seed(3)).to(torch.bfloat16)


def _turns(device: torch.device, width: int) -> Tensor:
    angles = torch.arange(POSITIONS, device=device)[:, None] * 50000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    return torch.stack((angles.cos(), angles.sin()), -1)


def _positions(device: torch.device, n: int) -> Tensor:
    return torch.randint(0, POSITIONS, (n,), device=device, generator=torch.Generator(device=device).manual_seed(4))


def _run(launch: Callable[[], object], got: Callable[[], Tensor], want: Tensor) -> Run:
    def several() -> None:
        for _ in range(CALLS):
            launch()

    def error() -> float:
        return float((got().double() - want.double()).abs().max() / want.double().abs().max())

    return Run(several, error, CALLS)


def _add_norm(n: int, device: torch.device) -> Run:
    x, delta, weight = _random(device, n, HIDDEN), _random(device, n, HIDDEN), _random(device, HIDDEN)
    out, kept = torch.empty_like(x), torch.empty_like(x)
    want = ref.add_norm(x, weight, EPS, delta)[1]
    return _run(lambda: op.add_norm(x, weight, EPS, delta, residual=kept, out=out), lambda: out, want)


def _turn(n: int, device: torch.device) -> Run:
    """Queries are turned again by every timed call; the error is of the cache."""
    x, weight, turns = _random(device, n, Q + L + P)[:, Q:], _random(device, L), _turns(device, P)
    queries, at, slots = _random(device, n, HEADS, NOPE + P)[..., NOPE:], _positions(device, n), torch.arange(n, device=device)
    cache = torch.zeros(n, L + P, dtype=torch.bfloat16, device=device)
    want = ref.latent(x, weight, turns, at, EPS)
    return _run(lambda: op.turn_and_store(queries, x, weight, turns, at, slots, cache, EPS), lambda: cache, want)


def _heads(n: int, device: torch.device) -> Run:
    """In place: the timed calls norm and turn again what they normed before; the error is of the first call."""
    qkv, wq, wk, turns = _random(device, n, 8, Q_HEADS + 2 * KV_HEADS, D), _random(device, D), _random(device, D), _turns(device, D)
    lengths = _positions(device, n)
    at = (lengths[:, None] + torch.arange(8, device=device)).flatten()
    want = ref.heads(qkv.flatten(0, 1)[:, :Q_HEADS], wq, turns, at, EPS)
    once = op.head_norm_rope(qkv.clone(), wq, wk, turns, lengths, KV_HEADS, EPS).flatten(0, 1)[:, :Q_HEADS]
    return _run(lambda: op.head_norm_rope(qkv, wq, wk, turns, lengths, KV_HEADS, EPS), lambda: once, want)


def _ring(n: int, device: torch.device) -> Run:
    kv, weights, turns = _random(device, n, 5, 2, LAYERS, KV_HEADS, D), _random(device, LAYERS, D), _turns(device, D)
    keys = torch.zeros(LAYERS, n, CAPACITY, KV_HEADS, D, dtype=torch.bfloat16, device=device)
    values, lengths, ids = torch.zeros_like(keys), _positions(device, n) % 9000, torch.arange(n, device=device)
    counts = torch.full((n,), 5, device=device)
    at = (lengths[0] + torch.arange(5, device=device)) % CAPACITY
    want = ref.heads(kv[0, :, 0, 0], weights[0], turns, lengths[0] + torch.arange(5, device=device), EPS)
    return _run(
        lambda: op.ring_write(kv, weights, turns, lengths, counts, ids, keys, values, EPS), lambda: keys[0, 0, at], want
    )


def cases() -> list[Case]:
    """Return the cases; rows are nodes, or rows of 8-token blocks and of 5 accepted tokens for the drafter's."""
    found = []
    for n in ROWS:
        for name, setup, size in (
            ("add_norm 7168", _add_norm, op.bytes_moved("add_norm", n, width=HIDDEN, parts=2)),
            ("turn_and_store 64x64, 512+64", _turn, op.bytes_moved("turn_and_store", n, heads=HEADS, l=L, p=P)),
            ("head_norm_rope 8 x 72x128", _heads, op.bytes_moved("head_norm_rope", 8 * n, heads=Q_HEADS + KV_HEADS, d=D)),
            ("ring_write 5 x 6x8x128", _ring, op.bytes_moved("ring_write", 5 * n, heads=LAYERS * KV_HEADS, d=D)),
        ):
            found.append(Case("norm_rope", f"{name} rows {n}", functools.partial(setup, n), size))
    return found
