"""Launches the kernels of this folder, and chooses their shape.

`MlaAttention` is made once for a bucket (rows, nodes, heads, context); all its buffers are fixed then. `plan` reads lengths and
node counts on the device, once per step; calling the object does one layer. Nothing waits for the host, so both can be captured
in a CUDA graph. Which shape is chosen changes times only: results are bitwise the same for all (layout.cuh, LAW).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.kernels.check import Variant
from draftwood.kernels.jit import ARCHS, SHARED_LIMIT, Kernel, Source

FOLDER = Path(__file__).parent
PAGE = 64
MOST_NODES, MOST_ROWS = 65, 256
LOG2E = 1.4426950408889634
JOB_BYTES, ROW_BYTES = 48, 32
MOST_JOBS = 1 << 18
PARTIAL_BYTES = 4 << 30
"""What partial results of a bucket may take by default. If a step needs more, its blocks walk whole rows and need little."""


@dataclass(frozen=True)
class Law:
    """How keys are cut, the only numbers that results depend on: `unit` keys, twice as many from grow[0] and again from
    grow[1] on; `per` units are a group."""

    unit: int = 128
    per: int = 4
    grow: tuple[int, int] = (4096, 16384)

    def pieces(self, context: int, size: int) -> int:
        """Return how many units (size `unit`) or groups (`unit * per`) hold `context` keys."""
        one, two = self.grow
        parts = (min(context, one), min(max(context - one, 0), two - one), max(context - two, 0))
        return sum(-(-n // (size << i)) for i, n in enumerate(parts))


LAW = Law()


@dataclass(frozen=True)
class Shape:
    """A way to cut the work into blocks and warps; the fields are attend.cu's macros."""

    tiles: int
    warps: int
    walk: bool = False
    split: int = 1
    line_groups: int = 1
    halves: int = 2
    pipe: bool = False
    in_registers: int | None = None
    in_shared: int = 0
    blocks: int = 1
    spill: int = 0
    archs: tuple[str, ...] = ARCHS

    def own_tiles(self, heads: int) -> int:
        """Tiles of 16 heads of a block that has one node's own keys."""
        return self.tiles if heads >= 16 * self.tiles else 1

    def shared_bytes(self, heads: int, width: int) -> int:
        """Dynamic shared memory of a block (the sum in attend.cu, which checks it)."""
        mine = self._bytes(self.tiles, self.halves, self.split, self.walk, width)
        own = self.own_tiles(heads)
        return max(mine, self._bytes(own, 2, self.split if own == self.tiles else 1, False, width))

    def _bytes(self, tiles: int, halves: int, split: int, walk: bool, width: int) -> int:
        row, lines = (width + 8) * 2, tiles * 16
        key_groups = self.warps // tiles if split == 2 else self.warps // (self.line_groups if tiles == self.tiles else 1)
        exchanged = self.warps * (8 // key_groups) * 512 if split == 2 else 0
        total = halves * 32 * row + lines * row + max(lines * (PAGE + 8) * 2, exchanged)
        total += lines * (key_groups * 4 + 32 + 4) + PAGE * 4
        if walk:
            total += 2 * self.warps * lines * 8 + self.in_shared * tiles * self.warps * 32 * 16
        return total

    def macros(self, heads: int, latent: int, rope: int, law: Law) -> dict[str, int]:
        """Return the macros of attend.cu."""
        kept = latent // 8 // self.warps if self.in_registers is None else self.in_registers
        given = {"MT": self.tiles, "BT": self.own_tiles(heads), "NW": self.warps, "WR": self.line_groups, "KS": self.split}
        given |= {"PIPE": int(self.pipe), "HALVES": self.halves, "WALK": int(self.walk), "GR": kept, "GS": self.in_shared}
        given |= {"BLOCKS": self.blocks, "SHARED_BYTES": self.shared_bytes(heads, latent + rope)}
        return given | (sizes(latent, rope, law) if self.walk else {"LATENT": latent, "ROPE": rope})


def sizes(latent: int, rope: int, law: Law) -> dict[str, int]:
    """Return the macros of layout.cuh."""
    given = {"LATENT": latent, "ROPE": rope, "UNIT": law.unit, "PER": law.per}
    return given | {"GROW1": law.grow[0], "GROW2": law.grow[1]}


SHAPES: dict[str, Shape] = {
    "u1x4": Shape(1, 4, blocks=2),
    "u1x8": Shape(1, 8, blocks=2),
    "u1x8h4": Shape(1, 8, halves=4),
    "u2x8": Shape(2, 8, split=2, halves=4),
    "u4x8": Shape(4, 8, split=2, halves=3, spill=96),
    "g1x4": Shape(1, 4, walk=True, blocks=2),
    "g1x8h4": Shape(1, 8, walk=True, halves=4),
    "g2x8": Shape(2, 8, walk=True, split=2, halves=4, spill=96),
    "g2x8p": Shape(2, 8, walk=True, split=2, halves=4, pipe=True),
    "g4x8h2s3": Shape(4, 8, walk=True, split=2, halves=2, in_registers=0, in_shared=3, spill=96),
    "g4x8h3s1": Shape(4, 8, walk=True, split=2, halves=3, in_registers=0, in_shared=1, spill=96),
    "g4x8h3s1p": Shape(4, 8, walk=True, split=2, halves=3, in_registers=0, in_shared=1, pipe=True, spill=96, archs=("sm_90a",)),
}
"""u: a block has one unit; g: a block walks a group, or whole rows. Then tiles of 16 lines x warps."""
NARROW = Shape(1, 2)
"""For latents narrower than 512 (the bundled nano model's 96)."""


def fits(shape: Shape, arch: str, heads: int, width: int) -> bool:
    """Whether the shape is for `arch` and a block's shared memory fits there."""
    return arch in shape.archs and shape.shared_bytes(heads, width) <= SHARED_LIMIT[arch]


def choose(rows: int, nodes: int, heads: int, context: int, arch: str) -> str:
    """Return the name of the shape for a bucket's capacities: fewer, larger blocks as lines and keys grow."""
    lines = nodes * heads
    if arch == "sm_120a":
        return "u1x4" if rows * lines * context <= 8 << 20 else "g1x4"
    if lines <= 16:
        return "u1x4" if rows * context <= 1 << 17 else "g1x4"
    if rows * lines * context <= 4 << 20:
        return "u2x8"
    return "g2x8" if lines <= 96 else "g4x8h3s1"


def variants() -> list[Variant]:
    """Return every compiled form that an MlaAttention of K2 or nano may choose."""
    found = [Variant(Source(FOLDER / "plan.cu", "mla_plan"), 256), Variant(Source(FOLDER / "combine.cu", "mla_combine"), 512)]
    for shape in SHAPES.values():
        for heads in (64, 8) if shape.tiles > 1 else (8,):
            found.append(_variant(shape, heads, 512, 64))
    nano = sizes(96, 16, LAW)
    found.append(Variant(Source(FOLDER / "combine.cu", "mla_combine", nano), 512))
    return [*found, _variant(NARROW, 8, 96, 16)]


def _variant(shape: Shape, heads: int, latent: int, rope: int) -> Variant:
    source = Source(FOLDER / "attend.cu", "mla_attend", shape.macros(heads, latent, rope, LAW))
    archs = tuple(a for a in ARCHS if fits(shape, a, heads, latent + rope))
    shared = shape.shared_bytes(heads, latent + rope)
    return Variant(source, shape.warps * 32, shared, shape.blocks, shape.spill, archs)


@functools.cache
def _load(file: str, entry: str, macros: tuple[tuple[str, int], ...], device: int, shared: int) -> Kernel:
    return Kernel(Source(FOLDER / file, entry, dict(macros)), device, shared)


def _kernel(file: str, entry: str, macros: Mapping[str, int], device: int, shared: int = 0) -> Kernel:
    return _load(file, entry, tuple(sorted(macros.items())), device, shared)


def bytes_moved(heads: int, lengths: list[int], counts: list[int], latent: int = 512, rope: int = 64) -> int:
    """Return the fewest bytes one call must move: each row's latents once, queries in, results out (bf16)."""
    kept = sum(n + c for n, c in zip(lengths, counts, strict=True)) * (latent + rope)
    return 2 * (kept + sum(counts) * heads * (2 * latent + rope))


def flops(heads: int, lengths: list[int], counts: list[int], latent: int = 512, rope: int = 64) -> int:
    """Return the multiply-adds, counted as two, of scores and values, for keys before the tree."""
    return sum(2 * n * c * heads * (2 * latent + rope) for n, c in zip(lengths, counts, strict=True))


@dataclass(frozen=True)
class Need:
    """How much memory an MlaAttention uses: rows, tokens, partial results and jobs that it has room for."""

    rows: int
    tokens: int
    parts: int
    jobs: int

    def with_room_for(self, other: Need) -> Need:
        """The larger of each."""
        return Need(*map(max, astuple(self), astuple(other)))

    def within(self, other: Need) -> bool:
        """Whether `other` is enough for this."""
        return self.with_room_for(other) == other

    def nbytes(self, heads: int, latent: int) -> int:
        """Bytes of `allocate`."""
        work = self.jobs * JOB_BYTES + self.rows * ROW_BYTES + 8
        return work + (self.parts + 2 * self.tokens * heads) * (latent + 2) * 4


@dataclass(frozen=True)
class Scratch:
    """Work list (jobs, row_info, head) and partial results of a step; never read before it is written."""

    jobs: Tensor
    row_info: Tensor
    head: Tensor
    part_o: Tensor
    part_ml: Tensor
    own_o: Tensor
    own_ml: Tensor


def allocate(needed: Need, heads: int, latent: int, device: torch.device | str) -> Scratch:
    """Return the memory of an MlaAttention, or of several that take turns."""
    floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
    return Scratch(
        jobs=torch.zeros(needed.jobs * JOB_BYTES, dtype=torch.uint8, device=device),
        row_info=torch.zeros(needed.rows * ROW_BYTES, dtype=torch.uint8, device=device),
        head=torch.zeros(2, dtype=torch.int32, device=device),
        part_o=floats(needed.parts, latent), part_ml=floats(needed.parts, 2),
        own_o=floats(needed.tokens, 2, heads, latent), own_ml=floats(needed.tokens, 2, heads, 2),
    )  # fmt: skip


def need(
    rows: int, nodes: int, tokens: int, heads: int, context: int, device: torch.device, latent: int = 512,
    partial_bytes: int = PARTIAL_BYTES,
) -> Need:  # fmt: skip
    """What an MlaAttention of this bucket will use with its own choice of shape. Raises ConfigError as it does."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    shape = _shape(rows, nodes, heads, context, latent, _arch(index), None)
    return _need(rows, nodes, tokens, heads, context, latent, shape, LAW, partial_bytes)


def _shape(rows: int, nodes: int, heads: int, context: int, latent: int, arch: str, name: str | None) -> Shape:
    if latent != 512:
        return NARROW
    return SHAPES[choose(rows, nodes, heads, context, arch) if name is None else name]


def _need(
    rows: int, nodes: int, tokens: int, heads: int, context: int, latent: int, shape: Shape, law: Law, partial_bytes: int
) -> Need:
    lines = nodes * heads
    spans = max(1, law.pieces(context, law.unit * law.per if shape.walk else law.unit))
    per_partial = latent * 4 + 8
    parts = rows * lines * spans
    blocks = rows * -(-lines // (16 * shape.tiles))
    own = rows * nodes * 2 * -(-heads // (16 * shape.own_tiles(heads)))
    jobs = blocks * spans + own
    if shape.walk:
        parts = min(parts, max(2 * rows * lines, partial_bytes // per_partial))
        jobs = min(jobs, max(blocks + own, MOST_JOBS))
    elif parts * per_partial > max(partial_bytes, 2 * rows * lines * per_partial):
        raise ConfigError(
            f"attention of {rows} rows x {nodes} nodes x {heads} heads over {context} tokens needs "
            f"{parts * per_partial} B of partial results, limit {partial_bytes}; take a shape that walks"
        )
    return Need(rows, tokens, parts, jobs)


class MlaAttention:
    """Attention of up to `rows` rows with up to `nodes` nodes each, over contexts of up to `context` committed tokens.

    scale: of the scores. shape: a name in SHAPES, by default `choose`'s. partial_bytes: limit for partial results. scratch:
    memory that objects of several buckets share (one runs at a time); made if absent.
    Raises ConfigError for a bucket that the kernels do not take.
    """

    def __init__(
        self,
        rows: int,
        nodes: int,
        heads: int,
        context: int,
        scale: float,
        device: torch.device,
        latent: int = 512,
        rope: int = 64,
        shape: str | None = None,
        law: Law = LAW,
        partial_bytes: int = PARTIAL_BYTES,
        tokens: int | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ConfigError(f"attention over {nodes} nodes per row; the kernels take 1 to {MOST_NODES}")
        if not 1 <= rows <= MOST_ROWS:
            raise ConfigError(f"attention over {rows} rows; the kernels take 1 to {MOST_ROWS}")
        self.rows, self.nodes, self.heads, self.latent, self.rope = rows, nodes, heads, latent, rope
        self.tokens = rows * nodes if tokens is None else tokens
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.shape = _shape(rows, nodes, heads, context, latent, _arch(index), shape)
        self.span = law.unit * law.per if self.shape.walk else law.unit
        self._size(context, law, partial_bytes)
        self._buffers(device, scratch)
        self._load(law, index)
        self._scale = np.float32(scale * LOG2E)

    def _size(self, context: int, law: Law, partial_bytes: int) -> None:
        needed = _need(self.rows, self.nodes, self.tokens, self.heads, context, self.latent, self.shape, law, partial_bytes)
        self.parts, self.max_jobs = needed.parts, needed.jobs
        groups = max(1, law.pieces(context, law.unit * law.per))
        self.fold_warps = min(16, -(-groups // 4) if self.shape.walk else groups)
        self.grid = min(self.max_jobs, 16_384)

    def _buffers(self, device: torch.device, scratch: Scratch | None) -> None:
        needed = Need(self.rows, self.tokens, self.parts, self.max_jobs)
        given = allocate(needed, self.heads, self.latent, device) if scratch is None else scratch
        self.jobs, self.row_info, self.head = given.jobs, given.row_info, given.head
        self.part_o, self.part_ml, self.own_o, self.own_ml = given.part_o, given.part_ml, given.own_o, given.own_ml
        held = Need(len(self.row_info) // ROW_BYTES, len(self.own_o), len(self.part_o), len(self.jobs) // JOB_BYTES)
        if not needed.within(held) or self.own_o.shape[1:] != (2, self.heads, self.latent):
            raise ValueError(f"scratch for {held} does not hold {needed} of {self.heads} heads of {self.latent}")

    def _load(self, law: Law, device: int) -> None:
        given = sizes(self.latent, self.rope, law)
        shared = self.shape.shared_bytes(self.heads, self.latent + self.rope)
        self._plan = _kernel("plan.cu", "mla_plan", given, device)
        macros = self.shape.macros(self.heads, self.latent, self.rope, law)
        self._attend = _kernel("attend.cu", "mla_attend", macros, device, shared)
        self._combine = _kernel("combine.cu", "mla_combine", given, device)

    def plan(self, lengths: Tensor, counts: Tensor, starts: Tensor) -> None:
        """Write the step's work list. lengths, counts, starts [rows] int32 or int64: committed tokens, live nodes (0 for an
        empty row), token of each row's node 0. Must be called again when any of them changed."""
        arrays: list[Any] = []
        for name, x in (("lengths", lengths), ("counts", counts), ("starts", starts)):
            _expect(name, x, (self.rows,), (torch.int32, torch.int64))
            arrays += [x, np.int32(1 if x.dtype == torch.int32 else 2)]
        lines, own = 16 * self.shape.tiles, 16 * self.shape.own_tiles(self.heads)
        numbers: list[Any] = [np.int32(x) for x in (self.rows, self.heads, lines, own, self.span)]
        numbers += [np.int64(self.parts), np.int32(self.max_jobs)]
        grid = min(32, -(-self.max_jobs // 256))
        self._plan(grid, 256, [*arrays, *numbers, self.jobs, self.row_info, self.head], pdl=True)

    def __call__(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor, out: Tensor) -> Tensor:
        """Attend in one layer and return `out`.

        q [tokens, heads, latent] bf16; q_pe [tokens, heads, rope] bf16, also as columns of a wider contiguous tensor;
        cache [slots, latent + rope] bf16 of this layer;
        table [rows, pages] int32; masks [tokens, W] int64 ancestors (self included; ancestors have smaller indices);
        out [tokens, heads, latent] bf16: rows' live nodes are written, nothing else is touched.
        """
        self.partials(q, q_pe, cache, table, masks)
        return self.fold(masks, out)

    def partials(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor) -> None:
        """The first half of a call: partial results into this object's buffers."""
        t, h = self.tokens, self.heads
        apart = q_pe.stride(1)
        whole = q_pe.stride() == (h * apart, apart, 1) and apart % 8 == 0
        if q_pe.shape != (t, h, self.rope) or q_pe.dtype != torch.bfloat16 or not whole:
            raise ValueError(f"q_pe is {tuple(q_pe.shape)} {q_pe.dtype} {q_pe.stride()}; expected {(t, h, self.rope)} bf16")
        _expect("q", q, (t, h, self.latent), (torch.bfloat16,))
        _expect("cache", cache, (cache.shape[0], self.latent + self.rope), (torch.bfloat16,))
        _expect("table", table, (self.rows, table.shape[1]), (torch.int32,))
        words = self._words(masks)
        pages = np.int32(table.shape[1])
        given = [q, q_pe, np.int32(apart), cache, table, pages, masks, words, np.int32(h), self._scale]
        parts = [self.part_o, self.part_ml, self.own_o, self.own_ml]
        self._attend(self.grid, self.shape.warps * 32, [*given, self.jobs, self.head, *parts], pdl=True)

    def fold(self, masks: Tensor, out: Tensor) -> Tensor:
        """The second half of a call: partial results to `out`, which is returned."""
        h = self.heads
        _expect("out", out, (self.tokens, h, self.latent), (torch.bfloat16,))
        numbers = [self._words(masks), np.int32(self.nodes), np.int32(h)]
        parts = [self.part_o, self.part_ml, self.own_o, self.own_ml]
        grid = (self.rows * self.nodes * h, -(-self.latent // 128))
        self._combine(grid, 32 * self.fold_warps, [self.row_info, self.head, masks, *numbers, *parts, out], pdl=True)
        return out

    def _words(self, masks: Tensor) -> np.int32:
        words = masks.shape[1]
        _expect("masks", masks, (self.tokens, words), (torch.int64,))
        if words * 64 < self.nodes:
            raise ValueError(f"masks of {words} words for {self.nodes} nodes")
        return np.int32(words)


@functools.cache
def _arch(device: int) -> str:
    from draftwood.kernels.jit import arch_of

    return arch_of(torch.cuda.get_device_capability(device))


def _expect(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous():
        raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}, contiguous {x.is_contiguous()}; expected {shape} {dtypes[0]}")
