"""What the expert kernels mean, in torch on any device: dense products, one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Expert = tuple[Tensor, Tensor, Tensor]
"""gate [W, H], up [W, H], down [H, W]."""


def hidden(x: Tensor, gate: Tensor, up: Tensor, rounded: bool = True) -> Tensor:
    """x [n, H] -> h [n, W] = silu(x gate^T) * (x up^T), in gate's type; rounded to bfloat16 as the kernels store it."""
    x = x.to(gate.dtype)
    h = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
    return h.to(torch.bfloat16).to(gate.dtype) if rounded else h


def experts(
    x: Tensor, get: Callable[[int], Expert], chosen: Tensor, weights: Tensor, first: int, held: int, shared: Tensor | None = None
) -> Tensor:
    """x [n, H], chosen and weights [n, k] -> [n, H] in the type of `get`'s tensors.

    out[t] = sum over slots of weights[t, slot] * down(h(x[t])) of expert chosen[t, slot], for the experts first .. first + held - 1
    only, then + shared[t]. get(e): the dense expert first + e.
    """
    rows = []
    for t in range(x.shape[0]):
        total: Tensor | None = None
        for slot, e in enumerate(chosen[t].tolist()):
            if first <= e < first + held:
                gate, up, down = get(e - first)
                part = weights[t, slot].to(gate.dtype) * (hidden(x[t : t + 1], gate, up) @ down.T)[0]
                total = part if total is None else total + part
        row = x[t].to(torch.float64).new_zeros(x.shape[1]) if total is None else total
        rows.append(row if shared is None else row + shared[t].to(row.dtype))
    return torch.stack(rows)
