"""Which sizes steps are captured for. No torch.

A step has *places*: rows that decode first, then pieces of prompts, at most 64 known tokens each, cut at multiples of 64. Graphs
are keyed by the number of decoding rows and the largest budget, both rounded up, and by whether there are pieces. Beside pieces
trees are small: a launch for trees that might be large costs time even where they are not, and a prompt fills the step anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.config import PAGE_SIZE, Plan
from draftwood.model.costs import Table, total
from draftwood.model.cuda import work
from draftwood.model.cuda.bucket import Bucket, DraftBucket

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BUDGETS = (0, 8, 16, 32, 64)
SEGMENT = 8192
"""Tokens of the vocabulary that one block of the choosing kernels reads (kernels/tree/numbers.py)."""
BIASES = 1024
"""Most entries of a request's logit_bias (engine/request.py)."""
FLOOR_IDS = 1024 + 64
"""Most end tokens of a request with min_tokens: its own and the model's."""
LINES = 1024
"""Most nodes of a step that grammars may have a mask for."""
PIECE = PAGE_SIZE
"""Most tokens of a piece: what a chunk committed does not depend on where it was cut, for it is always cut here."""


@dataclass(frozen=True, order=True)
class Key:
    """A graph: `rows` decoding rows of at most `budget` nodes beyond the root, and pieces of prompts beside them or none; does the
    drafter observe what is committed?"""

    rows: int
    budget: int
    prompts: bool
    observes: bool = True


@dataclass(frozen=True)
class Sizes:
    """What a Plan's steps may need. pieces: most of a step; path: most nodes a walk accepts; width: pages of a table's row, the
    last of which are never a row's own; context: most committed tokens of a row."""

    rows: tuple[int, ...]
    budgets: tuple[int, ...]
    pieces: int
    path: int
    block: int
    width: int
    context: int

    @staticmethod
    def of(plan: Plan) -> Sizes:
        """The sizes of a plan."""
        return Sizes.make(plan.max_model_len, plan.max_num_seqs, plan.block, plan.max_budget, plan.prefill_chunk)

    @staticmethod
    def make(context: int, rows: int, block: int, budget: int, chunk: int) -> Sizes:
        """The sizes for up to `rows` (1..128) requests of up to `context` tokens, trees of up to `budget` nodes beyond the root,
        and `chunk` prompt tokens a step. A row that ended may run once more, so lengths can pass the context by a block."""
        path = max(block, 1)
        budgets = BUDGETS[: 1 + next(i for i, b in enumerate(BUDGETS) if b >= (budget if block else 0))]
        return Sizes(
            rows=ROWS[: 1 + next(i for i, r in enumerate(ROWS) if r >= rows)],
            budgets=budgets,
            pieces=chunk // PIECE,
            path=path,
            block=block,
            width=-(-(context + path + 1 + budgets[-1]) // PAGE_SIZE) + 1,
            context=context + path,
        )

    @property
    def places(self) -> int:
        """Most places of a step."""
        return self.rows[-1] + self.pieces

    @property
    def most_observed(self) -> int:
        """Most tokens that a drafter observes at once."""
        return max(self.rows[-1] * self.path, self.pieces * PIECE)

    @property
    def beside(self) -> int:
        """Most nodes beyond its root that a row may have while prompts run beside it: those of the smallest trees."""
        return self.budgets[min(1, len(self.budgets) - 1)]

    def key(self, rows: int, budget: int, prompts: bool, observes: bool = True) -> Key:
        """The smallest graph that holds such a step; beside prompts trees have at most `beside` nodes. observes: False where no row
        will ever draft."""
        up = next(r for r in self.rows if r >= rows)
        most = min(budget, self.beside) if prompts else budget
        return self._key(up, next(b for b in self.budgets if b >= most), prompts, observes)

    def _key(self, rows: int, budget: int, prompts: bool, observes: bool) -> Key:
        return Key(rows, budget, prompts, self.block > 0 and (observes or budget > 0))

    def keys(self) -> list[Key]:
        """All graphs, the largest first."""
        found = set()
        for rows in self.rows:
            for observes in (False, True):
                found |= {self._key(rows, b, False, observes) for b in self.budgets}
                found |= {self._key(rows, b, True, observes) for b in (0, self.beside)}
        return sorted(found, reverse=True)

    def places_of(self, key: Key) -> int:
        """Places of a graph."""
        return key.rows + (self.pieces if key.prompts else 0)

    def bucket(self, key: Key) -> Bucket:
        """Capacities of the target's forward in a graph."""
        free = key.rows * (1 + key.budget)
        if not key.prompts:
            return Bucket(key.rows, 1 + key.budget, free, free, self.context)
        return Bucket(self.places_of(key), PIECE, free + self.pieces * PIECE, free + self.pieces, self.context)

    def buckets(self) -> list[Bucket]:
        """Capacities of all graphs."""
        return [self.bucket(key) for key in self.keys()]

    def draft_buckets(self, key: Key, capacity: int) -> tuple[DraftBucket, DraftBucket | None]:
        """The drafter's buckets of a graph: of decoding rows, and of pieces where there are any. capacity: of a window."""
        free = DraftBucket(key.rows, self.block, self.path, capacity)
        return free, DraftBucket(self.pieces, self.block, PIECE, capacity) if key.prompts else None

    def all_draft_buckets(self, capacity: int) -> list[DraftBucket]:
        """All of them, each once."""
        found = {b for key in self.keys() for b in self.draft_buckets(key, capacity) if b is not None}
        return sorted(found, key=lambda b: (b.rows, b.path))


GRAPH_BYTES = 12_000
"""What the driver keeps for one launch of a graph (an estimate; it is not ours to allocate)."""
STEP_LAUNCHES, KEPT_LAUNCHES = 16, 32
"""Launches of a step beside the models' and those of a choice level by level, and those that keep what it observed for a prefix
cache."""
SEGMENT_BYTES = 2 << 20
"""The least that torch's allocator takes for the few numbers that are computed between launches."""


def graph_bytes(
    sizes: Sizes, target: work.Sizes, drafter: work.DraftSizes | None, window: int, masks: bool, kept: bool, arch: str
) -> int:
    """Bytes of all graphs. window: places of a row's ring; masks: may steps have grammars, whose graphs come in three parts beside
    the whole ones; kept: is there a prefix cache. What a graph computes in memory of its own is small and shared by all; it is
    there twice, since a step runs once before it is recorded."""
    launches = 0
    for key in sizes.keys():  # noqa: SIM118
        launches += total(work.launches(target, sizes.bucket(key), arch, chosen=key.prompts)) + STEP_LAUNCHES + 3 * sizes.path
        if drafter is not None and key.observes:
            buckets = [b for b in sizes.draft_buckets(key, window) if b is not None]
            launches += sum(total(work.draft_launches(drafter, b, arch)) + KEPT_LAUNCHES * kept for b in buckets)
    return launches * (1 + masks) * GRAPH_BYTES + 2 * -(-own_bytes(sizes, kept) // SEGMENT_BYTES) * SEGMENT_BYTES


def own_bytes(sizes: Sizes, kept: bool) -> int:
    """Most bytes that the launches of a graph compute in memory of their own: which places are observed, and where they go."""
    longs = 5 * sizes.pieces + 65 * sizes.pieces + (14 * sizes.most_observed + 4 * sizes.places if kept else 0)
    return 8 * longs + 64 * 512


def step_memory(sizes: Sizes, rows: int, vocab: int, kept: int = 0) -> Table:
    """Bytes that a stepper allocates beside the models' workspaces: state of rows and what is sent, and buffers of a step. kept:
    bytes of the keys that a drafter has of a token, where a prefix cache keeps them."""
    places, pieces = sizes.places, max(sizes.pieces, 1)
    one = 3 * 16 + sum(_up(places * n) for n in (8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 1, 1, 1, 32, 4))
    one += 2 * _up(4 * places + 4) + _up(8 * pieces)
    state = one + rows * (16 + 4 * vocab + 8 * BIASES + 4 * FLOOR_IDS) + 4 * (places * sizes.width + pieces * PIECE)
    tokens = max(b.tokens for b in sizes.buckets())
    verified = max(b.verified for b in sizes.buckets())
    segments = -(-vocab // SEGMENT)
    trees = places * (65 * (4 * 8 + 4 + 16) + 8)
    flat = places * (8 + 65 * 8) + 4 + tokens * 7 * 8
    accept = verified * (12 + segments * (8 + 8 + 8 + 64 * 8)) + places * (65 * 4 + 8)
    chosen = verified * 24 + 4 + places * (12 + 8 * sizes.path) + pieces * PIECE * 8
    results = 2 * 8 * (len(BUDGETS) - 1) + 5 * _up(places * 8) + 2 * _up(places * sizes.path * 8) + _up(places * sizes.path * 4)
    depth = sizes.block - 1
    candidates = sizes.rows[-1] * depth * (segments * (64 * 8 + 8) + 64 * 12 + 4) if sizes.block else 0
    candidates += sizes.rows[-1] * max(depth - 1, 0) * 64 * 64 * 5
    masks = 4 * verified + LINES * 4 * -(-vocab // 32)
    between = kept * sizes.most_observed
    return (("rows", state), ("step buffers", trees + flat + accept + chosen + results + candidates + masks + between))


def _up(size: int) -> int:
    return -(-size // 16) * 16
