"""Draft trees: padded batches of them, and how they grow.

Growth is best-first over the drafter's independent per-depth marginals, as published for DDTree (arXiv 2604.12989):
pop the likeliest node, push its next sibling and its first child, stop at the budget. Nodes are stored in pop order,
so any prefix of a tree is the best smaller tree, and a parent always precedes its children.

Score of a child x at depth d under a parent that holds token a, with drafter logits l_d, temperature T, noise g:

    z_d(x)    = log q_d(x) / T + beta_d * g_d(x)                  q_d = softmax(l_d); T = 1 and no noise when greedy
    s(x)      = log_softmax_x(z_d)                                depth 1, and every depth without a previous-token table
    s(x | a)  = log_softmax_{x in C_d}(z_d(x) + (alpha / T) * PMI(a, x))     depth >= 2 with a table

C_d are the `candidates` (64) tokens of highest z_d. So the table corrects log q before the temperature divides it, and
the noise comes last. Beside a table, tokens that followed the end of the path in the row's own text get a bonus at every
depth (`spec.echo`; s at depth 1 is then a log_softmax over C_1). beta is 1 at depth 1 and .75 below:
from depth 2 on q_d mixes many paths, and the full noise would pick a random component of the mixture instead of its mode.
The cumulative sum of s along a path orders the heap. It never decides what is committed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.config import MAX_BUDGET
from draftwood.spec.bigram import Bigram
from draftwood.spec.echo import LONGEST, Echo, Tail, loudness
from draftwood.spec.noise import COLD
from draftwood.spec.rank import host, maxima, top

CAP_STEPS = ((8, 4), (16, 8), (MAX_BUDGET, 16))
"""(nodes, cap): the first 8 nodes of a tree take children of rank < 4, the next 8 of rank < 8, the rest of rank < 16.
Siblings refused by a lower cap come back when the cap rises, which it also does when nothing else is left to take. So
trees stay nested across budgets."""
WORTH = 0.5
"""`GrowOptions.worth` of a CPU, where every node costs time. A tree of 8 nodes then takes none that it gives less than one
chance in 16: greedy, 12 built-in prompts, 4.25 tokens from some 6 nodes instead of 4.41 from 8. By the steps measured on two idle
AVX-512 cores (8.85 ms at 8 nodes, some .3 less for each node less) that is 4 % more tokens a second; 1 % where cores and
caches are shared. Trees of 1 would be 1 % faster still and miss 7 % of the tokens."""


@dataclass(frozen=True)
class Tree:
    """R trees padded to N nodes. Node 0 is the root; nodes past counts[r] are padding (token 0, parent -1, depth 0).

    tokens, parents (-1 for the root), depths: [R, N] int64; counts [R] int64, live nodes, root included;
    forced [R] bool: a chain of known tokens, every node of which is accepted (a prompt chunk);
    logprob [R, N] float32: cumulative draft log-probability, 0 at the root.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    counts: Tensor
    forced: Tensor
    logprob: Tensor

    def positions(self, lengths: Tensor) -> Tensor:
        """Return [R, N] absolute positions; lengths [R] = committed tokens = position of the root."""
        return lengths[:, None] + self.depths.to(lengths.device)

    def verified(self) -> tuple[Tensor, Tensor]:
        """Return (rows [M], nodes [M]) where the target chooses: live nodes of free rows, the last of forced rows."""
        rows: list[int] = []
        nodes: list[int] = []
        for r, (count, forced) in enumerate(zip(self.counts.tolist(), self.forced.tolist(), strict=True)):
            seen = range(count - 1 if forced else 0, count)
            rows += [r] * len(seen)
            nodes += seen
        return torch.tensor(rows, dtype=torch.long), torch.tensor(nodes, dtype=torch.long)

    def ancestors(self) -> Tensor:
        """Return [R, N, W] int64, W = ceil(N / 64): bit j % 64 of word j // 64 is set when node j is an ancestor or self.

        Padding has no bits. The sign bit is bit 63: read the words as unsigned.
        """
        rows, width = self.tokens.shape
        words = (width + 63) // 64
        bits = np.zeros((rows, width, words), np.int64)
        forced = self.forced.tolist()
        for r, (count, parents) in enumerate(zip(self.counts.tolist(), self.parents.tolist(), strict=True)):
            if forced[r]:
                bits[r, :count] = _chain_bits(count, words)
                continue
            seen: list[int] = []
            for node, parent in enumerate(parents[:count]):
                seen.append(1 << node | (seen[parent] if parent >= 0 else 0))
            packed = b"".join(mask.to_bytes(words * 8, "little") for mask in seen)
            bits[r, :count] = np.frombuffer(packed, "<i8").reshape(count, words)
        return torch.from_numpy(bits)

    def cut(self, budgets: Tensor) -> Tree:
        """Keep the first budgets[r] nodes beyond each root (fewer if the tree is smaller); forced rows stay whole.

        The result is the best tree of that budget, since nodes stand in pop order.
        """
        counts = torch.where(self.forced, self.counts, torch.minimum(self.counts, budgets.to(self.counts) + 1))
        width = int(counts.max()) if len(counts) else 0
        live = torch.arange(width) < counts[:, None]
        return replace(
            self,
            tokens=self.tokens[:, :width].where(live, 0),
            parents=self.parents[:, :width].where(live, -1),
            depths=self.depths[:, :width].where(live, 0),
            counts=counts,
            logprob=self.logprob[:, :width].where(live, 0.0),
        )


def _chain_bits(width: int, words: int) -> NDArray[np.int64]:
    """Return [N, W]: bits 0..n of node n."""
    node = np.arange(width)
    own = np.zeros((width, words), np.uint64)
    own[node, node // 64] = np.uint64(1) << (node % 64).astype(np.uint64)
    return np.bitwise_or.accumulate(own, axis=0).view(np.int64)


def _pack(rows: Sequence[tuple[list[int], list[int], list[int], list[float]]], forced: bool) -> Tree:
    """Pad per-row (tokens, parents, depths, logprob) lists to one Tree."""
    counts = [len(row[0]) for row in rows]
    if len(rows) == 1:  # a third of the time
        tokens, parents, depths = torch.from_numpy(np.array(rows[0][:3], np.int64)[:, None]).unbind()
        logprob = torch.from_numpy(np.array(rows[0][3:], np.float32))
        return Tree(tokens, parents, depths, torch.tensor(counts), torch.tensor([forced]), logprob)
    shape = len(rows), max(counts, default=0)
    whole, scored = np.zeros((3, *shape), np.int64), np.zeros(shape, np.float32)
    whole[1] = -1
    for r, (count, (*links, scores)) in enumerate(zip(counts, rows, strict=True)):
        whole[:, r, :count], scored[r, :count] = links, scores
    tokens, parents, depths = torch.from_numpy(whole).unbind()
    live = torch.tensor(counts, dtype=torch.long)
    return Tree(tokens, parents, depths, live, torch.full((len(rows),), forced), torch.from_numpy(scored))


def chain(tokens: Sequence[Sequence[int]]) -> Tree:
    """Return forced chains: every token is known, so every node is accepted. Each list holds at least one token."""
    return _pack([(list(t), list(range(-1, len(t) - 1)), list(range(len(t))), [0.0] * len(t)) for t in tokens], True)


def roots(tokens: Tensor | Sequence[int]) -> Tree:
    """Return trees of one node each (plain decoding); tokens [R]."""
    column = torch.as_tensor(tokens, dtype=torch.long).cpu().reshape(-1, 1)
    rows = len(column)
    return Tree(
        tokens=column,
        parents=torch.full((rows, 1), -1),
        depths=torch.zeros(rows, 1, dtype=torch.long),
        counts=torch.ones(rows, dtype=torch.long),
        forced=torch.zeros(rows, dtype=torch.bool),
        logprob=torch.zeros(rows, 1),
    )


def join(trees: Sequence[Tree], order: Sequence[int] | None = None) -> Tree:
    """Stack the rows of several batches; row i of the result is row order[i] of the stack (default: as stacked)."""
    width = max(tree.tokens.shape[1] for tree in trees)

    def stack(name: str, fill: float) -> Tensor:
        parts = [getattr(tree, name) for tree in trees]
        return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts])

    whole = Tree(
        tokens=stack("tokens", 0),
        parents=stack("parents", -1),
        depths=stack("depths", 0),
        counts=torch.cat([tree.counts for tree in trees]),
        forced=torch.cat([tree.forced for tree in trees]),
        logprob=stack("logprob", 0.0),
    )
    if order is None:
        return whole
    index = torch.as_tensor(order, dtype=torch.long)
    return Tree(*(getattr(whole, name)[index] for name in ("tokens", "parents", "depths", "counts", "forced", "logprob")))


@dataclass(frozen=True)
class GrowOptions:
    """Knobs of growth. None of them changes a committed token.

    topk_cap: most children of a node; None = CAP_STEPS. spine: put the whole top-1 chain first.
    beta: scale of the shared noise by depth, the last value holds for all deeper ones. alpha: weight of the
    previous-token table; candidates: tokens per depth that the table re-ranks.
    worth: a tree of budget n takes no node that it holds less likely than worth / n; 0 = any (`WORTH`).
    calibration: [2, D, K] added to a child's score: off / on the top-1 chain, depth - 1, rank (last entries hold beyond).
    """

    topk_cap: int | None = None
    spine: bool = False
    beta: tuple[float, ...] = (1.0, 0.75)
    alpha: float = 0.4
    candidates: int = 64
    worth: float = 0.0
    calibration: NDArray[np.float32] | None = None

    def caps(self) -> tuple[tuple[int, int], ...]:
        """Return (nodes, cap) steps: nodes up to `nodes` take children of rank < cap."""
        return CAP_STEPS if self.topk_cap is None else ((MAX_BUDGET, self.topk_cap),)


Children = tuple[list[int], list[float]]
"""Tokens and log-probabilities of a node's possible children, best first."""


def grow(
    logits: Tensor,
    roots: Tensor,
    budgets: Tensor | Sequence[int],
    temperature: Tensor | Sequence[float],
    noise: Tensor | None,
    options: GrowOptions = GrowOptions(),
    bigram: Bigram | None = None,
    echoes: Sequence[Echo | None] = (),
) -> Tree:
    """Grow one tree per row from drafter logits [R, D, V]; index d - 1 holds the prediction for depth d.

    roots [R] tokens; budgets [R] most nodes beyond the root, 0..64; temperature [R], 0 (up to COLD) = greedy; noise [R, >=D, V]
    Gumbel noise, index d - 1 = that of position length + d (rows with temperature 0 ignore theirs), or None. echoes [R]: the rows'
    own texts, of use with a table.
    Equal scores go to the lowest token id, then to the node seen first. NaN logits count as -inf; a row without
    a finite logit at depth 1 stays a root.
    """
    first = torch.as_tensor(roots).tolist()
    sizes = [int(b) for b in torch.as_tensor(budgets).tolist()]
    heat = [float(t) for t in torch.as_tensor(temperature).tolist()]
    rows: list[tuple[list[int], list[int], list[int], list[float]]] = [([t], [-1], [0], [0.0]) for t in first]
    active = [r for r, b in enumerate(sizes) if b > 0]
    if not active or logits.shape[1] == 0:
        return _pack(rows, False)
    most = min(options.caps()[-1][1], max(sizes))
    width = most if bigram is None else options.candidates
    # With a table the scores of deeper marginals are never asked for.
    scored = logits.shape[1] if bigram is None else 1
    ids, scores, raw = _marginals(logits, active, heat, noise, options.beta, width, scored)
    for i, r in enumerate(active):
        if bigram is None:
            lists: _Marginal = _Marginal(ids[i], scores[i])
        else:
            t = heat[r] if heat[r] > COLD else 0.0
            lists = _Conditional(ids[i], scores[i], raw[i], bigram, options.alpha / (t or 1.0), most)
            lists.hear(echoes[r] if echoes else None, t)
        rows[r] = _grow_row(lists, first[r], sizes[r], options, options.worth / sizes[r])
    return _pack(rows, False)


def _marginals(
    logits: Tensor,
    active: list[int],
    heat: list[float],
    noise: Tensor | None,
    beta: tuple[float, ...],
    width: int,
    scored: int | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return the `width` best tokens per row and depth: ids [A, D, width]; log-probabilities s [A, scored, width] of the
    first `scored` depths, None for all; and z [A, D, width] up to a constant per depth that cancels in s. Padding: id -1,
    values -inf."""
    depth, vocab = logits.shape[1], logits.shape[2]
    found = host(logits.float())
    groups = maxima(found.reshape(-1, vocab))
    peak = found.max(-1) if groups is None else groups.max(-1).reshape(-1, depth)
    sound = bool(((peak > -1e30) & (peak < 1e30)).all())  # false for NaN too
    z = found if sound else np.where(np.isnan(found), np.float32(-np.inf), np.minimum(found, np.float32(1e30)))
    z = _heated(z, active, heat, noise, beta)
    head = z[:, :scored]
    if z is found:
        peak = peak[:, :scored].copy()
    else:
        groups, peak = None, head.max(-1)
    peak[peak == -np.inf] = 0.0
    with np.errstate(divide="ignore"):  # nothing but -inf: log 0 = -inf, and its values stay -inf below
        norm = peak + np.log(np.exp(head - peak[..., None]).sum(-1))
    ids, best = top(z.reshape(-1, vocab), width, groups)
    ids, best = ids.reshape(len(active), depth, -1), best.reshape(len(active), depth, -1)
    norm = np.where(np.isfinite(norm), norm, np.float32(0))[..., None]
    scores = np.where(ids[:, :scored] >= 0, best[:, :scored] - norm, np.float32(-np.inf))
    return ids, scores, best


def _heated(
    z: NDArray[np.float32], active: list[int], heat: list[float], noise: Tensor | None, beta: tuple[float, ...]
) -> NDArray[np.float32]:
    """Return logits / T + beta_d * noise for the rows `active`; greedy rows as they are."""
    every = len(active) == len(z)
    hot = [i for i, r in enumerate(active) if heat[r] > COLD]
    if not hot:
        return z if every else z[active]
    source = [active[i] for i in hot]
    with np.errstate(over="ignore"):  # hostile logits near -3e38 become -inf
        part = (z if len(hot) == len(z) else z[source]) / np.array([heat[r] for r in source], np.float32)[:, None, None]
    if noise is not None:
        shared = host(noise[:, : z.shape[1]])
        shared = shared if len(hot) == len(shared) else shared[source]
        scale = np.array([beta[min(d, len(beta) - 1)] for d in range(z.shape[1])], np.float32)
        part += shared * scale[:, None]
    if len(hot) == len(active):
        return part
    out: NDArray[np.float32] = z[active]
    out[hot] = part
    return out


class _Marginal:
    """Children lists of one row when a node's children do not depend on the node: one list per depth."""

    def __init__(self, ids: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        self.depth = len(ids)
        self.lists: list[Children] = list(zip(ids.tolist(), scores.tolist(), strict=True))

    def tail(self, root: int) -> Tail:
        """Return the tokens before a root's children that decide about them, the root last."""
        return (root,)

    def children(self, depth: int, tail: Tail) -> Children:
        """Return candidates for depth `depth` + 1 under a node at `depth` whose path ends with `tail`."""
        return self.lists[depth]


class _Conditional(_Marginal):
    """Children lists of one row re-ranked by the end of the parent's path; each (depth, end) is computed once, when asked for."""

    def __init__(
        self,
        ids: NDArray[np.int64],
        scores: NDArray[np.float32],
        raw: NDArray[np.float32],
        bigram: Bigram,
        weight: float,
        most: int,
    ) -> None:
        super().__init__(ids[:1], scores)
        self.depth = len(ids)
        order = np.argsort(ids, axis=1)  # ascending ids: a stable sort then gives ties to the lowest
        every = np.arange(self.depth)[:, None]
        self.ids, self.raw = ids[every, order], raw[every, order]
        self.bigram, self.weight, self.most = bigram, np.float32(weight), most
        self.known: dict[tuple[int, Tail], Children] = {}
        self.echo: Echo | None = None
        self.loudness = 0.0

    def hear(self, echo: Echo | None, temperature: float) -> None:
        """Heed the row's own text, if there is one. temperature: 0 = greedy."""
        self.echo, self.loudness = echo, loudness(temperature)

    def tail(self, root: int) -> Tail:
        """Return the end of the row's text, or the root alone where a child's score depends on nothing before its parent."""
        return (root,) if self.echo is None else self.echo.tail

    def children(self, depth: int, tail: Tail) -> Children:
        """Return candidates for depth `depth` + 1 under a node at `depth` whose path ends with `tail`."""
        said, bonus = ((), 0.0) if self.echo is None else self.echo.after(tail)
        if depth == 0 and not said:
            return self.lists[0]
        # Where nothing was said the parent alone decides.
        key = depth, tail if said else tail[-1:]
        found = self.known.get(key)
        if found is None:
            ids = self.ids[depth]
            score = self.raw[depth].copy()
            if depth > 0:
                score += self.bigram.scores(tail[-1], ids) * self.weight
            for token in said:
                at = int(ids.searchsorted(token))
                if at < len(ids) and ids[at] == token:
                    score[at] += bonus * self.loudness
            order = (-score).argsort(kind="stable")[: self.most]
            best = score[order]
            peak = best[0]
            if peak == -np.inf:
                found = ([], [])
            else:
                norm = peak + np.log(np.exp(score - peak).sum())
                found = (ids[order].tolist(), (best - norm).tolist())
            self.known[key] = found
        return found


def _grow_row(
    lists: _Marginal, root: int, budget: int, options: GrowOptions, least: float = 0.0
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Pop up to `budget` nodes in order of cumulative score, down to a probability of `least` but for the spine; return tokens,
    parents, depths, cumulative scores."""
    bound = np.log(least) if least > 0 else -np.inf
    tokens, parents, depths, logprob = [root], [-1], [0], [0.0]
    tails = [lists.tail(root)]
    heap: list[tuple[float, int, int, int, int, float, bool, Children, float]] = []
    refused: list[tuple[int, int, float, bool, Children]] = []
    serial = 0
    steps = iter(options.caps())
    until, cap = next(steps)

    def push(parent: int, rank: int, base: float, spine: bool, kids: Children) -> None:
        """Offer child `rank` of node `parent`, whose cumulative score is `base` and which is on the top-1 chain or not."""
        nonlocal serial
        if rank >= len(kids[0]) or kids[1][rank] == -np.inf:
            return
        if rank >= cap:
            refused.append((parent, rank, base, spine, kids))
            return
        total = base + kids[1][rank] + _correction(options, depths[parent], rank, spine)
        first = options.spine and spine and rank == 0
        serial += 1
        key = depths[parent] - 1e9 if first else -total
        heapq.heappush(heap, (key, kids[0][rank], serial, parent, rank, base, spine, kids, total))

    push(0, 0, 0.0, True, lists.children(0, tails[0]))
    while len(tokens) <= budget:
        while (not heap or len(tokens) > until) and (step := next(steps, None)):
            until, cap = step
            again, refused = refused, []
            for one in again:
                push(*one)
        if not heap:
            break
        key, token, _, parent, rank, base, spine, kids, total = heapq.heappop(heap)
        if total < bound and key > -1e8:
            break
        node, depth = len(tokens), depths[parent] + 1
        tokens.append(token)
        tails.append((*tails[parent], token)[-LONGEST:])
        parents.append(parent)
        depths.append(depth)
        logprob.append(total)
        if node == budget:
            break
        push(parent, rank + 1, base, spine, kids)
        if depth < lists.depth:
            push(node, 0, total, spine and rank == 0, lists.children(depth, tails[node]))
    return tokens, parents, depths, logprob


def _correction(options: GrowOptions, depth: int, rank: int, spine: bool) -> float:
    """Return what the calibration table adds to a child of rank `rank` at depth `depth` + 1."""
    table = options.calibration
    if table is None:
        return 0.0
    return float(table[int(spine), min(depth, table.shape[1] - 1), min(rank, table.shape[2] - 1)])
