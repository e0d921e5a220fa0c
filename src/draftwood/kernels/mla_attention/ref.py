"""The meaning of the kernels, on any device: every node attends to its row's committed tokens, its ancestors and itself."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE = 64


def slots_of(table: Tensor, positions: Tensor) -> Tensor:
    """Return the cache slots of `positions` of a row whose page ids, in position order, are `table` [pages]."""
    return table.long()[positions // PAGE] * PAGE + positions % PAGE


def visible(masks: Tensor, count: int) -> Tensor:
    """Unpack ancestor words masks [n, W] int64 to bool [n, count]: bit j of word j // 64 says that node j is seen."""
    nodes = torch.arange(count, device=masks.device)
    return (masks[:, nodes // 64] >> (nodes % 64)) & 1 == 1


def attend(
    q: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    counts: Tensor,
    starts: Tensor,
    masks: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return [T, heads, latent] in `dtype`; tokens that are no row's live node are zero.

    q [T, heads, latent] queries times W_UK, q_pe [T, heads, rope]; cache [slots, latent + rope]; table [R, pages] page ids;
    lengths [R] committed tokens, counts [R] live nodes, starts [R] token of each row's node 0 (its nodes follow);
    masks [T, W] int64 ancestors. Node i of a row is stored at the slot of position length + i.
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for row in range(len(lengths)):
        length, n, t = int(lengths[row]), int(counts[row]), int(starts[row])
        if n == 0:
            continue
        positions = torch.arange(length + n, device=q.device)
        keys = cache[slots_of(table[row], positions)].to(dtype)
        query = torch.cat((q[t : t + n], q_pe[t : t + n]), -1).to(dtype)
        logits = torch.einsum("nhd,kd->nhk", query, keys) * scale
        hidden = ~visible(masks[t : t + n], n)
        logits[..., length:].masked_fill_(hidden.unsqueeze(1), float("-inf"))
        out[t : t + n] = torch.einsum("nhk,kd->nhd", torch.softmax(logits, -1), keys[:, : q.shape[-1]])
    return out
