"""What the router kernels mean, in torch on any device: DeepSeek's noaux_tc with one group (arXiv 2412.19437, section 2.1.2).

Everything in one float type (float32, or float64 as the judge of both). Not fast; read it to know what is asked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """experts [T, k] long, best biased score first; weights [T, k]; gap [T]: how far the last chosen biased score is above
    the first one not chosen (a near-tie when small)."""

    experts: Tensor
    weights: Tensor
    gap: Tensor


def choose(x: Tensor, router: Tensor, bias: Tensor, k: int, scale: float, dtype: torch.dtype = torch.float32) -> Chosen:
    """x [T, H], router [E, H], bias [E] -> the k experts of each row. k < E.

    score = sigmoid(x . router^T); the bias only helps to choose; ties go to the lowest id; weights are the unbiased scores of
    the chosen / (their sum + 1e-20) * scale.
    """
    scores = torch.sigmoid(x.to(dtype) @ router.to(dtype).T)
    ranked, order = (scores + bias.to(dtype)).sort(dim=-1, descending=True, stable=True)
    experts = order[:, :k]
    weights = scores.gather(1, experts)
    return Chosen(experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, ranked[:, k - 1] - ranked[:, k])


def held_weights(experts: Tensor, weights: Tensor, first: int, held: int) -> Tensor:
    """Weights [T, k] with exactly 0 where the expert is not one of first .. first + held - 1."""
    return torch.where((experts >= first) & (experts < first + held), weights, 0)


def lists(experts: list[list[int]], first: int, held: int, tile: int) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """experts[t][slot] -> (pairs, jobs) for the experts first .. first + held - 1.

    pairs: t * k + slot, grouped by expert (ascending id), in row order inside a group. jobs: (expert - first, where its pairs
    start, how many, 0), at most `tile` (a multiple of 8) pairs each: the fewest jobs that suffice, of equal size in multiples
    of 8 but for the last.
    """
    k = len(experts[0]) if experts else 0
    groups: list[list[int]] = [[] for _ in range(held)]
    for t, row in enumerate(experts):
        for slot, expert in enumerate(row):
            if first <= expert < first + held:
                groups[expert - first].append(t * k + slot)
    pairs: list[int] = []
    jobs = []
    for expert, group in enumerate(groups):
        if group:
            least = math.ceil(len(group) / tile)
            size = math.ceil(math.ceil(len(group) / 8) / least) * 8
            jobs += [(expert, len(pairs) + at, min(size, len(group) - at), 0) for at in range(0, len(group), size)]
        pairs += group
    return pairs, jobs
