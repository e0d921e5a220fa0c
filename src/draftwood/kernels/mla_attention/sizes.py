"""How a bucket's attention is cut and how much memory that takes: arithmetic on its capacities. No torch.

The launcher (`op`) and the memory plan share these numbers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import pairwise

from draftwood.errors import ConfigError

PAGE = 64
JOB_BYTES, ROW_BYTES = 64, 32
MOST_JOBS = 1 << 18
PARTIAL_BYTES = 4 << 30
"""What partial results of a bucket may take by default. If a step needs more, its blocks walk whole rows and need little."""


@dataclass(frozen=True)
class Law:
    """How keys are cut, the only numbers that results depend on: `unit` keys, twice as many from each of `grow` on; `per` units
    are a group."""

    unit: int = 128
    per: int = 4
    grow: tuple[int, int, int] = (2048, 8192, 32768)

    def pieces(self, context: int, size: int) -> int:
        """Return how many units (size `unit`) or groups (`unit * per`) hold `context` keys."""
        ends = (0, *self.grow, max(context, self.grow[-1]))
        return sum(-(-max(0, min(context, end) - begin) // (size << i)) for i, (begin, end) in enumerate(pairwise(ends)))


LAW = Law()


@dataclass(frozen=True)
class Shape:
    """A way to cut the work into blocks; tiles, halves and walk are attend.cu's macros.

    tiles: of 16 lines, at most, in a block. halves: slots of 32 latents. walk: blocks fold units into groups themselves. blocks:
    how many a multiprocessor holds. archs: that it is compiled for; None: all.
    """

    tiles: int
    halves: int
    walk: bool = False
    blocks: int = 1
    spill: int = 0
    archs: tuple[str, ...] | None = None

    def threads(self, latent: int) -> int:
        """Threads of a block: four warps for scores, and those that share out the columns."""
        return 128 + latent // (64 if latent % 64 == 0 else 16) * 32

    def shared_bytes(self, width: int) -> int:
        """Dynamic shared memory of a block (the sum in attend.cu, which checks it)."""
        row, lines = -(-width * 2 // 128) * 128, self.tiles * 16
        total = (self.halves * 32 + lines) * row + 2 * min(lines, 32) * 128 + lines * (8 + 8 + 4 + (8 if self.walk else 0))
        return total + 2 * (512 if self.tiles == 4 else 256) + 64

    def macros(self, latent: int, rope: int, law: Law) -> dict[str, int]:
        """Return the macros of attend.cu."""
        given = {"MT": self.tiles, "HALVES": self.halves, "WALK": int(self.walk), "BLOCKS": self.blocks}
        return given | {"SHARED_BYTES": self.shared_bytes(latent + rope)} | sizes(latent, rope, law)


def sizes(latent: int, rope: int, law: Law) -> dict[str, int]:
    """Return the macros of layout.cuh."""
    given = {"LATENT": latent, "ROPE": rope, "UNIT": law.unit, "PER": law.per}
    return given | {f"GROW{i}": k for i, k in enumerate(law.grow, 1)}


LARGE = ("sm_90a", "sm_100a", "sm_103a")
SHAPES: dict[str, Shape] = {
    "u1": Shape(1, 5, archs=LARGE),
    "u1s": Shape(1, 2),
    "g1": Shape(1, 5, walk=True, archs=LARGE),
    "g1s": Shape(1, 2, walk=True),
    "u2": Shape(2, 5, spill=256, archs=LARGE),
    "g2": Shape(2, 5, walk=True, spill=2048, archs=LARGE),
    "u4": Shape(4, 4, spill=1024, archs=LARGE),
    "g4": Shape(4, 4, walk=True, spill=8192, archs=LARGE),
}
"""u: partial results of units; g: of groups, or whole rows. Then tiles of 16 lines; s: little shared memory."""
NARROW = Shape(1, 2)
"""For latents narrower than 512 (the bundled nano model's 96)."""


MOST_BYTES = 1 << 30
"""Of partial results of units; beyond it blocks fold units themselves, at some cost."""


def choose(rows: int, nodes: int, heads: int, context: int, arch: str) -> str:
    """Return the name of the shape for a bucket's capacities, as measured on one H200: larger blocks as lines and keys grow."""
    lines = nodes * heads
    work = rows * lines * context
    fits = rows * lines * LAW.pieces(context, LAW.unit) * 2056 <= MOST_BYTES
    if arch == "sm_120a":
        return "u1s" if work <= 8 << 20 else "g1s"
    if lines <= 16:
        return "u1" if rows < 32 and fits else "g1"
    if work <= 9 << 18:
        return "u1" if work <= 1 << 18 else "u2"
    if rows >= 8 and lines <= 640:
        return "g2"
    if lines <= 96:
        return "g1" if work <= 4 << 20 else "g2"
    return "u4" if fits else "g4"


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
        work = self.jobs * JOB_BYTES + self.rows * ROW_BYTES + 16
        return work + (self.parts + 2 * self.tokens * heads) * (latent + 2) * 4


def fold_warps(lines: int) -> int:
    """Warps of a block of combine.cu for so many lines of all rows: enough that all multiprocessors have work."""
    return 16 if lines <= 32 else 4 if lines <= 128 else 1


def shape_for(rows: int, nodes: int, heads: int, context: int, latent: int, arch: str, name: str | None = None) -> Shape:
    """Return the shape of a bucket: the one named, else `choose`'s; there is but one for narrow latents."""
    if latent != 512:
        return NARROW
    return SHAPES[choose(rows, nodes, heads, context, arch) if name is None else name]


def need(
    rows: int, nodes: int, tokens: int, heads: int, context: int, latent: int, shape: Shape, law: Law = LAW,
    partial_bytes: int = PARTIAL_BYTES,
) -> Need:  # fmt: skip
    """Return what an MlaAttention of this bucket uses. Raises ConfigError for partial results beyond `partial_bytes`."""
    lines = nodes * heads
    spans = max(1, law.pieces(context, law.unit * law.per if shape.walk else law.unit))
    per_partial = latent * 4 + 8
    parts = rows * lines * spans
    blocks = rows * -(-lines // (16 * shape.tiles))
    own = rows * nodes * 2 * -(-heads // (16 * shape.tiles))
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
