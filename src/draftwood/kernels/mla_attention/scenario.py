"""Random steps for tests and benchmarks: rows with trees, scrambled pages, NaN in every slot that nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels.mla_attention import op, ref

PAGE = 64
SCALE = 0.14468
"""Close to K2's softmax scale."""


def random_parents(n: int, kind: str, rng: np.random.Generator) -> list[int]:
    """Return parents (-1 root) of n nodes, each after its parent. kind: chain, near (deep), wide or star."""
    lowest = {"chain": lambda j: j - 1, "near": lambda j: max(0, j - 6), "wide": lambda j: 0, "star": lambda j: 0}[kind]
    return [-1] + [0 if kind == "star" else int(rng.integers(lowest(j), j)) for j in range(1, n)]


def paths_of(parents: list[int]) -> list[list[int]]:
    """Return for each node its ancestors in order and itself."""
    paths: list[list[int]] = []
    for j, parent in enumerate(parents):
        paths.append([*([] if parent < 0 else paths[parent]), j])
    return paths


def words_of(paths: list[list[int]], words: int) -> Tensor:
    """Return ancestor masks [n, words] int64."""
    bits = np.zeros((len(paths), words), np.uint64)
    for j, path in enumerate(paths):
        for a in path:
            bits[j, a // 64] |= np.uint64(1) << np.uint64(a % 64)
    return torch.from_numpy(bits.view(np.int64))


@dataclass
class Step:
    """Arguments of `ref.attend` and of `MlaAttention`, and what they were made from."""

    q: Tensor
    q_pe: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor
    counts: Tensor
    starts: Tensor
    masks: Tensor
    prefixes: list[Tensor]
    """Committed latents of each row [length, width]."""
    latents: list[Tensor]
    """The nodes' latents of each row [count, width]."""
    paths: list[list[list[int]]]


def reference(step: Step, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return what `ref.attend` says about the step."""
    s = step
    return ref.attend(s.q, s.q_pe, s.cache, s.table, s.lengths, s.counts, s.starts, s.masks, SCALE, dtype)


def place(prefixes: list[Tensor], latents: list[Tensor], rng: np.random.Generator, spare: int = 3) -> tuple[Tensor, Tensor]:
    """Put each row's latents into pages of random ids; return cache [slots, width], NaN where unused, and the page table."""
    width, device, dtype = latents[0].shape[1], latents[0].device, latents[0].dtype
    need = [-(-(len(p) + len(n)) // PAGE) for p, n in zip(prefixes, latents, strict=True)]
    total = sum(need) + spare
    order = rng.permutation(total)
    cache = torch.full((total, PAGE, width), float("nan"), dtype=dtype, device=device)
    table = np.full((len(need), max(1, *need)), int(order[-1]), np.int32)
    at = 0
    for row, (prefix, nodes, pages) in enumerate(zip(prefixes, latents, need, strict=True)):
        ids = order[at : at + pages]
        at += pages
        table[row, :pages] = ids
        filled = torch.full((pages * PAGE, width), float("nan"), dtype=dtype, device=device)
        filled[: len(prefix) + len(nodes)] = torch.cat((prefix, nodes))
        cache[torch.from_numpy(ids.copy()).to(device)] = filled.view(pages, PAGE, width)
    return cache.view(-1, width), torch.from_numpy(table).to(device)


def make(
    lengths: list[int],
    counts: list[int],
    heads: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    kind: str = "near",
    nodes: int | None = None,
    latent: int = 512,
    rope: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """Return a step of rows with these lengths and node counts; token of node i of row r is r * nodes + i."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    nodes = max(counts) if nodes is None else nodes
    tokens = len(lengths) * nodes

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * 0.8).to(dtype)

    paths = [paths_of(random_parents(n, kind, rng)) if n else [] for n in counts]
    prefixes = [random(n, latent + rope) for n in lengths]
    latents = [random(n, latent + rope) for n in counts]
    masks = torch.full((tokens, 2), -1, dtype=torch.int64)
    for row, path in enumerate(paths):
        if path:
            masks[row * nodes : row * nodes + len(path)] = words_of(path, 2)
    cache, table = place(prefixes, latents, rng)
    q, q_pe = random(tokens, heads, latent), random(tokens, heads, rope)
    live = torch.zeros(len(lengths), nodes, dtype=torch.bool)
    for row, n in enumerate(counts):
        live[row, :n] = True
    q[~live.flatten().to(device)] = float("nan")

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [row * nodes for row in range(len(lengths))]
    return Step(q, q_pe, cache, table, ints(lengths), ints(counts), ints(starts), masks.to(device), prefixes, latents, paths)


def alone(step: Step, row: int, node: int, seed: int = 1) -> Step:
    """Return the step in which the node's ancestors are committed and it is the only node, on other pages."""
    path, device = step.paths[row][node], step.q.device
    prefix = torch.cat((step.prefixes[row], step.latents[row][path[:-1]]))
    latents = step.latents[row][node : node + 1]
    cache, table = place([prefix], [latents], np.random.default_rng(seed))
    t = int(step.starts[row]) + node

    def ints(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    masks = torch.tensor([[1, 0]], dtype=torch.int64, device=device)
    q, q_pe = step.q[t : t + 1].clone(), step.q_pe[t : t + 1].clone()
    return Step(q, q_pe, cache, table, ints(len(prefix)), ints(1), ints(0), masks, [prefix], [latents], [[[0]]])


def same(a: Tensor, b: Tensor) -> bool:
    """Equality of bits."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def attend(step: Step, shape: str | None = None, partial_bytes: int = op.PARTIAL_BYTES, law: op.Law | None = None) -> Tensor:
    """Plan and run one step with a bucket of its own sizes; what is not written stays NaN."""
    rows, tokens = len(step.lengths), step.q.shape[0]
    context = step.table.shape[1] * 64
    one = op.MlaAttention(
        rows, tokens // rows, step.q.shape[1], context, SCALE, step.q.device, step.q.shape[2], step.q_pe.shape[2],
        shape, law, partial_bytes,
    )  # fmt: skip
    for buffer in (one.part_o, one.part_ml, one.own_o, one.own_ml):
        buffer.fill_(float("nan"))
    out = torch.full_like(step.q, float("nan"))
    one.plan(step.lengths, step.counts, step.starts)
    return one(step.q, step.q_pe, step.cache, step.table, step.masks, out)
