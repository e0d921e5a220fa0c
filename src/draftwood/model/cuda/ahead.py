"""Weights that are asked for in L2 while kernels run that leave the memory idle: attention, and the router.

A product's own blocks fill their rings while its predecessor runs, but no earlier. What stands before the predecessor is used here:
blocks beside a small kernel ask for the part of the weight that comes next in every ring. Hints only: no result depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear import plan
from draftwood.kernels.linear.op import Weight
from draftwood.kernels.norm_rope.op import Ahead
from draftwood.model.cuda.pack import PackedLayer, PackedMoE


@dataclass(frozen=True)
class Reach:
    """Bytes that are asked for in a layer, at most; they must outlive in L2 what is read in between. o: of attention's output
    projection, when the queries are turned; shared: of the shared expert's gates and ups, before the router."""

    o: int = 16 << 20
    shared: int = 16 << 20


@dataclass(frozen=True)
class LayerAhead:
    """What two kernels of a layer ask for."""

    o: Ahead | None
    shared: Ahead | None


def layer_ahead(layer: PackedLayer, rows: int, reach: Reach, device: torch.device) -> LayerAhead:
    """What is asked for in a layer, in a step of up to `rows` nodes."""
    shared = _part(layer.mlp.shared.gate_up, rows, reach.shared, device) if isinstance(layer.mlp, PackedMoE) else None
    return LayerAhead(_part(layer.o, rows, reach.o, device), shared)


def _part(weight: Weight, rows: int, wanted: int, device: torch.device) -> Ahead | None:
    """As many whole steps of every run as `wanted` bytes are, after those that the product asks for itself."""
    shape, segments = weight.shape, plan.segments(weight.shape)
    first = linear_op.held(shape, rows, device.index or 0)
    steps = min(wanted // (shape.tiles * segments * 2048), shape.steps // segments - first)
    return Ahead(weight.data, segments, first, steps) if steps > 0 else None
