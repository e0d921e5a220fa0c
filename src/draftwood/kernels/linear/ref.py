"""What `linear` means, in torch on any device, and its weight layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, residual: Tensor | None = None, out: torch.dtype = torch.bfloat16) -> Tensor:
    """Return x [n, K] @ weight [N, K]^T, summed in float32 (float64 if weight is), rounded once to `out`.

    With a residual [n, N] the product is rounded to its type first and the sum once more, as tensors add.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    y = (x.to(wide) @ weight.to(wide).mT).to(out)
    return y if residual is None else y + residual


def heads(x: Tensor, weight: Tensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """Return one product per head: x [n, h, K], weight [h, N, K] -> [n, h, N]."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.einsum("nhk,hok->nho", x.to(wide), weight.to(wide)).to(out)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, out: torch.dtype = torch.bfloat16) -> Tensor:
    """Return silu(x gate^T) * (x up^T), rounded once: gate, up [I, K] -> [n, I].

    `model.layers` rounds gate, up and silu to the activation type on the way, as Hugging Face's modules do; this keeps
    them in float32, which is nearer to the float64 result.
    """
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    x = x.to(wide)
    return (F.silu(x @ gate.to(wide).mT) * (x @ up.to(wide).mT)).to(out)


def pack(weight: Tensor) -> Tensor:
    """Reorder [heads, N, K] to the kernels' fragment order: [heads, N/16, K/64 rounded up, 1024], zeros past K.

    1024 elements of a step are [2 K32 blocks][2 halves][lane = 4g + q][2 k pairs][row g, row g + 8][2]. N is a multiple of 16.
    """
    h, n, k = weight.shape
    steps = -(-k // 64)
    if k % 64:
        weight = F.pad(weight, (0, steps * 64 - k))
    parts = weight.reshape(h, n // 16, 2, 8, steps * 2, 4, 2, 2, 2)  # head tile row8 g block q half pair low/high
    return parts.permute(0, 1, 4, 6, 3, 5, 7, 2, 8).reshape(h, n // 16, steps, 1024)


def unpack(packed: Tensor, inputs: int) -> Tensor:
    """Undo `pack`: [heads, N/16, steps, 1024] -> [heads, N, inputs]."""
    h, tiles, steps, _ = packed.shape
    parts = packed.view(h, tiles, steps * 2, 2, 8, 4, 2, 2, 2)  # head tile block half g q pair row8 low/high
    return parts.permute(0, 1, 7, 4, 2, 5, 3, 6, 8).reshape(h, tiles * 16, steps * 64)[..., :inputs]


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Return [2 I, K]: 8 rows of gate, the 8 of up that belong to them, the next 8 of gate, ... I is a multiple of 8."""
    i, k = gate.shape
    return torch.stack((gate.view(i // 8, 8, k), up.view(i // 8, 8, k)), 1).reshape(2 * i, k)
