"""Small random models with YaRN, whole or cut over ranks, and steps over scrambled pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwood.model.config import K2_6, K2_6_DRAFT, DrafterConfig, ModelConfig, read_drafter_config, read_model_config
from draftwood.model.drafter import Drafter
from draftwood.model.kimi import Target
from draftwood.model.weights import (
    DrafterWeights,
    MoEWeights,
    TargetWeights,
    dummy_drafter,
    dummy_target,
)  # fmt: skip
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout

_K2 = read_model_config(K2_6)
SMALL = replace(
    _K2, hidden_size=64, num_layers=3, num_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=16, num_experts=8, experts_per_token=3, moe_intermediate_size=64,
    intermediate_size=96, vocab_size=128, max_position=1024,
    rope=replace(_K2.rope, factor=16.0, original_max_position=64),
)  # fmt: skip
TAPS = (2, 0)
_DRAFT = read_drafter_config(K2_6_DRAFT)
SMALL_DRAFT = replace(
    _DRAFT, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=16, intermediate_size=96, taps=TAPS,
    vocab_size=128, num_target_layers=3, mask_token_id=126, block_size=16, max_position=1024,
    rope=replace(_DRAFT.rope, factor=16.0, original_max_position=64),
)  # fmt: skip


def shake(weights: TargetWeights | DrafterWeights, seed: int) -> None:
    """Make norms and biases matter: the dummy loader leaves them at one and near zero."""
    g = torch.Generator().manual_seed(seed)
    for layer in weights.layers:
        for name, value in vars(layer).items():
            if name.endswith("norm"):
                value.copy_(0.5 + torch.rand(value.shape, generator=g))
        if isinstance(layer.mlp, MoEWeights):
            layer.mlp.bias.copy_(torch.randn(layer.mlp.bias.shape, generator=g) * 0.1)
    weights.norm.copy_(0.5 + torch.rand(weights.norm.shape, generator=g))


def target_weights(config: ModelConfig = SMALL, layout: Layout | None = None, dtype: torch.dtype = torch.float32) -> TargetWeights:
    """Random weights; ranks of any layout hold slices of the same model."""
    weights = dummy_target(config, layout or Layout(), dtype, "cpu", seed=3)
    shake(weights, 5)
    return weights


def drafter_weights(config: DrafterConfig = SMALL_DRAFT, layout: Layout | None = None) -> DrafterWeights:
    """Random weights of a drafter, as `target_weights`."""
    weights = dummy_drafter(config, layout or Layout(), torch.float32, "cpu", seed=7)
    shake(weights, 9)
    weights.hidden_norm.mul_(1.3)
    return weights


def small_target(config: ModelConfig = SMALL, weights: TargetWeights | None = None) -> Target:
    """A whole target on one rank."""
    return Target(config, weights or target_weights(config), Layout(), Local(), TAPS, torch.float32)


@dataclass
class Pages:
    """The latents of some rows at scrambled slots; every slot that nobody wrote is NaN."""

    cache: Tensor
    slots: list[Tensor]

    @classmethod
    def make(cls, config: ModelConfig, rows: int, longest: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pages:
        total = 2 * rows * longest + 7
        cache = torch.full((config.num_layers, total, config.latent_width), torch.nan, dtype=dtype)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        return cls(cache, list(order[: rows * longest].view(rows, longest)))


@dataclass
class Step:
    """The arguments of one forward; what stands at padding is hostile."""

    tokens: Tensor
    positions: Tensor
    ancestors: Tensor
    counts: Tensor
    cache: Tensor
    prefix: Tensor
    lengths: Tensor
    nodes: Tensor

    @property
    def verified(self) -> tuple[Tensor, Tensor]:
        live = [(r, i) for r, n in enumerate(self.counts.tolist()) for i in range(n)]
        rows, nodes = torch.tensor(live).T
        return rows, nodes

    def run(self, target: Target) -> tuple[Tensor, Tensor]:
        return target.forward(self.tokens, self.positions, self, self.ancestors, self.counts, self.verified)


def make_step(pages: Pages, rows: list[tuple[int, int, list[int], list[int]]], garbage: int = 0) -> Step:
    """rows: (row of `pages`, committed length, tokens, parents) with parent -1 for the root. `garbage` seeds padding."""
    g = torch.Generator().manual_seed(garbage)
    n = max(len(tokens) for _, _, tokens, _ in rows) + (3 if garbage else 0)
    longest = max(length for _, length, _, _ in rows) + (5 if garbage else 0)
    r, words = len(rows), -(-n // 64)
    step = Step(
        torch.randint(0, 128, (r, n), generator=g),
        torch.randint(0, 500, (r, n), generator=g),
        torch.randint(-(1 << 62), 1 << 62, (r, n, words), generator=g),
        torch.tensor([len(tokens) for _, _, tokens, _ in rows]),
        pages.cache,
        torch.randint(0, pages.cache.shape[1], (r, longest), generator=g),
        torch.tensor([length for _, length, _, _ in rows]),
        torch.randint(0, pages.cache.shape[1], (r, n), generator=g),
    )
    for i, (row, length, tokens, parents) in enumerate(rows):
        depth: list[int] = []
        masks: list[int] = []
        for j, parent in enumerate(parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            masks.append((0 if parent < 0 else masks[parent]) | 1 << j)
            for w in range(words):
                word = masks[j] >> (64 * w) & (1 << 64) - 1
                step.ancestors[i, j, w] = word - (1 << 64) if word >> 63 else word
        k = len(tokens)
        step.tokens[i, :k] = torch.tensor(tokens)
        step.positions[i, :k] = length + torch.tensor(depth)
        step.prefix[i, :length] = pages.slots[row][:length]
        step.nodes[i, :k] = pages.slots[row][length : length + k]
    return step


def chain(n: int) -> list[int]:
    """Parents of a chain."""
    return list(range(-1, n - 1))


def random_tree(n: int, seed: int) -> list[int]:
    """Parents of a random tree of n nodes, parents first."""
    g = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(0, i, (1,), generator=g)) for i in range(1, n)]


def random_tokens(n: int, seed: int) -> list[int]:
    """Token ids that are no mask."""
    found: list[int] = torch.randint(0, 120, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@dataclass
class Window:
    """A draft window whose unwritten places are NaN."""

    keys: Tensor
    values: Tensor
    row_ids: Tensor
    lengths: Tensor

    @classmethod
    def make(cls, drafter: Drafter, rows: list[int], lengths: list[int], capacity: int, total: int = 5) -> Window:
        c, kv = drafter.config, drafter.layers[0].kv_heads
        keys = torch.full((c.num_layers, total, capacity, kv, c.head_dim), torch.nan)
        return cls(keys, keys.clone(), torch.tensor(rows), torch.tensor(lengths))


class Exchange:
    """Ranks as threads of this process: every collective meets at a barrier and joins in rank order."""

    def __init__(self, world: int) -> None:
        self.world, self.parts = world, [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=20)

    def run(self, work: Callable[[ThreadComm], Tensor]) -> list[Tensor]:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(lambda rank: work(ThreadComm(self, rank)), range(self.world)))


class ThreadComm(Local):
    """One rank of an Exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.world = exchange, rank, exchange.world

    def _meet(self, x: Tensor) -> list[Tensor]:
        self.exchange.parts[self.rank] = x.clone()  # its owner may write on as soon as all have met
        self.exchange.barrier.wait()
        parts = list(self.exchange.parts)
        self.exchange.barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meet(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._meet(x), dim)
