"""Launcher of the expert kernels: checks shapes, picks the kernels by the number of rows, never waits for the device.

All kernels compute the same chain per output (moe.cuh), so the choice moves time and never bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant
from draftwood.kernels.moe_int4.repack import Packed
from draftwood.kernels.moe_int4.sizes import FEW, FEW_OF_SLICES, SLICE, few_rows
from draftwood.kernels.moe_route.op import Lists, most_jobs

FOLDER = Path(__file__).parent


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

    def segment(self, part: str) -> int:
        """Steps of a segment: a row's sum is that of its segments, in order (moe.cuh)."""
        steps = self.steps(part)
        return 16 if part == "gate_up" and steps % 16 == 0 else steps


@dataclass(frozen=True)
class Form:
    """One way to run either part: file.cu with blocks of `warps` warps, `blocks` of them on a multiprocessor.

    tokens: 8-token tiles of a job. stages, span: the ring's (ring.cu, staged.cu). depth, ahead: most steps in a warp's ring, and
    how many steps ahead it reads x (flow.cuh). rows: most rows that a block of down_stream keeps. spill: bytes that ptxas may
    spill. scaled: the chain (moe.cuh), the same for all forms that may meet.
    """

    file: str
    tokens: int
    warps: int
    blocks: int
    stages: int = 0
    span: int = 0
    unroll: int = 0
    depth: int = 0
    ahead: int = 1
    rows: int = 0
    spill: int = 0
    scaled: bool = False

    def fits(self, shape: Shape, part: str) -> bool:
        """Whether a block's rows divide the expert's, and what else the source asks of a shape."""
        if self.file == "split":
            return part == "gate_up" and 1 < shape.steps(part) // shape.segment(part) == self.warps
        if self.file == "stream":
            return (part == "down") == (self.rows > 0)
        return shape.rows(part) % (32 * self.warps) == 0

    def ring(self, shape: Shape, part: str) -> int:
        """Steps in a warp's ring of the stream kernels: an even part of a segment, or (down) several."""
        segment = shape.segment(part)
        if self.depth >= segment:
            return segment if part == "gate_up" else self.depth // segment * segment
        return next(d for d in range(self.depth // 2 * 2, 0, -2) if segment % d == 0)

    def shared(self, shape: Shape, part: str) -> int:
        """Dynamic shared memory of a block, bytes (for down_stream: the largest)."""
        if self.file in ("split", "stream"):
            y = 64 * shape.topk * self.rows if part == "down" else 0
            return self.warps * self.ring(shape, part) * 576 + y
        if self.file == "ring":
            return self.warps * self.stages * 1152 + (self.stages - 2 + 2 * self.span) * 1024 * self.tokens
        return self.stages * self.span * (self.warps * 1152 + 1024 * self.tokens)

    def macros(self, shape: Shape, part: str) -> dict[str, int]:
        """The macros of its source."""
        found = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "TOPK": shape.topk, "WARPS": self.warps, "BLOCKS": self.blocks}
        if part == "gate_up":
            found["GATE_UP"] = 1
        if self.scaled:
            found["SCALED"] = 1
        if self.file in ("stream", "split"):
            depth = self.ring(shape, part)
            length = min(depth, shape.segment(part))
            return found | {"DEPTH": depth, "XAHEAD": next(a for a in range(self.ahead, 0, -1) if length % a == 0)}
        found |= {"TOKENS": self.tokens, "STAGES": self.stages, "SPAN": self.span}
        return found | {"UNROLL": self.unroll} if self.unroll else found


HOPPER = {
    "split": Form("split", 1, 7, 3, depth=16, ahead=4, spill=64),
    "stream": Form("stream", 1, 4, 4, depth=8),
    "few": Form("stream", 1, 4, 4, depth=8, rows=FEW, spill=48),
    "rows": Form("stream", 1, 4, 4, depth=12, rows=FEW_OF_SLICES, spill=48),
    "thin": Form("ring", 1, 8, 2, stages=6, span=4),
    "wide": Form("staged", 4, 4, 3, stages=4, span=2, spill=320),
    "widest": Form("staged", 8, 4, 2, stages=3, span=2, unroll=1, spill=640),
}
"""Forms by growing tokens per expert, as measured on an H200 (384 and 48 experts of K2.6); the limits are in `choose`.

split and rows are for slices of the experts; few and rows keep y in shared memory and need no combine.
"""
FORMS = {
    "sm_90a": HOPPER,
    # Not measured there.
    "sm_100a": HOPPER,
    "sm_103a": HOPPER,
    # Not measured there. 100 KB of shared memory a multiprocessor: rings that let two blocks be resident.
    "sm_120a": HOPPER
    | {
        "split": Form("split", 1, 7, 2, depth=8, ahead=4),
        "rows": Form("stream", 1, 4, 2, depth=8, rows=FEW_OF_SLICES),
        "thin": Form("ring", 1, 8, 2, stages=4, span=4),
        "wide": Form("staged", 4, 4, 2, stages=5, span=1, spill=320),
        "widest": Form("staged", 8, 4, 2, stages=3, span=1, spill=320),
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
    mean, few = rows * shape.topk / experts, rows <= few_rows(shape.width)
    if shape.width <= SLICE and (few or mean <= 2):
        return Plan(_first(shape, "gate_up", ("split", "stream")), "rows" if few else _first(shape, "down", ("thin", "wide")))
    if few:
        return Plan("stream", "few")
    if mean <= 1:
        return Plan("stream", _first(shape, "down", ("thin", "wide")))
    name = "wide" if mean <= 48 else "widest"
    return Plan(name, name)


def _first(shape: Shape, part: str, names: tuple[str, ...]) -> str:
    for name in names:
        if HOPPER[name].fits(shape, part):
            return name
    raise ValueError(f"no expert kernel for {shape.rows(part)} rows of {part}; 128 must divide them")


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
    call = Call(x, weights, lists, live, shared, out, work, plan, x.shape[0] if rows is None else rows, pdl)
    call.check()
    call.gate_up()
    call.down()


@dataclass(frozen=True)
class Call:
    """The arguments of one `moe_int4`, and its two parts: gate_up writes work.h, down reads it and writes out."""

    x: Tensor
    weights: Packed
    lists: Lists
    live: Tensor
    shared: Tensor | None
    out: Tensor
    work: Workspace
    plan: Plan
    rows: int
    pdl: bool = True

    @property
    def shape(self) -> Shape:
        """Sizes of the experts."""
        return Shape(self.weights.hidden, self.weights.width, self.lists.experts.shape[1])

    def gate_up(self) -> None:
        """Launch h = SwiGLU of every pair."""
        w = self.weights
        self._launch("gate_up", self.plan.gate_up, (w.gate_up, w.gate_up_scale, self.x, *self._listed(), self.work.h))

    def down(self) -> None:
        """Launch the second product and the weighted sum over each row's experts."""
        w, plan, work, lists = self.weights, self.plan, self.work, self.lists
        tail = (np.uint64(0) if self.shared is None else self.shared, self.live, self.out)
        args = (w.down, w.down_scale, work.h, *self._listed())
        if HOPPER[plan.down].file == "stream":
            self._launch("down", plan.down, (*args, lists.weights, *tail, np.int32(self.rows)))
            return
        self._launch("down", plan.down, (*args, work.y))
        grid = (self.rows, -(-self.shape.hidden // 1024))
        kernel = _kernel("", "combine", self.shape, self.x.device.index or 0)
        kernel(grid, 256, (work.y, lists.weights, *tail), pdl=self.pdl)

    def _listed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.lists.jobs, self.lists.njobs, self.lists.pairs

    def _launch(self, part: str, name: str, args: tuple) -> None:
        jobs = most_jobs(self.rows, self.shape.topk, self.lists.held, self.plan.tile)
        _launch(part, name, self.shape, self.x.device.index or 0, jobs, args, self.pdl)

    def check(self) -> None:
        """Raise ValueError when shapes, types or capacities do not fit."""
        shape, n, work, lists = self.shape, self.rows, self.work, self.lists
        for name, t in (("x", self.x), ("shared", self.shared), ("out", self.out)):
            if t is not None and (t.dtype != torch.bfloat16 or t.ndim != 2 or t.shape[1] != shape.hidden or not t.is_contiguous()):
                raise ValueError(f"{name} is contiguous bfloat16 [rows, {shape.hidden}], not {t.dtype} {tuple(t.shape)}")
            if t is not None and t.shape[0] < n:
                raise ValueError(f"{name} has {t.shape[0]} rows, {n} asked")
        if self.weights.experts != lists.held:
            raise ValueError(f"weights hold {self.weights.experts} experts, the lists {lists.held}")
        if not 1 <= n <= lists.rows or work.h.shape[0] < n * shape.topk or work.y.shape[0] < n * shape.topk:
            raise ValueError(f"{n} rows asked, lists for {lists.rows}, workspace for {work.h.shape[0] // shape.topk}")
        if work.h.shape[1] != shape.width or work.y.shape[1] != shape.hidden:
            raise ValueError(f"workspace is for {work.y.shape[1]} x {work.h.shape[1]}, not {shape.hidden} x {shape.width}")
        most = HOPPER[self.plan.down].rows
        if most and n > most:
            raise ValueError(f"{self.plan.down} serves up to {most} rows, not {n}")
        if self.live.dtype != torch.int32:
            raise ValueError(f"live is int32 [1], not {self.live.dtype}")


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


def bytes_moved(shape: Shape, distinct: float, rows: int, pairs: int) -> int:
    """Bytes that must move: weights of the chosen experts, rows in and out (and the shared output), h between the parts."""
    weights = int(distinct * 3 * shape.width * shape.hidden * 9 / 16)
    return weights + rows * shape.hidden * 2 * 3 + pairs * shape.width * 2 * 2
