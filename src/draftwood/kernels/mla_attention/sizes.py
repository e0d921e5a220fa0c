"""How a bucket's attention is cut and how much memory that takes: arithmetic on its capacities. No torch.

The launcher (`op`) and the memory plan share these numbers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import ClassVar

from draftwood.errors import ConfigError

PAGE = 64
JOB_BYTES, HEAD_BYTES, NODE_BYTES = 64, 32, 32
MOST_JOBS = 1 << 18
MOST_RUNS = 4096
"""Jobs of nodes.cu beyond one for each of its nodes' blocks: of rows that are cut."""
PARTIAL_BYTES = 4 << 30
"""What partial results of a bucket may take by default. If a step needs more, its blocks walk whole rows and need little."""


@dataclass(frozen=True)
class Law:
    """How keys are cut, the only numbers that results depend on: `unit` keys, twice as many from each of `grow` on; `per` units
    are a group."""

    unit: int
    per: int
    grow: tuple[int, int, int]

    def pieces(self, context: int, size: int) -> int:
        """Return how many units (size `unit`) or groups (`unit * per`) hold `context` keys."""
        ends = (0, *self.grow, max(context, self.grow[-1]))
        return sum(-(-max(0, min(context, end) - begin) // (size << i)) for i, (begin, end) in enumerate(pairwise(ends)))


FEW, MANY = Law(128, 4, (2048, 32768, 65536)), Law(256, 4, (2048, 8192, 32768))


def law_for(heads: int) -> Law:
    """Return the law of an engine with so many heads on a device. With few, one row's keys are cut finely enough for all
    multiprocessors; with many, partial results must stay few. Nothing else may choose it."""
    return FEW if heads <= 16 else MANY


LARGE = ("sm_90a", "sm_100a", "sm_103a")
"""Architectures whose blocks may have more shared memory than sm_120a's."""
HOPPER = ("sm_90a",)


@dataclass(frozen=True)
class Shape:
    """A way to cut the work into blocks; tiles, halves and walk are attend.cu's macros.

    tiles: of 16 lines, at most, in a block. halves: slots of 32 latents. walk: blocks fold units into groups themselves. blocks:
    how many a multiprocessor holds. spill: bytes of spills that were measured not to hurt. archs: that it is compiled for;
    None: all.
    """

    tiles: int
    halves: int
    walk: bool = False
    blocks: int = 1
    spill: int = 0
    archs: tuple[str, ...] | None = None
    file: ClassVar[str] = "attend.cu"
    columns: ClassVar[bool] = False

    @property
    def lines(self) -> int:
        """Most lines of a block."""
        return 16 * self.tiles

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


@dataclass(frozen=True)
class Columns:
    """The same for columns.cu, which is for latents of 512 + 64 and multiples of 8 heads; eights, slots and walk are its macros.

    eights: of lines, at most, in a block. slots: tiles of 64 latents.
    """

    eights: int
    slots: int
    walk: bool = False
    spill: int = 0
    file: ClassVar[str] = "columns.cu"
    columns: ClassVar[bool] = True
    archs: ClassVar[tuple[str, ...] | None] = HOPPER
    blocks: ClassVar[int] = 1

    @property
    def lines(self) -> int:
        """Most lines of a block."""
        return 8 * self.eights

    def threads(self, latent: int) -> int:
        """Threads of a block: four roles of four warps."""
        return 512

    def shared_bytes(self, width: int) -> int:
        """Dynamic shared memory of a block (the sum in columns.cu, which checks it)."""
        keys = self.slots * PAGE + self.lines
        return keys * 1152 + (1024 if self.eights > 8 else 0) + self.lines * (20 if self.walk else 12) + self.slots * 24 + 16

    def macros(self, latent: int, rope: int, law: Law) -> dict[str, int]:
        """Return the macros of columns.cu."""
        given = {"EIGHTS": self.eights, "SLOTS": self.slots, "WALK": int(self.walk), "COLUMNS": 1}
        return given | {"SHARED_BYTES": self.shared_bytes(latent + rope)} | sizes(latent, rope, law)


@dataclass(frozen=True)
class Nodes:
    """nodes.cu, for latents of 512 + 64: a block has some heads of a node and all its keys, or a run of them.

    eights: of heads of a block. together: blocks of a cluster, which fetch keys for each other. slots: blocks that run at once on
    an H200, in whole clusters.
    """

    eights: int
    together: int
    slots: int
    spill: int = 0
    file: ClassVar[str] = "nodes.cu"
    columns: ClassVar[bool] = True
    walk: ClassVar[bool] = False
    archs: ClassVar[tuple[str, ...] | None] = HOPPER
    blocks: ClassVar[int] = 1
    crew: ClassVar[int] = 1
    """Blocks of a job."""

    @property
    def lines(self) -> int:
        """Heads of a job."""
        return 8 * self.eights

    @property
    def spare(self) -> int:
        """Partials in which blocks keep a job's earlier groups."""
        return self.slots * self.lines // self.crew

    def threads(self, latent: int) -> int:
        """Threads of a block: four roles of four warps."""
        return 512

    def shared_bytes(self, width: int) -> int:
        """Dynamic shared memory of a block (the sum in nodes.cu, which checks it)."""
        ring = 22 if self.eights > 2 else 25
        return ring * 8192 + self.lines * (11 * 128 + 40) + 16 + 512 + 256 + (28 + ring) * 8

    def macros(self, latent: int, rope: int, law: Law) -> dict[str, int]:
        """Return the macros of nodes.cu."""
        given = {"EIGHTS": self.eights, "TOGETHER": self.together, "COLUMNS": 1}
        return given | {"SHARED_BYTES": self.shared_bytes(latent + rope)} | sizes(latent, rope, law)


@dataclass(frozen=True)
class Heads(Nodes):
    """heads.cu, for latents of 512 + 64: a job is 64 heads of a node. Two blocks have half of the values' columns each, and form
    scores of tiles in turn."""

    eights: int = 8
    together: int = 2
    slots: int = 132
    spill: int = 1024
    file: ClassVar[str] = "heads.cu"
    crew: ClassVar[int] = 2

    def shared_bytes(self, width: int) -> int:
        """Dynamic shared memory of a block (the sum in heads.cu, which checks it)."""
        return 28 * 8192 + 7 * 64 * 4 + 512 + 6 * 64 + 40 * 8

    def macros(self, latent: int, rope: int, law: Law) -> dict[str, int]:
        """Return the macros of heads.cu."""
        given = {"TOGETHER": self.together, "COLUMNS": 1}
        return given | {"SHARED_BYTES": self.shared_bytes(latent + rope)} | sizes(latent, rope, law)


Form = Shape | Columns | Nodes


def sizes(latent: int, rope: int, law: Law) -> dict[str, int]:
    """Return the macros of layout.cuh."""
    given = {"LATENT": latent, "ROPE": rope, "UNIT": law.unit, "PER": law.per}
    return given | {f"GROW{i}": k for i, k in enumerate(law.grow, 1)}


SHAPES: dict[str, Form] = {
    "u1": Shape(1, 5, archs=LARGE),
    "u1s": Shape(1, 2),
    "g1": Shape(1, 5, walk=True, archs=LARGE),
    "g1s": Shape(1, 2, walk=True),
    "u2": Shape(2, 5, spill=256, archs=LARGE),
    "g2": Shape(2, 5, walk=True, spill=2048, archs=LARGE),
    "u4": Shape(4, 4, spill=1024, archs=LARGE),
    "g4": Shape(4, 4, walk=True, spill=8192, archs=LARGE),
    "c1": Columns(1, 3),
    "c9": Columns(9, 2),
    "d4": Columns(4, 2, walk=True, spill=2048),
    "n4": Nodes(4, 2, 132, spill=512),
    "n2": Nodes(2, 4, 120),
    "h": Heads(),
}
"""u: partial results of units; g: of groups, or whole rows. Then tiles of 16 lines; s: little shared memory. c, d: the same with
lines as columns, in eights; n: no partial results; h: nor here, with lines as rows."""
NARROW = Shape(1, 2)
"""For latents narrower than 512 (the bundled nano model's 96)."""


MOST_CUT = 1 << 17
"""Partial results of rows that nodes.cu cuts; rows beyond are whole."""
MOST_BYTES = 1 << 30
"""Of partial results of units; beyond it blocks fold units themselves, at some cost."""


COLUMNS = True
"""Whether Hopper takes the forms of columns.cu. All buckets or none: their bits are not those of attend.cu (layout.cuh, LAW)."""


SHORT, MIDDLE = 2304, 6144
"""Contexts up to which few nodes, and many, are jobs of nodes.cu and heads.cu: 512 and 4096 tokens and the room that timed steps
have."""


def choose_nodes(tokens: int, heads: int, context: int) -> str | None:
    """Return the form of nodes.cu or heads.cu for a bucket of so many nodes, None where columns.cu is as fast.

    Few nodes of a short context are cut into runs for all multiprocessors. Many are whole: their jobs take turns of 66, and a last
    turn that few blocks have work in is cut. A first turn must be well filled.
    """
    if not takes(SHAPES["h"], heads) or context > MIDDLE:
        return None
    if context <= SHORT and 4 <= tokens <= 22:
        return "n2" if tokens <= 10 else "n4"
    return "h" if tokens * heads // 64 >= 0.7 * 66 else None


def choose(rows: int, nodes: int, heads: int, context: int, arch: str) -> str:
    """Return the name of the shape for a bucket's capacities, as measured on one H200: larger blocks as lines and keys grow."""
    lines, law = nodes * heads, law_for(heads)
    work = rows * lines * context
    fits = rows * lines * law.pieces(context, law.unit) * 2056 <= MOST_BYTES
    if COLUMNS and arch in HOPPER and heads % 8 == 0:
        nodes_form = choose_nodes(rows * nodes, heads, context)
        if nodes_form is not None:
            return nodes_form
        if not fits:
            return "d4"
        return "c1" if lines == 8 or (lines <= 64 and rows <= 8 and context <= 65536) else "c9"
    if arch == "sm_120a":
        return "u1s" if work <= 8 << 20 else "g1s"
    if lines <= 16:
        return "u1" if rows < 32 and fits else "g1"
    if work <= 5 << 18:
        return "u1" if work <= 1 << 18 else "u2"
    if rows >= 8 and lines <= 640 and (heads <= 16 or not fits):
        return "g2"
    if lines <= 96:
        return "g2" if heads <= 16 else "u1" if rows < 8 and work <= 4 << 20 else "u2"
    if not fits:
        return "g4"
    return "u2" if rows >= 8 and work <= 4 << 20 else "u4"


@dataclass(frozen=True)
class Need:
    """How much memory an MlaAttention uses: tokens, partial results and jobs that it has room for."""

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
        work = self.jobs * JOB_BYTES + HEAD_BYTES + self.tokens * NODE_BYTES
        return work + (self.parts + 2 * self.tokens * heads) * (latent + 2) * 4


def fold_columns(lines: int) -> int:
    """Columns of a block of combine.cu for so many lines of all rows, 0 where a warp has a whole line: few lines need many blocks,
    for each may have hundreds of partials."""
    return 32 if lines <= 16 else 64 if lines <= 64 else 128 if lines <= 128 else 0


def _multiple(shape: Form) -> int:
    return shape.lines * shape.together // shape.crew if isinstance(shape, Nodes) else 8 if shape.columns else 1


def takes(shape: Form, heads: int) -> bool:
    """Whether the shape is for so many heads."""
    return heads % _multiple(shape) == 0


def shape_for(rows: int, nodes: int, heads: int, context: int, latent: int, arch: str, name: str | None = None) -> Form:
    """Return the shape of a bucket: the one named, else `choose`'s; there is but one for narrow latents. Raises ConfigError for a
    number of heads that the one named does not take."""
    if latent != 512:
        return NARROW
    shape = SHAPES[choose(rows, nodes, heads, context, arch) if name is None else name]
    if not takes(shape, heads):
        raise ConfigError(f"attention shape {name} with {heads} heads; it takes multiples of {_multiple(shape)}")
    return shape


def need(
    rows: int, nodes: int, tokens: int, heads: int, context: int, latent: int, shape: Form, law: Law | None = None,
    partial_bytes: int = PARTIAL_BYTES,
) -> Need:  # fmt: skip
    """Return what an MlaAttention of this bucket uses. Raises ConfigError for partial results beyond `partial_bytes`."""
    if isinstance(shape, Nodes):
        jobs = tokens * heads // shape.lines + MOST_RUNS
        law = law_for(heads) if law is None else law
        cut = min(tokens * heads * law.pieces(context, law.unit), MOST_CUT)
        return Need(tokens, cut + shape.spare, jobs)
    lines, law = nodes * heads, law_for(heads) if law is None else law
    spans = max(1, law.pieces(context, law.unit * law.per if shape.walk else law.unit))
    per_partial = latent * 4 + 8
    parts = rows * lines * spans
    blocks = rows * -(-lines // shape.lines)
    own = rows * nodes * 2 * -(-heads // shape.lines)
    jobs = blocks * spans + own
    if shape.walk:
        parts = min(parts, max(2 * rows * lines, partial_bytes // per_partial))
        jobs = min(jobs, max(blocks + own, MOST_JOBS))
    elif parts * per_partial > max(partial_bytes, 2 * rows * lines * per_partial):
        raise ConfigError(
            f"attention of {rows} rows x {nodes} nodes x {heads} heads over {context} tokens needs "
            f"{parts * per_partial} B of partial results, limit {partial_bytes}; take a shape that walks"
        )
    return Need(tokens, parts, jobs)
