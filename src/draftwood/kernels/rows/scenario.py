"""Random places, states and trees for tests of the kernels of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.accept import op as accept_op
from draftwood.kernels.accept.ref import Path
from draftwood.kernels.rows.ref import Places, State, Verified
from draftwood.kernels.tree import op as tree_op
from draftwood.kernels.tree.ref import NODES, Trees

VOCAB, LINES = 96, 5


def places(free: int, pieces: int, room: int, device: torch.device | str, seed: int = 0) -> Places:
    """`free` decoding rows, then `pieces` of prompts of 1 to 64 tokens, some of which end theirs; room for `room` places."""
    g = torch.Generator().manual_seed(seed)
    chunks = torch.randint(1, 65, (room,), generator=g, dtype=torch.int32)
    offsets = (chunks.cumsum(0) - chunks).int()
    parts = (
        torch.tensor([free + pieces], dtype=torch.int32), torch.tensor([free], dtype=torch.int32),
        torch.randperm(2 * room, generator=g)[:room], torch.randint(0, 9, (room,), generator=g) * 64, chunks, offsets,
        torch.randint(0, 2, (room,), generator=g, dtype=torch.uint8),
        torch.randint(0, VOCAB, (int(chunks.sum()),), generator=g, dtype=torch.int32),
        torch.randint(0, 12_000, (room,), generator=g, dtype=torch.int32),
    )  # fmt: skip
    return Places(*(p.to(device) for p in parts))


def state(room: int, device: torch.device | str, seed: int = 0) -> State:
    """Rows for `room` places."""
    g = torch.Generator().manual_seed(seed)
    parts = (
        torch.randint(0, 10_000, (2 * room,), generator=g),
        torch.randint(0, VOCAB, (2 * room,), generator=g),
        torch.randint(0, 9, (LINES, VOCAB), generator=g, dtype=torch.int32),
    )
    return State(*(p.to(device) for p in parts))


def trees(rows: int, device: torch.device | str, seed: int = 0) -> Trees:
    """Random trees with distinct children."""
    g = torch.Generator().manual_seed(seed)
    out = tree_op.allocate_trees(rows, "cpu")
    for r in range(rows):
        n = int(torch.randint(1, NODES + 1, (1,), generator=g))
        out.counts[r], out.parents[r, 0] = n, -1
        out.tokens[r] = torch.randperm(VOCAB, generator=g)[:NODES]
        for i in range(1, n):
            out.parents[r, i] = int(torch.randint(max(0, i - 6), i, (1,), generator=g))
            out.depths[r, i] = out.depths[r, out.parents[r, i]] + 1
    return Trees(*(getattr(out, name).to(device) for name in Trees.__dataclass_fields__))


def path(rows: int, width: int, device: torch.device | str, seed: int = 0) -> Path:
    """What walks might have accepted."""
    g = torch.Generator().manual_seed(seed)
    out = accept_op.allocate_path(rows, width, "cpu")
    out.counts.copy_(torch.randint(1, width + 1, (rows,), generator=g))
    out.emitted.copy_(out.counts)
    out.tokens.copy_(torch.randint(0, VOCAB, (rows, width), generator=g))
    out.tokens[:, ::3] = out.tokens[:, :1]  # some tokens more than once
    out.final.copy_(torch.randint(0, VOCAB, (rows,), generator=g))
    return Path(*(getattr(out, name).to(device) for name in Path.__dataclass_fields__))


def verified(most: int, device: torch.device | str) -> Verified:
    """Room for `most` nodes."""
    index, rows, nodes = (torch.full((most,), -7, device=device) for _ in range(3))
    return Verified(index, rows, nodes, torch.zeros(1, dtype=torch.int32, device=device))


def same(ours: object, theirs: object) -> bool:
    """Whether all tensors of two records are equal."""
    names = type(ours).__dataclass_fields__  # type: ignore[attr-defined]
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    return all(a is b is None or isinstance(a, Tensor) and torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
