"""Who holds what: arithmetic from a rank to its slices. No torch, no communication.

world = tp * ep ranks. Attention heads, dense columns and the vocabulary are cut over the whole world. Routed experts
are cut in two ways: rank // tp says which whole experts (expert parallel), rank % tp which columns of them (tensor
parallel).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from draftwood.errors import ConfigError

GROUP = 32
"""Inputs that share one INT4 scale; a cut of an expert's columns must fall between groups, because the columns of gate
and up are the inputs of down."""


class TargetShape(Protocol):
    """The sizes of a target that a layout cuts (satisfied by model.config.ModelConfig)."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class DrafterShape(Protocol):
    """The sizes of a drafter that a layout cuts (satisfied by model.config.DrafterConfig)."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...


def cut(n: int, parts: int, index: int, multiple: int = 1) -> range:
    """Return part `index` of `parts` of range(n): whole multiples, in order, sizes that differ by at most one multiple.

    Raises ValueError when `n` is not a number of multiples or `index` is no part.
    """
    if n % multiple or not 0 <= index < parts:
        raise ValueError(f"cannot give part {index} of {parts} of {n} in multiples of {multiple}")
    units = n // multiple
    return range(units * index // parts * multiple, units * (index + 1) // parts * multiple)


@dataclass(frozen=True)
class Layout:
    """The place of one rank among tp * ep."""

    tp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or not 0 <= self.rank < self.tp * self.ep:
            raise ValueError(f"no rank {self.rank} in a layout of tp {self.tp} x ep {self.ep}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.ep

    def heads(self, n: int) -> range:
        """Attention heads of this rank."""
        return cut(n, self.world, self.rank)

    def kv_heads(self, q_heads: int, kv_heads: int) -> range:
        """Key-value heads that this rank's query heads read; ranks share one where there are more ranks than heads."""
        mine, per_kv = self.heads(q_heads), q_heads // kv_heads
        return range(mine.start // per_kv, -(-mine.stop // per_kv))

    def vocab(self, n: int) -> range:
        """Rows of the output head of this rank."""
        return cut(n, self.world, self.rank)

    def columns(self, n: int, multiple: int = 1) -> range:
        """Intermediate columns of a dense MLP (or the shared expert) of this rank."""
        return cut(n, self.world, self.rank, multiple)

    def experts(self, n: int) -> range:
        """Routed experts of which this rank holds a part."""
        return cut(n, self.ep, self.rank // self.tp)

    def expert_columns(self, n: int, multiple: int = GROUP) -> range:
        """Intermediate columns of those experts that this rank holds."""
        return cut(n, self.tp, self.rank % self.tp, multiple)


def _divisors(numbers: Iterable[int]) -> str:
    common = math.gcd(*numbers)
    return ", ".join(str(d) for d in range(1, min(common, 64) + 1) if common % d == 0)


def check_layout(config: TargetShape, drafter: DrafterShape | None, tp: int, ep: int) -> None:
    """Check that tp * ep ranks can share these shapes. Raises ConfigError: the flag, the number, what to choose."""
    world = tp * ep
    asked = f"--tp {tp}" if ep == 1 else f"--ep {ep}" if tp == 1 else f"--tp {tp} --ep {ep} ({world} ranks)"
    whole = {"heads": config.num_heads, "vocabulary entries": config.vocab_size}
    if drafter is not None:
        whole["drafter heads"] = drafter.num_heads
    for name, n in whole.items():
        if n % world:
            raise ConfigError(
                f"{asked} cannot share {n} {name} evenly; choose tp x ep from {_divisors(whole.values())}"
            )
    if drafter is not None:
        mine, per_kv = drafter.num_heads // world, drafter.num_heads // drafter.num_kv_heads
        if mine % per_kv and per_kv % mine:
            raise ConfigError(
                f"{asked} cuts the drafter's {drafter.num_kv_heads} key-value heads across ranks; "
                f"choose tp x ep that divides {drafter.num_kv_heads} or is a multiple of it"
            )
    groups = config.moe_intermediate_size // GROUP
    if tp > groups:
        raise ConfigError(f"--tp {tp} is more than the {groups} INT4 groups of an expert; choose --tp {groups} or less")
    if ep > config.num_experts:
        most = config.num_experts
        raise ConfigError(f"--ep {ep} is more than the {most} experts; choose --ep {most} or less")
