"""`kv_commit`'s own source, run on the CPU: what the latent store's commit does, and every other byte as it was."""

import functools

import pytest
import torch

from draftwood.kernels.kv_commit import op, ref
from draftwood.kv.store import LatentStore
from tests.kernels.emulate import COMPILER, Emulated

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_kernel", functools.cache(lambda device: Emulated(op._source())))


def paths(rows: int, nodes: int, longest: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    path, counts = torch.full((rows, longest), -1), torch.ones(rows, dtype=torch.int64)
    for r in range(rows):
        n = int(torch.randint(1, longest + 1, (1,), generator=g))
        path[r, 0] = 0
        path[r, 1:n] = torch.randperm(nodes - 1, generator=g)[: n - 1].sort().values + 1
        counts[r] = n
    return path, counts


@emulated
@pytest.mark.parametrize(("page", "nodes", "longest"), [(8, 9, 9), (16, 65, 16), (64, 33, 33), (64, 65, 65), (8, 1, 1)])
def test_latents_move_as_the_store_moves_them(page: int, nodes: int, longest: int) -> None:
    g = torch.Generator().manual_seed(nodes)
    rows, layers = 5, 3
    store = LatentStore(layers, 80, page, 24, torch.bfloat16, "cpu")
    store.cache.copy_(torch.randn(store.cache.shape, generator=g))
    lengths = torch.tensor([0, 3, page, 2 * page - 1, page + 5])
    pages = -(-(int(lengths.max()) + nodes) // page)
    tables = torch.randperm(80, generator=g)[: rows * pages].view(rows, pages) if rows * pages <= 80 else None
    if tables is None:
        pytest.fail("the store is too small for the case")
    scratch = store.scratch(tables, lengths, torch.full((rows,), nodes), nodes, int(lengths.max()))
    path, counts = paths(rows, nodes, longest, g)
    cache = store.cache.clone()
    assert torch.equal(ref.compact(cache, scratch.nodes, path, counts), _committed(store, scratch, path, counts))
    op.commit_latents(cache, scratch.nodes.contiguous(), path, counts)
    assert torch.equal(cache.view(torch.int16), store.cache.view(torch.int16))


def _committed(store: LatentStore, scratch, path: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
    store.commit(scratch, path, counts)
    return store.cache


@emulated
def test_prompt_chunks_and_rows_beyond_the_count_are_not_touched() -> None:
    data = torch.randn(2, 300, 16)
    slots = torch.randperm(300)[:240].view(2, 120)
    path = torch.arange(120).repeat(2, 1)
    path[1, :3] = torch.tensor([0, 7, 90])
    cache = data.clone()
    op.commit_latents(cache, slots, path, torch.tensor([120, 3]), rows=torch.tensor([1], dtype=torch.int32))
    assert torch.equal(cache, data)
