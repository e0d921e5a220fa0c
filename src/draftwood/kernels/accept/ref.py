"""What the accept kernels mean, in torch: the target's choice at every verified node, and the walk.

At a node, always on its raw logits x in float32 (NaN = -inf):

0. what the node's mask does not allow, and early enough the row's end tokens (floor): -inf.
1. logit bias: added.
2. penalties over history and the node's own path below the root. Repetition r, for tokens of the prompt or path or generated:
   x / r if x > 0 else x * r. Frequency f and presence p, for tokens generated n > 0 times (path nodes count): x - f * n - p.
3. greedy (T <= 1e-5): argmax, lowest id on ties; no filter applies. Otherwise z = x / T.
4. min-p m: keep z >= max z + log m. 5. top-k: keep the k first in the order (z descending, id ascending).
6. top-p: in that order, keep a token while the weight before it is < p * total; the first always stays. A weight is
   round(2^45 exp(z - max z)); the total is over what top-k (or else min-p) left, or, if both are off, over all tokens, from the
   segments' float32 sums.
7. choose argmax(z + gumbel(seed, length + depth + 1, token)), lowest id on ties.

The log-probability of a choice is under the raw logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.tree.numbers import COLD, clean, exp_of, gumbel, log_sum_exp, minus_log, ranked, segment_sums

ONE = 2.0**45
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
"""Columns of Params.numbers."""


@dataclass(frozen=True)
class Params:
    """Sampling parameters of R rows. numbers float32 [R, 8] (columns above, two unused), top_k int32 [R] (0: off), seeds int64 [R].

    Bias, compressed: bias_ptr int32 [R + 1], bias_ids int32 (ascending in a row), bias_values float32; or None.
    history int32 [H, V]: 2 * times generated + (1 if in the prompt), history_rows int32 [R]: row's line of it (-1: none); or None.
    Floor: nodes at depth d (of chains of known tokens: 0) with d < floor_left[r], int32 [R], may not choose the row's floor_ids
    (int32, ascending in a row, from floor_ptr int32 [R + 1]); or None.
    """

    numbers: Tensor
    top_k: Tensor
    seeds: Tensor
    bias_ptr: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    history: Tensor | None = None
    history_rows: Tensor | None = None
    floor_left: Tensor | None = None
    floor_ptr: Tensor | None = None
    floor_ids: Tensor | None = None


@dataclass(frozen=True)
class Nodes:
    """Trees of R rows [R, N] int64 and the verified nodes [M] int64; lengths int64 [R]; forced uint8 [R] (known chains).

    mask int32 [L, words], words of at least V bits: bit t % 32 of word t // 32 is set where token t is allowed; mask_lines int32
    [M]: each node's line of it (-1: everything is allowed); or None.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    lengths: Tensor
    rows: Tensor
    nodes: Tensor
    forced: Tensor | None = None
    mask: Tensor | None = None
    mask_lines: Tensor | None = None


def adjusted(logits: Tensor, at: Nodes, params: Params) -> Tensor:
    """Logits [M, V] after bias, penalties and temperature (greedy rows: not divided)."""
    z = clean(logits)
    for m, (r, n) in enumerate(zip(at.rows.tolist(), at.nodes.tolist(), strict=True)):
        x = z[m]
        if params.bias_ptr is not None and params.bias_ids is not None and params.bias_values is not None:
            part = slice(int(params.bias_ptr[r]), int(params.bias_ptr[r + 1]))
            x[params.bias_ids[part].long()] += params.bias_values[part]
        heat, _, _, presence, frequency, repetition = params.numbers[r, :6]
        if presence != 0 or frequency != 0 or repetition != 1:
            counts, seen = _counts(at, params, r, n, x)
            y = torch.where(x > 0, x / repetition, x * repetition) - frequency * counts.float()
            z[m] = torch.where(seen, y - presence * (counts > 0).float(), x)
        z[m].masked_fill_(~_allowed(at, params, m, r, n, x), -torch.inf)
        if heat > COLD:
            z[m] = z[m] / heat
    return clean(z)


def _allowed(at: Nodes, params: Params, m: int, r: int, n: int, x: Tensor) -> Tensor:
    """Which tokens of x [V] node n of row r, the m-th verified one, may choose at all."""
    vocab = torch.arange(len(x), device=x.device)
    allowed = torch.ones_like(x, dtype=torch.bool)
    if at.mask is not None and at.mask_lines is not None and at.mask_lines[m] >= 0:
        allowed = (at.mask[at.mask_lines[m]][vocab // 32] >> (vocab % 32) & 1).bool()
    if params.floor_left is not None and params.floor_ptr is not None and params.floor_ids is not None:
        depth = 0 if at.forced is not None and at.forced[r] else int(at.depths[r, n])
        if depth < params.floor_left[r]:
            allowed[params.floor_ids[int(params.floor_ptr[r]) : int(params.floor_ptr[r + 1])].long()] = False
    return allowed


def _counts(at: Nodes, params: Params, r: int, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """How often each token was generated, and whether it was seen at all, at node n of row r."""
    words = torch.zeros_like(x, dtype=torch.int64)
    if params.history is not None and params.history_rows is not None and params.history_rows[r] >= 0:
        words = params.history[params.history_rows[r]].long()
    times = torch.zeros_like(words)
    while n > 0 and not (at.forced is not None and at.forced[r]):
        times[at.tokens[r, n]] += 1
        n = int(at.parents[r, n])
    return (words >> 1) + times, (words | times) > 0


def kept(z: Tensor, top_p: Tensor, min_p: Tensor, top_k: int) -> int:
    """How many tokens of z [V] the filters keep, first in the order (z descending, id ascending)."""
    vocab = len(z)
    order = ranked(z, vocab)[1]
    order = order[order > -torch.inf]
    if not len(order):
        return 0
    peak = order[0]
    above = int((order >= peak - minus_log(min_p)).sum()) if min_p > 0 else len(order)
    limit = min(top_k, vocab) if top_k > 0 else vocab
    inside = min(limit, above)
    if not top_p < 1:
        return inside
    weights = (exp_of(order[:inside] - peak) * ONE).double().round().long()
    before = weights.cumsum(0) - weights
    if limit < vocab or min_p > 0:
        total = weights.sum().double()
    else:
        total = torch.zeros((), dtype=torch.float64, device=z.device)
        for most, part in zip(*segment_sums(z), strict=True):
            total = total + part.double() * exp_of(most - peak).double()
        total = total * ONE
    return min(inside, max(int((before.double() < top_p.double() * total).sum()), 1))


def choose(logits: Tensor, at: Nodes, params: Params) -> tuple[Tensor, Tensor]:
    """The target's tokens [M] int64 and their log-probabilities [M] float32 under the raw logits [M, V]."""
    raw = clean(logits)
    z = adjusted(logits, at, params)
    tokens = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for m, (r, n) in enumerate(zip(at.rows.tolist(), at.nodes.tolist(), strict=True)):
        heat, top_p, min_p = params.numbers[r, :3]
        if heat > COLD:
            keep = kept(z[m], top_p, min_p, int(params.top_k[r]))
            ids = ranked(z[m], z.shape[1])[0][:keep].sort().values.long()
            position = at.lengths[r] + at.depths[r, n] + 1
            drawn = z[m, ids] + gumbel(params.seeds[r : r + 1], position[None], z.shape[1])[0, ids]
        else:
            ids, drawn = torch.arange(z.shape[1], device=z.device), z[m]
        best = ranked(drawn, 1)[0][0] if len(ids) else torch.tensor(-1)
        tokens[m] = ids[int(best)] if best >= 0 else 0
    return tokens, raw.gather(1, tokens[:, None])[:, 0] - log_sum_exp(raw)


@dataclass(frozen=True)
class Path:
    """What a step accepted, padded to P: nodes, tokens, chosen [R, P] int64 (-1), logprobs [R, P] float32 (0); counts (accepted
    nodes, root included), emitted, final [R] int64. chosen: which of the M choices each emitted token is."""

    nodes: Tensor
    counts: Tensor
    tokens: Tensor
    emitted: Tensor
    final: Tensor
    logprobs: Tensor
    chosen: Tensor


def walk(at: Nodes, counts: Tensor, choices: Tensor, scores: Tensor, width: int) -> Path:
    """Follow the choices through trees of counts [R] live nodes; a path ends after `width` nodes at the latest."""
    rows = len(counts)
    place = {(r, n): m for m, (r, n) in enumerate(zip(at.rows.tolist(), at.nodes.tolist(), strict=True))}
    nodes, tokens, chosen = (torch.full((rows, width), -1) for _ in range(3))
    accepted, emitted, final = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
    logprobs = torch.zeros(rows, width)
    for r, count in enumerate(counts.tolist()):
        if at.forced is not None and at.forced[r]:
            path, sources = list(range(count)), [place[r, count - 1]]
        else:
            path = [0]
            while len(path) < width:
                token = int(choices[place[r, path[-1]]])
                match = [n for n in range(count) if at.parents[r, n] == path[-1] and at.tokens[r, n] == token]
                if not match:
                    break
                path.append(match[0])
            sources = [place[r, n] for n in path]
        shown = path[:width]
        nodes[r, : len(shown)] = torch.tensor(shown)
        accepted[r], emitted[r], final[r] = len(path), len(sources), choices[sources[-1]]
        chosen[r, : len(sources)] = torch.tensor(sources)
        tokens[r, : len(sources)] = choices[sources].cpu()
        logprobs[r, : len(sources)] = scores[sources].cpu()
    moved = (t.to(counts.device) for t in (nodes, accepted, tokens, emitted, final, logprobs, chosen))
    return Path(*moved)
