"""Launcher of the router kernels: checks shapes, picks the launches by the number of rows, never waits for the device.

The bits of a row do not depend on which launches were picked, on the other rows or on their number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant

MOST_ROWS, MOST_ROWS_TO_FEW, FEW_HELD = 1024, 2304, 96
"""Rows of one call, and of one for a rank that holds few experts, and how many those are: each expert's rows are a bit mask of this
many bits in shared memory. A rank's experts then read their weights once where two calls read them twice."""
MOST_PAIRS = 32_768
"""Pairs of one call: they are counted beside jobs in half a word."""
WHOLE_ROWS, WHOLE_BLOCK = 128, 32
"""Rows up to which all may be one launch, and rows of one of its blocks."""
SCORE_BLOCKS, TURN = 132, 16
"""Blocks of the score kernel that are to run at once, one on each multiprocessor, and rows that a block takes in a turn."""
CHOOSERS = 16
"""Rows of a block of `settle`, a warp each."""
FORMS = {"parts": ("parts", ""), "beside": ("", "beside"), "apart": ("scores", "settle")}
"""Ways of a layer, of the same bits: what is launched ahead of the shared expert's first product, and what beside it. parts: all,
in two launches. beside: all in one, in which the last block of some rows chooses and the last of all makes the lists, without
waiting for the kernel before; up to WHOLE_ROWS rows. apart: the scores ahead, choice and lists beside."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a router: of a row, number of experts, experts per row."""

    hidden: int
    experts: int
    topk: int

    def __post_init__(self) -> None:
        if self.hidden % 128 or self.experts % 16 or not 16 <= self.experts <= 1024 or not 1 <= self.topk < min(33, self.experts):
            raise ValueError(
                f"no router kernel for hidden {self.hidden} (multiples of 128), {self.experts} experts (multiples of 16, at "
                f"most 1024), {self.topk} per row (1 to 32, fewer than the experts)"
            )

    @property
    def warps(self) -> int:
        """Warps of a score block: as many chains of 128 inputs as one segment has."""
        return next(w for w in range(8, 0, -1) if self.hidden % (128 * w) == 0)

    @property
    def segments(self) -> int:
        """Segments of a row whose sums meet in global memory."""
        return self.hidden // (128 * self.warps)


@dataclass
class Router:
    """One layer's router on the device: weight in fragment order (`repack`), bias [E] float32."""

    shape: Shape
    weight: Tensor
    bias: Tensor
    scale: float


@dataclass
class Lists:
    """What a router call writes, of fixed capacity: `rows` rows, this rank's experts first .. first + held - 1.

    experts int32 [rows, k]; weights float32 [rows, k], 0 for experts of other ranks; pairs int32 [rows * k]: row * k + slot by
    expert; jobs int32 [most, 4]: expert - first, start in pairs, count, 0; njobs int32 [1]; partial: scratch; tickets int32, zero
    between calls.
    """

    rows: int
    first: int
    held: int
    experts: Tensor
    weights: Tensor
    pairs: Tensor
    jobs: Tensor
    njobs: Tensor
    partial: Tensor
    tickets: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


def most_jobs(rows: int, topk: int, held: int, tile: int) -> int:
    """Most jobs that `rows` rows can make: one per expert that is chosen at all, one more per full tile of pairs."""
    return min(rows * topk, held) + (rows * topk // tile if rows > tile else 0)


def most_rows(held: int) -> int:
    """Most rows of one call for a rank that holds `held` experts."""
    return MOST_ROWS_TO_FEW if held <= FEW_HELD else MOST_ROWS


def allocate(shape: Shape, rows: int, first: int, held: int, device: torch.device | str) -> Lists:
    """Return lists for up to `rows` rows and any tile. Raises ValueError for sizes that no kernel serves."""
    if not 1 <= rows <= most_rows(held) or rows * shape.topk > MOST_PAIRS:
        most = min(most_rows(held), MOST_PAIRS // shape.topk)
        raise ValueError(f"the router serves 1 to {most} rows a call of {held} experts, not {rows}; cut the rows into chunks")
    if not 0 <= first < first + held <= shape.experts:
        raise ValueError(f"experts {first} to {first + held - 1} are not all among the {shape.experts} of the router")
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    return Lists(
        rows, first, held,
        experts=ints(rows, shape.topk),
        weights=torch.zeros(rows, shape.topk, device=device),
        pairs=ints(rows * shape.topk),
        jobs=ints(most_jobs(rows, shape.topk, held, 8), 4),
        njobs=ints(1),
        partial=torch.zeros(shape.segments, rows, shape.experts, device=device),
        tickets=ints(1 + WHOLE_ROWS // WHOLE_BLOCK),
    )  # fmt: skip


def repack(weight: Tensor) -> Tensor:
    """Put a router's weight [E, H] (float32 or bfloat16) into mma fragment order: int32 [parts, E/16, H/16, 32, 4].

    parts is 1 when every value is a bfloat16, else 3: bfloat16 tensors that sum to the float32 value exactly.
    """
    rest, parts = weight.float(), []
    while True:
        part = rest.to(torch.bfloat16)
        parts.append(part)
        rest = rest - part.float()
        if len(parts) == 3 or (len(parts) == 1 and not rest.any()):
            break
    return torch.stack([_fragments(part) for part in parts])


def _fragments(weight: Tensor) -> Tensor:
    """bfloat16 [E, H] -> int32 [E/16, H/16, 32, 4]: see route.cu for which two values a register holds."""
    experts, hidden = weight.shape
    # expert = 16 tile + 8 half + g; input = 32 b + 8 q + 4 s + 2 pair + (0, 1)
    words = weight.contiguous().view(torch.int32).view(experts // 16, 2, 8, hidden // 32, 4, 2, 2)
    return words.permute(0, 3, 5, 2, 4, 6, 1).reshape(experts // 16, hidden // 16, 32, 4).contiguous()


@functools.cache
def _kernel(entry: str, shape: Shape, parts: int, device: int) -> jit.Kernel:
    variant = _variant(entry, shape, parts)
    return jit.Kernel(variant.source, device, variant.shared)


def _variant(entry: str, shape: Shape, parts: int) -> Variant:
    macros = {
        "HIDDEN": shape.hidden, "EXPERTS": shape.experts, "TOPK": shape.topk, "PARTS": parts, "WARPS": shape.warps,
        entry.upper(): 1,
    }  # fmt: skip
    threads = 32 * (CHOOSERS if entry == "settle" else shape.warps)
    shared = max(_settle_bytes(shape, held, most_rows(held)) for held in (shape.experts, FEW_HELD)) if entry == "settle" else 0
    return Variant(jit.Source(Path(__file__).parent / "route.cu", entry, macros), threads, shared)


def _settle_bytes(shape: Shape, held: int, rows: int) -> int:
    """Dynamic shared memory of `settle`: scores of a block and biases; then, in their place, a bit and half a count per 32 rows and
    expert, starts, sums of 32 warps and the experts of all pairs."""
    return max(4 * shape.experts * (CHOOSERS + 1), 6 * held * (-(-rows // 32) | 1) + 4 * (held + 33) + 2 * rows * shape.topk)


def variants() -> list[Variant]:
    """Everything the launcher can choose, for K2.6 and nano."""
    shapes = (Shape(7168, 384, 8), Shape(384, 16, 4))
    entries = [("scores", 1), ("scores", 3), ("settle", 1), ("whole", 1), ("whole", 3)]
    return [_variant(entry, shape, parts) for shape in shapes for entry, parts in entries]


def best_form(rows: int) -> str:
    """The way that is fastest within a layer, as measured on an H200: all beside the shared expert's first product where it can be
    (a step of one row of K2.6 10.00 instead of 10.26 ms); beyond, the scores ahead (3.8 us of 288 rows and 48 experts) and the rest
    beside (.2 where parts take 8.0)."""
    return "beside" if rows <= WHOLE_ROWS else "apart"


def launches(form: str) -> int:
    """Launches of a call of `route`, or of a way."""
    return {"parts": 2, "apart": 2}.get(form, 1)


def score_grid(shape: Shape, rows: int, parts: int) -> tuple[tuple[int, int, int], int]:
    """Grid of the score kernel, and rows that one of its blocks walks. Weights of one part are held for 48 experts at a time."""
    across = shape.experts // (48 if parts == 1 and shape.experts % 48 == 0 else 16)
    block = -(-rows // max(1, SCORE_BLOCKS // (across * shape.segments)))
    block = -(-block // TURN) * TURN
    return (across, shape.segments, -(-rows // block)), block


def route(
    x: Tensor, router: Router, live: Tensor, out: Lists, tile: int, rows: int | None = None, pdl: bool = True, form: str = "parts"
) -> None:  # fmt: skip
    """Choose experts for x [rows, H] bfloat16 and make the lists of the grouped GEMMs, cut into jobs of `tile` pairs.

    live int32 [1] on the device: rows that count; the others are padding. rows: how many of x's rows to launch for (all). form:
    "parts" or "beside", or of the two calls that are apart "scores" and then "settle". "beside" is right only if x, `live` and what
    last used `out` are older than the kernel before, which waits for its own predecessor before it lets the next kernel start; what
    follows may rely on that kernel's end. So is "settle", of `live` and the scores. Raises ValueError when shapes, types or the
    capacity of `out` do not fit, and for a form that there is not.
    """
    n = x.shape[0] if rows is None else rows
    _check(x, router, live, out, tile, n)
    if form not in ("parts", "scores", "settle", "beside") or (form == "beside" and n > WHOLE_ROWS):
        raise ValueError(f"form {form!r} must be parts, scores, settle, or up to {WHOLE_ROWS} rows beside; it is for {n}")
    shape, arg = router.shape, np.int32
    get = functools.partial(_kernel, shape=shape, device=x.device.index or 0)
    parts = router.weight.shape[0]
    made = (out.experts, out.weights, out.pairs, out.jobs, out.njobs, out.tickets)
    numbers = (arg(out.first), arg(out.held), np.float32(router.scale), arg(tile))
    scored = (router.weight, x, live, out.partial)
    if form == "beside":
        grid = (shape.experts // 16, shape.segments, -(-n // WHOLE_BLOCK))
        all_of_it = (*scored, router.bias, *made, arg(n), arg(WHOLE_BLOCK), *numbers)
        get("whole", parts=parts)(grid, 32 * shape.warps, all_of_it, pdl=pdl)
        return
    if form != "settle":
        grid, block = score_grid(shape, n, parts)
        get("scores", parts=parts)(grid, 32 * shape.warps, (*scored, arg(n), arg(block)), pdl=pdl)
    if form != "scores":
        given = (out.partial, router.bias, live, *made, arg(n), *numbers, arg(form == "settle"))
        get("settle", parts=1)(-(-n // CHOOSERS), 32 * CHOOSERS, given, shared=_settle_bytes(shape, out.held, n), pdl=pdl)


def _check(x: Tensor, router: Router, live: Tensor, out: Lists, tile: int, n: int) -> None:
    shape = router.shape
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != shape.hidden or not x.is_contiguous():
        raise ValueError(f"the router reads contiguous bfloat16 [rows, {shape.hidden}], not {x.dtype} {tuple(x.shape)}")
    if not 1 <= n <= min(x.shape[0], out.rows):
        raise ValueError(f"{n} rows asked, {x.shape[0]} given, lists for {out.rows}")
    if tile < 8 or tile % 8:
        raise ValueError(f"a job holds a positive multiple of 8 pairs, not {tile}")
    packed = (shape.experts // 16, shape.hidden // 16, 32, 4)
    if router.weight.dtype != torch.int32 or tuple(router.weight.shape[1:]) != packed or router.weight.shape[0] not in (1, 3):
        raise ValueError(f"router weight is {router.weight.dtype} {tuple(router.weight.shape)}; use repack()")
    if live.dtype != torch.int32 or router.bias.dtype != torch.float32 or router.bias.numel() != shape.experts:
        raise ValueError(f"live is int32 [1] and the bias float32 [{shape.experts}], not {live.dtype} and {router.bias.dtype}")
    if out.tickets.numel() < 1 + WHOLE_ROWS // WHOLE_BLOCK:
        raise ValueError(f"the lists have {out.tickets.numel()} tickets, and the router takes {1 + WHOLE_ROWS // WHOLE_BLOCK}")


def bytes_moved(shape: Shape, rows: int, parts: int = 1) -> int:
    """Bytes that must move: weights and rows once, choices and pairs out."""
    return parts * 2 * shape.experts * shape.hidden + 2 * rows * shape.hidden + rows * shape.topk * 12
