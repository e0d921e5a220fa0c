"""What `draft_attention` means, in torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ids: Tensor, wide: torch.dtype = torch.float32
) -> Tensor:
    """Return [R, block, q_heads, D] of qkv's type: softmax(q k / sqrt(D)) v over context and block, no mask.

    qkv [R, block, q_heads + 2 kv_heads, D]: queries, keys, values of the block, normed and turned; keys, values
    [rows_total, capacity, kv_heads, D]: position p at place p % capacity; lengths, ids [R]: committed tokens and ring of
    each row. Context: positions max(0, length - capacity) .. length - 1. Everything is computed in `wide` and rounded once
    (the kernel rounds the softmax's numerators to bf16 for its second product).
    """
    r, block, heads, d = qkv.shape
    capacity, kv_heads = keys.shape[1:3]
    share = heads // kv_heads - 2
    out = torch.empty(r, block, share * kv_heads, d, dtype=qkv.dtype, device=qkv.device)
    for row, (length, ring) in enumerate(zip(lengths.tolist(), ids.tolist(), strict=True)):
        q, own_k, own_v = qkv[row].split((share * kv_heads, kv_heads, kv_heads), 1)
        places = torch.arange(max(0, length - capacity), length, device=qkv.device) % capacity
        k = torch.cat((keys[ring, places], own_k)).to(wide)
        v = torch.cat((values[ring, places], own_v)).to(wide)
        logits = torch.einsum("tghd,kgd->gthk", q.to(wide).view(block, kv_heads, share, d), k) * d**-0.5
        seen = torch.einsum("gthk,kgd->tghd", torch.softmax(logits, -1), v)
        out[row] = seen.reshape(block, -1, d).to(qkv.dtype)
    return out
