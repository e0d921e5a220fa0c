"""Counter-based Gumbel noise: a function of (seed, position, token) alone, the same bits on every device.

Bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011) with key =
the request's 64-bit seed (low word, high word) and counter = (token // 4, position, 0, 0); a token takes word token % 4.

From 32 bits b: w = (b + 1/2) / 2^32, never 0 or 1, u = 1 - w, gumbel = -log(-log(u)). The mapping keeps all 32 bits
where they matter: w near 0 is a high Gumbel value, up to 22.87, so tokens of probability 1e-9 can still be drawn, which
a float32 u near 1 would round away. Lowest value: -3.13.

The logarithm is written out in float32 multiplications, additions and divisions, which IEEE 754 rounds the same way
everywhere; a library's log would differ between processors, devices and even positions in an array, and with it,
once in a while, the token. Two implementations, numpy for the CPU and torch for CUDA, are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLD = 1e-5
"""Temperatures up to this are greedy: no noise, and no division by them."""
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_HALF_OCTAVE = 0x3F3504F3  # bits of sqrt(1/2) in float32
_LN2 = 0.6931471805599453
_PIECE = 8192  # counters per pass on the CPU: intermediate arrays stay in its second-level cache
_SMALL = 1 << 26  # below these bits (w < 1/64) -log(1 - w) comes from its series in w: 1 - w has lost w's low bits


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Return the four 32-bit output words of Philox4x32-10.

    Words come and go in arrays that broadcast, either numpy uint64 or torch int64 (whose wrapped product has
    the same bits). Early rounds stay small where the counter's parts vary along different axes.
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = a * _MULTIPLY[0], c * _MULTIPLY[1]
        a, b, c, d = _high(p1) ^ b ^ k0, p1 & _LOW, _high(p0) ^ d ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d


def _high(product: Any) -> Any:
    """Return the upper 32 bits of 64; a torch product may look negative, so its shift needs the mask."""
    return product >> 32 if isinstance(product, np.ndarray) else (product >> 32) & _LOW


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return float32 [R, M, V] Gumbel noise; seeds [R] int64 (two's complement of the 64 bits), positions [R, M]."""
    if seeds.device.type == "cpu":
        return torch.from_numpy(gumbel_numpy(seeds.numpy(), positions.numpy(), vocab))
    return gumbel_torch(seeds, positions, vocab)


def gumbel_numpy(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocab: int) -> NDArray[np.float32]:
    """`gumbel` on numpy arrays."""
    rows, places = positions.shape
    block = np.arange((vocab + 3) // 4, dtype=np.uint64)[None]
    zero = np.zeros((1, 1), np.uint64)
    key = np.repeat(seeds.astype(np.int64).view(np.uint64), places)[:, None]
    at = (positions.astype(np.uint64) & np.uint64(_LOW)).reshape(-1, 1)
    out = np.empty((rows * places, vocab), np.float32)
    piece = max(1, _PIECE // block.size)
    bits = np.empty((piece, block.size, 4), np.uint32)
    for start in range(0, rows * places, piece):
        k = key[start : start + piece]
        words = philox((block, at[start : start + piece], zero, zero), (k & np.uint64(_LOW), k >> np.uint64(32)))
        for lane, word in enumerate(words):
            bits[: len(k), :, lane] = word
        out[start : start + piece] = _gumbel_of_numpy(bits[: len(k)].reshape(len(k), -1))[:, :vocab]
    return out.reshape(rows, places, vocab)


def _gumbel_of_numpy(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return -log(-log(1 - w)) of 32-bit words [...], step by step as `_gumbel_of_torch`."""
    u = (~bits).astype(np.float32)
    u *= np.float32(2.0**-32)
    u += np.float32(2.0**-33)
    e = _minus_log_numpy(u)
    low = np.flatnonzero(bits < _SMALL)
    w = bits.reshape(-1)[low].astype(np.float32)
    w *= np.float32(2.0**-32)
    w += np.float32(2.0**-33)
    series = w * np.float32(1 / 4)
    for term in (1 / 3, 1 / 2, 1.0):
        series += np.float32(term)
        series *= w
    e.reshape(-1)[low] = series
    return _minus_log_numpy(e)


def _minus_log_numpy(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return -log(x) of positive float32 x by the series of 2 artanh(f / (2 + f)), x = (1 + f) 2^k, f within
    [sqrt(1/2) - 1, sqrt(2) - 1). Error below 3e-7 + 1e-7 |result|."""
    offset = x.view(np.int32) - np.int32(_HALF_OCTAVE)
    k = (offset >> 23).astype(np.float32)
    offset &= np.int32(0x7FFFFF)
    offset += np.int32(_HALF_OCTAVE)
    f = offset.view(np.float32)
    f -= np.float32(1)
    s = f + np.float32(2)
    np.divide(f, s, out=s)
    t = np.multiply(s, s, out=f)
    p = t * np.float32(1 / 9)
    for term in (1 / 7, 1 / 5, 1 / 3):
        p += np.float32(term)
        p *= t
    s *= np.float32(-2)
    p *= s
    p += s
    k *= np.float32(-_LN2)
    p += k
    return p


def gumbel_torch(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """`gumbel` in torch on any device."""
    rows, places = positions.shape
    seeds = seeds.long()[:, None, None]
    block = torch.arange((vocab + 3) // 4, device=seeds.device)[None, None]
    zero = torch.zeros((1, 1, 1), dtype=torch.long, device=seeds.device)
    at = positions.to(seeds.device).long()[:, :, None] & _LOW
    words = philox((block, at, zero, zero), (seeds & _LOW, (seeds >> 32) & _LOW))
    bits = torch.stack(torch.broadcast_tensors(*words), -1).reshape(rows, places, -1)[..., :vocab]
    return _gumbel_of_torch(bits)


def _gumbel_of_torch(bits: Tensor) -> Tensor:
    """Return -log(-log(1 - w)) of 32-bit words held in int64."""
    w = bits.float() * 2.0**-32 + 2.0**-33
    u = (_LOW - bits).float() * 2.0**-32 + 2.0**-33
    series = w * _float32(1 / 4, w)
    for term in (1 / 3, 1 / 2, 1.0):
        series = (series + _float32(term, w)) * w
    return _minus_log_torch(torch.where(bits < _SMALL, series, _minus_log_torch(u)))


def _minus_log_torch(x: Tensor) -> Tensor:
    offset = x.contiguous().view(torch.int32) - _HALF_OCTAVE
    k = (offset >> 23).float()
    f = ((offset & 0x7FFFFF) + _HALF_OCTAVE).view(torch.float32) - 1.0
    s = f / (f + 2.0)
    t = s * s
    p = t * _float32(1 / 9, f)
    for term in (1 / 7, 1 / 5, 1 / 3):
        p = (p + _float32(term, f)) * t
    s = s * -2.0
    return p * s + s + k * _float32(-_LN2, f)


def _float32(value: float, like: Tensor) -> Tensor:
    """Return a constant that is float32 in memory: a Python number may be applied in another precision on some devices."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)
