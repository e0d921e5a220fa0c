"""Benchmark cases of the tree kernels: K2.6's vocabulary, block 8 (7 depths), rows 1 / 32 / 128, budgets 16 / 64."""

from __future__ import annotations

import functools

import torch

from draftwood.kernels.case import Case, Run
from draftwood.kernels.tree import op, ref, scenario

ROWS, BUDGETS = (1, 32, 128), (16, 64)
VOCAB, DEPTH = 163840, 7
COLD = 240_000_000
"""Bytes of different logits in one measured graph: several times the L2 of an H200."""


@functools.cache
def _table(device: torch.device) -> ref.Table:
    return scenario.table(VOCAB, 100, device)


def _setup(rows: int, budget: int, heat: float, with_table: bool, part: str, device: torch.device) -> Run:
    calls = max(1, min(40, COLD // (rows * DEPTH * VOCAB * 2)))
    x = scenario.logits(rows * calls, DEPTH, VOCAB, device)
    given, knobs = scenario.rows(rows, VOCAB, device, budget), op.knobs(ref.Options(), DEPTH, device)
    given.temperature.fill_(heat)
    table = _table(device) if with_table else None
    buffers, out = op.allocate(rows, DEPTH, VOCAB, device), op.allocate_trees(rows, device)
    norms = 1 if with_table else DEPTH

    def find(i: int) -> None:
        some = x[i * rows : (i + 1) * rows]
        op.candidates(some, given.temperature, given.budgets, knobs, buffers, given.seeds, given.lengths, norms=norms)

    def grow() -> None:
        op.grow(buffers.found, given.roots, given.lengths, given.budgets, given.temperature, knobs, out, table, lists=buffers.lists)

    def launch() -> None:
        for i in range(calls):
            if part != "grow":
                find(i)
            if part != "candidates":
                grow()

    def error() -> float:
        """Of the log-sum-exp at depth 1, against float64; infinite if row 0's tree is not the reference's."""
        last = x[(calls - 1) * rows :]
        one = given.pick(torch.tensor([0], device=device))
        z = ref.heated(last[:1], one.temperature, knobs.options.beta, one.seeds, one.lengths)
        want = ref.grow(ref.candidates(z, norms), one.roots, one.lengths, one.budgets, one.temperature, knobs.options, table)
        exact = z[0, 0].double().logsumexp(-1)
        if part == "both" and not torch.equal(out.tokens[:1], want.tokens):
            return float("inf")
        return float((buffers.found.norm[0, 0].double() - exact).abs() / exact.abs())

    def rival() -> None:
        for i in range(calls):
            some = x[i * rows : (i + 1) * rows]
            torch.topk(some, 64)
            torch.logsumexp(some, -1)

    find(calls - 1)
    return Run(launch, error, calls, rival if part == "candidates" else None)


def cases() -> list[Case]:
    """Return the cases. The library's topk and logsumexp have no noise, and read the logits twice."""
    found = []

    def add(label: str, rows: int, budget: int, heat: float, with_table: bool, part: str) -> None:
        moved = 0 if part == "grow" else op.bytes_moved(rows, DEPTH, VOCAB)
        found.append(Case("tree", label, functools.partial(_setup, rows, budget, heat, with_table, part), moved))

    for rows in ROWS:
        for budget in BUDGETS:
            add(f"greedy rows {rows} budget {budget}", rows, budget, 0.0, False, "both")
            add(f"T 1 table rows {rows} budget {budget}", rows, budget, 1.0, True, "both")
        add(f"candidates greedy rows {rows}", rows, 16, 0.0, False, "candidates")
        add(f"candidates T 1 rows {rows}", rows, 16, 1.0, False, "candidates")
        add(f"candidates T 1 for a table rows {rows}", rows, 16, 1.0, True, "candidates")
        for budget in BUDGETS:
            add(f"growth table rows {rows} budget {budget}", rows, budget, 1.0, True, "grow")
    return found
