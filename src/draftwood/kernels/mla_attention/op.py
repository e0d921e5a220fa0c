"""Launches the kernels of this folder, and chooses their shape.

`MlaAttention` is made once for a bucket (rows, nodes, heads, context); all its buffers are fixed then. `plan` reads lengths and
node counts on the device, once per step; calling the object does one layer. Nothing waits for the host, so both can be captured
in a CUDA graph. Which shape is chosen changes times only: results are bitwise the same for all (layout.cuh, LAW).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.kernels.check import Variant
from draftwood.kernels.jit import ARCHS, SHARED_LIMIT, Kernel, Source, arch_of
from draftwood.kernels.mla_attention.sizes import (
    FEW,
    HEAD_BYTES,
    HOPPER,
    JOB_BYTES,
    MANY,
    NARROW,
    NODE_BYTES,
    PAGE,
    PARTIAL_BYTES,
    SHAPES,
    Form,
    Law,
    Need,
    Nodes,
    fold_columns,
    law_for,
    need,
    shape_for,
    sizes,
)

FOLDER = Path(__file__).parent
MOST_NODES, MOST_ROWS = 65, 256
LOG2E = 1.4426950408889634
PLAN_THREADS, FOLD_THREADS = 1024, (128, 256)
"""Threads of a block of plan.cu; of combine.cu, if a warp has a line and if a block has a part of one."""


def fits(shape: Form, arch: str, width: int) -> bool:
    """Whether the shape is for `arch` and a block's shared memory fits there."""
    return (shape.archs is None or arch in shape.archs) and shape.shared_bytes(width) <= SHARED_LIMIT[arch]


def variants() -> list[Variant]:
    """Return every compiled form that an MlaAttention of K2 or nano may choose."""
    return [*_variants(512, 64, FEW), *_variants(512, 64, MANY), *_variants(96, 16, FEW)]


def _variants(latent: int, rope: int, law: Law) -> list[Variant]:
    shapes = tuple(s for s in SHAPES.values() if law != FEW or not isinstance(s, Nodes)) if latent == 512 else (NARROW,)
    given, found = sizes(latent, rope, law), []
    for columns in sorted({shape.columns for shape in shapes}):
        archs = HOPPER if columns else ARCHS
        found.append(Variant(Source(FOLDER / "plan.cu", "mla_plan", given | {"COLUMNS": int(columns)}), PLAN_THREADS, archs=archs))
        for cols in (0, 32, 64, 128):
            macros = given | {"FOLDED": cols, "COLUMNS": int(columns)}
            fold = Source(FOLDER / "combine.cu", "mla_combine", macros)
            found.append(Variant(fold, FOLD_THREADS[cols > 0], spill=16 if cols else 0, archs=archs))
    if any(isinstance(shape, Nodes) for shape in shapes):
        plan = Source(FOLDER / "nodes_plan.cu", "mla_plan_nodes", given | {"COLUMNS": 1})
        found.append(Variant(plan, PLAN_THREADS, archs=HOPPER))
    return found + [_variant(shape, latent, rope, law) for shape in shapes]


def _variant(shape: Form, latent: int, rope: int, law: Law) -> Variant:
    source = Source(FOLDER / shape.file, "mla_attend", shape.macros(latent, rope, law))
    archs = tuple(a for a in ARCHS if fits(shape, a, latent + rope))
    return Variant(source, shape.threads(latent), shape.shared_bytes(latent + rope), shape.blocks, shape.spill, archs)


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
class Scratch:
    """Work list (jobs, head, live) and partial results of a step; never read before it is written."""

    jobs: Tensor
    head: Tensor
    live: Tensor
    part_o: Tensor
    part_ml: Tensor
    own_o: Tensor
    own_ml: Tensor


def allocate(needed: Need, heads: int, latent: int, device: torch.device | str) -> Scratch:
    """Return the memory of an MlaAttention, or of several that take turns."""
    floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
    return Scratch(
        jobs=torch.zeros(needed.jobs * JOB_BYTES, dtype=torch.uint8, device=device),
        head=torch.zeros(HEAD_BYTES // 4, dtype=torch.int32, device=device),
        live=torch.zeros(needed.tokens, NODE_BYTES // 4, dtype=torch.int32, device=device),
        part_o=floats(needed.parts, latent), part_ml=floats(needed.parts, 2),
        own_o=floats(needed.tokens, 2, heads, latent), own_ml=floats(needed.tokens, 2, heads, 2),
    )  # fmt: skip


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
        law: Law | None = None,
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
        self.shape = shape_for(rows, nodes, heads, context, latent, arch(device), shape)
        law = law_for(heads) if law is None else law
        self.span = law.unit * law.per if self.shape.walk else law.unit
        self.blocks = processors(device) * self.shape.blocks
        self.crew = 1
        """Blocks of a job."""
        self.spare = 0
        """Partials ahead of all others in which blocks of nodes.cu keep a job's earlier groups."""
        self._boxes: dict[tuple[int, int], Any] = {}
        """Tensor maps of the layers' caches, which live no longer than this."""
        if isinstance(self.shape, Nodes):
            self.blocks = min(self.blocks - self.blocks % self.shape.together, self.shape.slots)
            self.crew, self.spare = self.shape.crew, self.shape.spare
        self._size(context, law, partial_bytes)
        self._buffers(device, scratch)
        self._load(law, index)
        self._scale = np.float32(scale * LOG2E)

    def _size(self, context: int, law: Law, partial_bytes: int) -> None:
        needed = need(self.rows, self.nodes, self.tokens, self.heads, context, self.latent, self.shape, law, partial_bytes)
        self.parts, self.max_jobs = needed.parts, needed.jobs
        self.grid = min(self.max_jobs * self.crew, self.blocks)

    def _buffers(self, device: torch.device, scratch: Scratch | None) -> None:
        needed = Need(self.tokens, self.parts, self.max_jobs)
        given = allocate(needed, self.heads, self.latent, device) if scratch is None else scratch
        self.jobs, self.head, self.live = given.jobs, given.head, given.live
        self.part_o, self.part_ml, self.own_o, self.own_ml = given.part_o, given.part_ml, given.own_o, given.own_ml
        held = Need(min(len(self.own_o), len(self.live)), len(self.part_o), len(self.jobs) // JOB_BYTES)
        if not needed.within(held) or self.own_o.shape[1:] != (2, self.heads, self.latent):
            raise ValueError(f"scratch for {held} does not hold {needed} of {self.heads} heads of {self.latent}")

    def _load(self, law: Law, device: int) -> None:
        self._macros = sizes(self.latent, self.rope, law) | {"COLUMNS": int(self.shape.columns)}
        self._device = device
        shared = self.shape.shared_bytes(self.latent + self.rope)
        plan = ("nodes_plan.cu", "mla_plan_nodes") if self.spare else ("plan.cu", "mla_plan")
        self._plan = _kernel(*plan, self._macros, device)
        macros = self.shape.macros(self.latent, self.rope, law)
        self._attend = _kernel(self.shape.file, "mla_attend", macros, device, shared)
        self.fold_with(0 if self.spare else fold_columns(self.tokens * self.heads))

    def fold_with(self, cols: int) -> None:
        """Let `fold` have blocks of 32, 64 or 128 columns, or warps of whole lines (0): for times only."""
        lines = self.tokens * self.heads
        self._fold_grid = (lines, -(-self.latent // cols)) if cols else (-(-lines * 32 // FOLD_THREADS[0]), 1)
        if self.spare:  # few rows are cut
            self._fold_grid = (min(self._fold_grid[0], 3 * self.blocks), 1)
        self._fold_threads = FOLD_THREADS[cols > 0]
        self._combine = _kernel("combine.cu", "mla_combine", self._macros | {"FOLDED": cols}, self._device)

    def plan(self, lengths: Tensor, counts: Tensor, starts: Tensor) -> None:
        """Write the step's work list. lengths, counts, starts [rows] int32 or int64: committed tokens, live nodes (0 for an
        empty row), token of each row's node 0. Must be called again when any of them changed."""
        arrays: list[Any] = []
        for name, x in (("lengths", lengths), ("counts", counts), ("starts", starts)):
            _expect(name, x, (self.rows,), (torch.int32, torch.int64))
            arrays += [x, np.int32(1 if x.dtype == torch.int32 else 2)]
        given: list[Any] = [np.int32(x) for x in (self.rows, self.heads, self.shape.lines)]
        given += [] if self.spare else [np.int32(self.span)]
        given += [np.int32(self.blocks // self.crew), np.int64(self.parts - self.spare), np.int32(self.max_jobs)]
        grid = min(16, -(-self.max_jobs // PLAN_THREADS))
        self._plan(grid, PLAN_THREADS, [*arrays, *given, self.jobs, self.head, self.live], pdl=True)

    def __call__(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor, out: Tensor) -> Tensor:
        """Attend in one layer and return `out`.

        q [tokens, heads, latent] bf16; q_pe [tokens, heads, rope] bf16, also as columns of a wider contiguous tensor;
        cache [slots, latent + rope] bf16 of this layer;
        table [rows, pages] int32; masks [tokens, W] int64 ancestors (self included; ancestors have smaller indices);
        out [tokens, heads, latent] bf16: rows' live nodes are written, nothing else is touched.
        """
        self.partials(q, q_pe, cache, table, masks, out)
        return self.fold(masks, out)

    def partials(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor, out: Tensor | None = None) -> None:
        """The first half of a call: partial results into this object's buffers, and those of whole rows into `out`."""
        given = [*self._given(q, q_pe, cache, table, masks), self.jobs, self.head]
        parts: list[Any] = [self.part_o, self.part_ml, self.own_o, self.own_ml]
        if self.spare:
            key = cache.data_ptr(), cache.shape[0]
            if key not in self._boxes:
                self._boxes[key] = boxes_of(cache)
            given = [self._boxes[key], *given, self.part_o]
            parts = [self.part_o[self.spare :], self.part_ml[self.spare :], self.own_o, self.own_ml, out]
        self._attend(self.grid, self.shape.threads(self.latent), [*given, *parts], pdl=True)

    def _given(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor) -> list[Any]:
        """The arguments with which every form begins."""
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
        return [q, q_pe, np.int32(apart), cache, table, pages, masks, words, np.int32(h), self._scale]

    def fold(self, masks: Tensor, out: Tensor) -> Tensor:
        """The second half of a call: partial results to `out`, which is returned."""
        spare, h = self.spare, self.heads
        _expect("out", out, (self.tokens, h, self.latent), (torch.bfloat16,))
        given = [self.head, self.live, np.int32(self.tokens), masks, self._words(masks), np.int32(h)]
        parts = [self.part_o[spare:], self.part_ml[spare:], self.own_o, self.own_ml]
        self._combine(self._fold_grid, self._fold_threads, [*given, *parts, out], pdl=True)
        return out

    def _words(self, masks: Tensor) -> np.int32:
        words = masks.shape[1]
        _expect("masks", masks, (self.tokens, words), (torch.int64,))
        if words * 64 < self.nodes:
            raise ValueError(f"masks of {words} words for {self.nodes} nodes")
        return np.int32(words)


def boxes_of(cache: Tensor) -> Any:
    """Return the tensor map of a cache [slots, width] bf16 whose boxes are 64 x 64 values, as nodes.cu fetches them; without a
    CUDA device, where nothing is launched, the cache."""
    if not cache.is_cuda:
        return cache
    from cuda.core._tensor_map import TensorMapDataType, TensorMapL2Promotion, TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(cache.view(torch.int16), stream_ptr=-1)
    return view.as_tensor_map(
        (PAGE, 64), data_type=TensorMapDataType.UINT16, swizzle=TensorMapSwizzle.SWIZZLE_128B,
        l2_promotion=TensorMapL2Promotion.L2_256B,
    )  # fmt: skip


@functools.cache
def arch(device: torch.device) -> str:
    """Return the architecture that kernels are compiled for on a CUDA device."""
    return arch_of(torch.cuda.get_device_capability(device))


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _expect(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous():
        raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}, contiguous {x.is_contiguous()}; expected {shape} {dtypes[0]}")
