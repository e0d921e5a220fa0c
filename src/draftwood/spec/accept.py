"""The one rule of acceptance, for greedy and for sampled rows.

The target chose a token at every verified node. From the root, follow the child that holds the chosen token while
there is one; the first choice without a child is the step's last token. Each committed token is thus the target's own
choice given exactly the tokens before it, whatever the tree holds. The rows of a prompt chunk are chains of known
tokens: all nodes are accepted and only the last choice is new.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.spec.tree import Tree


@dataclass(frozen=True)
class Path:
    """What a step accepted. P is the longest path of the batch; padding is -1 (log-probabilities: 0).

    nodes [R, P]: accepted nodes in order, the root first; counts [R]: how many, root included.
    tokens [R, P], logprobs [R, P]: what the step commits: emitted[r] tokens, the last of them final[r].
    Free rows emit counts[r] tokens, the tokens of the path beyond the root and then the final choice; forced rows
    emit the final choice only. chosen [R, P]: index into the verified list of the choice that became each token.
    """

    nodes: Tensor
    counts: Tensor
    tokens: Tensor
    emitted: Tensor
    final: Tensor
    logprobs: Tensor
    chosen: Tensor


def accept(tree: Tree, choices: Tensor, verified: tuple[Tensor, Tensor], logprobs: Tensor | None = None) -> Path:
    """Walk every row. choices [M]: the target's token at each verified (row, node); logprobs [M]: theirs, if wanted.

    Children of a node hold distinct tokens; should a hand-made tree repeat one, the first child wins.
    """
    rows, nodes = verified[0].cpu().numpy(), verified[1].cpu().numpy()
    tokens, parents, counts = tree.tokens.numpy(), tree.parents.numpy(), tree.counts.numpy()
    forced = tree.forced.numpy()
    total, width = tokens.shape
    chosen = choices.cpu().numpy()
    choice = np.full((total, width), -1, np.int64)
    where = np.full((total, width), -1, np.int64)
    choice[rows, nodes] = chosen
    where[rows, nodes] = np.arange(len(rows))

    # following[r, n]: the child of n that holds n's choice, 0 when there is none.
    following = np.zeros((total, width), np.int64)
    r, n = np.nonzero((np.arange(width) < counts[:, None]) & (parents >= 0) & ~forced[:, None])
    match = tokens[r, n] == choice[r, parents[r, n]]
    r, n = r[match][::-1], n[match][::-1]  # the last write wins: the lowest node
    following[r, parents[r, n]] = n
    steps = [np.zeros(total, np.int64)]
    every = np.arange(total)
    while True:
        step = np.where(steps[-1] >= 0, following[every, steps[-1]], 0)
        if not step.any():
            break
        steps.append(np.where(step > 0, step, -1))
    free = np.stack(steps, 1)
    longest = max(free.shape[1], int(counts[forced].max(initial=0)))
    path = np.full((total, longest), -1, np.int64)
    path[:, : free.shape[1]] = free
    chain = np.arange(longest)
    path[forced] = np.where(chain < counts[forced, None], chain, -1)

    accepted = (path >= 0).sum(1)
    emitted = np.where(forced, 1, accepted)
    source = np.where(path >= 0, where[every[:, None], path], -1)
    source[forced] = -1
    source[forced, 0] = where[forced, counts[forced] - 1]
    if len(chosen):
        out = np.where(source >= 0, chosen[source], -1)
    else:
        out = np.full_like(source, -1)
    scored = np.zeros(source.shape, np.float32)
    if logprobs is not None and len(chosen):
        scored = np.where(source >= 0, logprobs.cpu().numpy()[source], np.float32(0))
    return Path(
        nodes=torch.from_numpy(path),
        counts=torch.from_numpy(accepted),
        tokens=torch.from_numpy(out),
        emitted=torch.from_numpy(emitted),
        final=torch.from_numpy(out[every, emitted - 1]),
        logprobs=torch.from_numpy(scored),
        chosen=torch.from_numpy(source),
    )
