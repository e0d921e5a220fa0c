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
    chosen, counts, forced = choices.tolist(), tree.counts.tolist(), tree.forced.tolist()
    index = {at: i for i, at in enumerate(zip(verified[0].tolist(), verified[1].tolist(), strict=True))}
    walks = []
    for r, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if forced[r]:
            walks.append((list(range(counts[r])), [index[r, counts[r] - 1]]))
            continue
        path, sources = [0], [index[r, 0]]
        while node := _child(tokens[: counts[r]], parents, path[-1], chosen[sources[-1]]):
            path.append(node)
            sources.append(index[r, node])
        walks.append((path, sources))
    return _padded(walks, chosen, None if logprobs is None else logprobs.tolist())


def _child(tokens: list[int], parents: list[int], node: int, token: int) -> int:
    """Return the first child of `node` that holds `token`, 0 when there is none. A child stands behind its parent."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return 0


def _padded(walks: list[tuple[list[int], list[int]]], chosen: list[int], logprobs: list[float] | None) -> Path:
    """Collect each row's (accepted nodes, indices of the choices that it commits)."""
    shape = (len(walks), max((len(path) for path, _ in walks), default=0))
    nodes, tokens, source = (np.full(shape, -1, np.int64) for _ in range(3))
    scored = np.zeros(shape, np.float32)
    for r, (path, sources) in enumerate(walks):
        nodes[r, : len(path)] = path
        source[r, : len(sources)] = sources
        tokens[r, : len(sources)] = [chosen[i] for i in sources]
        if logprobs is not None:
            scored[r, : len(sources)] = [logprobs[i] for i in sources]
    return Path(
        nodes=torch.from_numpy(nodes),
        counts=torch.tensor([len(path) for path, _ in walks], dtype=torch.long),
        tokens=torch.from_numpy(tokens),
        emitted=torch.tensor([len(sources) for _, sources in walks], dtype=torch.long),
        final=torch.tensor([chosen[sources[-1]] for _, sources in walks], dtype=torch.long),
        logprobs=torch.from_numpy(scored),
        chosen=torch.from_numpy(source),
    )
