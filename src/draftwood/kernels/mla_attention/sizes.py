"""How a bucket's attention is cut and how much memory that takes: arithmetic on its capacities. No torch.

The launcher (`op`) and the memory plan share these numbers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from draftwood.errors import ConfigError

PAGE = 64
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
    archs: tuple[str, ...] | None = None
    """Architectures that it is compiled for; None: all."""

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
