"""Launcher of the expert kernels: checks shapes, picks the kernels by the number of rows, never waits for the device.

All kernels compute the same chain per output (moe.cuh), so the choice moves time and never bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant
from draftwood.kernels.moe_int4.repack import Packed
from draftwood.kernels.moe_route.op import Lists, most_jobs

FOLDER = Path(__file__).parent
FEW_ROWS = 4
"""Rows up to which down_stream runs: it keeps y in shared memory and needs no combine, which is faster there (H200)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a rank's experts: hidden size, columns (padded to 128), experts per row."""

    hidden: int
    width: int
    topk: int

    def __post_init__(self) -> None:
        if self.hidden % 128 or self.width % 128 or self.hidden < 128 or self.width < 128 or self.topk < 1:
            raise ValueError(
                f"no expert kernel for hidden {self.hidden} and width {self.width} (multiples of 128), {self.topk} experts per row"
            )

    def rows(self, part: str) -> int:
        """Weight rows of an expert in `part`, "gate_up" or "down"."""
        return 2 * self.width if part == "gate_up" else self.hidden

    def steps(self, part: str) -> int:
        """Steps of 64 inputs of a weight row."""
        return (self.hidden if part == "gate_up" else self.width) // 64


@dataclass(frozen=True)
class Form:
    """One way to run either part: file.cu with blocks of `warps` warps, `blocks` of them on a multiprocessor.

    tokens: 8-token tiles of a job. stages, span: the ring's (ring.cu, staged.cu). spill: bytes that ptxas may spill.
    """

    file: str
    tokens: int
    warps: int
    blocks: int
    stages: int = 0
    span: int = 0
    unroll: int = 0
    spill: int = 0

    def fits(self, shape: Shape, part: str) -> bool:
        """Whether a block's rows divide the expert's, and what else the source asks of a shape."""
        if self.file == "split":
            return part == "gate_up" and shape.steps(part) % self.warps == 0
        if self.file == "stream" and self.warps == 8:
            return part == "down"
        return self.file == "stream" or shape.rows(part) % (32 * self.warps) == 0

    def shared(self, shape: Shape, part: str) -> int:
        """Dynamic shared memory of a block, bytes (for down_stream: the largest)."""
        if self.file == "split":
            return shape.steps(part) * 576
        if self.file == "stream":
            y = 64 * shape.topk * FEW_ROWS if part == "down" else 0
            return self.warps * _depth(shape.steps(part)) * 576 + y
        if self.file == "ring":
            return self.warps * self.stages * 1152 + (self.stages - 2 + 2 * self.span) * 1024 * self.tokens
        return self.stages * self.span * (self.warps * 1152 + 1024 * self.tokens)

    def macros(self, shape: Shape, part: str) -> dict[str, int]:
        """The macros of its source."""
        found = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "TOPK": shape.topk, "WARPS": self.warps, "BLOCKS": self.blocks}
        if part == "gate_up":
            found["GATE_UP"] = 1
        if self.file == "stream":
            return found | {"DEPTH": _depth(shape.steps(part))}
        if self.file == "split":
            return found
        found |= {"TOKENS": self.tokens, "STAGES": self.stages, "SPAN": self.span}
        return found | {"UNROLL": self.unroll} if self.unroll else found


HOPPER = {
    "split": Form("split", 1, 8, 3),
    "burst": Form("stream", 1, 8, 4, spill=48),
    "stream": Form("stream", 1, 4, 4),
    "thin": Form("ring", 1, 8, 2, stages=6, span=4),
    "narrow": Form("ring", 3, 8, 2, stages=6, span=4),
    "wide": Form("staged", 4, 4, 3, stages=4, span=2),
    "wider": Form("ring", 6, 4, 3, stages=5, span=2),
    "widest": Form("staged", 8, 4, 2, stages=3, span=2, unroll=1),
}
"""Forms by growing tokens per expert, as measured on an H200 (384 and 48 experts of K2.6); the limits are in `choose`.

split and burst are for a few rows of a narrow slice: more warps for gate_up, a warp per job of down (not measured yet).
"""
# Not measured there. ptxas needs a register or two more than for sm_90a: fewer blocks rather than spills in the inner loop.
BLACKWELL = HOPPER | {"stream": replace(HOPPER["stream"], spill=32), "wider": replace(HOPPER["wider"], blocks=2)}
FORMS = {
    "sm_90a": HOPPER,
    "sm_100a": BLACKWELL,
    "sm_103a": BLACKWELL,
    # Not measured there. 100 KB of shared memory a multiprocessor: rings that let two blocks be resident.
    "sm_120a": {
        "split": Form("split", 1, 8, 1),
        "burst": Form("stream", 1, 8, 4, spill=48),
        "stream": Form("stream", 1, 4, 4, spill=32),
        "thin": Form("ring", 1, 8, 2, stages=4, span=4),
        "narrow": Form("ring", 3, 8, 2, stages=4, span=1),
        "wide": Form("staged", 4, 4, 2, stages=5, span=1),
        "wider": Form("ring", 6, 4, 2, stages=4, span=1),
        "widest": Form("staged", 8, 4, 2, stages=3, span=1),
    },
}
"""Forms by architecture: the same names and token tiles everywhere."""


@dataclass(frozen=True)
class Plan:
    """Names of the forms that run, for one bucket of rows."""

    gate_up: str
    down: str

    @property
    def tile(self) -> int:
        """Most pairs of a job that both forms can take: what the lists are cut to."""
        return 8 * min(HOPPER[self.gate_up].tokens, HOPPER[self.down].tokens)


@dataclass
class Workspace:
    """h bfloat16 [rows * k, W] and y float32 [rows * k, H] between the kernels. Never read before it is written."""

    h: Tensor
    y: Tensor


def workspace(shape: Shape, rows: int, device: torch.device | str) -> Workspace:
    """Return buffers for up to `rows` rows."""
    pairs = rows * shape.topk
    return Workspace(
        torch.empty(pairs, shape.width, dtype=torch.bfloat16, device=device),
        torch.empty(pairs, shape.hidden, dtype=torch.float32, device=device),
    )


def choose(shape: Shape, rows: int, experts: int) -> Plan:
    """Pick the forms for `rows` rows spread over `experts` experts (of all ranks), by the mean number of rows per expert."""
    mean = rows * shape.topk / experts
    if rows <= FEW_ROWS:
        # Whole rows of weights as units: fewer than half of the warps that an H200 keeps busy -> split them.
        units = rows * shape.topk * shape.rows("gate_up") // 16
        gate_up = _first(shape, "gate_up", ("split", "stream") if units <= 1024 else ("stream",))
        return Plan(gate_up, "burst" if shape.steps("down") <= 4 else "stream")
    if mean <= 2:
        return Plan("stream", _first(shape, "down", ("thin", "wide")))
    name = next(n for n, most in (("narrow", 12), ("wide", 32), ("wider", 48), ("widest", float("inf"))) if mean <= most)
    return Plan(_first(shape, "gate_up", (name, "wide")), _first(shape, "down", (name, "wide")))


def _first(shape: Shape, part: str, names: tuple[str, ...]) -> str:
    for name in names:
        if HOPPER[name].fits(shape, part):
            return name
    raise ValueError(f"no expert kernel for {shape.rows(part)} rows of {part}; 128 must divide them")


def _depth(steps: int) -> int:
    """Steps in a warp's ring of the stream kernels: the largest even divisor up to 8."""
    return next(d for d in (8, 6, 4, 2) if steps % d == 0)


def _variant(name: str, part: str, shape: Shape, arch: str) -> Variant:
    form = FORMS[arch][name]
    source = jit.Source(FOLDER / f"{form.file}.cu", f"{part}_{form.file}", form.macros(shape, part))
    return Variant(source, 32 * form.warps, form.shared(shape, part), form.blocks, form.spill, archs=(arch,))


def _combine_variant(shape: Shape) -> Variant:
    return Variant(jit.Source(FOLDER / "combine.cu", "combine", {"HIDDEN": shape.hidden, "TOPK": shape.topk}), 256)


def shapes() -> list[Shape]:
    """K2.6 whole and in slices of 2, 4 and 8, and nano."""
    return [Shape(7168, 2048 // tp, 8) for tp in (1, 2, 4, 8)] + [Shape(384, 128, 4)]


def variants(found: Iterable[Shape] | None = None) -> list[Variant]:
    """Everything the launcher can choose, for `shapes` or the given ones."""
    result = []
    for shape in shapes() if found is None else found:
        for arch, forms in FORMS.items():
            for name, form in forms.items():
                result += [_variant(name, part, shape, arch) for part in ("gate_up", "down") if form.fits(shape, part)]
        result.append(_combine_variant(shape))
    return result


@functools.cache
def _kernel(name: str, part: str, shape: Shape, device: int) -> jit.Kernel:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    variant = _combine_variant(shape) if part == "combine" else _variant(name, part, shape, arch)
    return jit.Kernel(variant.source, device, variant.shared)


def moe_int4(
    x: Tensor,
    weights: Packed,
    lists: Lists,
    live: Tensor,
    shared: Tensor | None,
    out: Tensor,
    work: Workspace,
    plan: Plan,
    rows: int | None = None,
    pdl: bool = True,
) -> None:
    """out[t] = sum over this rank's chosen experts of weight * expert(x[t]), + shared[t]; x, shared, out [rows, H] bfloat16.

    lists: as `route` made them with tile = plan.tile, for the same rows and live. live int32 [1]: rows of `out` that are
    written. shared may be None. Raises ValueError when shapes, types or capacities do not fit.
    """
    n = x.shape[0] if rows is None else rows
    shape = Shape(weights.hidden, weights.width, lists.experts.shape[1])
    _check(x, weights, lists, live, shared, out, work, plan, n, shape)
    device = x.device.index or 0
    jobs = most_jobs(n, shape.topk, lists.held, plan.tile)
    listed = (lists.jobs, lists.njobs, lists.pairs)
    _launch("gate_up", plan.gate_up, shape, device, jobs, (weights.gate_up, weights.gate_up_scale, x, *listed, work.h), pdl)
    nothing = np.uint64(0)
    tail = (nothing if shared is None else shared, live, out)
    args = (weights.down, weights.down_scale, work.h, *listed)
    if HOPPER[plan.down].file == "stream":
        _launch("down", plan.down, shape, device, jobs, (*args, lists.weights, *tail, np.int32(n)), pdl)
        return
    _launch("down", plan.down, shape, device, jobs, (*args, work.y), pdl)
    grid = (n, -(-shape.hidden // 1024))
    _kernel("", "combine", shape, device)(grid, 256, (work.y, lists.weights, *tail), pdl=pdl)


def _launch(part: str, name: str, shape: Shape, device: int, jobs: int, args: tuple, pdl: bool) -> None:
    form, rows = HOPPER[name], shape.rows(part)          # warps and tokens are the same on every architecture
    grid: int | tuple[int, ...]
    if form.file == "split":
        grid = jobs * (rows // 16)
    elif form.file != "stream":
        grid = (rows // (32 * form.warps), jobs)
    elif part == "gate_up":
        grid = -(-jobs * (rows // 16) // form.warps)
    else:
        grid = rows // 16
    _kernel(name, part, shape, device)(grid, 32 * form.warps, args, pdl=pdl)


def _check(
    x: Tensor, weights: Packed, lists: Lists, live: Tensor, shared: Tensor | None, out: Tensor, work: Workspace, plan: Plan,
    n: int, shape: Shape,
) -> None:  # fmt: skip
    for name, t in (("x", x), ("shared", shared), ("out", out)):
        if t is not None and (t.dtype != torch.bfloat16 or t.ndim != 2 or t.shape[1] != shape.hidden or not t.is_contiguous()):
            raise ValueError(f"{name} is contiguous bfloat16 [rows, {shape.hidden}], not {t.dtype} {tuple(t.shape)}")
        if t is not None and t.shape[0] < n:
            raise ValueError(f"{name} has {t.shape[0]} rows, {n} asked")
    if weights.experts != lists.held:
        raise ValueError(f"weights hold {weights.experts} experts, the lists {lists.held}")
    if not 1 <= n <= lists.rows or work.h.shape[0] < n * shape.topk or work.y.shape[0] < n * shape.topk:
        raise ValueError(f"{n} rows asked, lists for {lists.rows}, workspace for {work.h.shape[0] // shape.topk}")
    if work.h.shape[1] != shape.width or work.y.shape[1] != shape.hidden:
        raise ValueError(f"workspace is for {work.y.shape[1]} x {work.h.shape[1]}, not {shape.hidden} x {shape.width}")
    if HOPPER[plan.down].file == "stream" and n > FEW_ROWS:
        raise ValueError(f"down_stream serves up to {FEW_ROWS} rows, not {n}")
    if plan.gate_up == "split" and n > FEW_ROWS:
        raise ValueError(f"gate_up_split serves up to {FEW_ROWS} rows, not {n}")
    if live.dtype != torch.int32:
        raise ValueError(f"live is int32 [1], not {live.dtype}")


def bytes_moved(shape: Shape, distinct: float, rows: int, pairs: int) -> int:
    """Bytes that must move: weights of the chosen experts, rows in and out (and the shared output), h between the parts."""
    weights = int(distinct * 3 * shape.width * shape.hidden * 9 / 16)
    return weights + rows * shape.hidden * 2 * 3 + pairs * shape.width * 2 * 2
