"""What the kernels of this folder mean. The mathematics is `spec.policy`'s; gains are counted in bins of 1/16 octave.

Sizes decide how long a step takes, never what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.accept.ref import Path
from draftwood.kernels.tree.numbers import COLD, exp_of, minus_log
from draftwood.kernels.tree.ref import Trees

EDGES = (-8.0, -6.0, -5.0, -4.0, -3.0, -2.5, -2.0, -1.5, -1.0, -0.7, -0.4, -0.2, -0.1, -0.05)
"""Of the classes of log-probabilities."""
WARM = 0.8
KINDS, CLASSES, BINS = 3, len(EDGES) + 1, 257
CAPS = (8, 16, 32, 64)
"""Nodes beyond the root that trees are grown to; a step with each is a graph of its own, with its own costs."""
ONE = 1 << 18
PER_OCTAVE = 23.083120
PRIOR, MEMORY = 4.0, 64.0
DOUBT = 1.02
"""How much more tokens per second a cut must promise than whole trees do: costs are not known better, and uneven trees take longer
than even ones of as many nodes (5 % of nano's steps of 64 rows)."""


@dataclass(frozen=True)
class Calibration:
    """Predicted and observed acceptances int64 [3, 15] in units of 2^-18, by kind of temperature (greedy, up to 0.8, above) and
    class of log-probability, and their corrected ratio float32 [3, 15]."""

    predicted: Tensor
    observed: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class Costs:
    """Seconds float32 [caps, points] of a step with so many nodes in all, totals int32 [caps, points] ascending, in the graph of
    each cap."""

    totals: Tensor
    seconds: Tensor


def _kind(heat: Tensor) -> Tensor:
    return (heat > COLD).long() + (heat > torch.tensor(WARM, dtype=torch.float32)).long()


def _class(logprob: Tensor) -> Tensor:
    edges = torch.tensor(EDGES, dtype=torch.float32, device=logprob.device)
    return (edges < logprob[..., None]).sum(-1)


@dataclass(frozen=True)
class Fitted:
    """What a step would return and be, by cap: expected int64 [caps], tokens of all decoding places on average, times 2^18; sized
    int64 [caps], its nodes. 0 for caps that trees were not grown to."""

    expected: Tensor
    sized: Tensor


def seconds_at(costs: Costs, cap: int, total: int) -> Tensor:
    """Seconds of a step with `total` nodes in the graph of a cap, float32 as the kernel has it."""
    totals, seconds = costs.totals[cap].tolist(), costs.seconds[cap]
    if len(totals) == 1:
        return seconds[0]
    high = 1
    while high < len(totals) - 1 and totals[high] < total:
        high += 1
    slope = (seconds[high] - seconds[high - 1]) / float(totals[high] - totals[high - 1])
    return seconds[high - 1] + slope * float(total - totals[high - 1])


def chances(trees: Trees, heat: Tensor, ratio: Tensor, r: int) -> Tensor:
    """The chance of each node of row r beyond its root, none above one before it."""
    given = trees.logprob[r, 1 : int(trees.counts[r])]
    p = exp_of(given.clamp(max=0.0)) * ratio[_kind(heat[r])][_class(given)]
    return p.clamp(max=1.0).cummin(0).values if len(p) else p


def fit(
    live: Tensor,
    free: Tensor,
    automatic: Tensor,
    trees: Trees,
    heat: Tensor,
    calibration: Calibration,
    costs: Costs,
    own: int,
    out: Fitted,
) -> None:
    """Cut the counts of the trees of decoding places with `automatic` uint8 [R], of at most CAPS[own] nodes beyond the root, to
    what pays most; and say so for all smaller caps, without cutting. See sizes.cu."""
    rows = len(trees.counts)
    places = min(rows, int(live))
    decoding = min(places, int(free))
    nodes, gain = 0, decoding * ONE
    in_bin, gain_in, bins = [[0] * BINS for _ in CAPS], [[0] * BINS for _ in CAPS], dict[int, list[int]]()
    for r in range(places):
        n = int(trees.counts[r])
        if r >= decoding or not bool(automatic[r]):
            nodes += n
        else:
            nodes, bins[r] = nodes + 1, []
        if r >= decoding:
            continue
        p = chances(trees, heat, calibration.ratio, r)
        gains = (p * ONE).int()
        if r not in bins:
            gain += int(gains.sum())
            continue
        octaves = torch.where(gains > 0, minus_log(p.where(gains > 0, 1.0)) * torch.tensor(PER_OCTAVE), float(BINS))
        bins[r] = octaves.int().clamp(max=BINS - 1).tolist()
        for i, (b, g) in enumerate(zip(bins[r], gains.tolist(), strict=True), 1):
            cap = next(c for c, most in enumerate(CAPS) if i <= most)
            in_bin[cap][b] += 1
            gain_in[cap][b] += g
    out.expected.zero_()
    out.sized.zero_()
    last = -1
    for cap in range(own + 1):
        more = [(sum(x[b] for x in in_bin[: cap + 1]), sum(x[b] for x in gain_in[: cap + 1])) for b in range(BINS)]
        last, out.expected[cap], out.sized[cap] = _best(costs, cap, nodes, gain, more)
    for r, found in bins.items():
        size = next((i for i, b in enumerate(found) if b > last), len(found))
        trees.counts[r] = min(size, CAPS[own]) + 1


def _best(costs: Costs, cap: int, nodes: int, gain: int, more: list[tuple[int, int]]) -> tuple[int, int, int]:
    """The last bin to take (-1: none), and the gain and nodes of the step then. more: of each bin its nodes and their gain."""
    all_gain, all_nodes = gain + sum(won for _, won in more), nodes + sum(count for count, _ in more)
    whole = torch.tensor(float(all_gain)) / seconds_at(costs, cap, all_nodes)
    last, kept, size, most = -1, gain, nodes, torch.tensor(float(gain)) / seconds_at(costs, cap, nodes)
    for b, (count, won) in enumerate(more):
        if count:
            nodes, gain = nodes + count, gain + won
            rate = torch.tensor(float(gain)) / seconds_at(costs, cap, nodes)
            if rate > most:
                last, most, kept, size = b, rate, gain, nodes
    return (last, kept, size) if most > whole * torch.tensor(DOUBT) else (BINS - 1, all_gain, all_nodes)


def learn(free: Tensor, trees: Trees, heat: Tensor, path: Path, calibration: Calibration) -> None:
    """Count what was accepted of the verified nodes of decoding places, and correct the ratios."""
    for r in range(min(len(trees.counts), int(free))):
        n = int(trees.counts[r])
        kind, given = int(_kind(heat[r])), trees.logprob[r, 1:n]
        took = set(path.nodes[r, 1 : min(int(path.counts[r]), path.nodes.shape[1])].tolist())
        for i, (at, said) in enumerate(
            zip(_class(given).tolist(), (exp_of(given.clamp(max=0.0)) * ONE).long().tolist(), strict=True)
        ):
            calibration.predicted[kind, at] += said
            calibration.observed[kind, at] += ONE * (i + 1 in took)
    while bool((full := torch.maximum(calibration.predicted, calibration.observed).float() > MEMORY * ONE).any()):
        for x in (calibration.predicted, calibration.observed):
            x.copy_(torch.where(full, x // 2, x))
    extra = PRIOR * ONE
    calibration.ratio.copy_((calibration.observed.float() + extra) / (calibration.predicted.float() + extra))
