"""The step as a sequence of launches: begin, propose, candidates, grow, flatten, target, choose, walk, commit, observe, advance.

Everything is decided on the device: lengths, node counts, accepted paths. What a launch reads and writes has a fixed address, so
one recording serves every step of its key. Nothing here waits for the device or knows what a request is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.config import STAGES
from draftwood.engine.cuda.auto import AutoTrees
from draftwood.engine.cuda.forms import Forms
from draftwood.engine.cuda.state import DeviceRows, Fields, carve, carved_bytes
from draftwood.engine.step import Common
from draftwood.kernels.accept import op as accept_op
from draftwood.kernels.accept.ref import Nodes, Path
from draftwood.kernels.kv_commit import op as commit_op
from draftwood.kernels.rows import op as rows_op
from draftwood.kernels.rows.ref import Verified
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes.ref import CAPS, Fitted
from draftwood.kernels.tree import op as tree_op
from draftwood.kernels.tree.ref import NODES, Flat, Options, Table, Trees
from draftwood.kv.store import DraftStore, LatentStore
from draftwood.model.cuda.drafter import CudaDrafter, Draft
from draftwood.model.cuda.keys import PIECE, Key, Sizes
from draftwood.model.cuda.target import CudaTarget
from draftwood.spec.grammar import Grammars


@dataclass(kw_only=True)
class CudaParts(Common):
    """What an engine on a GPU is made of. Without a drafter every tree is its root.

    noise: of the drafter at temperature > 0, as Options has it. synthetic: tokens that a step of a row returns on average,
    whatever the target says; None: the target decides.
    """

    target: CudaTarget
    kv: LatentStore
    stop_ids: tuple[int, ...] = ()
    """The model's end tokens, which an answer with min_tokens waits for."""
    drafter: CudaDrafter | None = None
    draft_kv: DraftStore | None = None
    options: Options = Options()
    bigram: Table | None = None
    auto: AutoTrees | None = None
    """Where trees may be cut to what pays."""
    noise: str = "shared"
    synthetic: float | None = None


@dataclass(frozen=True)
class Results:
    """What a step leaves for the host, of R places, in one stretch of memory `raw`: lengths before it, live nodes, what sizes of
    trees would have given, the path."""

    raw: Tensor
    lengths: Tensor
    nodes: Tensor
    fitted: Fitted
    path: Path

    @staticmethod
    def fields(places: int, width: int) -> Fields:
        """Names, types and shapes."""
        longs, each, wide = torch.int64, (places,), (places, width)
        return [
            ("lengths", longs, each), ("nodes", longs, each), ("counts", longs, each), ("emitted", longs, each),
            ("final", longs, each), ("expected", longs, (len(CAPS),)), ("sized", longs, (len(CAPS),)), ("path", longs, wide),
            ("tokens", longs, wide), ("logprobs", torch.float32, wide),
        ]  # fmt: skip

    @staticmethod
    def of(buffer: Tensor, places: int, width: int, chosen: Tensor) -> Results:
        """Lay them into a byte buffer."""
        fields = Results.fields(places, width)
        v = carve(buffer, fields)
        which = chosen[: places * width].view(places, width)
        path = Path(v["path"], v["counts"], v["tokens"], v["emitted"], v["final"], v["logprobs"], which)
        return Results(buffer[: carved_bytes(fields)], v["lengths"], v["nodes"], Fitted(v["expected"], v["sized"]), path)


class Buffers:
    """Memory of a step beside the models' own, for the largest key; smaller ones use its first rows."""

    def __init__(
        self, sizes: Sizes, vocab: int, device: torch.device, grammars: Grammars | None = None, window: DraftStore | None = None
    ) -> None:
        """window: of the drafter, where there is one."""
        places, keys = sizes.places, sizes.keys()
        tokens = max(sizes.bucket(key).tokens for key in keys)
        verified = max(sizes.bucket(key).verified for key in keys)
        self.trees = tree_op.allocate_trees(places, device)
        self.flat = tree_op.allocate_flat(places, tokens, device)
        self.accept = accept_op.allocate(verified, places, NODES, vocab, device)
        index, at, nodes = (torch.zeros(verified, dtype=torch.int64, device=device) for _ in range(3))
        self.verified = Verified(index, at, nodes, torch.zeros(1, dtype=torch.int32, device=device))
        self.roots = torch.zeros(places, dtype=torch.int64, device=device)
        self.floor_left = torch.zeros(places, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(places * sizes.path, dtype=torch.int64, device=device)
        self.results = torch.zeros(carved_bytes(Results.fields(places, sizes.path)), dtype=torch.uint8, device=device)
        depth = max(sizes.block - 1, 1)
        self.candidates = tree_op.allocate(sizes.rows[-1], depth, vocab, device) if sizes.block else None
        self.forms = Forms(verified, vocab, device, grammars)
        self.chain = torch.arange(PIECE, device=device).repeat(max(sizes.pieces, 1), 1)
        """The path of a piece: all its nodes."""
        kept = sizes.most_observed if window is not None and window.slots else 0
        layers, _, _, heads, width = (0,) * 5 if window is None else window.keys.shape
        self.kept = torch.zeros(layers * kept * heads * width, dtype=torch.bfloat16, device=device)
        """The drafter's context of a step's tokens on its way beside their latents."""

    def between(self, window: DraftStore, tokens: int) -> Tensor:
        """Room for the keys, or the values, of `tokens` tokens in all layers."""
        layers, _, _, heads, width = window.keys.shape
        return self.kept[: layers * tokens * heads * width].view(layers, tokens, heads, width)


def _first(record: Any, rows: int, **whole: Tensor) -> dict[str, Tensor]:
    """The first `rows` of every tensor of a dataclass, or what `whole` has."""
    names = [f.name for f in dataclasses.fields(record)]
    return {name: whole[name] if name in whole else getattr(record, name)[:rows] for name in names}


class CudaStep:
    """The launches of one key, by stage. Views of the buffers are made once."""

    def __init__(self, parts: CudaParts, rows: DeviceRows, buffers: Buffers, sizes: Sizes, key: Key, masked: bool = False) -> None:
        """masked: some rows' choices are kept to grammars."""
        self.parts, self.rows, self.buffers, self.sizes, self.key = parts, rows, buffers, sizes, key
        bucket = sizes.bucket(key)
        r, t, m = bucket.rows, bucket.tokens, bucket.verified
        self.places, self.drafts = r, key.budget > 0 and parts.drafter is not None
        self.forward = parts.target.bind(bucket)
        self.results = Results.of(buffers.results, r, sizes.path, buffers.chosen)
        self.lengths, self.roots, self.floor_left = self.results.lengths, buffers.roots[:r], buffers.floor_left[:r]
        self.trees = Trees(**_first(buffers.trees, r, counts=self.results.nodes))
        flat = buffers.flat
        self.flat = Flat(**_first(flat, t, starts=flat.starts[:r], total=flat.total, slots=flat.slots[:r]))
        self.verified = Verified(**_first(buffers.verified, m, live=buffers.verified.live))
        # Whole, but for `where`: pieces that end no prompt point to choices of other steps, which must be there to be read.
        self.accept = dataclasses.replace(buffers.accept, where=buffers.accept.where[:r])
        at = self.verified if key.prompts else self.flat
        forced = rows.given("forced", r) if key.prompts else None
        t3 = (self.trees.tokens, self.trees.parents, self.trees.depths)
        masks = (buffers.forms.bits, buffers.forms.lines[:m]) if masked else (None, None)
        self.nodes = Nodes(*t3, self.lengths, at.rows[:m], at.nodes[:m], forced, *masks)
        self.knobs = tree_op.knobs(parts.options, sizes.block - 1, parts.target.device) if self.drafts else None
        self._bind_drafts(key)

    def _bind_drafts(self, key: Key) -> None:
        parts, sizes = self.parts, self.sizes
        self.draft = self.piece_draft = None
        if parts.drafter is None or parts.draft_kv is None or not key.observes:
            return
        free, pieces = sizes.draft_buckets(key, parts.draft_kv.keys.shape[2])
        self.draft = parts.drafter.bind(free)
        self.piece_draft = parts.drafter.bind(pieces) if pieces is not None else None

    @property
    def stages(self) -> dict[str, Callable[[], None]]:
        """What each stage launches, in order."""
        return dict(zip(STAGES, (self._draft, self._tree, self._verify, self._accept, self._commit), strict=True))

    def run(self) -> None:
        """Launch the whole step."""
        for launch in self.stages.values():
            launch()

    def plant(self) -> None:
        """Launch what comes before the target."""
        self._draft()
        self._tree()

    def verify(self) -> None:
        """Launch the target."""
        self._verify()

    def finish(self) -> None:
        """Launch what comes after the target."""
        self._accept()
        self._commit()

    def _draft(self) -> None:
        rows, r, f = self.rows, self.places, self.key.rows
        rows_op.begin(rows.places(r), rows.state, self.lengths, self.roots, self.floor_left, self.trees)
        if self.drafts and self.draft is not None and self.parts.draft_kv is not None:
            window = self.parts.draft_kv
            given = (self.roots[:f], self.lengths[:f], rows.given("ids", f), window.keys, window.values, rows.given("free", 1))
            self.guesses = self.draft.propose(*given)

    def _tree(self) -> None:
        rows, r, f, parts = self.rows, self.places, self.key.rows, self.parts
        if self.drafts:
            candidates = self.buffers.candidates
            assert candidates is not None and self.knobs is not None
            heat, budgets, free = rows.given("temperature", f), rows.given("budgets", f), rows.given("free", 1)
            seeds = None if parts.noise == "none" else rows.given("draft_seeds", f)
            norms = None if parts.bigram is None else 1
            found = tree_op.candidates(
                self.guesses, heat, budgets, self.knobs, candidates, seeds, self.lengths[:f], rows=free, norms=norms
            )
            tree_op.grow(
                found, self.roots[:f], self.lengths[:f], budgets, heat, self.knobs, self.trees, parts.bigram, rows=free,
                lists=candidates.lists,
            )  # fmt: skip
            if parts.synthetic is not None:  # a random drafter says the same at every depth, and nothing of what will be accepted
                seeds = rows.given("seeds", r)
                rows_op.guesses(free, seeds, self.lengths, self.trees, parts.vocab, parts.synthetic)
            self._cut()
        tree_op.flatten(
            self.trees, self.lengths, rows.table(r), parts.kv.page_size, self.flat, rows=rows.given("live", 1)
        )  # fmt: skip
        if self.key.prompts:
            rows_op.select(rows.places(r), self.trees.counts, self.flat, self.verified)

    def _cut(self) -> None:
        """Keep of the automatic rows' trees what pays."""
        rows, auto = self.rows, self.parts.auto
        if auto is not None:
            heat, automatic = rows.given("temperature", self.places), rows.given("automatic", self.places)
            counters = (rows.given("live", 1), rows.given("free", 1))
            costs, own = auto.costs[self.key.rows, self.key.prompts], CAPS.index(self.key.budget)
            sizes_op.fit(*counters, automatic, self.trees, heat, auto.calibration, costs, own, self.results.fitted)

    def _verify(self) -> None:
        wanted = (self.verified.index, self.verified.live) if self.key.prompts else None
        self.logits, self.taps = self.forward(
            self.flat, self.lengths, self.trees.counts, self.rows.table(self.places), self.parts.kv.cache, wanted
        )

    def _accept(self) -> None:
        rows, r, parts = self.rows, self.places, self.parts
        live = self.verified.live if self.key.prompts else self.flat.total
        levels = self.sizes.path if parts.synthetic is None else None  # synthetic choices lead to nodes that no choice leads to
        accept_op.choose(self.logits, self.nodes, rows.params(r, self.floor_left), self.accept, live=live, levels=levels)
        if parts.synthetic is not None:
            rows_op.synthetic(
                rows.given("free", 1), rows.given("seeds", r), self.lengths, self.trees, self.accept.where, self.accept.choices,
                parts.vocab, parts.synthetic,
            )  # fmt: skip
        accept_op.walk(self.nodes, self.trees.counts, self.accept, self.results.path, rows=rows.given("live", 1))

    def _commit(self) -> None:
        rows, r, path, parts = self.rows, self.places, self.results.path, self.parts
        if self.drafts:
            commit_op.commit_latents(parts.kv.cache, self.flat.slots, path.nodes, path.counts, rows=rows.given("live", 1))
        if self.drafts and parts.auto is not None:
            heat = rows.given("temperature", r)
            sizes_op.learn(rows.given("free", 1), self.trees, heat, path, parts.auto.calibration)
        self._observe()
        rows_op.advance(rows.places(r), rows.state, self.lengths, path, rows.given("history_rows", r))

    def _observe(self) -> None:
        """Give the drafter what was accepted: of decoding rows their paths, of pieces all nodes."""
        rows, f, path = self.rows, self.key.rows, self.results.path
        if self.draft is None:
            return
        starts, ids, slots = self.flat.starts, rows.given("ids", self.places), self.flat.slots
        at = _Observed(path.nodes[:f], starts[:f], self.lengths[:f], path.counts[:f], ids[:f], slots[:f], rows.given("free", 1))
        self._give(self.draft, at)
        if self.piece_draft is not None:
            places = rows.given("piece_places", 1)
            every = (starts, self.lengths, path.counts, ids, slots)
            starts, lengths, counts, ids, slots = (x.index_select(0, places) for x in every)
            chain = self.buffers.chain[: len(places)]
            self._give(self.piece_draft, _Observed(chain, starts, lengths, counts, ids, slots, rows.given("pieces", 1)))

    def _give(self, draft: Draft, at: _Observed) -> None:
        window = self.parts.draft_kv
        assert window is not None
        draft.observe(
            self.taps, at.path, at.starts, at.lengths, at.counts, at.ids, window.keys, window.values, at.live
        )  # fmt: skip
        if window.slots:  # what the prefix cache may share is kept beside the latents
            row, place = torch.arange(len(at.path), device=at.path.device), torch.arange(at.path.shape[1], device=at.path.device)
            real = (row < at.live)[:, None] & (place < at.counts[:, None])
            slots = at.slots[:, : len(place)].where(real, self.parts.kv.sink * self.parts.kv.page_size)
            window.keep(window.rows(at.ids, at.lengths), slots, self.buffers.between(window, slots.numel()))


@dataclass(frozen=True)
class _Observed:
    """Accepted nodes of some places: path [R, P]; starts, lengths, counts, ids [R]; slots [R, 65]; live [1]: how many are real."""

    path: Tensor
    starts: Tensor
    lengths: Tensor
    counts: Tensor
    ids: Tensor
    slots: Tensor
    live: Tensor
