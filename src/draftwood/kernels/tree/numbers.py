"""numbers.cuh in torch: float32 operations in the same order, so the same bits. Philox as published (Salmon et al., SC 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

COLD = 1e-5
"""Temperatures up to this are greedy: no noise, and no division by them."""
SEGMENT, THREADS, CHUNK = 8192, 512, 8
"""Tokens of a segment; the threads that share it; tokens that one reads at a time."""
_LOW = 0xFFFFFFFF
_HALF_OCTAVE = 0x3F3504F3


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there, which a second rounding cannot spoil (Boldo and
    Melquiond, 2008): truncated towards zero, and the last bit set if anything was lost.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    added = total - product
    lost = (product - (total - added)) + (c - added)
    bits = total.contiguous().view(torch.int64)
    bits = torch.where(lost == 0, bits, torch.where((lost > 0) == (total > 0), bits, bits - 1) | 1)
    return bits.view(torch.float64).float()


def exp_of(x: Tensor) -> Tensor:
    """e^x for x <= 0 (float32); below -86 it stays e^-86."""
    x = x.clamp(min=-86.0)
    magic = _constant(12582912.0, x)
    shifted = fma(x, _constant(1.44269504, x), magic)
    k = shifted - magic
    r = fma(k, _constant(2.12194440e-4, x), fma(k, _constant(-0.693359375, x), x))
    p = fma(_constant(0.0083125019, x), r, _constant(0.0418903343, x))
    for term in (0.1666711569, 0.4999923110, 1.0, 1.0):
        p = fma(p, r, _constant(term, x))
    return (p.view(torch.int32) + k.to(torch.int32) * (1 << 23)).view(torch.float32)


def minus_log(x: Tensor) -> Tensor:
    """-log(x) of positive float32 x."""
    offset = x.contiguous().view(torch.int32) - _HALF_OCTAVE
    k = (offset >> 23).float()
    f = ((offset & 0x7FFFFF) + _HALF_OCTAVE).view(torch.float32) - 1.0
    s = f / (f + 2.0)
    t = s * s
    p = t * _constant(1 / 9, f)
    for term in (1 / 7, 1 / 5, 1 / 3):
        p = (p + _constant(term, f)) * t
    s = s * -2.0
    return p * s + s + k * _constant(-0.69314718, f)


def _product(a: Tensor, b: int) -> Tensor:
    """64-bit product of 32-bit words held in int64 (it wraps with the same bits)."""
    return a * b


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Float32 [..., V] noise for seeds and positions [...] (int64)."""
    seeds, at = seeds[..., None], positions[..., None] & _LOW
    a = torch.arange((vocab + 3) // 4, device=seeds.device).expand(*positions.shape, -1)
    b, c, d = at.expand_as(a), torch.zeros_like(a), torch.zeros_like(a)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(10):
        p0, p1 = _product(a, 0xD2511F53), _product(c, 0xCD9E8D57)
        a, b, c, d = ((p1 >> 32) & _LOW) ^ b ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ d ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    bits = torch.stack((a, b, c, d), -1).flatten(-2)[..., :vocab]
    w = bits.float() * 2.0**-32 + 2.0**-33
    u = (_LOW - bits).float() * 2.0**-32 + 2.0**-33
    series = w * _constant(1 / 4, w)
    for term in (1 / 3, 1 / 2, 1.0):
        series = (series + _constant(term, w)) * w
    return minus_log(torch.where(bits < 1 << 26, series, minus_log(u)))


def clean(logits: Tensor) -> Tensor:
    """Float32 logits with NaN as -inf."""
    x = logits.float()
    return torch.where(x == x, x, -torch.inf)


def segment_sums(z: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value m and sum of exp(z - m) of each segment of z [..., V]: [..., S] each, in the kernels' order.

    A thread adds its chunks in order, a warp adds its lanes in a butterfly (16, 8, 4, 2, 1), then come the warps in order.
    """
    segments = -(-z.shape[-1] // SEGMENT)
    z = torch.nn.functional.pad(z, (0, segments * SEGMENT - z.shape[-1]), value=-torch.inf)
    z = z.unflatten(-1, (segments, SEGMENT // THREADS // CHUNK, THREADS, CHUNK))
    peak = z.amax((-3, -2, -1))
    part = exp_of(z - peak[..., None, None, None].where(peak[..., None, None, None] > -torch.inf, 0.0))
    mine = torch.zeros_like(part[..., 0, :, 0])
    for i in range(part.shape[-3]):
        for e in range(CHUNK):
            mine = mine + part[..., i, :, e]
    lanes = butterfly(mine.unflatten(-1, (THREADS // 32, 32)))
    total = lanes[..., 0]
    for w in range(1, THREADS // 32):
        total = total + lanes[..., w]
    return peak, total


def butterfly(x: Tensor) -> Tensor:
    """Sum of 32 lanes [..., 32] as warp_sum adds them."""
    lane = torch.arange(32, device=x.device)
    for d in (16, 8, 4, 2, 1):
        x = x + x[..., lane ^ d]
    return x[..., 0]


def log_sum_exp(z: Tensor) -> Tensor:
    """log sum exp of z [..., V] from its segments in order; -inf when nothing is above -inf."""
    peaks, sums = segment_sums(z)
    peak = peaks.amax(-1)
    safe = peak.where(peak > -torch.inf, 0.0)
    total = torch.zeros_like(peak)
    for s in range(peaks.shape[-1]):
        total = total + sums[..., s] * exp_of(peaks[..., s] - safe)
    found = safe - minus_log(total.where(total > 0, 1.0))
    return found.where(peak > -torch.inf, -torch.inf)


def ranked(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values [..., k] of the k highest of z [..., V]: value descending, then id ascending; -1 and -inf for nothing."""
    values, ids = (z + 0.0).sort(dim=-1, descending=True, stable=True)
    values, ids = values[..., :k], ids[..., :k]
    short = k - values.shape[-1]
    values = torch.nn.functional.pad(values, (0, max(short, 0)), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, max(short, 0)), value=-1)
    return ids.where(values > -torch.inf, -1), values
