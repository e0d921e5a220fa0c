"""Benchmark cases of the accept kernels: K2.6's vocabulary in float32, rows 1 / 8 / 32 / 128, budgets 16 / 64; choice and walk.

`walked`: choices level by level, of the nodes that walks meet, where three of four nodes with children choose one of them."""

from __future__ import annotations

import functools

import torch

from draftwood.kernels.accept import op, ref, scenario
from draftwood.kernels.case import Case, Run

VOCAB = 163840
COLD = 240_000_000
"""Bytes of different logits in one measured graph: several times the L2 of an H200."""
SIZES = ((1, 1), (1, 17), (1, 65), (32, 17), (32, 65), (128, 17))
WALKED = ((128, 17), (32, 65), (32, 17), (8, 65), (8, 17), (1, 65))
"""(rows, nodes of each)"""
LEVELS = 8
KINDS = {
    "greedy": (0, 2.0),
    "T 1": (1, 2.0),
    "top-p .95": (2, 2.0),
    "top-k 20": (3, 2.0),
    "penalties": (5, 2.0),
    "top-p flat": (7, 1.2),
}
"""Index into scenario.KINDS and the logits' sharpness."""


def _setup(rows: int, nodes: int, kind: int, sharpness: float, walked: bool | None, device: torch.device) -> Run:
    """walked: None: no choice leads anywhere; else some do, and choices go level by level or are made at all nodes."""
    at, counts = scenario.nodes([nodes] * rows, VOCAB, device)
    given = scenario.params(rows, VOCAB, device, kinds=[kind] * rows)
    m = rows * nodes
    calls = max(1, min(40, COLD // (m * VOCAB * 4)))
    x = scenario.logits(m * calls, VOCAB, device, sharpness=sharpness)
    if walked is not None:
        for i in range(calls):
            scenario.lead(x[i * m : (i + 1) * m], at, 0.75, i)
    levels = LEVELS if walked else None
    buffers, out = scenario.buffers(at, VOCAB), op.allocate_path(rows, LEVELS, device)
    temperature, _, top_p, min_p = scenario.KINDS[kind][:4]
    filters = temperature > 0 and (scenario.KINDS[kind][1] > 0 or top_p < 1 or min_p > 0)

    def launch() -> None:
        for i in range(calls):
            op.choose(x[i * m : (i + 1) * m], at, given, buffers, filters=filters, levels=levels, few_nodes=0)
            op.walk(at, counts, buffers, out)

    def error() -> float:
        """Of a few nodes' log-probabilities, relative; infinite if a choice is not the reference's."""
        some = torch.arange(0, m, max(m // 4, 1), device=device)
        if walked:
            met = out.chosen[out.chosen >= 0]
            some = met[:: max(len(met) // 4, 1)]
        part = ref.Nodes(at.tokens, at.parents, at.depths, at.lengths, at.rows[some], at.nodes[some], at.forced)
        last = x[(calls - 1) * m :][some]
        if not torch.equal(ref.choose(last, part, given)[0], buffers.choices[some]):
            return float("inf")
        exact = last.double().log_softmax(-1).gather(1, buffers.choices[some][:, None])[:, 0]
        return float((buffers.scores[some].double() - exact).abs().max() / exact.abs().max())

    def rival() -> None:
        for i in range(calls):
            some = x[i * m : (i + 1) * m]
            if temperature == 0:
                some.argmax(-1)
                some.logsumexp(-1)
            else:
                some.softmax(-1).multinomial(1)

    plain = rows * nodes <= 544 and kind in (0, 1) and walked is None
    return Run(launch, error, calls, rival if plain else None)


def cases() -> list[Case]:
    """Return the cases. The library's samplers have no filters here, and noise of their own."""
    found = []
    for rows, nodes in SIZES:
        for name, (kind, sharpness) in KINDS.items():
            if rows * nodes > 544 and name not in ("greedy", "T 1", "top-p .95"):
                continue
            setup = functools.partial(_setup, rows, nodes, kind, sharpness, None)
            found.append(Case("accept", f"{name} rows {rows} nodes {nodes}", setup, op.bytes_moved(rows * nodes, VOCAB)))
    for rows, nodes in WALKED:
        for name in ("greedy", "T 1", "top-p .95"):
            for walked in (False, True):
                label = f"{name} rows {rows} nodes {nodes} {'walked' if walked else 'all, some lead on'}"
                setup = functools.partial(_setup, rows, nodes, *KINDS[name], walked)
                found.append(Case("accept", label, setup, op.bytes_moved(rows * nodes, VOCAB)))
    return found
