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
from draftwood.kernels.moe_int4.sizes import BROAD_ROWS, CREW_ROWS, FEW, FEW_EXPERTS, FEW_OF_SLICES, JOINED_ROWS, SLICE
from draftwood.kernels.moe_route.op import Lists, most_jobs

FOLDER = Path(__file__).parent
PARTS = ("gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of a rank's experts: hidden size, columns (padded to 128), experts per row; and the chain of their sums.

    scaled: weights are scaled and rounded to bfloat16 before they are multiplied (moe.cuh). Use `shape_of`.
    """

    hidden: int
    width: int
    topk: int
    scaled: bool = False

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


def shape_of(hidden: int, width: int, topk: int, held: int) -> Shape:
    """Return the shape of a rank that holds `held` experts of `width` columns.

    Few wide experts see many rows each: there the chain of scaled weights is faster. It is the same for every number of rows.
    """
    return Shape(hidden, width, topk, held <= FEW_EXPERTS and width > SLICE)


@dataclass(frozen=True)
class Form:
    """One way to run either part: file.cu with blocks of `warps` warps, `blocks` of them on a multiprocessor.

    tokens: 8-token tiles of a job. stages, span: the ring's (staged.cu; joined.cu, crew.cu: of x). depth, ahead: most steps in a
    warp's ring (crew.cu: chunks of four; joined.cu: stages), and how many it reads x ahead (flow.cuh). rows: most rows it serves,
    0 for any. spill: bytes that ptxas may spill. chains: of the shapes it serves (Shape.scaled).
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
    chains: tuple[bool, ...] = (False, True)

    @property
    def threads(self) -> int:
        """Threads of a block; split has a warp more, which sums, joined one and crew four, of which one thread fetches."""
        return 32 * (self.warps + {"split": 1, "joined": 1, "crew": 4}.get(self.file, 0))

    @property
    def sums(self) -> bool:
        """Whether it is a down part that sums over a row's experts itself, so that no combine follows."""
        return self.file in ("duo", "one") or (self.file == "stream" and self.rows > 0)

    def fits(self, shape: Shape, part: str) -> bool:
        """Whether a block's rows divide the expert's, and what else the source asks of a shape."""
        if shape.scaled not in self.chains:
            return False
        if self.file in ("split", "share"):
            whole = self.file == "share" or shape.steps(part) % self.warps == 0
            return part == "gate_up" and whole and shape.width <= SLICE
        if self.file in ("duo", "one"):
            units = self.file == "duo" or shape.topk in (self.warps, 2 * self.warps)
            return part == "down" and units and shape.width <= SLICE
        if self.file == "stream":
            return (part == "down") == (self.rows > 0)
        if self.file == "crew" and any(shape.steps(p) % (4 * self.stages) for p in PARTS):
            return False
        if self.file == "joined":
            return not any(shape.rows(p) % self.block_rows or shape.steps(p) % self.span for p in PARTS)
        return shape.rows(part) % self.block_rows == 0

    @property
    def block_rows(self) -> int:
        """Weight rows of a block of staged.cu, of a unit of crew.cu and joined.cu."""
        return (16 if self.file == "crew" else 32) * self.warps

    def ring(self, shape: Shape, part: str) -> int:
        """Steps in a warp's ring (flow.cuh): an even part of a unit, or (down) several units."""
        steps = shape.steps(part)
        if self.depth >= steps:
            return steps if part == "gate_up" else self.depth // steps * steps
        return next(d for d in range(self.depth // 2 * 2, 0, -2) if steps % d == 0)

    def shared(self, shape: Shape, part: str) -> int:
        """Dynamic shared memory of a block, bytes (of those that sum: the largest)."""
        if self.file == "split":
            return shape.steps(part) * 576
        if self.file == "one":
            return shape.topk * (shape.steps(part) * 704 + 64)
        if self.file == "duo":
            return self.warps * self.ring(shape, part) * 576 + 64 * run_of(shape) * shape.topk * -(-self.rows // 2)
        if self.file in ("stream", "share"):
            rest = 516 * self.warps if self.file == "share" else 64 * shape.topk * self.rows if part == "down" else 0
            return self.warps * self.ring(shape, part) * 576 + rest
        if self.file == "crew":
            return self.stages * (4096 * self.tokens + 16) + self.depth * self.warps * (4 * 576 + 8) + 16 * CREW_UNITS
        if self.file == "joined":
            return self.span * (self.stages * 1024 * self.tokens + self.depth * self.warps * 1152) + 16 * self.stages + 4 * 24
        return self.stages * self.span * (self.warps * 1152 + 1024 * self.tokens)

    def macros(self, shape: Shape, part: str) -> dict[str, int]:
        """The macros of its source."""
        found = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "TOPK": shape.topk, "WARPS": self.warps, "BLOCKS": self.blocks}
        if part == "gate_up" and self.file != "joined":
            found["GATE_UP"] = 1
        if shape.scaled:
            found["SCALED"] = 1
        if self.file == "one":
            return found
        if self.file == "duo":
            found["RUN"] = run_of(shape)
        if self.file in ("stream", "share", "duo"):
            found["DEPTH"] = self.ring(shape, part)
            found["XAHEAD"] = _divisor(min(found["DEPTH"], shape.steps(part)), self.ahead)
            return found
        if self.file == "split":
            return found | {"XAHEAD": _divisor(shape.steps(part) // self.warps, self.ahead)}
        if self.file == "crew":
            return found | {"TOKENS": self.tokens, "DEPTH": self.depth, "CHUNKS": self.stages}
        if self.file == "joined":
            return found | {"TOKENS": self.tokens, "DEPTH": self.depth, "SLOTS": self.stages, "SPAN": self.span}
        found |= {"TOKENS": self.tokens, "STAGES": self.stages}
        found |= {"SPAN": self.span} if self.span else {}
        return found | {"UNROLL": self.unroll} if self.unroll else found


CREW_UNITS, ARRANGED = 64, 4
"""Most units (block_rows of a job) that a block of crew.cu takes; pairs that one of arrange.cu takes."""
JOINED_UNITS, JOINED_BLOCKS = 32_000, 511
"""Most units that a launch of joined.cu counts (15 bits, some of which blocks take beyond the last), and most blocks (9 bits)."""


def run_of(shape: Shape) -> int:
    """Row tiles of the output that a cluster of down_duo owns: 64 clusters of two blocks for K2.6."""
    return _divisor(shape.hidden // 16, 7)


def _divisor(number: int, most: int) -> int:
    return next(d for d in range(most, 0, -1) if number % d == 0)


HOPPER = {
    "split": Form("split", 1, 8, 3, ahead=2, rows=1, chains=(False,)),
    "one": Form("one", 1, 4, 8, rows=1, chains=(False,)),
    "stream": Form("stream", 1, 4, 4, depth=8, ahead=2),
    "few": Form("stream", 1, 4, 4, depth=8, rows=FEW, spill=48),
    "share": Form("share", 1, 16, 1, depth=8, ahead=2, chains=(False,)),
    "duo": Form("duo", 1, 16, 1, depth=8, ahead=2, rows=FEW_OF_SLICES, spill=8, chains=(False,)),
    "slim": Form("staged", 1, 8, 2, stages=4, span=2, chains=(False,)),
    "narrow": Form("staged", 2, 4, 4, stages=4, span=2),
    "wide": Form("staged", 4, 4, 3, stages=4, span=2, chains=(False,)),
    "wider": Form("staged", 4, 4, 4, stages=3, span=2, chains=(True,)),
    "joined": Form("joined", 3, 8, 2, stages=2, span=4, depth=2, chains=(True,)),
    "broad": Form("crew", 8, 16, 1, stages=4, depth=2, chains=(True,)),
    "widest": Form("crew", 16, 16, 1, stages=2, depth=2, spill=160, chains=(True,)),
}
"""Forms by growing tokens per expert, as measured on an H200 (384 and 48 experts of K2.6, slices of 8); the limits are in `choose`.

split, one, share and duo are for slices of the experts; those that sum keep y in shared memory and need no combine; joined is one
launch for both parts.
"""
WITHOUT_WARP_GROUPS = HOPPER | {
    "joined": Form("staged", 3, 4, 4, stages=3, span=2, chains=(True,)),
    "broad": Form("staged", 8, 4, 2, stages=2, span=2, unroll=1, chains=(True,)),
    "widest": Form("staged", 16, 4, 2, stages=2, span=2, unroll=1, chains=(True,)),
}
FORMS = {
    "sm_90a": HOPPER,
    # Not measured there.
    "sm_100a": WITHOUT_WARP_GROUPS,
    "sm_103a": WITHOUT_WARP_GROUPS,
    # Not measured there. 100 KB of shared memory a multiprocessor: rings that let two blocks be resident.
    "sm_120a": HOPPER
    | {
        "split": Form("split", 1, 8, 1, ahead=2, rows=1, chains=(False,)),
        "duo": Form("stream", 1, 4, 1, depth=8, ahead=2, rows=FEW_OF_SLICES, chains=(False,)),
        "slim": Form("staged", 1, 8, 2, stages=4, span=1, chains=(False,)),
        "narrow": Form("staged", 2, 4, 3, stages=4, span=1),
        "wide": Form("staged", 4, 4, 2, stages=5, span=1, chains=(False,)),
        "wider": Form("staged", 4, 4, 2, stages=5, span=1, chains=(True,)),
        "joined": Form("staged", 3, 4, 2, stages=5, span=1, chains=(True,)),
        "broad": Form("staged", 8, 4, 2, stages=2, span=1, chains=(True,)),
        "widest": Form("staged", 16, 4, 2, stages=2, span=1, chains=(True,)),
    },
}
"""Forms by architecture: everywhere the same names, tiles of tokens and limits of rows."""
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188}
"""Of the largest device: gate_up_share is right with any number of blocks, and best with as many as are resident."""


@dataclass(frozen=True)
class Plan:
    """Names of the forms that run, for one bucket of rows."""

    gate_up: str
    down: str

    @property
    def whole(self) -> bool:
        """Whether one form can follow the other: h of crew.cu has an order of its own, and joined.cu is both."""
        alone = {HOPPER[name].file for name in (self.gate_up, self.down)} & {"crew", "joined"}
        return not alone or HOPPER[self.gate_up].file == HOPPER[self.down].file

    @property
    def sums(self) -> bool:
        """Whether the down part sums over a row's experts itself, so that no y of its pairs is left."""
        return HOPPER[self.down].sums

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
    if shape.width <= SLICE:
        up = "split" if rows == 1 else "stream" if rows <= FEW else "share" if mean <= 0.5 else "wide"
        down = "one" if rows == 1 else "few" if rows <= FEW else "duo" if rows <= FEW_OF_SLICES else "wide"
        return Plan(_first(shape, "gate_up", (up, "stream")), _first(shape, "down", (down, "few")))
    if rows <= FEW:
        return Plan("stream", "few")
    if not shape.scaled and mean <= 0.25:
        return Plan("stream", _first(shape, "down", ("slim", "narrow")))
    if shape.scaled:
        name = "narrow" if mean <= 12 else "wider" if mean <= CREW_ROWS else "broad" if mean <= BROAD_ROWS else "widest"
        names = ("joined", name) if mean <= JOINED_ROWS else (name, "widest", "wider")
    else:
        names = ("narrow" if mean <= 5 else "wide", "narrow")
    return Plan(*(_first(shape, part, names) for part in PARTS))


def _first(shape: Shape, part: str, names: tuple[str, ...]) -> str:
    for name in names:
        if HOPPER[name].fits(shape, part):
            return name
    raise ValueError(f"no expert kernel for {shape.rows(part)} rows of {part}; 128 must divide them")


def _variant(name: str, part: str, shape: Shape, arch: str) -> Variant:
    form = FORMS[arch][name]
    entry = f"{'experts' if form.file == 'joined' else part}_{form.file}"
    source = jit.Source(FOLDER / f"{form.file}.cu", entry, form.macros(shape, part))
    return Variant(source, form.threads, form.shared(shape, part), form.blocks, form.spill, archs=(arch,))


def _arrange_variant(shape: Shape) -> Variant:
    source = jit.Source(FOLDER / "arrange.cu", "arrange", {"HIDDEN": shape.hidden, "TOPK": shape.topk})
    return Variant(source, -(-shape.hidden // 1024) * 32)


def _combine_variant(shape: Shape) -> Variant:
    return Variant(jit.Source(FOLDER / "combine.cu", "combine", {"HIDDEN": shape.hidden, "TOPK": shape.topk}), 256)


def shapes() -> list[Shape]:
    """K2.6 whole, in slices of 2, 4 and 8, and an eighth of its experts; nano."""
    return [shape_of(7168, 2048 // tp, 8, 384) for tp in (1, 2, 4, 8)] + [shape_of(7168, 2048, 8, 48), shape_of(384, 128, 4, 16)]


def variants(found: Iterable[Shape] | None = None) -> list[Variant]:
    """Everything the launcher can choose, for `shapes` or the given ones."""
    result = []
    for shape in shapes() if found is None else found:
        for arch, forms in FORMS.items():
            for name, form in forms.items():
                parts = PARTS[:1] if form.file == "joined" else PARTS
                result += [_variant(name, part, shape, arch) for part in parts if form.fits(shape, part)]
        result.append(_combine_variant(shape))
        if shape.scaled:
            result.append(_arrange_variant(shape))
    return result


@functools.cache
def _kernel(name: str, part: str, shape: Shape, device: int) -> jit.Kernel:
    small = {"combine": _combine_variant, "arrange": _arrange_variant}
    variant = small[part](shape) if part in small else _variant(name, part, shape, _arch(device))
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
    early: bool = False,
    summed: bool = True,
) -> None:
    """out[t] = sum over this rank's chosen experts of weight * expert(x[t]), + shared[t]; x, shared, out [rows, H] bfloat16.

    lists: as `route` made them with tile = plan.tile, for the same rows and live. live int32 [1]: rows of `out` that are
    written. shared may be None. early: lists and x are older than the kernel before, which waits for its own predecessor before
    it lets the next one start and does not touch `work` (the shared expert's, launched after the router): the first weights are
    then asked for, and x is arranged for a crew, while it runs. summed: else y of every pair stays in work.y, for a norm that sums
    (norm_rope), and out is not written; not with a plan that sums itself (`Plan.sums`). Raises ValueError when shapes, types or
    capacities do not fit.
    """
    call = Call(x, weights, lists, live, shared, out, work, plan, x.shape[0] if rows is None else rows, pdl, early, summed)
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
    early: bool = False
    summed: bool = True

    @property
    def shape(self) -> Shape:
        """Sizes of the experts."""
        return shape_of(self.weights.hidden, self.weights.width, self.lists.experts.shape[1], self.weights.experts)

    def gate_up(self) -> None:
        """Launch h = SwiGLU of every pair; y too if one launch does both."""
        w, x, early = self.weights, self.x, self.early
        device = self.x.device.index or 0
        if self._joined:
            packed = (w.gate_up, w.gate_up_scale, w.down, w.down_scale)
            both = (*packed, x, *self._listed(), self.work.h, self.work.y, np.int32(early))
            self._launch("gate_up", self.plan.gate_up, both)
            return
        if FORMS[_arch(device)][self.plan.gate_up].file == "crew":
            # To y, which nobody needs before the down part; the lists are then older than the kernel before.
            pairs, jobs = self.rows * self.shape.topk, most_jobs(self.rows, self.shape.topk, self.lists.held, self.plan.tile)
            threads, room = _arrange_variant(self.shape).threads, (np.int32(pairs), np.int32(jobs), np.int32(early))
            kernel = _kernel("", "arrange", self.shape, device)
            kernel(-(-pairs // ARRANGED), threads, (x, *self._listed(), self.work.y, *room), pdl=self.pdl)
            x, early = self.work.y, True
        args = (w.gate_up, w.gate_up_scale, x, *self._listed(), self.work.h, np.int32(early))
        self._launch("gate_up", self.plan.gate_up, args)

    def down(self) -> None:
        """Launch the second product, if gate_up's launch has not done it, and the sum over each row's experts, if asked for."""
        w, plan, work, lists = self.weights, self.plan, self.work, self.lists
        tail = (np.uint64(0) if self.shared is None else self.shared, self.live, self.out)
        args = (w.down, w.down_scale, work.h, *self._listed())
        if plan.sums:
            self._launch("down", plan.down, (*args, lists.weights, *tail, np.int32(self.rows)))
            return
        if not self._joined:
            self._launch("down", plan.down, (*args, work.y, np.int32(1)))
        if not self.summed:
            return
        grid = (self.rows, -(-self.shape.hidden // 1024))
        kernel = _kernel("", "combine", self.shape, self.x.device.index or 0)
        kernel(grid, 256, (work.y, lists.weights, *tail), pdl=self.pdl)

    @property
    def _joined(self) -> bool:
        return FORMS[_arch(self.x.device.index or 0)][self.plan.gate_up].file == "joined"

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
        if self.plan.sums and not self.summed:
            raise ValueError(f"{self.plan.down} sums over a row's experts itself and leaves no y; ask for the sum")
        if not self.plan.whole:
            raise ValueError(f"{self.plan.gate_up} and {self.plan.down} do not follow each other; let one form serve both parts")
        units = _joined_units(shape, HOPPER[self.plan.gate_up], most_jobs(n, shape.topk, lists.held, self.plan.tile))
        if HOPPER[self.plan.gate_up].file == "joined" and units > JOINED_UNITS:
            raise ValueError(f"{units} units of {n} rows are more than joined counts, {JOINED_UNITS}; use choose()")
        for part, name in (("gate_up", self.plan.gate_up), ("down", self.plan.down)):
            form = HOPPER[name]
            if n > (form.rows or n) or not form.fits(shape, part):
                raise ValueError(f"{name} does not serve {part} of {shape} for {n} rows; use choose()")
        if self.live.dtype != torch.int32:
            raise ValueError(f"live is int32 [1], not {self.live.dtype}")


@functools.cache
def _arch(device: int) -> str:
    return jit.arch_of(torch.cuda.get_device_capability(device))


def _multiprocessors(device: int) -> int:
    return MULTIPROCESSORS[_arch(device)]


def _joined_units(shape: Shape, form: Form, jobs: int) -> int:
    return jobs * sum(shape.rows(part) // form.block_rows for part in PARTS)


def _launch(part: str, name: str, shape: Shape, device: int, jobs: int, args: tuple, pdl: bool) -> None:
    form, rows = FORMS[_arch(device)][name], shape.rows(part)
    units, crews = jobs * (rows // 16), jobs * (rows // form.block_rows)
    grids: dict[str, int | tuple[int, ...]] = {
        "duo": (2, rows // (16 * run_of(shape))),
        "one": rows // 16,
        "split": units,
        "share": min(units, form.blocks * _multiprocessors(device)),
        "stream": rows // 16 if part == "down" else -(-units // form.warps),
        "crew": min(crews, max(_multiprocessors(device), -(-crews // CREW_UNITS))),
        "joined": min(_joined_units(shape, form, jobs), form.blocks * _multiprocessors(device), JOINED_BLOCKS),
    }
    grid = grids[form.file] if form.file in grids else (rows // form.block_rows, jobs)
    _kernel(name, part, shape, device)(grid, form.threads, args, pdl=pdl)


def bytes_moved(shape: Shape, distinct: float, rows: int, pairs: int) -> int:
    """Bytes that must move: weights of the chosen experts, rows in and out (and the shared output), h between the parts."""
    weights = int(distinct * 3 * shape.width * shape.hidden * 9 / 16)
    return weights + rows * shape.hidden * 2 * 3 + pairs * shape.width * 2 * 2
