"""What the tree kernels mean, in torch and Python: candidates of every depth, and trees grown from them.

    z_d(x)   = l_d(x) / T + beta_d * gumbel(seed, position, x)      greedy rows (T <= 1e-5): l_d(x); NaN = -inf; at most 1e30
    s(x)     = z_d(x) - log sum exp z_d                             depth 1, and all depths without a previous-token table
    s(x | a) = log_softmax over the candidates of z_d(x) + weight * PMI(a, x)      deeper, with a table; weight = alpha / T

The candidates of a depth are its 64 tokens of highest z (value descending, id ascending). Growth is best-first over the cumulative
sum of s (arXiv 2604.12989). Every float32 operation has one order, the kernels', so trees and scores are theirs to the bit. Another
implementation's logs of sums may differ in the last bits, which matters between scores that close, of different depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.tree.numbers import COLD, butterfly, clean, exp_of, gumbel, log_sum_exp, minus_log, ranked

TOP, NODES = 64, 65
CAP_STEPS = ((8, 4), (16, 8), (64, 16))
"""(nodes, cap): the first 8 nodes of a tree take children of rank < 4, the next 8 of rank < 8, the rest of rank < 16."""


@dataclass(frozen=True)
class Candidates:
    """The best of every row and depth: ids int32 (-1: none) and z float32 [R, D, 64], norm float32 [R, D] (-inf: not wanted);
    places int32 [R, D, 64]: the rank of each id among the 64, none last."""

    ids: Tensor
    z: Tensor
    places: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Table:
    """A previous-token table: entries row_ptr[a]..row_ptr[a + 1] of cols (int32, ascending) and vals (float32, PMI in nats) belong
    to previous token a; a token not listed there has PMI base[a], and an unknown a changes nothing."""

    row_ptr: Tensor
    cols: Tensor
    vals: Tensor
    base: Tensor


@dataclass(frozen=True)
class Options:
    """caps: (nodes, cap) steps; spine: the whole top-1 chain first; alpha: weight of the table; candidates: how many of a depth
    take part with a table; correction: float32 [2, depths, ranks] added off / on the top-1 chain (last entries hold beyond)."""

    caps: tuple[tuple[int, int], ...] = CAP_STEPS
    spine: bool = False
    beta: tuple[float, ...] = (1.0, 0.75)
    alpha: float = 0.4
    candidates: int = TOP
    correction: Tensor | None = None


@dataclass(frozen=True)
class Trees:
    """R trees padded to 65 nodes (token 0, parent -1, depth 0, no bits): tokens, parents, depths, positions [R, 65] int64,
    counts [R] int64, logprob [R, 65] float32, ancestors [R, 65, 2] int64 (bit j of both words: node j is an ancestor or self)."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    positions: Tensor
    counts: Tensor
    logprob: Tensor
    ancestors: Tensor


@dataclass(frozen=True)
class Flat:
    """Live nodes of all rows one after another, T of room. starts [R] int64: where a row's begin; total int32 [1]; slots [R, 65]
    int64: slot of each node; tokens, positions, places (slot), rows, nodes [T] int64; ancestors [T, 2] int64."""

    starts: Tensor
    total: Tensor
    slots: Tensor
    tokens: Tensor
    positions: Tensor
    places: Tensor
    rows: Tensor
    nodes: Tensor
    ancestors: Tensor


def flatten(trees: Trees, lengths: Tensor, table: Tensor, page: int) -> Flat:
    """Lay the live nodes of R rows one after another; node i is at position length + i of its row's pages, table [R, pages]."""
    live = torch.arange(NODES, device=lengths.device) < trees.counts[:, None]
    at = lengths[:, None] + torch.arange(NODES, device=lengths.device)
    slots = table.long().gather(1, (at // page).clamp(max=table.shape[1] - 1)) * page + at % page
    rows, nodes = live.nonzero(as_tuple=True)
    starts = trees.counts.cumsum(0) - trees.counts
    parts = (trees.tokens[live], trees.positions[live], slots[live], rows, nodes, trees.ancestors[live])
    return Flat(starts, trees.counts.sum()[None].int(), slots.where(live, 0), *parts)


def heated(
    logits: Tensor, temperature: Tensor, beta: Sequence[float], seeds: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """z [R, D, V]; seeds None: no noise. The token at index d stands at position lengths[r] + 1 + d."""
    x = clean(logits).clamp(max=1e30)
    hot = (temperature > COLD)[:, None, None]
    z = x / temperature.where(temperature > COLD, 1.0)[:, None, None]
    if seeds is not None and lengths is not None:
        depths = torch.arange(x.shape[1], device=x.device)
        at = lengths[:, None] + 1 + depths
        scale = torch.tensor([beta[min(d, len(beta) - 1)] for d in range(len(depths))], dtype=torch.float32, device=x.device)
        z = z + gumbel(seeds[:, None].expand_as(at), at, x.shape[2]) * scale[:, None]
    return torch.where(hot, z, x)


def candidates(z: Tensor, norms: int) -> Candidates:
    """The candidates of z [R, D, V]; norm for the first `norms` depths."""
    ids, best = ranked(z, TOP)
    order = ids.where(ids >= 0, 1 << 40).argsort(dim=-1, stable=True)
    places = torch.empty_like(order).scatter_(-1, order, torch.arange(TOP, device=z.device).expand_as(order))
    norm = torch.full(z.shape[:2], -torch.inf, device=z.device)
    norm[:, :norms] = log_sum_exp(z[:, :norms])
    return Candidates(ids.int(), best, places.int(), norm)


def _first_list(found: Candidates, r: int, d: int, width: int) -> list[tuple[int, float]]:
    norm = found.norm[r, d]
    scores = found.z[r, d] - (norm if norm > -torch.inf else torch.zeros_like(norm))
    return list(zip(found.ids[r, d, :width].tolist(), scores[:width].tolist(), strict=True))


def _table_list(found: Candidates, r: int, d: int, width: int, table: Table, weight: Tensor, token: int) -> list[tuple[int, float]]:
    """(token, s) of the candidates of depth index d after `token`, best first."""
    order = found.places[r, d].long().argsort()  # ascending ids
    ids, z = found.ids[r, d][order], found.z[r, d].masked_fill(torch.arange(TOP, device=order.device) >= width, -torch.inf)[order]
    pmi = torch.zeros_like(z)
    if 0 <= token < len(table.base):
        low, high = int(table.row_ptr[token]), int(table.row_ptr[token + 1])
        cols = table.cols[low:high]
        pmi = table.base[token].expand(TOP).clone()
        if len(cols):
            at = torch.searchsorted(cols, ids).clamp(max=len(cols) - 1)
            pmi = torch.where(cols[at] == ids, table.vals[low:high][at], pmi)
    score = pmi * weight + z
    peak = score.amax()
    safe = peak if peak > -torch.inf else torch.zeros_like(peak)
    part = exp_of(score - safe)
    total = butterfly(part[:32] + part[32:])
    norm = safe - minus_log(total.where(total > 0, 1.0))
    first = (score + 0.0).sort(dim=-1, descending=True, stable=True).indices
    return list(zip(ids[first].tolist(), (score - norm)[first].tolist(), strict=True))


def grow(
    found: Candidates,
    roots: Tensor,
    lengths: Tensor,
    budgets: Tensor,
    temperature: Tensor,
    options: Options = Options(),
    table: Table | None = None,
) -> Trees:
    """Grow one tree per row; budgets [R] nodes beyond the root. Equal scores: lowest token, then the earliest offer."""
    rows = len(roots)
    found = Candidates(found.ids.cpu(), found.z.cpu(), found.places.cpu(), found.norm.cpu())
    table = None if table is None else Table(table.row_ptr.cpu(), table.cols.cpu(), table.vals.cpu(), table.base.cpu())
    tokens, depths = torch.zeros(rows, NODES, dtype=torch.int64), torch.zeros(rows, NODES, dtype=torch.int64)
    parents, counts = torch.full((rows, NODES), -1), torch.ones(rows, dtype=torch.int64)
    logprob, words = torch.zeros(rows, NODES), torch.zeros(rows, NODES, 2, dtype=torch.int64)
    for r in range(rows):
        heat = float(temperature[r])
        weight = torch.tensor(options.alpha / (heat if heat > COLD else 1.0), dtype=torch.float64).float()
        nodes = _grow_row(found, r, int(roots[r]), int(budgets[r]), options, table, weight)
        counts[r] = len(nodes)
        masks: list[int] = []
        for i, (token, parent, depth, total) in enumerate(nodes):
            tokens[r, i], parents[r, i], depths[r, i], logprob[r, i] = token, parent, depth, total
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
            for w in range(2):
                word = masks[i] >> (64 * w) & 0xFFFFFFFFFFFFFFFF
                words[r, i, w] = word - (1 << 64) if word >> 63 else word
    positions = lengths.cpu()[:, None] + depths
    moved = (t.to(roots.device) for t in (tokens, parents, depths, positions, counts, logprob, words))
    return Trees(*moved)


def _grow_row(
    found: Candidates, r: int, root: int, budget: int, options: Options, table: Table | None, weight: Tensor
) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, cumulative score) of each node in order. Each node offers one child at a time: its best."""
    nodes = [(root, -1, 0, 0.0)]
    spine, next_rank = [True], [0]
    offers: dict[int, tuple[float, int, int, float]] = {}  # by node: key, token, serial, total
    refused: list[int] = []
    depth_count, width = found.ids.shape[1], TOP if table is None else options.candidates
    known: dict[tuple[int, int], list[tuple[int, float]]] = {}
    serial = 0
    steps = iter(options.caps)
    until, cap = next(steps)

    def children(e: int) -> list[tuple[int, float]]:
        token, _, depth, _ = nodes[e]
        key = (depth, token if table is not None and depth else 0)
        if key not in known:
            plain = table is None or depth == 0
            known[key] = (
                _first_list(found, r, depth, width)
                if table is None or plain
                else _table_list(found, r, depth, width, table, weight, token)
            )
        return known[key]

    def offer(e: int) -> None:
        nonlocal serial
        rank, list_ = next_rank[e], children(e)
        if rank >= len(list_) or list_[rank][1] == -torch.inf:
            return
        if rank >= cap:
            refused.append(e)
            return
        add = 0.0
        depth = nodes[e][2]
        if options.correction is not None:
            _, depths, ranks = options.correction.shape
            add = float(options.correction[int(spine[e]), min(depth, depths - 1), min(rank, ranks - 1)])
        total = nodes[e][3] + list_[rank][1] + add
        serial += 1
        key = depth - 1e9 if options.spine and spine[e] and rank == 0 else -total
        offers[e] = (key, list_[rank][0], serial, total)

    if budget > 0:
        offer(0)
    while len(nodes) <= budget:
        while (not offers or len(nodes) > until) and (step := next(steps, None)):
            until, cap = step
            again, refused = refused, []
            for e in again:
                offer(e)
        if not offers:
            break
        e = min(offers, key=lambda e: offers[e][:3])
        _, token, _, total = offers.pop(e)
        nodes.append((token, e, nodes[e][2] + 1, total))
        spine.append(spine[e] and next_rank[e] == 0)
        next_rank.append(0)
        next_rank[e] += 1
        offer(e)
        if nodes[-1][2] < depth_count:
            offer(len(nodes) - 1)
    return nodes
