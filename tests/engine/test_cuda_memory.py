"""What an engine on a GPU allocates is what its Plan says: buffers to the byte, what graphs compute beside them within bounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftwood.model.cuda import keys, work
from draftwood.model.cuda.drafter import Draft
from draftwood.model.cuda.keys import Sizes
from draftwood.parallel.layout import Layout
from tests.cuda_refs import cuda_refs  # noqa: F401
from tests.engine.cuda_nano import engine, made_plan

pytestmark = pytest.mark.usefixtures("cuda_refs")


def held(x, seen: set[int]) -> int:
    """Bytes of the tensors of a record, each memory once."""
    if isinstance(x, torch.Tensor):
        store = x.untyped_storage()
        return 0 if store.data_ptr() in seen else seen.add(store.data_ptr()) or store.nbytes()
    if dataclasses.is_dataclass(x):
        return sum(held(getattr(x, f.name), seen) for f in dataclasses.fields(x))
    return 0


@pytest.mark.parametrize("prefix", [False, True])
def test_what_is_allocated_is_what_the_arithmetic_says(prefix):
    some = engine(tree_budget=16, max_num_seqs=3, enable_prefix_caching=prefix)
    rows, buffers, sizes, window = some.stepper.rows, some.stepper.buffers, some.stepper.sizes, some.parts.draft_kv
    there = [m._there for m in (rows._inputs, rows._bias, rows._floors, rows._prompt)] + [rows._tables]
    found = {"rows": held(rows.state, set()) + sum(x.nbytes for x in there), "step buffers": 0}
    seen: set[int] = {torch.empty(0).untyped_storage().data_ptr()}
    found["step buffers"] = sum(held(x, seen) for x in (*vars(buffers).values(), buffers.forms.bits, buffers.forms.lines))
    kept = window.keys[:, 0, 0].nbytes if prefix else 0
    assert found == dict(keys.step_memory(sizes, 3, some.parts.vocab, kept)) and 2 * len(buffers.kept) == kept * sizes.most_observed
    planned = dict(some.plan.memory)
    assert {name: planned[name] for name in found} == found


class Made(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as torch's allocator on a GPU rounds them."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in before:
                self.bytes += -(-x.untyped_storage().nbytes() // 512) * 512
        return out


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_graph_computes_in_memory_of_its_own_is_in_the_plan(prefix, monkeypatch):
    monkeypatch.setattr(Draft, "observe", lambda self, *given: None)
    found = []
    for rows, chunk in ((4, 64), (32, 512)):
        some = engine(tree_budget=8, max_num_seqs=rows, enable_prefix_caching=prefix, max_num_batched_tokens=chunk, pages=16)
        sizes = some.stepper.sizes
        with torch.inference_mode():
            some.stepper.rows.silence()
            step = some.stepper.step_of(sizes.key(rows, 8, True))
            step.taps = None
            with Made() as made:
                step._observe()
        assert 0 < made.bytes <= keys.own_bytes(sizes, prefix) <= (1 << 16) + 2 * made.bytes
        found.append(made.bytes)
    assert found[0] < found[1]


def test_graphs_of_steps_with_grammars_and_of_the_prefix_cache_are_in_the_plan():
    def graphs(**options):
        made, checkpoint = made_plan(tree_budget=8, **options)
        sizes, layout = Sizes.of(made), Layout()
        target = work.Sizes(checkpoint.config, layout, len(checkpoint.drafter.taps))
        own = work.DraftSizes(checkpoint.drafter, layout, target.vocab)
        kept = made.options.enable_prefix_caching
        assert dict(made.memory)["graphs"] == keys.graph_bytes(sizes, target, own, made.window, True, kept, "sm_90a")
        return [keys.graph_bytes(sizes, target, own, made.window, masks, kept, "sm_90a") for masks in (False, True)]

    plain, formed = graphs()
    least = 2 * keys.SEGMENT_BYTES
    assert formed - least == 2 * (plain - least) > 0
    assert graphs(enable_prefix_caching=True)[0] > plain
