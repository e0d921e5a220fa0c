"""Steps of the CUDA target over scrambled pages, on any device: trees and prompt chunks laid flat, with hostile padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from draftwood.kernels.tree.ref import NODES, Flat, Trees, flatten
from draftwood.model.config import ModelConfig
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.target import CudaTarget, Forward

PAGE = 64


@dataclass(frozen=True)
class Row:
    """A row of a step: its page list's index, committed tokens, tokens and parents of its nodes (-1: the root)."""

    pages: int
    length: int
    tokens: Sequence[int]
    parents: Sequence[int]


def chain(n: int) -> list[int]:
    """Parents of a chain."""
    return list(range(-1, n - 1))


def chunk(pages: int, tokens: Sequence[int], at: int = 0) -> list[Row]:
    """Pseudo-rows of a prompt chunk that begins at position `at`: cut at absolute multiples of 64."""
    rows, done = [], 0
    while done < len(tokens):
        size = min(PAGE - (at + done) % PAGE, len(tokens) - done)
        rows.append(Row(pages, at + done, tokens[done : done + size], chain(size)))
        done += size
    return rows


def trees(rows: Sequence[Row], device: torch.device | str) -> Trees:
    """The rows' trees as `grow` leaves them."""
    r = len(rows)
    tokens, depths = torch.zeros(r, NODES, dtype=torch.int64), torch.zeros(r, NODES, dtype=torch.int64)
    parents, words = torch.full((r, NODES), -1), torch.zeros(r, NODES, 2, dtype=torch.int64)
    for i, row in enumerate(rows):
        masks: list[int] = []
        for j, parent in enumerate(row.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << j)
            depths[i, j] = depths[i, parent] + 1 if parent >= 0 else 0
            for w in range(2):
                word = masks[j] >> (64 * w) & (1 << 64) - 1
                words[i, j, w] = word - (1 << 64) if word >> 63 else word
        n = len(row.tokens)
        tokens[i, :n], parents[i, :n] = torch.tensor(row.tokens), torch.tensor(row.parents)
    counts = torch.tensor([len(row.tokens) for row in rows])
    positions = torch.tensor([row.length for row in rows])[:, None] + depths
    made = Trees(tokens, parents, depths, positions, counts, torch.zeros(r, NODES), words)
    return Trees(**{name: value.to(device) for name, value in vars(made).items()})


class Memory:
    """Page lists of some sequences, scrambled, and a latent cache whose every slot is NaN at first."""

    def __init__(self, config: ModelConfig, sequences: int, pages: int, device: torch.device | str, seed: int = 0) -> None:
        total = sequences * pages + 3
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: sequences * pages]
        self.table = order.view(sequences, pages).to(device, torch.int32)
        shape = (config.num_layers, total * PAGE, config.latent_width)
        self.cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)

    def copy(self) -> Memory:
        """The same pages with a cache of its own."""
        other = object.__new__(Memory)
        other.table, other.cache = self.table, self.cache.clone()
        return other


@dataclass
class Step:
    """The arguments of one forward at a bucket. Beyond the live rows and nodes stands garbage."""

    flat: Flat
    lengths: Tensor
    counts: Tensor
    table: Tensor
    total: int

    @classmethod
    def make(cls, bucket: Bucket, rows: Sequence[Row], memory: Memory, garbage: int = 7) -> Step:
        device = memory.table.device
        g = torch.Generator().manual_seed(garbage)
        lengths = torch.randint(0, 9, (bucket.rows,), generator=g)
        table = torch.randint(0, 3, (bucket.rows, memory.table.shape[1]), generator=g, dtype=torch.int32)
        lengths[: len(rows)] = torch.tensor([row.length for row in rows])
        table[: len(rows)] = memory.table[[row.pages for row in rows]].cpu()
        own = flatten(trees(rows, "cpu"), lengths[: len(rows)], table[: len(rows)], PAGE)
        total = int(own.total)
        assert len(rows) <= bucket.rows and total <= bucket.tokens
        wild = torch.randint(-(1 << 40), 1 << 40, (bucket.tokens, 2), generator=g)
        counts, starts = torch.zeros(bucket.rows, dtype=torch.int64), torch.full((bucket.rows,), total)
        counts[: len(rows)], starts[: len(rows)] = torch.tensor([len(row.tokens) for row in rows]), own.starts
        parts = {name: wild[:, 0].clone() for name in ("tokens", "positions", "places", "rows", "nodes")}
        for name, value in parts.items():
            value[:total] = getattr(own, name)
        wild[:total] = own.ancestors
        slots = torch.randint(0, 1 << 40, (bucket.rows, own.slots.shape[1]), generator=g)
        slots[: len(rows)] = own.slots
        parts |= {"starts": starts, "slots": slots, "ancestors": wild, "total": own.total}
        flat = Flat(**{name: value.to(device) for name, value in parts.items()})
        return cls(flat, lengths.to(device), counts.to(device), table.to(device), total)

    def to(self, device: torch.device | str) -> Step:
        """The same step elsewhere."""
        flat = Flat(**{name: value.to(device) for name, value in vars(self.flat).items()})
        return Step(flat, self.lengths.to(device), self.counts.to(device), self.table.to(device), self.total)

    def run(self, forward: Forward, cache: Tensor, verified: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Run and return copies of the live rows of (logits, taps)."""
        logits, taps = forward(self.flat, self.lengths, self.counts, self.table, cache, verified)
        live = self.total if verified is None else int(verified[1])
        return logits[:live].clone(), taps[: self.total].clone()


def poison(target: CudaTarget) -> None:
    """Fill the floats of the workspace with NaN: what a forward reads it must have written."""
    _poison(target.work)


def _poison(x: object) -> None:
    if isinstance(x, Tensor):
        if x.is_floating_point():
            x.fill_(torch.nan)
    elif is_dataclass(x):
        for part in fields(x):
            _poison(getattr(x, part.name))
