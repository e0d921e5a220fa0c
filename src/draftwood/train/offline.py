"""Offline acceptance: how many drafts of any tree a given text would have accepted.

Law 1 makes this exact: the text does not depend on the tree, so it is made once by plain decoding; then the drafter
guesses at every root, trees are grown, and the true continuation is walked through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.train.generate import keyed_gumbel
from draftwood.train.network import DrafterNet, TargetNet, linear

Noise = tuple[Tensor, tuple[float, float]]
"""What the drafter adds at temperature > 0: seeds [S] of the texts, and the scale of the noise by depth."""
NEVER = 10**6
NOTHING = -1e30


def dense_bigram(path: Path, vocab: int, device: torch.device) -> Tensor:
    """The previous-token table as a matrix [previous, next] of PMI (see train.bigram), in fp16."""
    try:
        t = load_file(path)
        pointer, cols, values, base = t["row_ptr"].long(), t["cols"], t["vals"], t["base"]
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path} is not a previous-token table ({error}); make it with `draftwood train bigram`") from None
    if len(base) != vocab:
        raise ConfigError(f"{path} is for {len(base)} tokens, the model has {vocab}; make it with its tokenizer")
    columns = cols.long() & 0xFFFF if cols.element_size() == 2 else cols.long()
    rows = torch.repeat_interleave(torch.arange(vocab), pointer.diff())
    out = base.half()[:, None].repeat(1, vocab)
    out[rows, columns] = values.half()
    return out.to(device)


@dataclass
class Roots:
    """All roots of one text set, flat: row of the text [N] and position [N], as CPU arrays."""

    row: np.ndarray
    position: np.ndarray


@dataclass
class Guesses:
    """Per root: the best K candidates per depth. log_q [N, D, K] sorted, ids [N, D, K]; truth [N, D]; root token [N]."""

    log_q: Tensor
    ids: Tensor
    truth: Tensor
    root: Tensor


def noise_scale(depth: int, beta: tuple[float, float], device: torch.device) -> Tensor:
    """Scale of the drafter's noise by depth [D, 1]: beta[0] at depth 1, beta[1] below."""
    out = torch.full((depth, 1), beta[1], device=device)
    out[0] = beta[0]
    return out


@torch.no_grad()
def guess(
    net: TargetNet, drafter: DrafterNet, text: Tensor, roots: Roots, width: int, temperature: float,
    noises: dict[str, Noise | None], dtype: torch.dtype, per_row: int = 32, rows: int = 16, top: int = 64,
) -> dict[str, Guesses]:  # fmt: skip
    """Draft at every root. `noises`: by name, None for none. text [S, L].

    Noise stays aligned: the token for position p gets the noise of (seed, p, token), which is the target's own where
    the seeds are those that the text was sampled with.
    """
    device, vocab, depth = text.device, net.shape.vocab, width - 1
    parts: dict[str, list[tuple[Tensor, ...]]] = {n: [] for n in noises}
    order: list[np.ndarray] = []
    tokens = torch.arange(vocab, device=device)
    for chunk in chunks(roots, per_row, rows):
        some = torch.from_numpy(chunk[:, 0, 0]).to(device)
        ids = text[some]
        _, taps = net(ids, dtype)
        anchors = torch.from_numpy(chunk[:, :, 1]).to(device)
        start = torch.zeros(1, dtype=torch.long, device=device)
        hidden = drafter(net.embed, ids.gather(1, anchors), torch.cat(taps, -1), anchors, start, width)[:, :, 1:]
        logits = linear(hidden, net.head).float()
        at = anchors[..., None] + torch.arange(1, width, device=device)
        truth = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, at)
        keep = torch.from_numpy(chunk[:, :, 2] >= 0).to(device)
        order.append(chunk[:, :, 2][chunk[:, :, 2] >= 0])
        base = logits if temperature == 0 else torch.log_softmax(logits / temperature, -1)
        for name, noise in noises.items():
            score = base
            if noise is not None and temperature > 0:
                seeds, beta = noise
                drawn = keyed_gumbel(seeds[some][:, None, None, None], at[..., None], tokens)
                score = base + noise_scale(depth, beta, device) * drawn
            best, which = torch.log_softmax(score, -1).topk(min(top, vocab), -1)
            parts[name].append((best[keep], which[keep].int(), truth[keep], ids.gather(1, anchors)[keep]))
    back = torch.from_numpy(np.argsort(np.concatenate(order), kind="stable")).to(device)
    return {n: Guesses(*(torch.cat(c)[back] for c in zip(*p, strict=True))) for n, p in parts.items()}


def chunks(roots: Roots, per_row: int, rows: int) -> list[np.ndarray]:
    """Cut the roots into arrays [rows, per_row, 3] of (row, position, root number or -1 for filling)."""
    pieces = []
    for row in np.unique(roots.row):
        mine = np.flatnonzero(roots.row == row)
        for at in range(0, len(mine), per_row):
            some = mine[at : at + per_row]
            piece = np.empty((per_row, 3), np.int64)
            piece[:, 0], piece[:, 1], piece[:, 2] = row, roots.position[some[0]], -1
            piece[: len(some), 1], piece[: len(some), 2] = roots.position[some], some
            pieces.append(piece)
    return [np.stack(pieces[at : at + rows]) for at in range(0, len(pieces), rows)]


@torch.no_grad()
def grow(
    g: Guesses, budget: int, bigram: Tensor | None = None, alpha: float = 0.0, chain: bool = False, keep: int = 32
) -> np.ndarray:
    """Best-first trees on cumulative log q, and when the true path was reached.

    Returns [N, D]: at which pop (1-based) the node that continues the true path at each depth came, NEVER if it did
    not; so one run answers every budget. Children below depth 1 are scored by log q + alpha * bigram[parent], and
    renormalised. `chain`: no siblings. `keep`: most children of a node.
    """
    out = [_grow(Guesses(*parts), budget, bigram, alpha, chain, keep) for parts in _split(g, 1 << 14)]
    return np.concatenate([o.cpu().numpy() for o in out])


def _split(g: Guesses, size: int) -> list[tuple[Tensor, ...]]:
    return list(zip(g.log_q.split(size), g.ids.split(size), g.truth.split(size), g.root.split(size), strict=True))


def _grow(g: Guesses, budget: int, bigram: Tensor | None, alpha: float, chain: bool, keep: int) -> Tensor:
    (N, D, K), device = g.log_q.shape, g.log_q.device
    keep = min(keep, K)
    each = torch.arange(N, device=device)
    ids = g.ids.long()
    slots = budget + 1  # node lists: list i holds the children of node i, node 0 is the root
    child_score = torch.full((N, slots, keep), NOTHING, device=device)
    child_token = torch.zeros(N, slots, keep, dtype=torch.long, device=device)
    list_depth = torch.zeros(N, slots, dtype=torch.long, device=device)
    list_sum = torch.zeros(N, slots, device=device)
    list_true = torch.zeros(N, slots, dtype=torch.bool, device=device)
    key = torch.full((N, 2 * budget + 1), NOTHING, device=device)  # the heap: cumulative log q
    of, rank = torch.zeros_like(key, dtype=torch.long), torch.zeros_like(key, dtype=torch.long)
    reached = torch.full((N, D), NEVER, device=device)

    def open_list(slot: int, depth: Tensor, token: Tensor, total: Tensor, true: Tensor, live: Tensor) -> Tensor:
        """Make the children of a node; the key of the best one."""
        d = depth.clamp(max=D - 1)
        score, candidates = g.log_q[each, d], ids[each, d]
        if bigram is not None and alpha:
            score = score + alpha * (depth > 0)[:, None] * bigram[token[:, None], candidates].float()
            score, i = torch.log_softmax(score, -1).topk(keep, -1)
            candidates = candidates.gather(1, i)
        child_score[:, slot], child_token[:, slot] = score[:, :keep], candidates[:, :keep]
        list_depth[:, slot], list_sum[:, slot], list_true[:, slot] = d, total, true
        return (total + score[:, 0]).masked_fill(~live | (depth >= D), NOTHING)

    zero, yes = torch.zeros(N, dtype=torch.long, device=device), torch.ones(N, dtype=torch.bool, device=device)
    key[:, 0] = open_list(0, zero, g.root.long(), torch.zeros(N, device=device), yes, yes)
    for pop in range(1, budget + 1):
        j = key.argmax(1)
        live = key[each, j] > NOTHING / 2
        parent, k = of[each, j], rank[each, j]
        depth, token = list_depth[each, parent], child_token[each, parent, k]
        total = list_sum[each, parent] + child_score[each, parent, k]
        hit = live & list_true[each, parent] & (token == g.truth[each, depth])
        reached[each, depth] = reached[each, depth].masked_fill(hit, pop)
        key[each, j] = NOTHING
        if not chain:
            after = (k + 1).clamp(max=keep - 1)
            sibling = list_sum[each, parent] + child_score[each, parent, after]
            key[:, 2 * pop - 1] = sibling.masked_fill(~live | (k + 1 >= keep), NOTHING)
            of[:, 2 * pop - 1], rank[:, 2 * pop - 1] = parent, after
        key[:, 2 * pop] = open_list(pop, depth + 1, token, total, hit, live)
        of[:, 2 * pop], rank[:, 2 * pop] = pop, zero
    return reached


def accepted(reached: np.ndarray, budget: int) -> np.ndarray:
    """reached [N, D] -> accepted drafts [N] of the tree cut to `budget` nodes."""
    return np.asarray(np.minimum.accumulate(reached <= budget, -1).sum(-1))


def walk(count: np.ndarray, roots: Roots, first: np.ndarray, stop: np.ndarray) -> tuple[int, int]:
    """Decode the rows: from first[row] on, commit count + 1 tokens per step until stop[row].

    count [N] belongs to `roots`; every position first .. stop-1 of a row must be a root. Returns tokens, steps; what
    the last step accepts beyond stop does not count.
    """
    table = np.zeros((len(first), int(roots.position.max()) + 1), np.int64)
    table[roots.row, roots.position] = count
    position, steps = first.copy(), 0
    while (live := position < stop).any():
        rows = np.flatnonzero(live)
        position[rows] += table[rows, position[rows]] + 1
        steps += len(rows)
    return int((np.minimum(position, stop) - first).clip(0).sum()), steps
