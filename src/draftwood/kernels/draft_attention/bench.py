"""Benchmark cases of the drafter's attention at K2.6-DFlash's shape, on one rank and on eight."""

from __future__ import annotations

import functools

import torch

from draftwood.kernels.case import Case, Run
from draftwood.kernels.draft_attention import op, ref

D, SHARE, LAYERS = 128, 8, 6


def _setup(rows: int, kv_heads: int, block: int, length: int, capacity: int, device: torch.device) -> Run:
    """One call per layer, each with its own ring; a library does not know rings: the rival sees the context laid out."""
    made = torch.Generator(device=device).manual_seed(5)
    qkv = torch.randn(rows, block, (SHARE + 2) * kv_heads, D, device=device, generator=made).to(torch.bfloat16)
    shape = (LAYERS, rows, capacity, kv_heads, D)
    keys, values = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=made) for _ in range(2))
    lengths = torch.full((rows,), length, device=device)
    ids = torch.randperm(rows, device=device, generator=made)
    out = torch.empty(rows, block, SHARE * kv_heads, D, dtype=torch.bfloat16, device=device)
    scratch = torch.empty(max(1, op.workspace_numel(rows, kv_heads, SHARE, block, capacity, D)), device=device)

    def launch() -> None:
        for layer in range(LAYERS):
            op.draft_attention(qkv, keys[layer], values[layer], lengths, ids, out, scratch)

    def error() -> float:
        some = slice(0, min(rows, 2))
        want = ref.draft_attention(qkv[some].double(), keys[-1], values[-1], lengths[some], ids[some], torch.float64)
        return float((out[some].double() - want).abs().max() / want.abs().max())

    context = min(length, capacity)
    q = qkv[:, :, : SHARE * kv_heads].transpose(1, 2).contiguous()
    flat = [(k[:, :context].transpose(1, 2), v[:, :context].transpose(1, 2)) for k, v in zip(keys, values, strict=True)]

    def rival() -> None:
        for k, v in flat:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return Run(launch, error, LAYERS, rival if context else None)


def cases() -> list[Case]:
    """Return the cases: context within the default window of 2048 and the recommended 4096, wrapped and not."""
    found = []
    for kv_heads in (8, 1):
        for rows in (1, 8, 32, 128):
            for block, length, capacity in ((8, 1000, 2048), (8, 30000, 2048), (8, 30000, 4096), (16, 30000, 4096)):
                sizes = [length] * rows, capacity, kv_heads, SHARE, block, D
                label = f"kv heads {kv_heads} rows {rows} block {block} context {min(length, capacity)}"
                setup = functools.partial(_setup, rows, kv_heads, block, length, capacity)
                found.append(Case("draft_attention", label, setup, op.bytes_moved(*sizes), op.flops(*sizes)))
    return found
