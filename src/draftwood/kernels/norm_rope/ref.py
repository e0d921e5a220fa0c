"""What the norm and rotary kernels mean, in torch on any device.

Rounding is that of Hugging Face's modules: see `pieces.cuh`. Tables of turns are float32 [positions, width / 2, 2]:
amplitude * cos and amplitude * sin (`torch.view_as_real` of `model.layers.rope_table`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) in float32, rounded to x's type, times weight. Over the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (h, norm(h) * weight) of h = x[index] + delta; both of x's type."""
    h = x if index is None else x.index_select(0, index)
    h = h if delta is None else h + delta
    return h, rms_norm(h, weight, eps)


def turn_pairs(x: Tensor, turns: Tensor) -> Tensor:
    """Turn (2i, 2i + 1) of the last dimension: x [..., d], turns [..., d / 2, 2] broadcast over it."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = turns.unbind(-1)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2).to(x.dtype)


def turn_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Turn (i, i + d / 2) of the last dimension: x [..., d], turns [..., d / 2, 2] broadcast over it."""
    a, b = x.float().chunk(2, -1)
    c, s = turns.unbind(-1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def at_positions(turns: Tensor, positions: Tensor) -> Tensor:
    """Turns of each position; one beyond the table takes the nearest."""
    return turns[positions.clamp(0, turns.shape[0] - 1)]


def latent(x: Tensor, weight: Tensor, turns: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Return the cache rows of x [n, L + P]: normed latents and turned keys."""
    low, key = x.split((weight.shape[0], 2 * turns.shape[1]), -1)
    return torch.cat((rms_norm(low, weight, eps), turn_pairs(key, at_positions(turns, positions))), -1)


def heads(x: Tensor, weight: Tensor, turns: Tensor, positions: Tensor, eps: float, pairs: bool = False) -> Tensor:
    """Norm and turn each head: x [n, h, D], weight [D] or [h, D], positions [n] -> [n, h, D]."""
    turn = turn_pairs if pairs else turn_halves
    return turn(rms_norm(x, weight, eps), at_positions(turns, positions).unsqueeze(1))


def ring_write(
    kv: Tensor, k_weights: Tensor, turns: Tensor, lengths: Tensor, counts: Tensor, ids: Tensor, keys: Tensor, values: Tensor,
    eps: float, pairs: bool = False,
) -> None:  # fmt: skip
    """Store the newest accepted tokens' context keys and values, in place.

    kv [R, path, 2, layers, g, D]; k_weights [layers, D]; lengths, counts, ids [R]; keys, values [layers, rows, capacity, g, D].
    """
    capacity = keys.shape[2]
    for r, (length, count, row) in enumerate(zip(lengths.tolist(), counts.tolist(), ids.tolist(), strict=True)):
        first = max(0, count - capacity)
        at = torch.arange(length + first, length + count, device=kv.device)
        for layer in range(keys.shape[0]):
            k, v = kv[r, first:count, :, layer].unbind(1)
            keys[layer, row, at % capacity] = heads(k, k_weights[layer], turns, at, eps, pairs)
            values[layer, row, at % capacity] = v
