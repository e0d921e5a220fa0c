"""Random trees, sampling parameters and target logits for tests and benchmarks of the accept kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.kernels.accept import op, ref

DEPTH = 7
KINDS: tuple[tuple[float, int, float, float, float, float, float, int], ...] = (
    # temperature, top k, top p, min p, presence, frequency, repetition, bias entries
    (0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0), (1.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0), (1.0, 0, 0.95, 0.0, 0.0, 0.0, 1.0, 0),
    (0.6, 20, 1.0, 0.0, 0.0, 0.0, 1.0, 0), (1.0, 0, 1.0, 0.05, 0.0, 0.0, 1.0, 40), (0.8, 100, 0.9, 0.01, 0.5, 0.2, 1.2, 3),
    (0.0, 0, 1.0, 0.0, 0.7, 0.0, 1.1, 300), (3.0, 0, 0.99, 0.0, 0.0, 0.0, 1.0, 0), (2.0, 5000, 0.97, 0.0, 0.0, 0.0, 1.0, 0),
    (1.3, 0, 1.0, 0.0, 0.0, 0.9, 1.0, 0), (5.0, 0, 1.0, 0.002, 0.0, 0.0, 1.0, 7),
)  # fmt: skip
"""Every way a choice can be made, the slowest included."""


def params(rows: int, vocab: int, device: torch.device | str, kinds: Sequence[int] | None = None, seed: int = 0) -> ref.Params:
    """Parameters of the kinds given (default: all in turn), with bias entries and a history line for each row that penalises."""
    made = torch.Generator().manual_seed(seed)
    chosen = [KINDS[k] for k in (kinds or [r % len(KINDS) for r in range(rows)])]
    numbers = torch.tensor([[k[0], k[2], k[3], k[4], k[5], k[6], 0, 0] for k in chosen], dtype=torch.float32)
    bias = [torch.randperm(vocab, generator=made)[: k[7]].sort().values for k in chosen]
    values = torch.randn(sum(len(b) for b in bias), generator=made) * 4
    ptr = torch.tensor([0, *(len(b) for b in bias)]).cumsum(0).int()
    penal = [k[4] != 0 or k[5] != 0 or k[6] != 1 for k in chosen]
    words = torch.zeros(max(sum(penal), 1), vocab, dtype=torch.int32)
    for line in words:
        line[torch.randint(0, vocab, (400,), generator=made)] += 1
        line.index_add_(0, torch.randint(0, vocab, (300,), generator=made), torch.full((300,), 2, dtype=torch.int32))
    lines = torch.tensor(penal).cumsum(0).int() - 1
    return ref.Params(
        numbers.to(device), torch.tensor([k[1] for k in chosen], dtype=torch.int32, device=device),
        torch.randint(-(1 << 62), 1 << 62, (rows,), generator=made).to(device), ptr.to(device), torch.cat(bias).int().to(device),
        values.to(device), words.to(device), lines.where(torch.tensor(penal), -1).to(device),
    )  # fmt: skip


def nodes(
    counts: Sequence[int], vocab: int, device: torch.device | str, seed: int = 0, forced: Sequence[bool] = (), width: int = 0
) -> tuple[ref.Nodes, Tensor]:
    """Random trees of these many nodes, at most DEPTH deep (forced rows: chains), all of whose nodes are verified (of a chain the
    last); and the counts on the device."""
    made = torch.Generator().manual_seed(seed)
    rows, width = len(counts), max(width, *counts)
    chains = [*forced, *[False] * (rows - len(forced))]
    tokens = torch.randint(0, vocab, (rows, width), generator=made)
    parents, depths = torch.full((rows, width), -1), torch.zeros(rows, width, dtype=torch.int64)
    draws = torch.rand(rows, width, generator=made)
    for r, n in enumerate(counts):
        for i in range(1, n):
            shallow = [i - 1] if chains[r] else [j for j in range(max(0, i - 9), i) if depths[r, j] < DEPTH] or [0]
            parents[r, i] = shallow[int(draws[r, i] * len(shallow))]
            depths[r, i] = depths[r, parents[r, i]] + 1
    where = [(r, i) for r, n in enumerate(counts) for i in (range(n - 1, n) if chains[r] else range(n))]
    at = torch.tensor(where)
    lengths = torch.randint(0, 1 << 18, (rows,), generator=made)
    parts = (
        tokens,
        parents,
        depths,
        lengths,
        at[:, 0].contiguous(),
        at[:, 1].contiguous(),
        torch.tensor(chains, dtype=torch.uint8),
    )
    return ref.Nodes(*(t.to(device) for t in parts)), torch.tensor(counts).to(device)


def logits(
    count: int, vocab: int, device: torch.device | str, dtype: torch.dtype = torch.float32, sharpness: float = 2.0, seed: int = 0
) -> Tensor:
    """Logits [M, V] whose probabilities fall as rank ** -sharpness: 2 leaves a nucleus of a dozen tokens, 1.3 of thousands."""
    made = torch.Generator(device=device).manual_seed(seed)
    out = torch.empty(count, vocab, dtype=dtype, device=device)
    for part in out.split(512):
        u = torch.rand(part.shape, device=device, generator=made).clamp_(min=1e-9)
        part.copy_(u.log_().mul_(-sharpness))
    return out


def lead(logits: Tensor, at: ref.Nodes, share: float, seed: int = 0) -> None:
    """Make this share of the verified nodes that have children choose one, the one with the longest path below it."""
    made = torch.Generator().manual_seed(seed)
    parents, tokens = at.parents.tolist(), at.tokens.tolist()
    best: list[dict[int, tuple[int, int]]] = []  # of each row: node -> (height, child) of its tallest child
    for links in parents:
        tallest: dict[int, tuple[int, int]] = {}
        for n in range(len(links) - 1, 0, -1):
            height = tallest[n][0] + 1 if n in tallest else 0
            if height >= tallest.get(links[n], (0, 0))[0]:
                tallest[links[n]] = height, n
        best.append(tallest)
    draws = torch.rand(len(at.rows), generator=made).tolist()
    led = [
        (m, tokens[r][best[r][n][1]])
        for m, (r, n) in enumerate(zip(at.rows.tolist(), at.nodes.tolist(), strict=True))
        if n in best[r] and draws[m] < share
    ]
    where = torch.tensor(led, device=logits.device).view(-1, 2)
    logits[where[:, 0], where[:, 1]] = 60.0


def held_back(params: ref.Params, at: ref.Nodes, vocab: int, seed: int = 0) -> tuple[ref.Params, ref.Nodes]:
    """The same with masks for two of three nodes, lines in any order, and floors of a few ids for every other row."""
    made, device = torch.Generator().manual_seed(seed), at.rows.device
    m, rows = len(at.rows), len(params.seeds)
    places = torch.tensor([i for i in range(m) if i % 3])
    lines = torch.full((m,), -1, dtype=torch.int32)
    lines[places] = torch.randperm(len(places), generator=made).int()
    mask = torch.randint(-(1 << 31), 1 << 31, (len(places), -(-vocab // 32)), generator=made, dtype=torch.int32)
    ids = [torch.randperm(vocab, generator=made)[: 40 * (r % 2)].sort().values for r in range(rows)]
    ptr = torch.tensor([0, *(len(x) for x in ids)]).cumsum(0).int()
    left = (torch.arange(rows) % 5).int()
    floored = dataclasses.replace(
        params, floor_left=left.to(device), floor_ptr=ptr.to(device), floor_ids=torch.cat(ids).int().to(device)
    )
    return floored, dataclasses.replace(at, mask=mask.to(device), mask_lines=lines.to(device))


def pick(params: ref.Params, at: ref.Nodes, index: Tensor) -> tuple[ref.Params, ref.Nodes, Tensor]:
    """The rows `index` alone, in that order: parameters, nodes, and which of the verified nodes they keep."""
    assert params.bias_ptr is not None and params.bias_ids is not None and params.bias_values is not None
    ranges = [torch.arange(int(params.bias_ptr[r]), int(params.bias_ptr[r + 1])) for r in index.tolist()]
    flat = torch.cat(ranges).to(index.device)
    ptr = torch.tensor([0, *(len(x) for x in ranges)]).cumsum(0).int().to(index.device)
    kept = torch.cat([(at.rows == r).nonzero()[:, 0] for r in index.tolist()])
    renamed = torch.cat([torch.full((int((at.rows == r).sum()),), i) for i, r in enumerate(index.tolist())]).to(index.device)
    some = ref.Params(
        params.numbers[index], params.top_k[index], params.seeds[index], ptr, params.bias_ids[flat], params.bias_values[flat],
        params.history, None if params.history_rows is None else params.history_rows[index],
    )  # fmt: skip
    if params.floor_left is not None and params.floor_ptr is not None and params.floor_ids is not None:
        spans = [params.floor_ids[int(params.floor_ptr[r]) : int(params.floor_ptr[r + 1])] for r in index.tolist()]
        ends = torch.tensor([0, *(len(x) for x in spans)]).cumsum(0).int().to(index.device)
        some = dataclasses.replace(some, floor_left=params.floor_left[index], floor_ptr=ends, floor_ids=torch.cat(spans))
    forced = None if at.forced is None else at.forced[index]
    trees = ref.Nodes(
        at.tokens[index], at.parents[index], at.depths[index], at.lengths[index], renamed, at.nodes[kept].contiguous(), forced
    )
    if at.mask is not None and at.mask_lines is not None:
        trees = dataclasses.replace(trees, mask=at.mask, mask_lines=at.mask_lines[kept].contiguous())
    return some, trees, kept


def buffers(at: ref.Nodes, vocab: int, spare: int = 0) -> op.Buffers:
    """Fresh buffers for these nodes."""
    r, n = at.tokens.shape
    return op.allocate(len(at.rows) + spare, r, n, vocab, at.tokens.device)
