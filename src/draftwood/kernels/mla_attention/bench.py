"""Benchmark cases of `mla_attention`: one rank's 8 heads and one device's 64, short and long contexts, small and large trees."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels.case import Case, Run
from draftwood.kernels.mla_attention import op, ref, scenario

COLD = 240_000_000
"""Bytes of different latents in one measured graph: several times the L2 of an H200."""
GOALS = [(8, n, c) for n in (1, 9) for c in (2048, 32768, 131072)] + [(64, n, c) for c in (32768, 131072) for n in (9, 17, 33, 65)]
"""(heads, nodes, context) that have a target."""
MORE = [(64, 1, 2048), (64, 1, 32768), (64, 9, 2048), (64, 33, 2048), (8, 33, 2048), (8, 33, 32768), (8, 65, 131072)]
BATCHES = [(32, 8, 9, 4096), (128, 8, 1, 2048), (128, 8, 33, 2048), (8, 64, 9, 8192)]
BATCHES += [(1, 64, 9, 512), (64, 64, 1, 512), (64, 64, 9, 512)]
"""(rows, heads, nodes, context)."""


@functools.cache
def _latents(device: torch.device) -> Tensor:
    """Pages of random latents, one layer's worth; every case takes its pages from here."""
    made = torch.Generator(device=device).manual_seed(1)
    pages = torch.empty(2 * 2052 + 128, 64, 576, dtype=torch.bfloat16, device=device)
    return pages.normal_(0, 0.8, generator=made).view(-1, 576)


class Bench:
    """One bucket, filled: several calls on different pages, each call one layer of a step."""

    def __init__(
        self,
        rows: int,
        heads: int,
        nodes: int,
        context: int,
        device: torch.device,
        shape: str | None = None,
        law: op.Law | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        self.cache, need = _latents(device), -(-(context + nodes) // 64)
        pages = self.cache.shape[0] // 64
        calls = max(1, min(64, -(-COLD // (rows * context * 1152)), pages // need))
        ids = np.stack([rng.permutation(pages)[: min(pages, calls * need)] for _ in range(rows)])
        # Rows share pages when there are more rows than pages: sizes and addresses are as real, residence in L2 is better.
        self.tables = [torch.from_numpy(ids[:, i * need : (i + 1) * need].astype(np.int32)).to(device) for i in range(calls)]
        made = torch.Generator(device=device).manual_seed(2)
        self.q = torch.randn(rows * nodes, heads, 512, generator=made, device=device).mul_(0.8).bfloat16()
        self.q_pe = torch.randn(rows * nodes, heads, 64, generator=made, device=device).mul_(0.8).bfloat16()
        paths = scenario.paths_of(scenario.random_parents(nodes, "wide", rng))
        self.masks = scenario.words_of(paths, 2).repeat(rows, 1).to(device)
        ints = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        self.lengths, self.counts = ints([context] * rows), ints([nodes] * rows)
        self.starts = ints([r * nodes for r in range(rows)])
        self.out = torch.empty(rows * nodes, heads, 512, dtype=torch.bfloat16, device=device)
        self.op = op.MlaAttention(rows, nodes, heads, context, scenario.SCALE, device, shape=shape, law=law)
        self.plan()

    def plan(self) -> None:
        """What a step does once, for all its layers."""
        self.op.plan(self.lengths, self.counts, self.starts)

    def launch(self) -> None:
        """One call per table."""
        for table in self.tables:
            self.op(self.q, self.q_pe, self.cache, table, self.masks, self.out)

    def partials(self) -> None:
        """The first half of each call."""
        for table in self.tables:
            self.op.partials(self.q, self.q_pe, self.cache, table, self.masks, self.out)

    def fold(self) -> None:
        """The second half of each call."""
        for _ in self.tables:
            self.op.fold(self.masks, self.out)

    def error(self) -> float:
        """Largest difference of the last call from float64, first row, two heads, relative to the largest value."""
        some = [0, self.q.shape[1] - 1]
        q, q_pe = self.q[:, some], self.q_pe[:, some]
        first = (self.tables[-1][:1], self.lengths[:1], self.counts[:1], self.starts[:1], self.masks)
        n = int(self.counts[0])
        want = ref.attend(q, q_pe, self.cache, *first, scenario.SCALE)[:n]
        return float((self.out[:n, some].double() - want).abs().max() / want.abs().max())

    def run(self) -> Run:
        """As benchmarks take it."""
        return Run(self.launch, self.error, len(self.tables))


def _case(rows: int, heads: int, nodes: int, context: int) -> Case:
    def setup(device: torch.device) -> Run:
        return Bench(rows, heads, nodes, context, device).run()

    lengths, counts = [context] * rows, [nodes] * rows
    label = f"{rows} x {nodes} nodes, {heads} heads, context {context}"
    return Case("mla_attention", label, setup, op.bytes_moved(heads, lengths, counts), op.flops(heads, lengths, counts))


def cases() -> list[Case]:
    """Return the cases, those with a target first."""
    return [_case(1, h, n, c) for h, n, c in GOALS + MORE] + [_case(*batch) for batch in BATCHES]
