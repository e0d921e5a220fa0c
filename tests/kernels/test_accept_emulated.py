"""The accept kernels' own source, run on the CPU: the reference's choices and paths; and the reference's are the spec room's."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels.accept import op, ref
from draftwood.spec import accept as spec_accept
from draftwood.spec.grammar import Permits
from draftwood.spec.sampling import Floor, History, Sampling, choose, uses_history
from draftwood.spec.tree import Tree, chain, join
from tests.kernels.emulate import COMPILER, Emulated
from tests.spec.toy import Params

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")
DEPTH = 6


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(entry: str, wide: int, device: int, filters: int = 1) -> Emulated:
        return Emulated(op._source(entry, wide, filters))

    monkeypatch.setattr(op, "_kernel", functools.cache(kernel))


def random_trees(counts: Sequence[int], vocab: int, g: torch.Generator) -> Tree:
    """Trees of random shape whose siblings hold different tokens."""
    rows, width = len(counts), max(counts)
    tokens, parents, depths = (
        torch.zeros(rows, width, dtype=torch.long),
        torch.full((rows, width), -1),
        torch.zeros(rows, width).long(),
    )
    for r, n in enumerate(counts):
        tokens[r, 0] = int(torch.randint(0, vocab, (1,), generator=g))
        for i in range(1, n):
            shallow = [j for j in range(i) if depths[r, j] < DEPTH]
            parent = shallow[max(int(torch.randint(0, len(shallow), (1,), generator=g)), len(shallow) - 4 if i % 2 else 0)]
            taken = {int(tokens[r, j]) for j in range(1, i) if parents[r, j] == parent}
            free = [t for t in torch.randperm(vocab, generator=g)[:80].tolist() if t not in taken]
            tokens[r, i], parents[r, i], depths[r, i] = free[0], parent, depths[r, parent] + 1
    return Tree(tokens, parents, depths, torch.tensor(counts), torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, width))


def on_device(params: Sequence[Params], seeds: Sequence[int], histories: Sequence[History | None]) -> ref.Params:
    numbers = torch.zeros(len(params), 8)
    for r, p in enumerate(params):
        numbers[r, :6] = torch.tensor(
            [p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty]
        )
    pairs = [sorted((p.logit_bias or {}).items()) for p in params]
    flat = [pair for row in pairs for pair in row]
    lines = [h for h in histories if h is not None]
    words = [torch.from_numpy(2 * h.generated + h.seen).int() for h in lines]
    ids = np.cumsum([h is not None for h in histories]) - 1
    return ref.Params(
        numbers,
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor(seeds),
        torch.tensor(np.cumsum([0] + [len(row) for row in pairs]), dtype=torch.int32),
        torch.tensor([i for i, _ in flat], dtype=torch.int32),
        torch.tensor([v for _, v in flat], dtype=torch.float32),
        torch.stack(words) if words else None,
        torch.tensor([int(i) if h is not None else -1 for i, h in zip(ids, histories, strict=True)], dtype=torch.int32)
        if words else None,
    )  # fmt: skip


class Scene:
    """Rows with their trees and parameters, for the kernels and for the spec room."""

    def __init__(
        self, params: Sequence[Params], counts: Sequence[int], vocab: int, seed: int = 0, chunk: Sequence[int] | None = None
    ):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.params = vocab, params
        self.tree = random_trees(counts, vocab, g)
        if chunk is not None:
            self.tree = join([self.tree, chain([list(chunk)])])
        rows = len(self.tree.counts)
        self.seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g).tolist()
        self.lengths = torch.randint(0, 5000, (rows,), generator=g)
        self.histories: list[History | None] = []
        for r, p in enumerate(params):
            history = None
            if uses_history(p):
                history = History(torch.randint(0, vocab, (40,), generator=g).tolist(), vocab)
                near = self.tree.tokens[r, :3].tolist()
                history.extend(torch.randint(0, vocab, (30,), generator=g).tolist() + near)
            self.histories.append(history)
        self.rows, self.nodes = (t.contiguous() for t in self.tree.verified())
        self.at = ref.Nodes(
            self.tree.tokens,
            self.tree.parents,
            self.tree.depths,
            self.lengths,
            self.rows,
            self.nodes,
            self.tree.forced.to(torch.uint8),
        )
        self.given = on_device(params, self.seeds, self.histories)
        self.g = g

    def logits(self, kind: str = "normal", dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(len(self.rows), self.vocab, generator=self.g) * 2.5
        if kind == "ties":
            x = x.round()
        if kind == "hostile":
            bad = torch.rand(x.shape, generator=self.g)
            x[bad < 0.3] = -torch.inf
            x[(bad > 0.3) & (bad < 0.35)] = float("nan")
            x[(bad > 0.35) & (bad < 0.4)] = -0.0
            x[0] = -torch.inf
            x[-1, 5:] = float("nan")
        return x.to(dtype)

    def left_open(self, logits: Tensor) -> Tensor:
        """Which choices `decide` leaves to `settle`."""
        with pytest.MonkeyPatch.context() as patch:
            known = op._kernel
            patch.setattr(op, "_kernel", lambda entry, *form: (lambda *_, **__: None) if entry == "settle" else known(entry, *form))
            return self.run(logits)[0] == -1

    def run(self, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor, op.Buffers]:
        m, (r, n) = len(self.rows), self.tree.tokens.shape
        buffers = op.allocate(m + 3, r, n, self.vocab, "cpu")
        tokens, scores = op.choose(logits, self.at, self.given, buffers, torch.tensor([m], dtype=torch.int32), **options)
        assert bool((buffers.choices[m:] == 0).all())
        return tokens[:m], scores[:m], buffers

    def spec(self, logits: Tensor, permits: Permits | None = None, floors: Sequence[Floor | None] = ()) -> tuple[Tensor, Tensor]:
        sampling = Sampling.build(self.params, self.seeds, self.histories, floors)
        first = self.lengths + torch.where(self.tree.forced, self.tree.counts, 1)
        noise = sampling.noise(first, DEPTH + 1, self.vocab)
        return choose(logits, self.rows, self.nodes, self.tree, sampling, noise, permits)


PLAIN = [
    Params(0.0),
    Params(1.0),
    Params(0.6),
    Params(0.0, logit_bias={3: 5.0, 17: -4.0, 23: 9.0}),
    Params(1.3, logit_bias={0: 8.0}),
]
PENAL = [
    Params(0.0, presence_penalty=0.9, repetition_penalty=1.3),
    Params(0.8, frequency_penalty=1.1, logit_bias={5: 6.0, 6: 6.0, 199: 7.0}),
    Params(1.0, top_p=0.9, presence_penalty=-0.7, frequency_penalty=0.3, repetition_penalty=0.8),
]
FILTERS = [
    Params(1.0, top_k=1), Params(1.0, top_k=20), Params(0.7, top_k=100), Params(2.0, top_k=150, top_p=0.8),
    Params(1.0, top_p=0.0), Params(1.0, top_p=0.5), Params(3.0, top_p=0.97), Params(1.0, min_p=0.02),
    Params(4.0, min_p=0.05), Params(3.0, min_p=0.1, top_p=0.9),
    Params(5.0, min_p=0.3, top_k=120, top_p=0.99), Params(1.0, top_k=199), Params(1.0, top_k=500, top_p=0.999),
    Params(1.0, min_p=1.0), Params(30.0, min_p=0.9, top_k=10), Params(30.0, min_p=0.2, top_p=0.6),
]  # fmt: skip


@emulated
@pytest.mark.parametrize("kind", ["normal", "ties", "hostile"])
@pytest.mark.parametrize(("name", "dtype"), [("plain", torch.bfloat16), ("penal", torch.float32), ("filters", torch.float32)])
def test_choices_are_the_references_to_the_bit(name: str, dtype: torch.dtype, kind: str) -> None:
    params = {"plain": PLAIN, "penal": PENAL, "filters": FILTERS}[name]
    scene = Scene(params, [1 + r % 2 if name == "filters" else 3 for r in range(len(params))], 200)
    logits = scene.logits(kind, dtype)
    before = logits.clone()
    tokens, scores, _ = scene.run(logits, filters=name != "plain")
    want_tokens, want_scores = ref.choose(logits, scene.at, scene.given)
    assert torch.equal(tokens, want_tokens)
    assert torch.equal(scores.nan_to_num(7.0).view(torch.int32), want_scores.nan_to_num(7.0).view(torch.int32))
    assert torch.equal(logits.nan_to_num(3.0), before.nan_to_num(3.0))
    if name == "filters" and kind != "hostile":  # all three ways were taken
        assert 2 < int(scene.left_open(logits).sum()) < len(tokens) - 8
    if name == "plain":
        again, _, _ = scene.run(logits, filters=True)
        assert torch.equal(again, tokens)


@emulated
@pytest.mark.parametrize(("size", "offset"), [(0.01, 0.0), (3.0, -1e5), (1e4, 1e6), (0.3, 1e3)])
def test_noise_that_is_skipped_changes_no_choice(size: float, offset: float) -> None:
    """Bounds on it hold for flat and steep logits, far from zero, where a sum rounds to more than the noise."""
    scene = Scene([Params(1.0), Params(0.6), Params(0.05), Params(4.0)], [3] * 4, 8200)
    logits = torch.randn(len(scene.rows), scene.vocab, generator=scene.g) * size + offset
    logits[1, ::2], logits[4, 17] = -torch.inf, torch.inf
    tokens, _, _ = scene.run(logits)
    assert torch.equal(tokens, ref.choose(logits, scene.at, scene.given)[0])


@emulated
@pytest.mark.parametrize(("name", "kind"), [("plain", "normal"), ("penal", "hostile"), ("filters", "ties")])
def test_only_nodes_of_a_walk_are_read_and_walks_are_the_same(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"plain": PLAIN, "penal": PENAL, "filters": FILTERS[1::2]}[name]
    scene = Scene(params, [4 + 3 * (r % 3) for r in range(len(params) - 1)], 200, chunk=[3, 1, 4])
    logits, r = scene.logits(kind), len(scene.tree.counts)
    for m, (row, node) in enumerate(zip(scene.rows.tolist(), scene.nodes.tolist(), strict=True)):
        children = [j for j in range(int(scene.tree.counts[row])) if scene.tree.parents[row, j] == node]
        if children and m % 4:  # most nodes choose a child
            logits[m, scene.tree.tokens[row, children[m % len(children)]]] = 60.0
    monkeypatch.setattr(op, "slots", lambda device: 5)  # more rows than blocks for them at first, several blocks a row later
    for width in (2, 7):
        _, _, whole = scene.run(logits)
        want = op.walk(scene.at, scene.tree.counts, whole, op.allocate_path(r, width, "cpu"))
        met = torch.zeros(len(logits), dtype=torch.bool)
        met[want.chosen[want.chosen >= 0]] = True
        poisoned = logits.clone()
        poisoned[~met] = 1e30
        tokens, _, some = scene.run(poisoned, levels=width, few_nodes=0)
        got = op.walk(scene.at, scene.tree.counts, some, op.allocate_path(r, width, "cpu"))
        for field in dataclasses.fields(want):
            a, b = getattr(got, field.name), getattr(want, field.name)
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), field.name
        assert bool((tokens[~met] == 0).all()) and bool((~met).any()) and int(want.counts.max()) >= min(width, 3)


def hold_back(scene: Scene) -> tuple[Permits, list[Floor | None]]:
    """Masks for two of three nodes, one of which allows nothing, and floors for every other row; the scene gets them too."""
    m, words = len(scene.rows), -(-scene.vocab // 32)
    places = torch.tensor([i for i in range(m) if i % 3])
    bits = torch.randint(-(2**31), 2**31, (len(places), words), generator=scene.g, dtype=torch.int32)
    bits[-1] = 0
    floors: list[Floor | None] = []
    for r in range(len(scene.params)):
        ids = torch.randperm(scene.vocab, generator=scene.g)[: 30 + r].sort().values
        floors.append(Floor(ids.numpy(), r % 3) if r % 2 else None)
    order = torch.randperm(len(places), generator=scene.g)  # lines lie anywhere
    lines = torch.full((m,), -1, dtype=torch.int32)
    lines[places] = order.int()
    scene.at = dataclasses.replace(scene.at, mask=torch.empty_like(bits).index_copy_(0, order, bits), mask_lines=lines)
    ids_of = [[] if floor is None else floor.ids.tolist() for floor in floors]
    scene.given = dataclasses.replace(
        scene.given,
        floor_left=torch.tensor([0 if floor is None else floor.left for floor in floors], dtype=torch.int32),
        floor_ptr=torch.tensor(np.cumsum([0] + [len(ids) for ids in ids_of]), dtype=torch.int32),
        floor_ids=torch.tensor(sum(ids_of, []), dtype=torch.int32),
    )
    return Permits(places.numpy(), bits.numpy()), floors


@emulated
@pytest.mark.parametrize("params", [PLAIN, PENAL, FILTERS])
def test_masks_and_floors_are_the_references_and_the_spec_rooms(params: list[Params]) -> None:
    scene = Scene(params, [2 + r % 3 for r in range(len(params))], 200)
    logits = scene.logits()
    free, _, _ = scene.run(logits)
    permits, floors = hold_back(scene)
    want = ref.choose(logits, scene.at, scene.given)
    spec_tokens, spec_scores = scene.spec(logits, permits, floors)
    assert torch.equal(want[0], spec_tokens) and not torch.equal(want[0], free)
    torch.testing.assert_close(want[1], spec_scores, rtol=1e-6, atol=2e-6)
    tokens, scores, _ = scene.run(logits)
    assert torch.equal(tokens, want[0]) and torch.equal(scores.view(torch.int32), want[1].view(torch.int32))


def test_half_of_a_mask_or_a_floor_is_refused() -> None:
    scene = Scene(PLAIN, [2] * len(PLAIN), 200)
    for change in ({"mask": torch.zeros(1, 7, dtype=torch.int32)}, {"mask": torch.zeros(1, 6, dtype=torch.int32)}):
        scene.at = dataclasses.replace(scene.at, **change)
        with pytest.raises(ValueError, match="mask"):
            scene.run(scene.logits())
    scene.at = dataclasses.replace(scene.at, mask=None)
    scene.given = dataclasses.replace(scene.given, floor_left=torch.zeros(len(PLAIN), dtype=torch.int32))
    with pytest.raises(ValueError, match="floor_left goes with|floor_left with"):
        scene.run(scene.logits())


@emulated
def test_segments_of_a_large_vocabulary_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        Params(1.0), Params(0.0), Params(1.0, top_p=0.95), Params(1.0, top_p=0.5, top_k=90), Params(0.9, min_p=0.05),
        Params(3.0, top_k=100), Params(0.4, top_p=0.9),
    ]  # fmt: skip
    scene = Scene(params, [1] * len(params), 24584)
    for kind in ("normal", "ties"):
        logits = scene.logits(kind)
        logits[2] *= 1.8  # the nucleus ends in the joined lists
        tokens, scores, buffers = scene.run(logits)
        want = ref.choose(logits, scene.at, scene.given)
        assert torch.equal(tokens, want[0])
        assert torch.equal(scores.view(torch.int32), want[1].view(torch.int32))
        if kind == "normal":  # deeper than 64, and yet nothing is left to the slowest way
            assert ref.kept(logits[2], torch.tensor(0.95), torch.tensor(0.0), 0) > 64
            assert not scene.left_open(logits).any()
        with monkeypatch.context() as patch:  # one block reads all segments of a node
            patch.setattr(op, "slots", lambda device: 1)
            one, its_scores, _ = scene.run(logits)
        assert torch.equal(one, tokens) and torch.equal(its_scores.view(torch.int32), scores.view(torch.int32))
        without, _, _ = scene.run(logits, logprobs=False)
        assert torch.equal(without, tokens)


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("params", [PLAIN, PENAL, FILTERS])
def test_the_reference_chooses_as_the_spec_room(params: list[Params], kind: str) -> None:
    for seed in range(3):
        scene = Scene(params, [4 + r % 3 for r in range(len(params))], 200, seed)
        logits = scene.logits(kind)
        want_tokens, want_scores = scene.spec(logits)
        tokens, scores = ref.choose(logits, scene.at, scene.given)
        assert torch.equal(tokens, want_tokens)
        torch.testing.assert_close(scores, want_scores, rtol=1e-6, atol=2e-6)


def test_what_filters_keep_is_what_the_spec_room_keeps() -> None:
    from draftwood.spec.sampling import truncate

    g = torch.Generator().manual_seed(0)
    for kind in ("normal", "ties"):
        z = torch.randn(len(FILTERS), 200, generator=g) * 2
        z = z.round() if kind == "ties" else z
        column = {name: np.array([getattr(p, name) for p in FILTERS], np.float32) for name in ("min_p", "top_p")}
        out = truncate(z.numpy(), column["min_p"], np.array([p.top_k for p in FILTERS]), column["top_p"])
        for r, p in enumerate(FILTERS):
            keep = ref.kept(z[r], torch.tensor(p.top_p), torch.tensor(p.min_p), p.top_k)
            ids = sorted(range(200), key=lambda i: (-float(z[r, i]), i))[:keep]
            assert sorted(ids) == np.flatnonzero(out[r] > -np.inf).tolist(), p


@emulated
@pytest.mark.parametrize("seed", [0, 1])
def test_walks_are_the_references_and_the_spec_rooms(seed: int) -> None:
    """Choices are made from the trees' own tokens, so that paths are long; one row is a prompt chunk."""
    counts = [1, 2, 9, 33, 65, 20] if seed else [1, 2, 110]  # one more than a warp holds
    scene = Scene([Params(0.0)] * (len(counts) + 1), counts, 50, seed, chunk=list(range(40)))
    m, (r, n) = len(scene.rows), scene.tree.tokens.shape
    buffers = op.allocate(m, r, n, 8, "cpu")
    choices = torch.randint(0, 50, (m,), generator=scene.g)
    for i, (row, node) in enumerate(zip(scene.rows.tolist(), scene.nodes.tolist(), strict=True)):
        children = [j for j in range(int(scene.tree.counts[row])) if scene.tree.parents[row, j] == node]
        if children and i % 5:
            choices[i] = scene.tree.tokens[row, children[i % len(children)]]
    scores = torch.randn(m, generator=scene.g)
    buffers.choices.copy_(choices)
    buffers.scores.copy_(scores)
    buffers.where.fill_(1 << 30)
    buffers.where[scene.rows, scene.nodes] = torch.arange(m, dtype=torch.int32)
    for width in (64, 3, 1):
        out = op.allocate_path(r + 1, width, "cpu")
        out.nodes.fill_(7)
        got = op.walk(scene.at, scene.tree.counts, buffers, out, torch.tensor([r], dtype=torch.int32))
        want = ref.walk(scene.at, scene.tree.counts, choices, scores, width)
        for name in ("nodes", "counts", "tokens", "emitted", "final", "logprobs", "chosen"):
            assert torch.equal(getattr(got, name)[:r], getattr(want, name)), (name, width)
        assert bool((got.nodes[r:] == 7).all())
    path = spec_accept.accept(scene.tree, choices, (scene.rows, scene.nodes), scores)
    want = ref.walk(scene.at, scene.tree.counts, choices, scores, path.nodes.shape[1])
    for name in ("nodes", "counts", "tokens", "emitted", "final", "logprobs", "chosen"):
        assert torch.equal(getattr(path, name), getattr(want, name)), name
    assert int(path.counts[:-1].max()) >= 3
