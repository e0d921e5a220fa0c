"""Random drafter logits, tables and rows for tests and benchmarks of the tree kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.tree import op, ref


@dataclass(frozen=True)
class Rows:
    """Inputs of R rows: temperature float32, budgets int32, seeds, lengths, roots int64."""

    temperature: Tensor
    budgets: Tensor
    seeds: Tensor
    lengths: Tensor
    roots: Tensor

    def pick(self, index: Tensor) -> Rows:
        """Return the rows `index` in that order."""
        return Rows(*(t[index].contiguous() for t in vars(self).values()))


def logits(
    rows: int, depth: int, vocab: int, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensor:
    """Heavy-tailed logits [R, D, V], flatter with depth, like a drafter's."""
    made = torch.Generator(device=device).manual_seed(seed)
    out = torch.empty(rows, depth, vocab, dtype=dtype, device=device)
    for r in range(rows):
        u = torch.rand(depth, vocab, device=device, generator=made).clamp_(min=1e-9)
        out[r] = u.log_() * -torch.linspace(1.8, 1.1, depth, device=device)[:, None]
    return out


def rows(count: int, vocab: int, device: torch.device | str, budget: int | None = None, seed: int = 0) -> Rows:
    """Mixed temperatures (0, .6, 1), budgets 0..64 unless one is given, positions up to a quarter million."""
    made = torch.Generator(device=device).manual_seed(seed)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (count,), device=device, generator=made)

    budgets = (draw(65) if budget is None else torch.full((count,), budget, device=device)).int()
    temperature = torch.tensor([0.0, 1.0, 0.6], device=device)[torch.arange(count, device=device) % 3]
    return Rows(temperature, budgets, draw(1 << 62) - (1 << 61), draw(1 << 18), draw(vocab))


def table(vocab: int, each: int, device: torch.device | str, seed: int = 0) -> ref.Table:
    """A table with about `each` entries for every token, and a few rows of thousands."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 2 * each + 1, (vocab,), generator=made)
    sizes[:: max(vocab // 20, 1)] = min(vocab // 2, 6000)
    total = int(sizes.sum())
    ends = sizes.cumsum(0)
    step = (vocab / sizes.clamp(min=1)).repeat_interleave(sizes)
    place = torch.arange(total) - (ends - sizes).repeat_interleave(sizes)
    cols = ((place + torch.rand(total, generator=made) * 0.99) * step).long().clamp(max=vocab - 1)  # ascending within a row
    flat = torch.repeat_interleave(torch.arange(vocab), sizes) * vocab + cols
    keep = torch.ones(total, dtype=torch.bool)
    keep[1:] = flat[1:] != flat[:-1]
    count = torch.zeros(vocab, dtype=torch.long).index_add_(0, flat[keep] // vocab, torch.ones(int(keep.sum()), dtype=torch.long))
    row_ptr = torch.cat((torch.zeros(1, dtype=torch.long), count.cumsum(0))).int()
    vals, base = torch.randn(int(keep.sum()), generator=made) * 2, torch.randn(vocab, generator=made) * 0.3 - 0.5
    return ref.Table(row_ptr.to(device), cols[keep].int().to(device), vals.to(device), base.to(device))


def run(
    x: Tensor,
    given: Rows,
    knobs: op.Knobs,
    table: ref.Table | None = None,
    noisy: bool = True,
    live: Tensor | None = None,
    spare: int = 0,
) -> tuple[ref.Candidates, ref.Trees]:
    """Candidates and trees in fresh buffers; `spare` rows more than needed."""
    r, depth, vocab = x.shape
    buffers, out = op.allocate(r + spare, depth, vocab, x.device), op.allocate_trees(r + spare, x.device)
    found = op.candidates(
        x,
        given.temperature,
        given.budgets,
        knobs,
        buffers,
        given.seeds if noisy else None,
        given.lengths,
        live,
        1 if table else depth,
    )
    op.grow(found, given.roots, given.lengths, given.budgets, given.temperature, knobs, out, table, live, buffers.lists)
    return found, out
