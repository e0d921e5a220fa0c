"""How the target chooses a token at every verified node: filters on its own logits, then argmax with keyed noise.

Order at a node, always on the target's raw logits [V] in float32:

0. what the row's grammar does not allow at the node: -inf.
1. logit bias: added.
2. penalties over the node's own path = history (prompt and generated tokens, the root included) + the node's ancestors
   below the root + itself. Repetition, for tokens of prompt or path: x / r if x > 0 else x * r. Frequency f and
   presence p, for generated tokens (path nodes count as generated) seen n > 0 times: x - f * n - p.
   Then tokens that would end an answer before its min_tokens: -inf at the nodes that are too early (`Floor`).
3. greedy (temperature <= COLD): argmax, lowest id on ties; the filters below cannot change it. Otherwise z = x / T.
4. min-p m: keep z >= max z + log m.
5. top-k k: keep the k first in the order (z descending, id ascending): exactly k, fewer if min-p left fewer.
6. top-p p: over the softmax of what is left, in that order, keep a token while the mass before it is < p; the first
   token always stays.
7. choose argmax(z + gumbel(seed, position, token)), lowest id on ties, which is an exact draw from softmax(z).

Off: bias none, presence and frequency 0, repetition 1, min-p 0, top-k 0 or less, top-p 1 or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.spec.grammar import Permits
from draftwood.spec.noise import COLD
from draftwood.spec.noise import gumbel as gumbel
from draftwood.spec.rank import host, top
from draftwood.spec.tree import Tree

_RANKED = 256
"""Values ranked at first; the few nodes whose top-k or top-p reaches further are ranked in full."""


class SamplingChoice(Protocol):
    """What is read of a request's parameters; engine.request.SamplingParams has these fields."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float] | None: ...


def uses_history(params: SamplingChoice) -> bool:
    """Say whether a request needs a History: it penalises tokens it has seen."""
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


class History:
    """Which tokens one request holds so far, for its penalties: the whole prompt, and generated tokens with counts.

    It holds every known token, the root included. For a prompt chunk it holds the whole prompt from the start.
    """

    def __init__(self, prompt: Sequence[int], vocab: int) -> None:
        self.seen: NDArray[np.bool_] = np.zeros(vocab, bool)
        self.generated: NDArray[np.int32] = np.zeros(vocab, np.int32)
        self.seen[list(prompt)] = True

    def extend(self, tokens: Sequence[int]) -> None:
        """Count committed tokens, each once."""
        np.add.at(self.generated, np.asarray(tokens, np.int64), 1)


@dataclass
class Floor:
    """Tokens that may not be chosen while an answer is shorter than it has to be."""

    ids: NDArray[np.int64]
    left: int
    """Tokens still to be generated before `ids` are allowed."""

    def extend(self, count: int) -> None:
        """Take note of generated tokens."""
        self.left = max(0, self.left - count)


@dataclass(frozen=True)
class Sampling:
    """Parameters of the rows of a step, one entry a row; build it again only when the rows change.

    Arrays are [R]: seed int64 (two's complement of 64 bits), top_k int64 (0 = off), the rest float32.
    bias[r]: (ids, values) or None; history[r]: History or None, changed in place as tokens are committed.
    """

    seed: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    bias: tuple[tuple[NDArray[np.int64], NDArray[np.float32]] | None, ...]
    history: tuple[History | None, ...]
    floors: tuple[Floor | None, ...] = ()
    """As history; empty where no row has one."""
    _recent: dict[int, tuple[int, NDArray[np.float32]]] = field(default_factory=dict, repr=False, compare=False)
    """By row: first position and noise [count, V] of the last step. Positions it did not accept come up again."""

    @staticmethod
    def build(
        params: Sequence[SamplingChoice],
        seeds: Sequence[int],
        histories: Sequence[History | None] | None = None,
        floors: Sequence[Floor | None] = (),
    ) -> Sampling:
        """Collect the rows' parameters; seeds are 64-bit, histories are needed where `uses_history`."""

        def column(name: str) -> NDArray[np.float32]:
            return np.array([getattr(p, name) for p in params], np.float32)

        bias = []
        for p in params:
            pairs = sorted((p.logit_bias or {}).items())
            ids = np.array([int(i) for i, _ in pairs], np.int64)
            bias.append((ids, np.array([v for _, v in pairs], np.float32)) if pairs else None)
        top_k = np.array([max(int(p.top_k or 0), 0) for p in params], np.int64)
        return Sampling(
            seed=np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64).view(np.int64),
            temperature=column("temperature"),
            top_k=top_k,
            top_p=column("top_p"),
            min_p=column("min_p"),
            presence=column("presence_penalty"),
            frequency=column("frequency_penalty"),
            repetition=column("repetition_penalty"),
            bias=tuple(bias),
            history=tuple(histories) if histories is not None else (None,) * len(params),
            floors=tuple(floors) if any(floor is not None for floor in floors) else (),
        )

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """[R] rows that draw; the others are greedy."""
        return self.temperature > COLD

    @property
    def penalised(self) -> NDArray[np.bool_]:
        """[R] rows whose logits depend on their history."""
        return (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """[R] rows with min-p, top-k or top-p at work."""
        return self.sampled & ((self.min_p > 0) | (self.top_k > 0) | (self.top_p < 1))

    def noise(self, first: Tensor, count: int, vocab: int) -> Tensor | None:
        """Return the Gumbel noise of a step, [R, count, V] float32, or None when every row is greedy.

        noise[r, j] belongs to position first[r] + j. Free rows: first = length + 1, so index d - 1 is that of a node at
        depth d for `grow` and index d that of the choice at it for `choose`; count = depth of the trees + 1.
        Forced rows: first = length + number of nodes, the position of their one choice. Greedy rows hold zeros.
        """
        if not self.sampled.any():
            return None
        starts = first.cpu().tolist()
        out = np.zeros((len(starts), count, vocab), np.float32)
        missing = []
        for r in np.flatnonzero(self.sampled).tolist():
            done = self._copy_recent(r, starts[r], out[r])
            missing += [(r, j) for j in range(done, count)]
            self._recent[r] = (starts[r], out[r])
        if missing:
            row, place = np.array(missing).T
            positions = torch.from_numpy(np.array(starts)[row] + place)[:, None]
            out[row, place] = gumbel(torch.from_numpy(self.seed[row]), positions, vocab).numpy()[:, 0]
        return torch.from_numpy(out)

    def _copy_recent(self, r: int, start: int, out: NDArray[np.float32]) -> int:
        """Fill the head of out [count, V] with what the last step computed beyond its accepted path; return how many."""
        before, values = self._recent.get(r, (start, out[:0]))
        if start < before or values.shape[1] != out.shape[1]:
            return 0
        known = values[start - before : start - before + len(out)]
        out[: len(known)] = known
        return len(known)


def choose(
    logits: Tensor,
    rows: Tensor,
    nodes: Tensor,
    tree: Tree,
    sampling: Sampling,
    noise: Tensor | None,
    permits: Permits | None = None,
    scored: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the target's tokens [M] int64 and, where `scored`, their log-probabilities [M] float32 under the raw logits.

    logits [M, V] at the verified (rows, nodes) [M]; noise as `Sampling.noise` gives it; permits: what grammars allow.
    Raises ValueError when a sampled row comes without noise.
    """
    raw = host(logits.float())
    at, node = host(rows), host(nodes)
    z = _filtered(raw if permits is None else permits.cut(raw), at, node, tree, sampling)
    hot = np.flatnonzero(sampling.sampled[at])
    if len(hot):
        if noise is None:
            raise ValueError("sampled rows need noise: pass Sampling.noise(...)")
        place = np.where(host(tree.forced)[at], 0, host(tree.depths)[at, node])
        values = host(noise)
        if len(hot) == len(at):
            z = z + values[at, place]
        else:
            z = z.copy() if z is raw else z
            z[hot] += values[at[hot], place[hot]]
    tokens = z.argmax(-1)
    return torch.from_numpy(tokens), torch.from_numpy(_log_probability(raw, tokens)) if scored else None


def _log_probability(raw: NDArray[np.float32], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return log_softmax(raw)[m, tokens[m]] for each m."""
    return raw[np.arange(len(raw)), tokens] - _log_sum_exp(raw)


def _log_sum_exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    peak = x.max(-1)
    return peak + np.log(np.exp(x - peak[:, None]).sum(-1))


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [M, k] of the likeliest tokens under the raw logits [M, V]; ties by lowest id."""
    raw = host(logits.float())
    ids, values = top(raw, k)
    return torch.from_numpy(ids), torch.from_numpy(values - _log_sum_exp(raw)[:, None])


def filter_logits(
    logits: Tensor, rows: Tensor, nodes: Tensor, tree: Tree, sampling: Sampling, permits: Permits | None = None
) -> Tensor:
    """Return the logits [M, V] that the choice is made from: steps 0 to 6 above, -inf where a filter removed a token.

    Greedy rows are not divided by a temperature and not truncated. The input is not changed.
    """
    raw = host(logits.float())
    raw = raw if permits is None else permits.cut(raw)
    out = _filtered(raw, host(rows), host(nodes), tree, sampling)
    return torch.from_numpy(out.copy() if out is raw else out)


def _filtered(
    raw: NDArray[np.float32], at: NDArray[np.int64], node: NDArray[np.int64], tree: Tree, sampling: Sampling
) -> NDArray[np.float32]:
    """`filter_logits` on arrays; returns `raw` itself when there is nothing to do."""
    z = raw
    biased = [r for r, pairs in enumerate(sampling.bias) if pairs is not None]
    penalised = np.flatnonzero(sampling.penalised[at])
    if biased or len(penalised):
        z = raw.copy()
    for r in biased:
        ids, values = sampling.bias[r] or ([], [])
        z[np.flatnonzero(at == r)[:, None], ids] += values
    if len(penalised):
        z[penalised] = _penalise(z[penalised], at[penalised], node[penalised], tree, sampling)
    if any(floor is not None and floor.left > 0 for floor in sampling.floors):
        z = _hold(z.copy() if z is raw else z, at, node, tree, sampling.floors)
    hot = sampling.sampled[at]
    if hot.any() and not (sampling.temperature[at] == 1).all():
        z = z / np.where(hot, sampling.temperature[at], np.float32(1)).astype(np.float32)[:, None]
    cut = np.flatnonzero(sampling.truncated[at])
    if len(cut):
        row = at[cut]
        part = truncate(z[cut], sampling.min_p[row], sampling.top_k[row], sampling.top_p[row])
        if len(cut) == len(at):
            return part
        z = z.copy() if z is raw else z
        z[cut] = part
    return z


def _hold(
    z: NDArray[np.float32], at: NDArray[np.int64], node: NDArray[np.int64], tree: Tree, floors: tuple[Floor | None, ...]
) -> NDArray[np.float32]:
    """Remove from z [M, V], in place, the tokens of each row's Floor: a node at depth d comes after d more tokens."""
    depth = np.where(host(tree.forced)[at], 0, host(tree.depths)[at, node])
    for r, floor in enumerate(floors):
        if floor is not None:
            z[np.flatnonzero((at == r) & (depth < floor.left))[:, None], floor.ids] = -np.inf
    return z


def _penalise(
    x: NDArray[np.float32], at: NDArray[np.int64], node: NDArray[np.int64], tree: Tree, sampling: Sampling
) -> NDArray[np.float32]:
    """Return x [M, V] of nodes whose rows penalise with the penalties applied. Only tokens seen so far are touched."""
    out = x.copy()
    for r in np.unique(at).tolist():
        history = sampling.history[r]
        if history is None:
            raise ValueError(f"row {r} penalises tokens but has no History")
        m = np.flatnonzero(at == r)
        token = np.flatnonzero(history.seen | (history.generated > 0))
        here = (m[:, None], token[None])
        out[here] = _penalty(x[here], history.generated[token], sampling, r)
        m, token, count = _path_tokens(m, node[m], tree, r, x.shape[1])
        if len(m):  # from the raw value again: tokens of the path may be in the history too
            out[m, token] = _penalty(x[m, token], history.generated[token] + count, sampling, r)
    return out


def _penalty(x: NDArray[np.float32], count: NDArray[np.int64], sampling: Sampling, r: int) -> NDArray[np.float32]:
    """Return penalised logits of seen tokens; count: how often each was generated."""
    repeat = sampling.repetition[r]
    x = np.where(x > 0, x / repeat, x * repeat)
    return x - sampling.frequency[r] * count.astype(np.float32) - sampling.presence[r] * (count > 0).astype(np.float32)


def _path_tokens(
    m: NDArray[np.int64], node: NDArray[np.int64], tree: Tree, r: int, vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (m, token, times) for every distinct token on each node's path below the root of row r.

    Chains of known tokens have nothing to add: they are in the history.
    """
    tokens, parents = host(tree.tokens[r]), host(tree.parents[r])
    pairs = []
    here = node if not bool(tree.forced[r]) else node[:0]
    m = m[: len(here)]
    while len(here):
        m, here = m[here > 0], here[here > 0]
        pairs.append(m * vocab + tokens[here])
        here = parents[here]
    pair, times = np.unique(np.concatenate(pairs) if pairs else m, return_counts=True)
    return pair // vocab, pair % vocab, times


def truncate(
    z: NDArray[np.float32], min_p: NDArray[np.float32], top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Apply min-p, top-k and top-p to tempered logits z [M, V] with a value of each per row; removed tokens are -inf."""
    if (min_p > 0).any():
        with np.errstate(divide="ignore"):  # off: log 0 = -inf keeps all
            bound = z.max(-1) + np.log(np.maximum(min_p, 0))
        z = np.where(z < bound[:, None], np.float32(-np.inf), z)
    ranked = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(ranked):
        return z
    limit = np.where(top_k > 0, np.minimum(top_k, z.shape[1]), z.shape[1])
    z = z.copy()
    for width in (_RANKED, z.shape[1]):
        if len(ranked):
            part, short = _keep_first(z[ranked], limit[ranked], top_p[ranked], min(width, z.shape[1]))
            z[ranked[~short]] = part[~short]
            ranked = ranked[short]
    return z


def _keep_first(
    z: NDArray[np.float32], limit: NDArray[np.int64], top_p: NDArray[np.float32], width: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Keep what top-k (`limit`) and top-p leave, in the order (z descending, id ascending), ranking `width` values.

    Return z with the rest at -inf, and which rows need more values ranked. Sums run in float64, a token's weight is
    computed once from its float32 value, and the sum of the whole is taken in id order or over `limit` values in
    rank order, so that the number of ranked values cannot change a result.
    """
    rows, vocab = z.shape
    ranked = top(z, width)[1] if width < vocab else -np.sort(-z, axis=-1)
    peak = ranked[:, :1]
    inside = (np.arange(width) < limit[:, None]) & (ranked > -np.inf)
    mass = np.cumsum(np.where(inside, np.exp(ranked - peak), np.float32(0)), -1, dtype=np.float64)
    total = mass[:, -1].copy()
    whole = np.flatnonzero(limit >= vocab)
    total[whole] = np.exp(z[whole] - peak[whole]).sum(-1, dtype=np.float64)
    before = np.concatenate([np.zeros((rows, 1)), mass[:, :-1]], -1)
    nucleus = (before < top_p[:, None].astype(np.float64) * total[:, None]).sum(-1)
    kept = np.minimum(inside.sum(-1), np.where(top_p < 1, np.maximum(nucleus, 1), vocab))
    last = ranked[np.arange(rows), np.maximum(kept - 1, 0)][:, None]
    out = np.where(z >= last, z, np.float32(-np.inf))
    for i in np.flatnonzero((out > -np.inf).sum(-1) > kept):  # equal values at the boundary: the lowest ids stay
        equal = np.flatnonzero(z[i] == last[i])
        out[i, equal[kept[i] - int((z[i] > last[i]).sum()) :]] = -np.inf
    return out, (limit > width) & ((limit < vocab) | (kept >= width))
