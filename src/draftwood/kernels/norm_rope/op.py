"""Checking and launching the norm and rotary kernels. All results are bf16; strides may be anything in whole rows.

`rows` everywhere: None, or one int32 on the device that says how many of the n rows are real: only they are written, and what
stands in the others does not matter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.kernels import jit
from draftwood.kernels.check import Variant

_FOLDER = Path(__file__).parent
_NULL = np.uint64(0)

WIDTHS = (128, 384, 1536, 7168)
"""Query latents and hidden sizes of nano and K2.6."""
SUMMED = ((384, 4), (7168, 8))
"""Hidden sizes whose rows are summed over so many experts."""
LATENTS = ((96, 16), (512, 64))
"""(latent, rotary key)."""
HEAD_DIMS = (64, 128)
"""Of the drafters."""
EARLY_ROWS, EARLY_QUERY_ROWS = 8, 132
"""Rows up to which a norm lets the next kernel start before it has waited: a product of few rows, whose rings then fill with
weights (.1 ms of 10.7 for one row of K2.6). Beyond, what the next kernel fetches delays the norm (.3 of 23.1 for nine), but for
that of queries, behind which q_b's rings fill (1.5 us of a layer at 17 to 128 rows; before the mlp it costs 5 to 8)."""


def _threads(width: int) -> int:
    """Threads of a row's block: two chunks of 8 each for wide rows."""
    chunks = width // 8
    return -(-chunks // 32) * 32 if chunks <= 256 else -(-chunks // 64) * 32


def _norm_source(width: int) -> jit.Source:
    return jit.Source(_FOLDER / "norm.cu", "rms_norm", {"WIDTH": width, "THREADS": _threads(width)})


def _sum_source(width: int, topk: int) -> jit.Source:
    return jit.Source(_FOLDER / "sum.cu", "sum_norm", {"WIDTH": width, "THREADS": _threads(width), "TOPK": topk})


def _rope_source(entry: str, **macros: int) -> jit.Source:
    return jit.Source(_FOLDER / "rope.cu", entry, macros)


def variants() -> list[Variant]:
    """Everything the launchers choose for K2.6, nano and their drafters."""
    found = [Variant(_norm_source(width), _threads(width), blocks=2) for width in WIDTHS]
    found += [Variant(_sum_source(width, topk), _threads(width)) for width, topk in SUMMED]
    found += [Variant(_rope_source("turn_and_store", L_WIDTH=l, P_WIDTH=p), 128, blocks=8) for l, p in LATENTS]
    for entry in ("head_norm_rope", "ring_write"):
        found += [Variant(_rope_source(entry, D=d, PAIRS=pairs), 128, blocks=8) for d in HEAD_DIMS for pairs in (0, 1)]
    return found


@functools.cache
def _kernel(device: int, make: object, *given: object) -> jit.Kernel:
    return jit.Kernel(make(*given), device)  # type: ignore[operator]


@functools.cache
def _rope_kernel(device: int, entry: str, macros: tuple[tuple[str, int], ...]) -> jit.Kernel:
    return jit.Kernel(_rope_source(entry, **dict(macros)), device)


def _rows_fit(name: str, x: Tensor | None, n: int | None, width: int) -> None:
    """Refuse a matrix [n, width] whose rows cannot be read in 16-byte pieces."""
    if x is None:
        return
    if x.dim() != 2 or x.shape[1] != width or (n is not None and x.shape[0] != n) or x.dtype != torch.bfloat16:
        raise ValueError(f"{name} must be bf16 [{'rows' if n is None else n}, {width}]; it is {x.dtype} {tuple(x.shape)}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"{name}: rows must be contiguous and start on 16 bytes; strides {x.stride()}")


@dataclass(frozen=True)
class Parts:
    """A delta in parts: y float32 [n * k, H] of the experts of each row's k slots, weights float32 [n, k], shared bf16 [n, H].

    All of it but y is older than the kernel before, which waits before it lets this one start. The sum is combine's (moe_int4):
    sum of weights * y over slots in order, + shared, rounded to bf16. A slot of weight 0 is not read.
    """

    y: Tensor
    weights: Tensor
    shared: Tensor


def _parts_fit(parts: Parts, n: int, width: int) -> None:
    k = parts.weights.shape[-1]
    for name, x, shape in (("y", parts.y, (n * k, width)), ("weights", parts.weights, (n, k))):
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[0] < shape[0] or x.shape[1] != shape[1] or not x.is_contiguous():
            raise ValueError(f"{name} must be float32 {list(shape)}, contiguous; it is {x.dtype} {tuple(x.shape)}")
    _rows_fit("shared", parts.shared, n, width)
    if not parts.shared.is_contiguous():
        raise ValueError(f"shared must be contiguous; its strides are {parts.shared.stride()}")


def _longs_fit(n: int, **given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None and (x.dtype != torch.int64 or x.shape != (n,) or not x.is_contiguous()):
            raise ValueError(f"{name} must be int64 [{n}]; it is {x.dtype} {tuple(x.shape)}")


def _turns_fit(turns: Tensor, width: int) -> None:
    if turns.dtype != torch.float32 or turns.dim() != 3 or turns.shape[1:] != (width // 2, 2) or not turns.is_contiguous():
        raise ValueError(f"turns must be float32 [positions, {width // 2}, 2]; it is {turns.dtype} {tuple(turns.shape)}")


def _count_fits(rows: Tensor | None) -> None:
    if rows is not None and (rows.dtype != torch.int32 or rows.numel() != 1):
        raise ValueError(f"rows must be one int32 on the device; it is {rows.dtype} {tuple(rows.shape)}")


def _or_null(x: Tensor | None) -> Tensor | np.uint64:
    return _NULL if x is None else x


def _stride(x: Tensor | None) -> np.int64:
    return np.int64(0 if x is None else x.stride(0))


def add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | Parts | None = None,
    index: Tensor | None = None,
    residual: Tensor | None = None,
    tap: Tensor | None = None,
    out: Tensor | None = None,
    rows: Tensor | None = None,
    early: int = EARLY_ROWS,
) -> Tensor:
    """h = x[index] + delta; write h to `residual` and `tap` where given; return norm(h) * weight [n, H].

    x [n, H], or [any, H] with index int64 [n]; delta, residual, tap, out [n, H]; residual may be x without an index. With a
    delta in parts it must be, and rows must be given (older than the kernel before, too). early: up to so many rows the next kernel
    may start before this one has waited (rule (b) of common.cuh).
    """
    width = x.shape[-1]
    n = x.shape[0] if index is None else index.shape[0]
    out = torch.empty(n, width, dtype=torch.bfloat16, device=x.device) if out is None else out
    _rows_fit("x", x, None, width)
    for name, given in (("residual", residual), ("tap", tap), ("out", out)):
        _rows_fit(name, given, n, width)
    _rows_fit("weight", weight.unsqueeze(0), 1, width)
    _longs_fit(n, index=index)
    _count_fits(rows)
    if width % 8 or not 8 <= width <= 8192:
        raise ValueError(f"rows of {width} values have no norm kernel; a multiple of 8 up to 8192 is needed")
    if isinstance(delta, Parts):
        if residual is not x or index is not None or rows is None:
            raise ValueError("a delta in parts needs x as the residual, no index and a count of rows")
        _parts_fit(delta, n, width)
        if n:
            _kernel(x.device.index, _sum_source, width, delta.weights.shape[1])(
                n, _threads(width),
                (delta.y, delta.weights, delta.shared, weight, rows, x, _or_null(tap), out, _stride(x), _stride(tap), _stride(out),
                 np.float32(eps)),
                pdl=True,
            )  # fmt: skip
        return out
    _rows_fit("delta", delta, n, width)
    if n:
        _kernel(x.device.index, _norm_source, width)(
            n, _threads(width),
            (x, _or_null(delta), weight, _or_null(index), _or_null(rows), _or_null(residual), _or_null(tap), out, _stride(x),
             _stride(delta), _stride(residual), _stride(tap), _stride(out), np.float32(eps), np.int32(n > early)),
            pdl=True,
        )  # fmt: skip
    return out


def turn_and_store(
    queries: Tensor, latents: Tensor, l_weight: Tensor, turns: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, eps: float,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Turn the rotary parts of queries [n, heads, P] (a view), in place; norm and store the latents [n, L + P] of the same nodes.

    turns [positions, P / 2, 2], positions and slots int64 [n], cache [slots, L + P] of one layer, written at `slots`; a negative
    slot is written nowhere. Runs beside the kernel before and waits for it at its end: right only if all arguments are older than
    that kernel, which waits for its own predecessor before it lets this one start.
    """
    n, heads, p = queries.shape
    l = l_weight.shape[0]
    if queries.dtype != torch.bfloat16:
        raise ValueError(f"queries must be bf16 [n, heads, {p}]; they are {queries.dtype} {tuple(queries.shape)}")
    if queries.stride(2) != 1 or queries.stride(0) % 8 or queries.stride(1) % 8 or queries.data_ptr() % 16:
        raise ValueError(f"queries: heads must be contiguous and start on 16 bytes; strides {queries.stride()}")
    _rows_fit("latents", latents, n, l + p)
    _rows_fit("l_weight", l_weight.unsqueeze(0), 1, l)
    _rows_fit("cache", cache, None, l + p)
    if not cache.is_contiguous():
        raise ValueError(f"cache must be one layer, contiguous; strides {cache.stride()}")
    _turns_fit(turns, p)
    _longs_fit(n, positions=positions, slots=slots)
    _count_fits(rows)
    if l % 8 or p % 8 or p > 256 or l > 768:
        raise ValueError(f"latents of {l} + {p} values have no kernel; multiples of 8, up to 768 and a key of 256, are needed")
    if n:
        _rope_kernel(queries.device.index, "turn_and_store", (("L_WIDTH", l), ("P_WIDTH", p)))(
            (n, -(-heads * p // 1024) + 1), 128,
            (queries, latents, l_weight, turns, positions, slots, _or_null(rows), cache, np.int32(heads),
             np.int64(queries.stride(0)), np.int64(queries.stride(1)), _stride(latents), np.int32(turns.shape[0]), np.float32(eps)),
            pdl=True,
        )  # fmt: skip


def _head_macros(d: int, pairs: bool) -> tuple[tuple[str, int], ...]:
    if d not in (32, 64, 128, 256):
        raise ValueError(f"heads of {d} values have no kernel; 32, 64, 128 or 256 are needed")
    return (("D", d), ("PAIRS", int(pairs)))


def head_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, turns: Tensor, lengths: Tensor, kv_heads: int, eps: float,
    pairs: bool = False, rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Norm and turn the queries and keys of blocks in place; values stay.

    qkv [R, block, q_heads + 2 kv_heads, D] contiguous; weights [D]; lengths int64 [R]: token t of row r stands at position
    lengths[r] + t. pairs: heads are stored so that (2i, 2i + 1) turn together, else (i, i + D / 2).
    """
    r, block, heads, d = qkv.shape
    _rows_fit("qkv", qkv.view(r * block, heads * d), r * block, heads * d)
    _rows_fit("q_weight", q_weight.unsqueeze(0), 1, d)
    _rows_fit("k_weight", k_weight.unsqueeze(0), 1, d)
    _turns_fit(turns, d)
    _longs_fit(r, lengths=lengths)
    _count_fits(rows)
    macros = _head_macros(d, pairs)
    if r:
        _rope_kernel(qkv.device.index, "head_norm_rope", macros)(
            (r * block, -(-(heads - kv_heads) * d // 1024)), 128,
            (qkv, q_weight, k_weight, turns, lengths, _or_null(rows), np.int32(block), np.int32(heads - 2 * kv_heads),
             np.int32(kv_heads), np.int64(heads * d), np.int32(turns.shape[0]), np.float32(eps)),
            pdl=True,
        )  # fmt: skip
    return qkv


def ring_write(
    kv: Tensor, k_weights: Tensor, turns: Tensor, lengths: Tensor, counts: Tensor, ids: Tensor, keys: Tensor, values: Tensor,
    eps: float, pairs: bool = False, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Store context keys (normed, turned) and values of the accepted tokens of each row.

    kv [R, path, 2, layers, kv_heads, D] contiguous; k_weights [layers, D]; lengths, counts, ids int64 [R]: token i of row r
    stands at position lengths[r] + i and is stored if i < counts[r], at place position % capacity of row ids[r] of keys and
    values [layers, rows_total, capacity, kv_heads, D]. Of more than `capacity` tokens only the newest are stored.
    """
    r, path, two, layers, kv_heads, d = kv.shape
    whole = two * layers * kv_heads * d
    _rows_fit("kv", kv.view(r * path, whole), r * path, whole)
    _rows_fit("k_weights", k_weights, layers, d)
    if not k_weights.is_contiguous():
        raise ValueError(f"k_weights must be contiguous; strides {k_weights.stride()}")
    for name, ring in (("keys", keys), ("values", values)):
        if ring.shape != keys.shape or ring.shape[0] != layers or ring.shape[3:] != (kv_heads, d) or not ring.is_contiguous():
            raise ValueError(f"{name} must be [{layers}, rows, capacity, {kv_heads}, {d}] contiguous; it is {tuple(ring.shape)}")
        if ring.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be bf16; it is {ring.dtype}")
    _turns_fit(turns, d)
    _longs_fit(r, lengths=lengths, counts=counts, ids=ids)
    _count_fits(rows)
    macros = _head_macros(d, pairs)
    if r and path:
        _rope_kernel(kv.device.index, "ring_write", macros)(
            (r * path, -(-layers * kv_heads * d // 1024)), 128,
            (kv, k_weights, turns, lengths, counts, ids, _or_null(rows), keys, values, np.int32(path), np.int32(layers),
             np.int32(kv_heads), np.int64(whole), np.int64(keys.shape[1]), np.int32(keys.shape[2]), np.int32(turns.shape[0]),
             np.float32(eps)),
            pdl=True,
        )  # fmt: skip


def bytes_moved(entry: str, n: int, **size: int) -> int:
    """Bytes that must move for n rows; `size` names the entry's widths.

    add_norm: width, parts (how many of delta, residual and tap are given). turn_and_store: heads, l, p.
    head_norm_rope: heads, d (queries and keys). ring_write: heads (layers x kv heads), d.
    """
    if entry == "add_norm":
        return 2 * size["width"] * (n * (2 + size.get("parts", 0)) + 1)
    if entry == "turn_and_store":
        row = (size["heads"] + 1) * size["p"] + size["l"]
        return n * (4 * row + 4 * size["p"] + 16) + 2 * size["l"]
    if entry == "head_norm_rope":
        return n * (4 * size["heads"] * size["d"] + 4 * size["d"])
    return n * (8 * size["heads"] * size["d"] + 4 * size["d"])
