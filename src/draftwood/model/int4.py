"""The compressed-tensors pack-quantized INT4 layout: symmetric, groups of 32 along the input dimension.

A code is value + 8 (offset binary) in 4 bits; eight codes fill one int32, the lowest nibble first, so byte j of a row
holds inputs 2j (low nibble) and 2j + 1 (high). weight = (code - 8) * scale[row, input // 32].
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

GROUP = 32
PER_WORD = 8
LARGEST = 7
"""Quantisation uses -7..7, as K2's own training did; the format itself also holds -8."""


def pack_codes(values: Tensor) -> Tensor:
    """Pack integers [..., K] in -8..7 to int32 [..., K/8]. K must be a multiple of 8."""
    codes = (values.to(torch.int16) + 8).to(torch.uint8)
    pairs = codes.view(*codes.shape[:-1], -1, 2)
    return _words(pairs[..., 0] | (pairs[..., 1] << 4))


def unpack_codes(packed: Tensor) -> Tensor:
    """Return int8 values [..., K] in -8..7 of packed int32 [..., K/8]."""
    low_high = _bytes(packed)
    return torch.stack((low_high & 15, low_high >> 4), dim=-1).flatten(-2).to(torch.int8) - 8


def pack_int4(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise weights [..., K] to (packed int32 [..., K/8], scale bfloat16 [..., K/32]).

    The scale of a group is its largest magnitude / 7, rounded to bfloat16 before it is used, unless `scale` is given.
    Raises ValueError when K is not a multiple of 32.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"cannot quantise {weight.shape[-1]} inputs in groups of {GROUP}")
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    if scale is None:
        scale = groups.abs().amax(-1) / LARGEST
    scale = scale.to(torch.bfloat16)
    step = scale.float().unsqueeze(-1)
    values = torch.where(step > 0, groups / step, 0).round().clamp(-LARGEST, LARGEST)
    return pack_codes(values.flatten(-2)), scale


def unpack_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [..., K] in `dtype` of packed int32 [..., K/8] and scale [..., K/32]."""
    values = unpack_codes(packed).to(dtype)
    groups = values.view(*values.shape[:-1], -1, GROUP)
    return groups.mul_(scale.to(dtype).unsqueeze(-1)).view_as(values)


def _words(data: Tensor) -> Tensor:
    """Join bytes [..., 4n], lowest first, to int32 [..., n] on a machine of either byte order."""
    if sys.byteorder == "big":
        data = data.reshape(*data.shape[:-1], -1, 4).flip(-1).flatten(-2)
    return data.contiguous().view(torch.int32)


def _bytes(words: Tensor) -> Tensor:
    data = words.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        data = data.reshape(*data.shape[:-1], -1, 4).flip(-1).flatten(-2)
    return data
