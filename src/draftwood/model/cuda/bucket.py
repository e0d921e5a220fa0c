"""The capacities that a step is captured for. No torch."""

from __future__ import annotations

from dataclasses import dataclass

MOST_NODES, MOST_ROWS = 65, 256
"""Nodes of a row and rows of a step that the attention kernels take."""


@dataclass(frozen=True)
class Bucket:
    """Capacities of a step; what is live may be less and is read on the device.

    rows: of the step, pseudo-rows of prompts among them. nodes: of one row, the root included (1 + most budget). tokens:
    live nodes of all rows together. verified: nodes whose logits are wanted. context: committed tokens of the longest row.
    """

    rows: int
    nodes: int
    tokens: int
    verified: int
    context: int

    def __post_init__(self) -> None:
        if not (1 <= self.rows <= MOST_ROWS and 1 <= self.nodes <= MOST_NODES and self.context >= 1):
            raise ValueError(f"{self}: 1 to {MOST_ROWS} rows of 1 to {MOST_NODES} nodes after at least one token of context")
        if not 1 <= self.verified <= self.tokens <= self.rows * self.nodes:
            raise ValueError(f"{self}: 1 <= verified <= tokens <= rows x nodes")

    @classmethod
    def of(cls, rows: int, budget: int, context: int) -> Bucket:
        """The bucket of `rows` trees of up to `budget` nodes beyond the root, every node verified."""
        nodes = 1 + budget
        return cls(rows, nodes, rows * nodes, rows * nodes, context)


@dataclass(frozen=True)
class DraftBucket:
    """Capacities of a draft. rows: of the step; block: the known token and the masked ones; path: places of an accepted path
    that are observed; capacity: places of a ring."""

    rows: int
    block: int
    path: int
    capacity: int
