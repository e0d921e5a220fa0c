"""The CUDA target on the CPU, by its kernels' references, beside `model.kimi`."""

from __future__ import annotations

import typing
from functools import cache

import pytest
import torch
from torch import Tensor

from draftwood import nano
from draftwood.model.config import ModelConfig, read_model_config
from draftwood.model.cuda import work
from draftwood.model.cuda.bucket import Bucket
from draftwood.model.cuda.pack import pack_target
from draftwood.model.cuda.target import CudaTarget
from draftwood.model.kimi import Target
from draftwood.model.weights import ExpertWeights, MoEWeights, TargetWeights, dummy_target, load_target
from draftwood.parallel.comm import Local
from draftwood.parallel.layout import Layout
from tests.cuda_refs import Calls, cuda_refs  # noqa: F401
from tests.cuda_tools import Memory, Row, Step, chain, chunk, poison
from tests.model.test_cuda_work import NARROW
from tests.model.tools import Exchange, ThreadComm, random_tokens, random_tree, shake

T = typing.TypeVar("T")
TREE = [-1, 0, 0, 1, 1, 2, 3]


def loaded(name: str, dtype: torch.dtype) -> tuple[ModelConfig, TargetWeights]:
    """Nano, or random weights of a narrow K2 with padded experts and odd inner sizes."""
    if name == "nano":
        config = read_model_config(nano.path())
        return config, load_target(nano.path(), config, Layout(), dtype, "cpu")
    return NARROW, cast(narrow(Layout()), dtype)


def narrow(layout: Layout) -> TargetWeights:
    """Random weights whose routers rarely have near-ties: what is compared is arithmetic."""
    weights = dummy_target(NARROW, layout, torch.bfloat16, "cpu", seed=3)
    shake(weights, 5)
    for layer in weights.layers:
        if isinstance(layer.mlp, MoEWeights):
            layer.mlp.bias.mul_(4)
    return weights


def cast(weights: T, dtype: torch.dtype) -> T:
    """The same values in another type; what is packed or float32 stays."""

    def change(x: object) -> object:
        if isinstance(x, Tensor):
            return x.to(dtype) if x.dtype == torch.bfloat16 else x
        if isinstance(x, list):
            return [change(part) for part in x]
        return x if isinstance(x, ExpertWeights | int) else type(x)(**{k: change(v) for k, v in vars(x).items()})

    return typing.cast(T, change(weights))


@cache
def reference(name: str, dtype: torch.dtype) -> Target:
    """model.kimi in `dtype`, from the same bfloat16 weights."""
    config, weights = loaded(name, dtype)
    return Target(config, weights, Layout(), Local(), taps(config), dtype)


def taps(config: ModelConfig) -> tuple[int, ...]:
    """Some layers, the last one among them, not in order."""
    return (config.num_layers - 2, 0, config.num_layers - 1)


def target(name: str = "nano") -> CudaTarget:
    config, weights = loaded(name, torch.bfloat16)
    return CudaTarget(config, pack_target(config, weights, "cpu"), Layout(), Local(), taps(config))


def prompt(n: int, seed: int) -> list[int]:
    return random_tokens(n, seed)


class _Slots:
    """The reference's slots: sequence positions in order, one row."""

    def __init__(self, cache: Tensor, length: int, nodes: int) -> None:
        self.cache, self.lengths = cache, torch.tensor([length])
        self.prefix, self.nodes = torch.arange(length)[None], torch.arange(length, length + nodes)[None]


def expected(
    name: str, context: list[int], tokens: list[int], parents: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits and taps of a tree after `context`, by the reference."""
    model, n, length = reference(name, dtype), len(tokens), len(context)
    cache = torch.zeros(model.config.num_layers, length + n, model.config.latent_width, dtype=dtype)

    def run(tokens: list[int], parents: list[int], at: int) -> tuple[Tensor, Tensor]:
        k = len(tokens)
        bits, depth = torch.zeros(1, k, -(-k // 64), dtype=torch.int64), torch.zeros(1, k, dtype=torch.int64)
        for j, parent in enumerate(parents):
            if parent >= 0:
                bits[0, j], depth[0, j] = bits[0, parent], depth[0, parent] + 1
            bits[0, j, j // 64] |= torch.tensor(1) << j % 64
        verified = (torch.zeros(k, dtype=torch.int64), torch.arange(k))
        return model.forward(torch.tensor([tokens]), at + depth, _Slots(cache, at, k), bits, torch.tensor([k]), verified)

    if context:
        run(context, chain(length), 0)
    logits, kept = run(tokens, parents, length)
    return logits, kept[0]


def distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far each node's row is off, as a share of the reference's length."""
    assert torch.isfinite(ours).all()
    return (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)


@pytest.mark.parametrize("name", ["nano", "narrow"])
def test_chunks_and_trees_are_as_near_to_float32_as_the_reference_in_bfloat16(cuda_refs: Calls, name: str) -> None:  # noqa: F811
    ours, contexts = target(name), [prompt(70, 1), prompt(9, 2)]
    buckets = [Bucket(4, 64, 128, 128, 256), Bucket(3, 9, 27, 27, 256)]
    ours.reserve(buckets)
    poison(ours)
    memory = Memory(ours.config, 2, 3, "cpu")
    prefill, decode = (ours.bind(b) for b in buckets)
    rows = [*chunk(0, contexts[0]), *chunk(1, contexts[1])]
    first = Step.make(buckets[0], rows, memory).run(prefill, memory.cache)
    rows = [Row(1, 9, prompt(7, 3), TREE), Row(0, 70, prompt(5, 4), random_tree(5, 5))]
    second = Step.make(buckets[1], rows, memory).run(decode, memory.cache)
    whole = [(name, [], context, chain(len(context))) for context in contexts]
    whole += [(name, contexts[row.pages], list(row.tokens), list(row.parents)) for row in rows]
    exact, rounded = ([expected(*step, dtype) for step in whole] for dtype in (torch.float32, torch.bfloat16))
    for part in (0, 1):  # logits, taps
        truth = torch.cat([step[part] for step in exact])
        found = distances(torch.cat((first[part], second[part])), truth)
        known = distances(torch.cat([step[part] for step in rounded]), truth)
        assert float(found.median()) < 0.05 and float(found.median()) < 1.3 * float(known.median()), (found, known)
        assert float(found.quantile(0.95)) < 2 * float(known.quantile(0.95)), (found, known)


def test_only_the_verified_nodes_get_logits_and_they_are_the_same(cuda_refs: Calls) -> None:  # noqa: F811
    ours, bucket = target(), Bucket(2, 16, 32, 32, 128)
    ours.reserve([bucket])
    forward, memory = ours.bind(bucket), Memory(ours.config, 2, 2, "cpu")
    rows = [Row(0, 0, prompt(11, 1), chain(11)), Row(1, 0, prompt(4, 2), random_tree(4, 3))]
    step = Step.make(bucket, rows, memory)
    every, _ = step.run(forward, memory.cache)
    index, live = torch.tensor([14, 10, 0, 1 << 40]), torch.tensor([3], dtype=torch.int32)
    some, _ = step.run(forward, memory.cache, (index, live))
    assert torch.equal(some, every[[14, 10, 0]])


def test_padding_is_neither_read_nor_written(cuda_refs: Calls) -> None:  # noqa: F811
    ours, bucket = target(), Bucket(4, 8, 32, 32, 128)
    ours.reserve([bucket])
    forward, memory = ours.bind(bucket), Memory(ours.config, 2, 2, "cpu")
    rows = [Row(1, 0, prompt(7, 1), TREE)]
    found = []
    for garbage in (1, 2):
        poison(ours)
        step, own = Step.make(bucket, rows, memory, garbage), memory.copy()
        found.append((*step.run(forward, own.cache), own.cache))
        assert ours.work is not None and ours.work.logits[7:].isnan().all() and ours.work.taps[7:].isnan().all()
        written = ~own.cache[0].isnan().any(-1)
        assert sorted(written.nonzero().squeeze(1).tolist()) == sorted(step.flat.places[:7].tolist())
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*found, strict=True))


def test_more_nodes_than_the_router_takes_go_through_it_in_parts(cuda_refs: Calls, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ours, bucket = target(), Bucket(2, 32, 64, 64, 128)
    rows = [Row(0, 0, prompt(27, 1), chain(27)), Row(1, 0, prompt(6, 2), chain(6))]
    found = []
    for most in (1024, 24):
        monkeypatch.setattr(work, "MOST_ROUTED_TO_FEW", most)
        ours.reserve([bucket])
        memory = Memory(ours.config, 2, 2, "cpu")
        found.append(Step.make(bucket, rows, memory).run(ours.bind(bucket), memory.cache))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_norms_that_sum_over_experts_give_what_a_sum_of_its_own_gives(cuda_refs: Calls, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ours, bucket = target(), Bucket(2, 40, 80, 80, 128)
    rows = [Row(0, 0, prompt(38, 1), chain(38)), Row(1, 0, prompt(6, 2), chain(6))]
    found = []
    for summed in (True, False):
        if not summed:
            monkeypatch.setattr(work, "SUMMED", range(0))
        ours.reserve([bucket])
        poison(ours)
        memory = Memory(ours.config, 2, 2, "cpu")
        forward = ours.bind(bucket)
        assert forward.norms_sum is summed
        found.append(Step.make(bucket, rows, memory).run(forward, memory.cache))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_ranks_together_are_the_whole(cuda_refs: Calls) -> None:  # noqa: F811
    """Two by two: experts are placed whole on pairs of ranks, which cut their columns. Sums are added, logits joined."""
    bucket, world = Bucket(2, 16, 32, 32, 128), 4
    rows = [Row(0, 0, prompt(11, 1), chain(11)), Row(1, 0, prompt(7, 9), TREE)]

    def run(ours: CudaTarget) -> tuple[Tensor, Tensor]:
        ours.reserve([bucket])
        poison(ours)
        memory = Memory(ours.config, 2, 2, "cpu")
        return Step.make(bucket, rows, memory).run(ours.bind(bucket), memory.cache)

    def rank(comm: ThreadComm) -> Tensor:
        layout = Layout(2, 2, comm.rank)
        logits, kept = run(CudaTarget(NARROW, pack_target(NARROW, narrow(layout), "cpu"), layout, comm, taps(NARROW)))
        return torch.cat((logits, kept.float()), 1)

    logits, kept = run(target("narrow"))
    found = Exchange(world).run(rank)
    assert all(torch.equal(part, found[0]) for part in found)
    assert float(distances(found[0][:, : NARROW.vocab_size], logits).quantile(0.9)) < 0.05
    assert float(distances(found[0][:, NARROW.vocab_size :], kept).quantile(0.9)) < 0.05
