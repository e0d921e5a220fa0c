"""How a linear operation is cut: segments of K (which decide its bits) and the form of each kernel (which do not).

Everything here is arithmetic on the weight's shape and the machine; no torch. `segments` must never depend on the number of rows
of x, nor on the machine.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from draftwood.kernels.linear.tuned import TUNED

STREAM_ROWS = 8
"""Rows of x up to which the stream kernel runs; beyond it the wide one."""
TILES = {2: 28, 3: 24, 5: 16, 9: 11, 16: 8}
"""8-row tiles of x that the wide kernel is compiled for, up to 16, 24, 40, 72 and 128 rows in one pass; and how many of its warps
the registers of a multiprocessor hold."""
STREAM_WARPS = 32
GMMA_WARPS = {1: 32, 2: 28, 3: 28, 5: 24, 9: 20, 12: 16, 16: 16}
"""The same for the warp-group products of sm_90, which also serve the rows of the stream kernel."""
MAX_ROWS = max(TILES) * 8
MANY = 8
"""Passes that a wide form for more rows is made for: a prompt's chunk."""
CLASSES = (*(8 * tiles for tiles in TILES), 144, 192, 256, 288, 384, 512, 576, 768, 1024, 1152)
"""Numbers of rows that an H200 has forms for: the form of the next larger one runs, the last one's everything beyond."""
RESERVED = 1024
"""Bytes of shared memory that the driver keeps for itself in every block."""


@dataclass(frozen=True)
class Machine:
    """block: most shared memory of a block; total: of a multiprocessor, bytes; parts: multiprocessors of each part of the
    machine, none of which a cluster may leave (guessed; an H200's hold as many clusters of 4 and 8 as these)."""

    block: int
    total: int
    parts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Multiprocessors."""
        return sum(self.parts)

    def slots(self, resident: int, cluster: int) -> int:
        """Blocks that run at once, with `resident` on each multiprocessor, in whole clusters."""
        spare = resident == 2 and cluster == 4  # a few clusters fewer than would fit were seen to run at once
        return sum(part * resident // cluster - spare for part in self.parts) * cluster


H200 = Machine(232_448, 233_472, (18, 18, 18, 18, 16, 16, 14, 14))
B300 = Machine(232_448, 233_472, (20, 20, 18, 18, 18, 18, 18, 18))
PRO_6000 = Machine(101_376, 102_400, (16,) * 11 + (12,))
MACHINES = {"sm_90a": H200, "sm_100a": B300, "sm_103a": B300, "sm_120a": PRO_6000}
"""By architecture: the machine that forms are chosen for."""


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
        """Blocks: (cluster along K, groups of tokens, heads x groups of rows); of linear_fed, as many as run at once."""
        if self.entry == "linear_fed":  # its blocks stay and take one tile after another
            return min(self.fed_tiles(shape, n), H200.slots(1, self.cluster)), 1, 1
        return self.cluster, -(-n // self.tokens), shape.heads * self.groups(shape)

    def fed_tiles(self, shape: Shape, n: int) -> int:
        """Tiles that the blocks of linear_fed take, in whole clusters."""
        macros = dict(self.macros)
        wide, high = -(-n // (self.tokens * macros["ALONG"])), -(-self.groups(shape) // macros["ACROSS"])
        return wide * high * shape.heads * self.cluster

    def groups(self, shape: Shape) -> int:
        """Groups of weight rows per head."""
        return -(-shape.outputs // self.rows)


def norms_itself(shape: Shape, rows: int) -> bool:
    """Whether the product of so many rows of x can take their RMSNorm itself (stream.cu)."""
    return rows <= STREAM_ROWS and shape.heads == 1 and shape.inputs % 64 == 0 and shape.inputs <= 8192


def segments(shape: Shape) -> int:
    """Return S, the number of parts that K is summed in: more parts for few row tiles, at least 3 steps each, at most 8."""
    s = 1
    while s < 8 and shape.tiles * s < 1152 and shape.steps >= 6 * s:
        s *= 2
    return s


IN_FLIGHT = 60_000
"""Bytes that a multiprocessor must have on their way to keep the memory of an H200 busy."""
RINGS = 200_000
"""Bytes of rings on a multiprocessor beyond which the stream kernel was seen to slow down."""


@dataclass(frozen=True)
class _Fit:
    """A candidate: `blocks` blocks of `tiles` row tiles and `warps` warps, each with a ring of `depth` steps of `piece` bytes."""

    tiles: int
    warps: int
    resident: int
    blocks: int
    depth: int
    x_steps: int = 0

    def load(self, cluster: int, machine: Machine) -> float:
        """Row tiles that the busiest multiprocessor multiplies; more when some of them must wait for others to end."""
        slots = machine.slots(self.resident, cluster)
        waves, rest = divmod(self.blocks, slots)
        used = max(slots // self.resident, 1)  # multiprocessors that clusters reach
        return (waves * self.resident + -(-rest // used)) * self.tiles * (1 + (0.1 / self.resident if self.blocks > slots else 0))

    def together(self, machine: Machine) -> int:
        """Blocks that are on a multiprocessor at once."""
        return min(self.resident, -(-self.blocks // machine.count))

    def starved(self, piece: int, machine: Machine) -> float:
        """How much too few bytes are on their way, 1 for enough."""
        return max(1.0, IN_FLIGHT / (self.together(machine) * self.warps * (self.depth - 1) * piece))


@functools.cache
def stream_form(shape: Shape, machine: Machine = H200) -> Form:
    """Return the stream kernel's form: S warps along K in a block, or in a cluster when there are few row tiles."""
    s, cluster = segments(shape), 1
    while cluster < s and shape.tiles * cluster < 96:
        cluster *= 2
    k_warps, steps = s // cluster, -(-shape.steps // s)
    fits = []
    for n_warps in range(1, max(1, 8 // k_warps) + 1):
        warps, blocks = k_warps * n_warps, -(-shape.outputs // (16 * n_warps)) * shape.heads * cluster
        for resident in range(1, min(16, STREAM_WARPS // warps) + 1):
            room = min(machine.block, min(machine.total, RINGS) // resident - RESERVED)
            depths = [d for d in (3, 4, 6, 8, 12) if d * warps * 2048 <= room and (d <= steps or d == 3)]
            if depths:
                fits.append(_Fit(n_warps, warps, resident, blocks, depths[-1]))
    even = shape.tiles * cluster / machine.count  # 2 % more for fewer, larger blocks
    best = min(
        fits, key=lambda f: (round(f.load(cluster, machine) * f.starved(2048, machine) ** 0.5 / even * 50), -f.warps, f.resident)
    )
    n_warps, depth = best.warps // k_warps, best.depth
    shared = max(best.warps * depth * 2048, k_warps * 8 * (n_warps * 16 + 4) * 4)
    macros = _macros(shape, CLUSTER=cluster, KWARPS=k_warps, NWARPS=n_warps, DEPTH=depth)
    return Form("linear_stream", macros, 32 * best.warps, shared, 16 * n_warps, 8, cluster)


def _wide_shared(warps: int, tiles: int, depth: int, x_steps: int) -> int:
    ring = warps * depth * 4096 + (depth - 2 + 2 * x_steps) * tiles * 1024
    return max(ring, tiles * 8 * (warps * 32 + 4) * 4)


ALONE = (1.2, 1.05, 1.0)
"""What it costs that none, or one other block works while one waits at its barrier."""


@functools.cache
def wide_forms(shape: Shape, tiles: int, passes: int = 1, machine: Machine = H200) -> tuple[Form, ...]:
    """Return the wide kernel's forms for `passes` times 8 * `tiles` rows of x, one for each number of resident blocks and of steps
    between barriers, the cheapest first: clusters of S blocks along K, with as many row tiles in each block as load the
    multiprocessors evenly."""
    s = segments(shape)
    fits = []
    fewest = 2 if tiles <= 3 else 3 if tiles <= 9 else 7  # registers hold the pointers to x of no fewer threads
    if tiles > 9 and machine != PRO_6000:
        fewest += 2 * _tail(shape)  # sm_90 needs a few more
    for block in range(fewest, 19 if tiles <= 9 else 17):
        warps, blocks = -(-block // 2), -(-shape.outputs // (16 * block)) * shape.heads * s * passes
        for resident in range(1, min(4, TILES[tiles] // warps) + 1):
            for depth in (3, 4, 5, 6):
                for x_steps in (1, 2, 4):
                    shared = _wide_shared(warps, tiles, depth, x_steps)
                    fitting = (shared + RESERVED) * resident <= machine.total and shared <= machine.block
                    if fitting and x_steps * tiles <= max(20, tiles):
                        fits.append(_Fit(block, warps, resident, blocks, depth, x_steps))

    def cost(f: _Fit) -> tuple[float, int, int, int]:
        """x goes to every block: fewer, larger ones read less of it. Then rings of up to 4 steps, fewer barriers, longer rings."""
        alone = ALONE[min(f.together(machine), len(ALONE)) - 1]
        share = 1 + 0.08 * tiles / f.tiles + 0.02 * tiles * (f.tiles % 2) / f.tiles
        total = f.load(s, machine) * f.starved(4096, machine) ** 0.5 * alone * share
        return round(total, 2), -min(f.depth, 4), -min(f.x_steps * tiles, 10), -f.depth

    found: dict[object, Form] = {}
    for best in sorted(fits, key=cost):
        found.setdefault((best.together(machine), best.x_steps), _wide_form(shape, tiles, best.tiles, best.depth, best.x_steps))
    return tuple(found.values())


def _wide_form(shape: Shape, tiles: int, block: int, depth: int, x_steps: int) -> Form:
    s, warps = segments(shape), -(-block // 2)
    macros = _macros(shape, CLUSTER=s, TILES=tiles, BLOCK=block, DEPTH=depth, XSTEPS=x_steps)
    return Form("linear_wide", macros, 32 * warps, _wide_shared(warps, tiles, depth, x_steps), 16 * block, 8 * tiles, s)


def _gmma_shared(block: int, tiles: int, depth: int, x_steps: int) -> int:
    ring = (depth - 1 + 2 * x_steps) * tiles * 1024 + block * depth * 2048
    return max(ring, tiles * 8 * (block * 16 + 4) * 4)


def _gmma_form(shape: Shape, tiles: int, block: int, depth: int, x_steps: int) -> Form:
    s = segments(shape)
    macros = _macros(shape, CLUSTER=s, TILES=tiles, BLOCK=block, DEPTH=depth, XSTEPS=x_steps)
    shared = _gmma_shared(block, tiles, depth, x_steps)
    return Form("linear_gmma", macros, 128 * -(-block // 4), shared, 16 * block, 8 * tiles, s)


GMMA_TILES = 5
"""8-row tiles of x from which on an H200 counts on the warp-group kernel: from 33 rows on it was the faster one at all but ten
of 156 measured cases."""
GMMA_FORMS = 2
"""Forms of the warp-group kernel that are worth measuring for a shape and a number of rows."""


@functools.cache
def gmma_forms(shape: Shape, tiles: int, passes: int = 1) -> tuple[Form, ...]:
    """Return forms of the warp-group kernel of an H200 for `passes` times 8 * `tiles` rows of x, the cheapest first: as
    `wide_forms`, with a row tile for a warp and blocks of up to five groups of warps."""
    s, fits = segments(shape), []
    most = shape.outputs // 16 if shape.heads > 1 else GMMA_WARPS[tiles]
    for block in range(1, min(GMMA_WARPS[tiles], 20, most) + 1):
        groups, blocks = -(-block // 4), -(-shape.outputs // (16 * block)) * shape.heads * s * passes
        for resident in range(1, 2 if tiles == 12 and groups > 1 else min(8, GMMA_WARPS[tiles] // (4 * groups)) + 1):
            for depth, x_steps in itertools.product((3, 4, 5, 6, 8), (1, 2)):
                shared = _gmma_shared(block, tiles, depth, x_steps)
                fitting = (shared + RESERVED) * resident <= H200.total and shared <= H200.block
                if fitting and (depth <= -(-shape.steps // s) + 1 or depth == 3):
                    fits.append(_Fit(block, block, resident, blocks, depth, x_steps))

    def cost(f: _Fit) -> tuple[float, int, int]:
        """As of the wide kernel. L2 gives a third more than the memory, to weights and to x, which goes to every block."""
        alone = ALONE[min(f.together(H200), len(ALONE)) - 1]
        share = max(1 + 0.08 * tiles / f.tiles, 0.73 * (1 + tiles / f.tiles / 2))
        return round(f.load(s, H200) * f.starved(2048, H200) ** 0.5 * alone * share, 2), -min(f.depth, 5), -f.x_steps

    found: dict[object, Form] = {}
    for best in sorted(fits, key=cost):
        found.setdefault((best.together(H200), best.x_steps), _gmma_form(shape, tiles, best.tiles, best.depth, best.x_steps))
    return tuple(found.values())[:GMMA_FORMS]


FED_TILES = {False: (8, 9, 12, 16, 18, 20, 22), True: (8, 9, 12, 16, 18, 20, 22, 24, 32)}
"""8-row tiles of x of a block of the fed kernel; more of them fit into registers where K is one segment (True)."""
HELD = 3
"""Steps of x as rows that the fed kernel has on their way. 2 was slower for most forms; 4 was faster for w_uv at 288 rows (9.3 us
for 10.0) and slower at 1152 (42.5 for 37.3)."""
FED_FORMS = 4
"""Its forms that are worth measuring for a shape and a number of rows."""
_PORT = 64
"""Bytes a clock that reach a multiprocessor of an H200 from L2, what others' copies bring it included."""
_SHARED = ((1, 1), (2, 1), (2, 2))
"""Blocks of a cluster that share weights along the tokens, and tokens across the rows. By counting all are even, and the first is
taken: (2, 1) was .5 % slower in the middle of 272 measured pairs, (2, 2) 1.2 % of 221; where K is long they gain up to 20 %."""


def _fed_form(shape: Shape, tiles: int, groups: int, along: int, across: int, arranged: int) -> Form:
    slot, several = tiles * 1024 + groups * 8192 + 16, segments(shape) > 1
    beside = 0 if shape.glu else groups * -(-tiles // 2) * 1024  # results on their way out
    held = {} if arranged else {"HELD": HELD}
    if held:
        beside += HELD * -(-tiles // 4) * 4096
    depth = min(8, (H200.block - beside) // slot)
    knobs = {"TILES": tiles, "GROUPS": groups, "ALONG": along, "ACROSS": across, "ARRANGED": arranged}
    macros = _macros(shape, **knobs, **held, SEVERAL=int(several), DEPTH=depth)
    return Form("linear_fed", macros, 128 * (groups + 1), depth * slot + beside, 64 * groups, 8 * tiles, along * across)


ARRANGE = Form("linear_arrange", (), 256, 0, 1024, 8, 1)
"""What puts x in order for the fed kernel: a block takes so many values (rows here) of so many tokens, or fewer of more."""


def arrange_warps(shape: Shape) -> int:
    """Return how many of the eight warps of ARRANGE's block go along K, 128 values each; the others go along the tokens."""
    return next(warps for warps in (1, 2, 4, 8) if warps == 8 or 128 * warps >= shape.inputs)


def arranged_tokens(form: Form, n: int) -> int:
    """Return for how many tokens a fed form wants x in order, of n rows; 0 if it takes rows."""
    macros = dict(form.macros)
    whole = form.tokens * macros["ALONG"]
    return -(-n // whole) * whole * macros["ARRANGED"]


def arranged_values(shape: Shape, n: int, machine: Machine = H200) -> int:
    """Return how many values of x the product of n rows puts in order first, in scratch memory; 0 for most."""
    form = form_for(shape, n, machine)
    return shape.heads * shape.steps * arranged_tokens(form, n) * 64 if form.entry == "linear_fed" else 0


def _fed_clocks(shape: Shape, n: int, form: Form) -> float:
    """Clocks of an H200 for n rows of x: in each round of tiles a step takes what the tensor cores need or the port, and x as rows
    300 clocks and 55 for 8 tokens."""
    m = dict(form.macros)
    tiles, groups = m["TILES"], m["GROUPS"]
    step = max(16 * tiles * groups, (groups * 8192 + tiles * 1024) / _PORT)
    if not m["ARRANGED"]:
        step = max(step, 300 + 55 * tiles)
    rounds = -(-form.fed_tiles(shape, n) // H200.slots(1, form.cluster))
    x_bytes = n * shape.inputs * shape.heads * 2
    moved = shape.nbytes + x_bytes + n * shape.outputs * shape.heads * 2
    work = max(rounds * (shape.steps * step + 1500), moved / 2450)
    return work + 6000 + m["ARRANGED"] * (3000 + 2 * x_bytes / 3000)


@functools.cache
def fed_forms(shape: Shape, n: int) -> tuple[Form, ...]:
    """Return forms of the fed kernel for n rows of x on an H200, the cheapest first."""
    fits = []
    single = segments(shape) == 1
    for tiles, groups, arranged in itertools.product(FED_TILES[single], (1, 2), (1, 0)):
        passes, blocks = -(-n // (8 * tiles)), -(-shape.outputs // (64 * groups))
        if not arranged and (tiles > 24 or shape.heads == 1):
            continue  # only heads have so much x for so few rows of weights that it should not be copied first
        for along, across in _SHARED:
            if along <= passes and across <= blocks and (tiles, along) != (22, 2):  # those spill
                fits.append(_fed_form(shape, tiles, groups, along, across, arranged))
    return tuple(sorted(fits, key=lambda form: round(_fed_clocks(shape, n, form), -2)))


def unfed(shape: Shape) -> Form:
    """Return a form of an H200 for any number of rows whose results need no more than the place of a pair."""
    return computed(shape, MAX_ROWS)[0]


def _tail(shape: Shape) -> int:
    return int(shape.inputs % 64 != 0)


def _macros(shape: Shape, **given: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((given | {"GLU": int(shape.glu), "TAIL": _tail(shape)}).items()))


FED = True
"""Whether an H200 takes fed forms for many rows. Seven processes that met a launch failure with them, or could have, pass since
blocks of a cluster release what they told each other before they leave (feed.cuh, cluster_end)."""


def forms_for(shape: Shape, n: int, machine: Machine = H200) -> tuple[Form, ...]:
    """Return what may run `n` rows of x (the capacity; the actual number may be smaller), the form in use first. More than 128
    rows take several passes, but of fed forms."""
    fastest = TUNED.get(tuning_key(shape, n)) if machine == H200 and n > STREAM_ROWS else None
    if fastest is None or (fastest[0] == "fed" and not FED):
        return computed(shape, n, machine)
    return tuple(dict.fromkeys((_made(shape, n, *fastest), *computed(shape, n, machine))))


def _made(shape: Shape, n: int, kernel: str, *knobs: int) -> Form:
    if kernel == "fed":
        return _fed_form(shape, *knobs)
    return (_gmma_form if kernel == "gmma" else _wide_form)(shape, _split(n)[0], *knobs)


def computed(shape: Shape, n: int, machine: Machine = H200) -> tuple[Form, ...]:
    """Return `forms_for` by counting alone, whatever was measured."""
    if n <= STREAM_ROWS:
        return (stream_form(shape, machine),)
    if FED and machine == H200 and n > MAX_ROWS:
        return fed_forms(shape, row_class(n))[:FED_FORMS]
    tiles, passes = _split(n, machine)
    if machine == H200 and tiles >= GMMA_TILES:
        return gmma_forms(shape, tiles, passes)
    return wide_forms(shape, tiles, passes, machine)


_STAGED = ("BLOCK", "DEPTH", "XSTEPS")
KNOBS = {"wide": _STAGED, "gmma": _STAGED, "fed": ("TILES", "GROUPS", "ALONG", "ACROSS", "ARRANGED")}
"""Macros that TUNED gives for a kernel, in its order."""


def row_class(n: int) -> int:
    """Return the number of rows whose form runs n rows."""
    return next((c for c in CLASSES if c >= n), CLASSES[-1])


def tuning_key(shape: Shape, n: int) -> tuple[int, int, int, int]:
    """Return the key of TUNED for n rows."""
    return shape.outputs, shape.inputs, shape.heads, row_class(n)


def _split(n: int, machine: Machine = H200) -> tuple[int, int]:
    """8-row tiles of a pass, and passes that a form is made for. Of more rows, as few as waste little: a pass reads all weights."""
    if n <= MAX_ROWS:
        return 1 if n <= STREAM_ROWS else next(t for t in TILES if 8 * t >= n), 1
    if machine != H200:
        return max(TILES), MANY
    passes = {tiles: -(-row_class(n) // (8 * tiles)) for tiles in (9, 12, 16)}
    tiles = min(passes, key=lambda t: passes[t] * (t + 4))
    return tiles, passes[tiles]


def candidates(shape: Shape, n: int) -> tuple[Form, ...]:
    """Return what a sweep of an H200 measures for `n` rows of x, the form in use first: that one, the cheapest by counting and
    those of the warp-group kernels."""
    fed = fed_forms(shape, row_class(n))[:FED_FORMS] if n > 64 else ()
    return tuple(dict.fromkeys((*forms_for(shape, n)[:1], *gmma_forms(shape, *_split(n))[:GMMA_FORMS], *fed)))


def form_for(shape: Shape, n: int, machine: Machine = H200) -> Form:
    """Return what runs `n` rows of x."""
    return forms_for(shape, n, machine)[0]


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
    target = target_shapes(world, 384, 8, 128, 96, 32, 16, 32, 128, 576, 8192)
    return target | drafter_shapes(world, 384, 3, 8, 2, 64, 640, 3 * 384)


def normed_shapes() -> list[Shape]:
    """Return the weights whose few rows of x are normed on their way: of queries."""
    return [shapes(world)["q_b"] for shapes in (k26_shapes, nano_shapes) for world in (1, 2, 4, 8)]


def early_shapes() -> list[Shape]:
    """Return the weights whose products of few rows let the next kernel start early: of values, behind attention."""
    return [shapes(world)["w_uv"] for shapes in (k26_shapes, nano_shapes) for world in (1, 2, 4, 8)]


def all_forms(machine: Machine) -> list[Form]:
    """Return everything `form_for` can answer for the shapes that are served, without duplicates, in a fixed order."""
    forms: dict[Form, None] = {}
    for shapes in (k26_shapes, nano_shapes):
        for world in (1, 2, 4, 8):
            for shape in shapes(world).values():
                for rows in (STREAM_ROWS, *CLASSES):
                    form = form_for(shape, rows, machine)
                    forms[form] = None
                    if form.entry == "linear_fed":
                        forms |= {ARRANGE: None, unfed(shape): None}
    return list(forms)
