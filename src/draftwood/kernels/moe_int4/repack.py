"""From the checkpoint's packed INT4 to the order in which the kernels' tensor cores read it, once, at load.

The layout is written down in moe.cuh. Works on any device; done expert by expert, so the peak above the result is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
WIDTH_MULTIPLE = 128
"""Expert widths are padded to this many columns with weights of scale 0: their h is exactly 0 and adds exactly nothing."""


@dataclass
class Packed:
    """Experts of one layer in fragment order. T = rows/16, S = K/64.

    gate_up int32 [e, 2W/16, H/64, 32, 4], gate_up_scale bfloat16 [e, 2W/16, H/64, 8, 4],
    down int32 [e, H/16, W/64, 32, 4], down_scale bfloat16 [e, H/16, W/64, 8, 4].
    """

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    @property
    def experts(self) -> int:
        """Number of experts held."""
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """Inputs of gate and up."""
        return self.gate_up.shape[2] * 64

    @property
    def width(self) -> int:
        """Columns of an expert on this rank, padded."""
        return self.gate_up.shape[1] * 8


def empty(experts: int, hidden: int, width: int, device: torch.device | str) -> Packed:
    """Return unset weights for experts of `width` columns (padded). Raises ValueError for a hidden size not in 128s."""
    if hidden % WIDTH_MULTIPLE:
        raise ValueError(f"hidden size {hidden} is not a multiple of {WIDTH_MULTIPLE}; no expert kernel reads it")
    width = -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE

    def both(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
        shape = (experts, rows // 16, inputs // 64)
        return (
            torch.empty(*shape, 32, 4, dtype=torch.int32, device=device),
            torch.empty(*shape, 8, 4, dtype=torch.bfloat16, device=device),
        )

    return Packed(*both(2 * width, hidden), *both(hidden, width))


def repack(
    gate_packed: Tensor, gate_scale: Tensor, up_packed: Tensor, up_scale: Tensor, down_packed: Tensor, down_scale: Tensor
) -> Packed:
    """Checkpoint layout (model.weights.ExpertWeights) -> fragment order, on the inputs' device.

    gate, up: int32 [e, W, H/8] and bfloat16 [e, W, H/32]; down: int32 [e, H, W/8] and bfloat16 [e, H, W/32].
    """
    out = empty(gate_packed.shape[0], gate_packed.shape[2] * 8, gate_packed.shape[1], gate_packed.device)
    pad = out.width - gate_packed.shape[1]
    for e in range(out.experts):
        gate, up = (_pad(t[e], pad, 0) for t in (gate_packed, up_packed))
        out.gate_up[e] = _interleave(_tiles(gate, 8), _tiles(up, 8))
        gate, up = (_pad(t[e], pad, 0) for t in (gate_scale, up_scale))
        out.gate_up_scale[e] = _interleave_scales(_tiles(gate, 8), _tiles(up, 8))
        down = _tiles(_pad(down_packed[e], pad // 8, 1), 16)
        out.down[e] = _interleave(down[:, :8], down[:, 8:])
        down = _tiles(_pad(down_scale[e], pad // GROUP, 1), 16)
        out.down_scale[e] = _interleave_scales(down[:, :8], down[:, 8:])
    return out


def _pad(t: Tensor, count: int, dim: int) -> Tensor:
    if not count:
        return t
    shape = list(t.shape)
    shape[dim] = count
    return torch.cat((t, t.new_zeros(shape)), dim)


def _tiles(rows: Tensor, size: int) -> Tensor:
    """[R, C] -> [R/size, size, C]."""
    return rows.view(rows.shape[0] // size, size, -1)


def _interleave(upper: Tensor, lower: Tensor) -> Tensor:
    """Packed words of a tile's rows 0..7 and 8..15, int32 [T, 8, K/8] each -> [T, K/64, 32, 4].

    Word (g, q, 2h + s): from input word 4h + q of rows g and g + 8 the codes 4s..4s+3; upper ones at bits 0, 16, 8, 24, lower
    ones 4 bits above.
    """
    tiles, _, words = upper.shape
    out = []
    for half in (upper, lower):
        codes = half.view(tiles, 8, words // 8, 2, 4, 1) >> torch.tensor([0, 16], dtype=torch.int32, device=half.device)
        spread = [(codes >> (4 * i) & 15) << bits for i, bits in enumerate((0, 16, 8, 24))]
        out.append(spread[0] | spread[1] | spread[2] | spread[3])
    joined = out[0] | (out[1] << 4)                               # [T, g, K/64, h, q, s]
    return joined.permute(0, 2, 1, 4, 3, 5).reshape(tiles, words // 8, 32, 4)


def _interleave_scales(upper: Tensor, lower: Tensor) -> Tensor:
    """Scales of rows 0..7 and 8..15, [T, 8, K/32] each -> [T, K/64, 8, 4] = (group, half)."""
    tiles, _, groups = upper.shape
    both = torch.stack((upper, lower), -1).view(tiles, 8, groups // 2, 2, 2)
    return both.permute(0, 2, 1, 3, 4).reshape(tiles, groups // 2, 8, 4)


def expand(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float64, rounded: bool = False) -> Tensor:
    """Fragment order of one matrix [T, S, 32, 4], [T, S, 8, 4] -> its rows [16 T, 64 S]: the inverse, for references.

    rounded: code * scale is rounded to bfloat16, as the chain of scaled weights has it (moe.cuh).
    """
    tiles, steps = packed.shape[:2]
    place = torch.arange(4, device=packed.device)
    shifts = torch.stack((4 * place, 4 * place + 16), 1).flatten()                       # nibble p, then half word
    codes = (packed.view(tiles, steps, 8, 4, 2, 2, 1).long() >> shifts) & 15             # T S g q h s (p, half word)
    codes = codes.view(tiles, steps, 8, 4, 2, 2, 2, 2, 2)                                # ... (pair of k, row half, half word)
    values = codes.permute(0, 7, 2, 1, 4, 3, 5, 6, 8).reshape(tiles * 16, steps * 64).to(dtype) - 8
    scales = scale.view(tiles, steps, 8, 2, 2).permute(0, 4, 2, 1, 3).reshape(tiles * 16, steps * 2)
    product = values * scales.to(dtype).repeat_interleave(GROUP, 1)
    return product.to(torch.bfloat16).to(dtype) if rounded else product


def expert(
    weights: Packed, index: int, dtype: torch.dtype = torch.float64, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (gate [W, H], up [W, H], down [H, W]) of one expert, W padded. rounded: as in `expand`."""
    both = expand(weights.gate_up[index], weights.gate_up_scale[index], dtype, rounded).view(-1, 2, 8, weights.hidden)
    down = expand(weights.down[index], weights.down_scale[index], dtype, rounded)
    return both[:, 0].reshape(-1, weights.hidden), both[:, 1].reshape(-1, weights.hidden), down
