"""Benchmark cases of the router: K2.6's shape, a bfloat16 weight, each call another layer's router."""

from __future__ import annotations

import functools

import torch

from draftwood.kernels.case import Case, Run
from draftwood.kernels.moe_route import op, ref

K26 = op.Shape(7168, 384, 8)
CALLS = 24
"""Routers in one measured graph: 130 MB, more than the L2 of an H200."""


@functools.cache
def _routers(device: torch.device) -> list[tuple[op.Router, torch.Tensor]]:
    made = torch.Generator(device).manual_seed(1)
    found = []
    for _ in range(CALLS):
        weight = (torch.randn(384, 7168, device=device, generator=made) * 7168**-0.5).to(torch.bfloat16)
        bias = torch.rand(384, device=device, generator=made) * 0.1
        found.append((op.Router(K26, op.repack(weight), bias, 2.827), weight))
    return found


def _setup(n: int, form: str, device: torch.device) -> Run:
    routers = _routers(device)
    x = torch.randn(n, 7168, device=device, generator=torch.Generator(device).manual_seed(2)).to(torch.bfloat16)
    out = op.allocate(K26, n, 0, 384, device)
    live = torch.tensor([n], dtype=torch.int32, device=device)

    def launch() -> None:
        for router, _ in routers:
            op.route(x, router, live, out, 8, form=form, pdl=form == "parts")

    def error() -> float:
        router, weight = routers[-1]
        right = ref.choose(x, weight, router.bias, 8, router.scale, torch.float64)
        same = (out.experts == right.experts).all(-1)
        return float((out.weights - right.weights).abs()[same].max() / right.weights.max()) if same.any() else float("inf")

    return Run(launch, error, CALLS)


def cases() -> list[Case]:
    """1 to 1024 rows in parts, lists for tiles of 8; few rows also in the one launch that a layer takes. A router beside the kernel
    before it must not follow itself: here it waits for it, as any launch does."""
    return [
        Case("moe_route", f"{n} rows, {form}", functools.partial(_setup, n, form), op.bytes_moved(K26, n), 2 * n * 384 * 7168)
        for n in (1, 9, 16, 33, 65, 128, 512, 1024)
        for form in ("beside", "parts")[n > op.WHOLE_ROWS :]
    ]
