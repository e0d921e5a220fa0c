"""A second-order Markov target, drafters from good to hostile, and the loop draft -> tree -> choose -> accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftwood.spec.accept import Path, accept
from draftwood.spec.sampling import History, Sampling, choose, uses_history
from draftwood.spec.tree import GrowOptions, Tree, grow, roots

DEFAULTS = GrowOptions()


@dataclass
class Params:
    """Sampling parameters with the names of engine.request.SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None


class Markov:
    """Logits [V] of the next token depend on the last two tokens."""

    def __init__(self, vocab: int, seed: int = 0, scale: float = 2.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, vocab, generator=g) * scale

    def logits(self, before: Tensor, last: Tensor) -> Tensor:
        """before, last: token ids of any shape -> [..., V]"""
        return self.table[before, last]

    def verify(self, tree: Tree, before_root: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """[M, V] at the verified nodes; before_root [R]: the token before each root."""
        last = tree.tokens[rows, nodes]
        parent = tree.parents[rows, nodes]
        before = torch.where(parent >= 0, tree.tokens[rows, parent.clamp(min=0)], before_root[rows])
        return self.logits(before, last)


Drafter = Callable[[Markov, Tensor, Tensor, int, int], Tensor]
"""(target, before [R], roots [R], depth, step) -> logits [R, D, V]"""


def honest(target: Markov, before: Tensor, root: Tensor, depth: int, step: int) -> Tensor:
    """Exact at depth 1, the greedy continuation's logits below: a good drafter of marginals."""
    out = []
    for _ in range(depth):
        out.append(target.logits(before, root))
        before, root = root, out[-1].argmax(-1)
    return torch.stack(out, 1)


def hostile(target: Markov, before: Tensor, root: Tensor, depth: int, step: int) -> Tensor:
    """Prefers what the target avoids, with NaN, infinities and dead rows thrown in."""
    z = -honest(target, before, root, depth, step)
    g = torch.Generator().manual_seed(step)
    kind = torch.randint(0, 12, z.shape, generator=g)
    z[kind == 0] = float("nan")
    z[kind == 1] = float("-inf")
    z[kind == 2] = float("inf")
    z[torch.randint(0, 6, z.shape[:2], generator=g) == 0] = float("-inf")
    return z


def noisy(target: Markov, before: Tensor, root: Tensor, depth: int, step: int) -> Tensor:
    """Honest plus random errors."""
    z = honest(target, before, root, depth, step)
    return z + torch.randn(z.shape, generator=torch.Generator().manual_seed(step))


@dataclass
class Run:
    """Tokens per row and what happened: paths of every step."""

    tokens: list[list[int]]
    steps: int = 0
    committed: int = 0
    trees: list[tuple[Tree, Path]] = field(default_factory=list)


def decode(
    target: Markov,
    prompts: Sequence[Sequence[int]],
    count: int,
    params: Sequence[Params],
    seeds: Sequence[int],
    drafter: Drafter | None = None,
    budgets: Sequence[int] | int = 8,
    depth: int = 4,
    options: GrowOptions = DEFAULTS,
    share: bool = True,
    keep: bool = False,
    bigram=None,
) -> Run:
    """Generate at least `count` tokens in every row and cut to `count`; prompts hold at least two tokens."""
    rows, vocab = len(prompts), target.vocab
    known = [list(p) for p in prompts]
    histories = [History(p, vocab) if uses_history(q) else None for p, q in zip(prompts, params, strict=True)]
    sampling = Sampling.build(params, seeds, histories)
    sizes = torch.full((rows,), budgets) if isinstance(budgets, int) else torch.tensor(budgets)
    run = Run([])
    start = [len(k) for k in known]
    while min(len(k) - s for k, s in zip(known, start, strict=True)) < count:
        last = torch.tensor([k[-1] for k in known])
        before = torch.tensor([k[-2] for k in known])
        lengths = torch.tensor([len(k) - 1 for k in known])
        noise = sampling.noise(lengths + 1, depth + 1, vocab)
        if drafter is None:
            tree = roots(last)
        else:
            logits = drafter(target, before, last, depth, run.steps)
            heat = torch.from_numpy(sampling.temperature)
            tree = grow(logits, last, sizes, heat, noise if share else None, options, bigram)
        verified = tree.verified()
        tokens, logprobs = choose(target.verify(tree, before, *verified), *verified, tree, sampling, noise)
        path = accept(tree, tokens, verified, logprobs)
        if keep:
            run.trees.append((tree, path))
        for r, n in enumerate(path.emitted.tolist()):
            fresh = path.tokens[r, :n].tolist()
            known[r] += fresh
            if histories[r] is not None:
                histories[r].extend(fresh)
        run.steps += 1
        run.committed += int(path.emitted.sum())
    run.tokens = [k[s : s + count] for k, s in zip(known, start, strict=True)]
    return run


def probabilities(target: Markov, context: Sequence[int], params: Params) -> np.ndarray:
    """The law of the next token after `context` (at least two tokens), written out naively in float64; no penalties."""
    z = target.logits(torch.tensor(context[-2]), torch.tensor(context[-1])).double().numpy().copy()
    for i, b in (params.logit_bias or {}).items():
        z[i] += b
    if params.temperature == 0:
        return np.eye(target.vocab)[z.argmax()]
    z /= params.temperature
    p = np.exp(z - z.max())
    p[p < params.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    if params.top_p < 1:
        p /= p.sum()
        mass = 0.0
        for place, i in enumerate(order):
            if place and mass >= params.top_p:
                p[order[place:]] = 0
                break
            mass += p[i]
    return p / p.sum()
