"""How a linear operation is cut: segments of K (which decide its bits) and the form of each kernel (which do not).

Everything here is arithmetic on the weight's shape; no torch. `segments` must never depend on the number of rows of x.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

STREAM_ROWS = 8
"""Rows of x up to which the stream kernel runs; beyond it the wide one."""
TILES = (2, 3, 5, 9, 16)
"""8-row tiles of x that the wide kernel is compiled for: up to 16, 24, 40, 72 and 128 rows in one pass."""
MAX_ROWS = TILES[-1] * 8
SMALL_SHARED = 101_376
"""Shared memory of a block on sm_120, bytes; the others have more than twice as much."""
BIG_SHARED = 232_448
MULTIPROCESSORS = 132
"""Of an H200; only the depth of rings depends on it."""


@dataclass(frozen=True)
class Shape:
    """A weight [heads][outputs, inputs]; heads > 1: one product per head. glu: outputs are gates and ups interleaved."""

    outputs: int
    inputs: int
    heads: int = 1
    glu: bool = False

    @property
    def steps(self) -> int:
        """K64 steps of a row, the last one perhaps filled up with zeros."""
        return -(-self.inputs // 64)

    @property
    def tiles(self) -> int:
        """Row tiles of 16 over all heads."""
        return self.outputs // 16 * self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.tiles * self.steps * 2048


@dataclass(frozen=True)
class Form:
    """One compiled kernel and how it is launched. macros: sorted pairs; shared: bytes; rows: of weights per block."""

    entry: str
    macros: tuple[tuple[str, int], ...]
    threads: int
    shared: int
    rows: int
    tokens: int
    cluster: int

    def grid(self, shape: Shape, n: int) -> tuple[int, int, int]:
        """Blocks: (cluster along K, heads x groups of rows, groups of tokens)."""
        return self.cluster, shape.heads * self.groups(shape), -(-n // self.tokens)

    def groups(self, shape: Shape) -> int:
        """Groups of weight rows per head."""
        return -(-shape.outputs // self.rows)


def segments(shape: Shape) -> int:
    """Return S, the number of parts that K is summed in: more parts for few row tiles, at least 3 steps each, at most 8."""
    s = 1
    while s < 8 and shape.tiles * s < 1152 and shape.steps >= 6 * s:
        s *= 2
    return s


def _tail(shape: Shape) -> int:
    return int(shape.inputs % 64 != 0)


@functools.cache
def stream_form(shape: Shape, limit: int = BIG_SHARED) -> Form:
    """Return the stream kernel's form: S warps along K in a block, or in a cluster when there are few row tiles."""
    s = segments(shape)
    cluster = 1
    while cluster < s and shape.tiles * cluster < 96:
        cluster *= 2
    k_warps = s // cluster
    n_warps = max(1, 4 // s) if cluster == 1 else 1
    blocks = -(-shape.outputs // (16 * n_warps)) * shape.heads * cluster
    resident = min(4, -(-blocks // MULTIPROCESSORS))
    per_depth = k_warps * n_warps * 2048
    room = min(limit, 200_000 // resident) // per_depth
    depth = max(d for d in (3, 4, 6, 8, 12) if d <= max(3, min(room, -(-shape.steps // s))))
    shared = max(per_depth * depth, k_warps * 8 * (n_warps * 16 + 4) * 4)
    macros = {"CLUSTER": cluster, "KWARPS": k_warps, "NWARPS": n_warps, "DEPTH": depth}
    macros |= {"GLU": int(shape.glu), "TAIL": _tail(shape)}
    return Form("linear_stream", tuple(sorted(macros.items())), 32 * k_warps * n_warps, shared, 16 * n_warps, 8, cluster)


@functools.cache
def wide_form(shape: Shape, tiles: int, limit: int = BIG_SHARED) -> Form:
    """Return the wide kernel's form for 8 * `tiles` rows of x: a cluster of S blocks along K."""
    s = segments(shape)
    warps = 2 if shape.tiles * s < 2 * 4 * 96 else 4
    if tiles > 9:
        warps = 8  # fewer would each stage too much of x
    depth, x_steps = 4, 4 if tiles <= 2 else 2 if tiles <= 5 else 1

    def shared() -> int:
        ring = warps * depth * 4096 + (depth - 2 + 2 * x_steps) * tiles * 1024
        return max(ring, tiles * 8 * (warps * 32 + 4) * 4)

    while shared() > limit:
        if depth > 3:
            depth -= 1
        elif x_steps > 1:
            x_steps -= 1
        else:
            warps -= 1
    macros = {"CLUSTER": s, "TILES": tiles, "WARPS": warps, "DEPTH": depth, "XSTEPS": x_steps}
    macros |= {"GLU": int(shape.glu), "TAIL": _tail(shape)}
    return Form("linear_wide", tuple(sorted(macros.items())), 32 * warps, shared(), 32 * warps, 8 * tiles, s)


def form_for(shape: Shape, n: int, limit: int = BIG_SHARED) -> Form:
    """Return what runs `n` rows of x (the capacity; the actual number may be smaller). n > 128 takes several passes."""
    if n <= STREAM_ROWS:
        return stream_form(shape, limit)
    return wide_form(shape, next((t for t in TILES if 8 * t >= n), TILES[-1]), limit)


def target_shapes(world: int, hidden: int, heads: int, q_lora: int, kv_lora: int, nope: int, rope: int, v: int,
                  shared: int, dense: int, vocab: int) -> dict[str, Shape]:  # fmt: skip
    """Return every projection of a target that is cut over `world` ranks: {name: shape}."""
    h = heads // world
    return {
        "q_a+kv_a": Shape(q_lora + kv_lora + rope, hidden),
        "q_b": Shape(h * (nope + rope), q_lora),
        "w_uk": Shape(kv_lora, nope, h),
        "w_uv": Shape(v, kv_lora, h),
        "o": Shape(hidden, h * v),
        "shared gate_up": Shape(2 * shared // world, hidden, glu=True),
        "shared down": Shape(hidden, shared // world),
        "dense gate_up": Shape(2 * dense // world, hidden, glu=True),
        "dense down": Shape(hidden, dense // world),
        "lm_head": Shape(vocab // world, hidden),
    }


def drafter_shapes(world: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, dense: int,
                   features: int) -> dict[str, Shape]:  # fmt: skip
    """Return every projection of a drafter that is cut over `world` ranks: {name: shape}; fc is whole on each rank."""
    q, kv = heads // world, max(kv_heads // world, 1)
    return {
        "draft fc": Shape(hidden, features),
        "draft qkv": Shape((q + 2 * kv) * head_dim, hidden),
        "draft context kv": Shape(2 * layers * kv * head_dim, hidden),
        "draft o": Shape(hidden, q * head_dim),
        "draft gate_up": Shape(2 * dense // world, hidden, glu=True),
        "draft down": Shape(hidden, dense // world),
    }


def k26_shapes(world: int = 1) -> dict[str, Shape]:
    """Kimi K2.6 and its drafter."""
    target = target_shapes(world, 7168, 64, 1536, 512, 128, 64, 128, 2048, 18432, 163840)
    return target | drafter_shapes(world, 7168, 6, 64, 8, 128, 18432, 6 * 7168)


def nano_shapes(world: int = 1) -> dict[str, Shape]:
    """The bundled model and its drafter."""
    target = target_shapes(world, 384, 8, 128, 96, 32, 16, 32, 128, 768, 8192)
    return target | drafter_shapes(world, 384, 3, 8, 2, 64, 640, 3 * 384)


def all_forms(limit: int) -> list[Form]:
    """Return everything `form_for` can answer for the shapes that are served, without duplicates, in a fixed order."""
    forms: dict[Form, None] = {}
    for shapes in (k26_shapes, nano_shapes):
        for world in (1, 2, 4, 8):
            for shape in shapes(world).values():
                forms[stream_form(shape, limit)] = None
                for tiles in TILES:
                    forms[wide_form(shape, tiles, limit)] = None
    kept: dict[tuple[str, tuple[tuple[str, int], ...]], Form] = {}
    for form in forms:
        kept.setdefault((form.entry, form.macros), form)
    return list(kept.values())
