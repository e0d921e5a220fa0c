"""Benchmark cases of `kv_commit` at K2.6's sizes: 61 layers of 576 latents; 5 of 17 nodes accepted."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from draftwood.kernels.case import Case, Run
from draftwood.kernels.kv_commit import op

ROWS = (1, 32, 128)
LAYERS, WIDTH, NODES, PAGE = 61, 576, 17, 64
CALLS = 10
PATH = (0, 2, 5, 9, 16)


def _path(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor([PATH] * rows, device=device), torch.full((rows,), len(PATH), device=device)


def _run(data: Tensor, launch: functools.partial[Tensor], to: Tensor, source: Tensor) -> Run:
    """data [layers, slots, width] as it is before the first launch."""
    want = data[:, source].clone()
    launch()
    wrong = float((data[:, to].view(torch.int16) != want.view(torch.int16)).sum())

    def several() -> None:
        for _ in range(CALLS):
            launch()

    return Run(several, lambda: wrong, CALLS)


def _latents(rows: int, device: torch.device) -> Run:
    made = torch.Generator(device=device).manual_seed(0)
    pages = rows + 1
    cache = torch.randn(LAYERS, pages * PAGE, WIDTH, device=device, generator=made).to(torch.bfloat16)
    table = torch.randperm(pages, device=device, generator=made)[:rows]
    slots = (table[:, None] * PAGE + 40 + torch.arange(NODES, device=device)).contiguous()
    path, counts = _path(rows, device)
    launch = functools.partial(op.commit_latents, cache, slots, path, counts)
    return _run(cache, launch, slots[:, : len(PATH)].flatten(), slots[:, list(PATH)].flatten())


def cases() -> list[Case]:
    """Return the cases. The error is the number of wrong values after the first call; later calls move the same bytes again."""
    found = []
    for rows in ROWS:
        moves = rows * (len(PATH) - 1)
        found.append(
            Case(
                "kv_commit",
                f"latents 61x576 rows {rows}",
                functools.partial(_latents, rows),
                op.bytes_moved(moves, LAYERS, WIDTH * 2),
            )
        )
    return found
