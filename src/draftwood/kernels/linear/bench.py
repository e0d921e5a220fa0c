"""Benchmark cases of `linear`: every projection of K2.6 on one rank and on eight, against cuBLAS."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.kernels.case import Case, Run
from draftwood.kernels.linear import op, plan, ref
from draftwood.kernels.linear.plan import Shape

ROWS = (1, 9, 33, 65)
PROMPT_ROWS = (256, 512, 1024)
"""Tokens of a prompt chunk: several passes of 128 rows; one rank only."""
COLD = 240_000_000
"""Bytes of different weights in one measured graph: several times the L2 of an H200."""


@functools.cache
def _pool(device: torch.device) -> Tensor:
    """Random bf16 weights, as many as the largest projection has; every case takes its weights from here."""
    made = torch.Generator(device=device).manual_seed(1)
    pool = torch.empty(163840 * 7168, dtype=torch.bfloat16, device=device)
    for part in pool.split(1 << 27):
        part.normal_(0, 0.02, generator=made)
    return pool


def weights(shape: Shape, device: torch.device) -> list[op.Weight]:
    """As many different weights as keep caches from holding one until its turn comes again."""
    pool, size = _pool(device), shape.nbytes // 2
    count = max(1, min(40, -(-COLD // shape.nbytes), pool.numel() // size))
    parts = [pool[i * size : (i + 1) * size].view(shape.heads, shape.outputs // 16, shape.steps, 1024) for i in range(count)]
    return [op.Weight(part, shape) for part in parts]


def _reference(x: Tensor, weight: op.Weight, tiles: list[int]) -> Tensor:
    """The product in float64 for the chosen row tiles of head 0: [n, columns]."""
    some = ref.unpack(weight.data[:1, tiles].contiguous(), weight.shape.inputs)[0].double()
    if weight.shape.glu:
        pairs = some.view(len(tiles), 2, 8, -1)
        gate, up = pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)
        return ref.swiglu(x.double(), gate, up, torch.float64)
    return ref.linear(x.double(), some, out=torch.float64)


def setup(shape: Shape, n: int, dtype: torch.dtype, device: torch.device) -> Run:
    """Prepare one projection with n rows; results of `dtype`."""
    copies = weights(shape, device)
    made = torch.Generator(device=device).manual_seed(2)
    wide = (n, shape.heads, shape.inputs) if shape.heads > 1 else (n, shape.inputs)
    x = torch.randn(wide, device=device, generator=made).to(torch.bfloat16)
    out = op.linear(x, copies[0], dtype=dtype)

    def launch() -> None:
        for weight in copies:
            op.linear(x, weight, out)

    def error() -> float:
        last = shape.outputs // 16 - 1
        tiles = sorted({0, last // 3, last // 2, last})
        width = 8 if shape.glu else 16
        columns = torch.tensor([t * width + i for t in tiles for i in range(width)], device=device)
        got = (out[:, 0] if shape.heads > 1 else out)[:, columns].double()
        want = _reference(x[:, 0] if shape.heads > 1 else x, copies[-1], tiles)
        return float((got - want).abs().max() / want.abs().max())

    if shape.heads > 1:
        plain = [w.data.view(shape.heads, shape.outputs, -1)[..., : shape.inputs].mT for w in copies]
        xs = x.transpose(0, 1).contiguous()

        def rival() -> None:
            for weight in plain:
                torch.bmm(xs, weight)
    else:
        flat = [w.data.view(shape.outputs, -1)[:, : shape.inputs] for w in copies]

        def rival() -> None:
            for weight in flat:
                F.linear(x, weight)

    return Run(launch, error, len(copies), rival)


def cases() -> list[Case]:
    """Return the cases, one rank first. The library computes a SwiGLU's product only; the head's result is float32 here."""
    found = []
    for world in (1, 8):
        for name, shape in plan.k26_shapes(world).items():
            dtype = torch.float32 if name == "lm_head" else torch.bfloat16
            for n in ROWS + (PROMPT_ROWS if world == 1 else ()):
                label = f"tp{world} {name} {shape.heads}x{shape.outputs}x{shape.inputs} rows {n}"
                make = functools.partial(setup, shape, n, dtype)
                moved = op.bytes_moved(shape, n, dtype.itemsize)
                found.append(Case("linear", label, make, moved, op.flops(shape, n)))
    return found
