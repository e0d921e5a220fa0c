"""Law 1 for whole forwards: a node's logits, taps and latents are the same bits alone, in any batch, slot, tree and chunking.

Every test runs on the kernels of a CUDA device, at nano's shape and at K2.6's width, and on the CPU by the kernels' references,
which shows that the test asks for what holds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from draftwood import nano
from draftwood.kernels.jit import Kernel
from draftwood.kernels.linear import plan as linear_plan
from draftwood.kernels.mla_attention.op import arch
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.tree.ref import Flat
from draftwood.model.config import K2_6, K2_6_DRAFT, DrafterConfig, ModelConfig, read_drafter_config, read_model_config, resized
from draftwood.model.costs import total
from draftwood.model.cuda import pack, work
from draftwood.model.cuda.bucket import Bucket, DraftBucket
from draftwood.model.cuda.drafter import CudaDrafter
from draftwood.model.cuda.dummy import dummy_drafter, dummy_target
from draftwood.model.cuda.pack import PackedDrafter, PackedTarget, pack_drafter, pack_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.model.weights import load_drafter, load_target
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import replace as replace_kernels
from tests.cuda_tools import Memory, Row, Step, chunk, poison
from tests.model.test_cuda_work import NARROW, NARROW_DRAFT
from tests.model.tools import random_tree

BF16 = torch.bfloat16
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PAIRS = [
    pytest.param(("narrow", "cpu"), id="narrow on the CPU"),
    pytest.param(("nano", "cuda"), id="nano", marks=gpu),
    pytest.param(("k2.6", "cuda"), id="k2.6 of two layers", marks=gpu),
]
CONTEXTS = (70, 333, 3, 130)


class Pair:
    """A target of random or nano's weights, and its drafter."""

    def __init__(self, config: ModelConfig, draft: DrafterConfig, packed: tuple[PackedTarget, PackedDrafter], device: str) -> None:
        self.config, self.device = config, torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.target = CudaTarget(config, packed[0], Layout(), Local(), draft.taps, 2048)
        self.drafter = CudaDrafter(draft, packed[1], Layout(), Local(), self.target, 2048)

    def tokens(self, n: int, seed: int) -> list[int]:
        g = torch.Generator().manual_seed(seed)
        found: list[int] = torch.randint(0, self.config.vocab_size - 9, (n,), generator=g).tolist()
        return found

    def prefilled(self) -> Memory:
        """Sequences of CONTEXTS tokens, committed chunk by chunk."""
        memory, bucket = Memory(self.config, len(CONTEXTS), 9, self.device, seed=1), Bucket(6, 64, 384, 1, 512)
        self.target.reserve([bucket])
        forward = self.target.bind(bucket)
        for sequence, length in enumerate(CONTEXTS):
            rows = chunk(sequence, self.tokens(length, sequence))
            Step.make(bucket, rows, memory).run(forward, memory.cache, self.one())
        return memory

    def one(self) -> tuple[Tensor, Tensor]:
        """Only node 0 is verified."""
        index = torch.zeros(1, dtype=torch.int64, device=self.device)
        return index, torch.ones(1, dtype=torch.int32, device=self.device)

    def row(self, sequence: int, nodes: int, seed: int) -> Row:
        """A random tree after a sequence."""
        return Row(sequence, CONTEXTS[sequence], self.tokens(nodes, seed), random_tree(nodes, seed))


@cache
def make(name: str, device: str) -> Pair:
    full, full_draft = read_model_config(K2_6), read_drafter_config(K2_6_DRAFT)
    if name == "nano":
        config, draft = read_model_config(nano.path()), read_drafter_config(nano.path() / "draft")
        weights = load_target(nano.path(), config, Layout(), BF16, "cpu")
        own = load_drafter(nano.path() / "draft", draft, Layout(), BF16, "cpu")
        return Pair(config, draft, (pack_target(config, weights, device), pack_drafter(draft, own, device)), device)
    config, draft = NARROW, NARROW_DRAFT
    if name == "k2.6":
        config, small = resized(full, full_draft, 48, 2)
        assert small is not None
        draft = replace(small, num_layers=2, taps=(0, 1))
    return Pair(config, draft, (dummy_target(config, Layout(), device), dummy_drafter(draft, Layout(), device)), device)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    name, device = request.param
    if device == "cpu":
        replace_kernels(monkeypatch)
    yield make(name, device)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits; a NaN is none that anybody computed."""
    assert not a.isnan().any() and not b.isnan().any()
    return torch.equal(a, b)


def run(pair: Pair, bucket: Bucket, rows: list[Row], memory: Memory, garbage: int = 7) -> list[tuple[Tensor, Tensor]]:
    """(logits, taps) of each row's nodes; the memory's cache is not touched, the workspace is poisoned."""
    pair.target.reserve([bucket])
    poison(pair.target)
    logits, taps = Step.make(bucket, rows, memory, garbage).run(pair.target.bind(bucket), memory.copy().cache)
    sizes = [len(row.tokens) for row in rows]
    return list(zip(logits.split(sizes), taps.split(sizes), strict=True))


@pytest.mark.parametrize("router", route_op.FORMS)
def test_kernels_beside_each_other_give_the_same_bits(pair: Pair, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device from a graph, which leaves the least time between them, and with two inputs in turn: what one leaves behind
    in a cache is wrong for the other."""
    memory = pair.prefilled()
    for bucket, sizes in ((Bucket.of(1, 0, 512), ((1,), (1,))), (Bucket.of(4, 16, 512), ((17, 4), (1, 9, 17, 3)))):
        pair.target.reserve([bucket])
        steps = [
            Step.make(bucket, [pair.row(i, n, 61 + 9 * s + i) for i, n in enumerate(nodes)], memory, s)
            for s, nodes in enumerate(sizes)
        ]
        want = [[x.clone() for x in step.run(pair.target.bind(bucket), memory.copy().cache)] for step in steps]
        with monkeypatch.context() as patch:
            patch.setattr(route_op, "best_form", lambda rows: router)
            again = Replayed(pair, bucket, steps[0], memory.copy().cache)
        for turn in range(40 if pair.device.type == "cuda" else 2):
            step = steps[turn % 2]
            got = again(step)
            assert all(same(a[: step.total], b) for a, b in zip(got, want[turn % 2], strict=True)), (bucket, turn)


class Replayed:
    """A forward at fixed addresses, of the inputs that a call gives; on a device a replayed graph."""

    def __init__(self, pair: Pair, bucket: Bucket, shown: Step, cache: Tensor) -> None:
        self.flat = Flat(**{name: value.clone() for name, value in vars(shown.flat).items()})
        self.rest = [x.clone() for x in (shown.lengths, shown.counts, shown.table)]
        self.run = partial(pair.target.bind(bucket), self.flat, *self.rest, cache)
        self.graph = torch.cuda.CUDAGraph() if pair.device.type == "cuda" else None
        if self.graph is not None:
            self.run()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.found = self.run()

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        for name, value in vars(step.flat).items():
            getattr(self.flat, name).copy_(value)
        for mine, theirs in zip(self.rest, (step.lengths, step.counts, step.table), strict=True):
            mine.copy_(theirs)
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.found


def test_a_row_is_the_same_in_any_batch_slot_and_bucket(pair: Pair) -> None:
    memory = pair.prefilled()
    rows = [pair.row(0, 9, 11), pair.row(1, 65, 12), pair.row(2, 1, 13), pair.row(3, 9, 14)]
    alone = [run(pair, Bucket.of(1, len(row.tokens) - 1, 512), [row], memory)[0] for row in rows]
    batches = [
        (Bucket.of(2, 8, 512), (3, 0)),
        (Bucket.of(4, 8, 1024), (0, 2, 3)),
        (Bucket(4, 65, 100, 100, 1024), (2, 1, 0, 3)),
        (Bucket.of(16, 64, 2048), (1, 3, 2, 0)),
    ]
    for garbage, (bucket, order) in enumerate(batches):
        found = run(pair, bucket, [rows[i] for i in order], memory, garbage)
        for i, (logits, taps) in zip(order, found, strict=True):
            assert same(logits, alone[i][0]) and same(taps, alone[i][1]), (bucket, i)


@pytest.mark.parametrize("fed", [False, True])
def test_few_live_tokens_of_a_large_bucket_are_those_of_a_small_one(pair: Pair, fed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over and over: blocks without tokens end at once, while others of their cluster may still tell them something."""
    monkeypatch.setattr(linear_plan, "FED", fed)
    memory, row = pair.prefilled(), pair.row(1, 1, 15)
    alone = run(pair, Bucket.of(1, 0, 512), [row], memory)[0]
    bucket = Bucket.of(64, 16, 512)
    pair.target.reserve([bucket])
    forward, step, cache = pair.target.bind(bucket), Step.make(bucket, [row], memory), memory.copy().cache
    for _ in range(400 if pair.device.type == "cuda" else 1):
        logits, taps = step.run(forward, cache)
    assert same(logits, alone[0]) and same(taps, alone[1])


def test_a_path_through_a_tree_is_plain_decoding(pair: Pair) -> None:
    memory = pair.prefilled()
    rows = [pair.row(0, 17, 21), pair.row(1, 33, 22)]
    trees = run(pair, Bucket.of(3, 32, 512), rows, memory)
    bucket = Bucket.of(1, 0, 1024)
    pair.target.reserve([bucket])
    forward = pair.target.bind(bucket)
    for row, (logits, taps) in zip(rows, trees, strict=True):
        path = [len(row.tokens) - 1]
        while row.parents[path[0]] >= 0:
            path.insert(0, row.parents[path[0]])
        assert len(path) > 2
        own = memory.copy()
        for depth, node in enumerate(path):
            step = Step.make(bucket, [Row(row.pages, row.length + depth, [row.tokens[node]], [-1])], memory)
            plain = step.run(forward, own.cache)
            assert same(plain[0][0], logits[node]) and same(plain[1][0], taps[node]), (row.pages, depth)


def test_what_is_committed_does_not_depend_on_the_chunks(pair: Pair) -> None:
    tokens, bucket = pair.tokens(300, 31), Bucket(6, 64, 320, 1, 512)
    pair.target.reserve([bucket])
    forward, found = pair.target.bind(bucket), []
    for seed, cuts in enumerate(((300,), (100, 137, 300), (1, 63, 65, 129, 300))):
        memory, at = Memory(pair.config, 1, 5, pair.device, seed=seed), 0
        for end in cuts:
            rows = chunk(0, tokens[at:end], at)
            step = Step.make(bucket, rows, memory)
            last = torch.tensor([end - at - 1], device=pair.device)
            logits, _ = step.run(forward, memory.cache, (last, torch.ones(1, dtype=torch.int32, device=pair.device)))
            at = end
        positions = torch.arange(300, device=pair.device)
        slots = memory.table[0].long()[positions // 64] * 64 + positions % 64
        found.append((memory.cache[:, slots], logits))
    assert all(same(cache, found[0][0]) and same(logits, found[0][1]) for cache, logits in found[1:])


def test_verified_nodes_have_the_logits_of_a_full_forward(pair: Pair) -> None:
    memory, rows = pair.prefilled(), [pair.row(0, 9, 41), pair.row(1, 5, 42)]
    bucket = Bucket.of(2, 8, 512)
    every = torch.cat([logits for logits, _ in run(pair, bucket, rows, memory)])
    index = torch.tensor([13, 0, 8, 1 << 40], device=pair.device)
    live = torch.tensor([3], dtype=torch.int32, device=pair.device)
    some, _ = Step.make(bucket, rows, memory).run(pair.target.bind(bucket), memory.copy().cache, (index, live))
    assert same(some, every[[13, 0, 8]])


# ---------------------------------------------------------------------------------------------------------- the drafter


def windows(pair: Pair, capacity: int, rings: int = 6) -> tuple[Tensor, Tensor]:
    c = pair.drafter.config
    shape = (c.num_layers, rings, capacity, pair.drafter.kv_heads, c.head_dim)
    found = [torch.full(shape, torch.nan, dtype=BF16, device=pair.device) for _ in range(2)]
    return found[0], found[1]


def features(pair: Pair, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, len(pair.drafter.config.taps) * pair.config.hidden_size, generator=g).to(pair.device, BF16)


@pytest.mark.parametrize("capacity", [96, 512])
def test_drafts_are_the_same_in_any_batch(pair: Pair, capacity: int) -> None:
    """Context that was observed in a batch or alone, and proposals from it."""
    drafter, device, block = pair.drafter, pair.device, 8
    taps, starts = features(pair, 140, 51), (0, 60, 100)
    sizes, rings = (60, 40, 7), (4, 1, 2)
    wide, alone = DraftBucket(4, block, 64, capacity), DraftBucket(1, block, 64, capacity)

    def longs(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    def live(n: int) -> Tensor:
        return torch.tensor([n], dtype=torch.int32, device=device)

    def fresh(bucket: DraftBucket) -> None:
        drafter.reserve([bucket])
        assert drafter.work is not None
        for value in vars(drafter.work).values():
            value.fill_(torch.nan)

    path = torch.arange(64, device=device).repeat(4, 1)
    batch, single = windows(pair, capacity), windows(pair, capacity)
    fresh(wide)
    lengths, counts = longs(0, 5, 90, 1 << 40), longs(*sizes, 9)
    drafter.bind(wide).observe(taps, path, longs(*starts, 1 << 40), lengths, counts, longs(*rings, 0), *batch, live(3))
    fresh(alone)
    for r in range(3):
        part = slice(r, r + 1)
        drafter.bind(alone).observe(
            taps, path[:1], longs(starts[r]), lengths[part], counts[part], longs(rings[r]), *single, live(1)
        )
    for a, b in zip(batch, single, strict=True):
        assert torch.equal(a.nan_to_num(-9.0), b.nan_to_num(-9.0)) and not a[:, list(rings)].isnan().all()
    roots, lengths = longs(5, 300, 17, 1 << 40), longs(60, 45, 97, 0)
    keys, values = (x.nan_to_num(0.0) for x in batch)
    fresh(wide)
    many = drafter.bind(wide).propose(roots, lengths, longs(*rings, 0), keys, values, live(3)).clone()
    fresh(alone)
    for r in range(3):
        part = slice(r, r + 1)
        one = drafter.bind(alone).propose(roots[part], lengths[part], longs(rings[r]), keys, values, live(1))
        assert same(one[0], many[r])
    assert many[3].isnan().all()


# ---------------------------------------------------------------------------------------------------------- on a device


@pytest.fixture(params=PAIRS[1:])
def device_pair(request: pytest.FixtureRequest) -> Pair:
    return make(*request.param)


def asked() -> int:
    """How often torch was asked for memory of the device, in all."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def test_a_replayed_graph_is_the_forward_it_was_captured_from(device_pair: Pair) -> None:
    """Without synchronising or allocating; and again after what it reads has changed."""
    pair, bucket = device_pair, Bucket.of(4, 16, 512)
    memory = pair.prefilled()
    steps = [Step.make(bucket, [pair.row(i, n, s) for i, n, s in rows], memory, s) for s, rows in enumerate(
        ([(0, 17, 61), (1, 4, 62)], [(2, 1, 63), (0, 9, 64), (1, 17, 65)])
    )]  # fmt: skip
    pair.target.reserve([bucket])
    forward = pair.target.bind(bucket)
    eager = [step.run(forward, memory.copy().cache) for step in steps]
    cache, shown = memory.copy().cache, steps[0]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            before = asked()
            forward(shown.flat, shown.lengths, shown.counts, shown.table, cache)
            assert asked() == before
            with torch.cuda.graph(graph, stream=stream):  # which takes 1 KiB itself: torch's seed and offset of random numbers
                before = asked()
                logits, taps = forward(shown.flat, shown.lengths, shown.counts, shown.table, cache)
                captured = asked() - before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured == 0
    torch.cuda.synchronize()
    for step, (want, kept) in zip(steps, eager, strict=True):
        for name in vars(shown.flat):
            getattr(shown.flat, name).copy_(getattr(step.flat, name))
        for name in ("lengths", "counts", "table"):
            getattr(shown, name).copy_(getattr(step, name))
        cache.copy_(memory.cache)
        poison(pair.target)
        graph.replay()
        assert same(logits[: step.total], want) and same(taps[: step.total], kept)


def test_a_step_launches_what_the_formula_says(device_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, count, launch = device_pair, [0], Kernel.__call__

    def counted(*args: object, **given: object) -> None:
        count[0] += 1
        launch(*args, **given)  # type: ignore[arg-type]

    memory = pair.prefilled()
    monkeypatch.setattr(Kernel, "__call__", counted)
    for bucket in (Bucket.of(1, 0, 512), Bucket.of(2, 8, 512)):
        pair.target.reserve([bucket])
        forward, step = pair.target.bind(bucket), Step.make(bucket, [pair.row(0, 1, 71)], memory)
        count[0] = 0
        step.run(forward, memory.copy().cache)
        assert count[0] == total(work.launches(pair.target.sizes, bucket, arch(pair.device)))


def test_a_workspace_is_what_the_formula_says(device_pair: Pair) -> None:
    """To the byte of what torch is asked for. Its allocator rounds a tensor up by less than 512 B, a large one by up to 1 MiB."""
    pair = device_pair
    buckets = [Bucket.of(8, 16, 4096), Bucket(4, 64, 256, 4, 2048)]
    pair.target.work = None
    gc.collect()

    def now() -> tuple[int, int]:
        found = torch.cuda.memory_stats()
        return found["requested_bytes.all.current"], found["allocated_bytes.all.current"]

    requested, held = now()
    pair.target.reserve(buckets)
    after, said = now(), total(work.workspace_bytes(pair.target.sizes, buckets, arch(pair.device)))
    assert after[0] - requested == said
    large = [t for t in pack.tensors(pair.target.work) if t.nbytes > 1 << 20]
    assert said <= after[1] - held <= said + (len(large) << 20) + 32 * 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dummy_weights_of_a_full_width_model_are_made_in_seconds() -> None:
    """Four layers of K2.6 with 48 experts, a fifteenth of the whole: 60 s would be slow."""
    config, _ = resized(read_model_config(K2_6), None, 48, 4)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    packed = dummy_target(config, Layout(), "cuda")
    ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) < 4000 and len(packed.layers) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nano_on_the_device_is_near_the_references() -> None:
    rows, found = [(0, 9, 81), (1, 33, 82), (2, 5, 83)], []
    for device in ("cuda", "cpu"):
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                replace_kernels(patch)
            pair = make("nano", device)
            memory = pair.prefilled()
            found.append(run(pair, Bucket.of(3, 32, 512), [pair.row(*row) for row in rows], memory))
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            distance = (a.cpu().float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
            assert float(distance.median()) < 0.02 and float(distance.max()) < 0.25, distance
