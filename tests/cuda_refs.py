"""The kernels' references in place of the kernels: the CUDA target, drafter and engine on CPU tensors.

`cuda_refs` is a fixture (import it in the test file). Every replacement takes the op's arguments, writes into the same buffers and
only the live rows: what the real kernels leave alone stays as it was. Callers must go through the op modules
(`linear_op.linear(...)`), for these attributes are what is replaced. Sums are float64, so that a row's rounded result as good as
never depends on how torch cuts a batch; the kernels' never does. `Calls` counts the launches that the kernels would make.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftwood.kernels.accept import op as accept_op
from draftwood.kernels.accept import ref as accept_ref
from draftwood.kernels.draft_attention import op as draft_op
from draftwood.kernels.draft_attention import ref as draft_ref
from draftwood.kernels.kv_commit import op as commit_op
from draftwood.kernels.linear import op as linear_op
from draftwood.kernels.linear import plan as linear_plan
from draftwood.kernels.linear import ref as linear_ref
from draftwood.kernels.mla_attention import op as attention_op
from draftwood.kernels.mla_attention import ref as attention_ref
from draftwood.kernels.moe_int4 import op as moe_op
from draftwood.kernels.moe_int4 import ref as moe_ref
from draftwood.kernels.moe_int4 import repack
from draftwood.kernels.moe_route import op as route_op
from draftwood.kernels.moe_route import ref as route_ref
from draftwood.kernels.norm_rope import op as norm_op
from draftwood.kernels.norm_rope import ref as norm_ref
from draftwood.kernels.rows import op as rows_op
from draftwood.kernels.rows import ref as rows_ref
from draftwood.kernels.sizes import op as sizes_op
from draftwood.kernels.sizes import ref as sizes_ref
from draftwood.kernels.tree import op as tree_op
from draftwood.kernels.tree import ref as tree_ref

BF16 = torch.bfloat16


class Calls:
    """Launches by kernel, as the real ops would make them."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()

    def add(self, name: str, launches: int = 1) -> None:
        self.launches[name] += launches

    @property
    def total(self) -> int:
        return sum(self.launches.values())

    def clear(self) -> None:
        self.launches.clear()


def _live(rows: Tensor | None, capacity: int) -> int:
    return capacity if rows is None else min(int(rows), capacity)


class Refs:
    """The replacements. Dense experts and weights are unpacked once per packed weight."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._dense: dict[int, tuple[object, Any]] = {}

    def _unpacked(self, owner: object, make: Any) -> Any:
        found = self._dense.get(id(owner))
        if found is None:
            found = self._dense[id(owner)] = (owner, make())  # the owner is kept, so that its id stays its own
        return found[1]

    # ------------------------------------------------------------------------------------------------------ model

    def linear(
        self, x: Tensor, weight: linear_op.Weight, out: Tensor | None = None, residual: Tensor | None = None,
        rows: Tensor | None = None, dtype: torch.dtype = BF16, form: object = None,
        norm: tuple[Tensor, float] | None = None, early: bool = False, scratch: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shape, n = weight.shape, x.shape[0]
        if norm is not None:
            linear_op._check_norm(norm[0], shape, n <= linear_plan.STREAM_ROWS)
            x = x.where(torch.arange(n)[:, None] < _live(rows, n), 0)
            x = norm_ref.rms_norm(x, *norm)
        outputs = shape.outputs // 2 if shape.glu else shape.outputs
        wanted = (n, outputs) if x.dim() == 2 else (n, shape.heads, outputs)
        out = torch.empty(wanted, dtype=dtype) if out is None else out
        linear_op._check(x, shape, out, wanted, residual, rows)
        self.calls.add("linear")
        if ordered := linear_plan.arranged_values(shape, n):
            assert scratch is not None and scratch.numel() >= ordered, "a model's products must not allocate"
            self.calls.add("inputs in order")
        live = _live(rows, n)
        dense = self._unpacked(weight, lambda: linear_ref.unpack(weight.data, shape.inputs).double())
        if x.dim() == 3:
            out[:live] = linear_ref.heads(x[:live], dense, out.dtype)
        elif shape.glu:
            gate, up = dense[0].view(-1, 2, 8, shape.inputs).unbind(1)
            out[:live] = linear_ref.swiglu(x[:live], gate.flatten(0, 1), up.flatten(0, 1))
        else:
            out[:live] = linear_ref.linear(x[:live], dense[0], None if residual is None else residual[:live], out.dtype)
        return out

    def add_norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | norm_op.Parts | None = None, index: Tensor | None = None,
        residual: Tensor | None = None, tap: Tensor | None = None, out: Tensor | None = None, rows: Tensor | None = None,
        early: int = norm_op.EARLY_ROWS,
    ) -> Tensor:  # fmt: skip
        n, width = (x.shape[0] if index is None else index.shape[0]), x.shape[-1]
        if isinstance(delta, norm_op.Parts):
            assert residual is x and index is None and rows is not None
            norm_op._parts_fit(delta, n, width)
            delta = torch.cat((self.sums, x.new_zeros(n - len(self.sums), width)))
        out = torch.empty(n, width, dtype=BF16) if out is None else out
        norm_op._rows_fit("x", x, None, width)
        for name, given in (("delta", delta), ("residual", residual), ("tap", tap), ("out", out)):
            norm_op._rows_fit(name, given, n, width)
        norm_op._longs_fit(n, index=index)
        norm_op._count_fits(rows)
        self.calls.add("add_norm")
        live = _live(rows, n)
        x = x[:live] if index is None else x
        h, y = norm_ref.add_norm(x, weight, eps, None if delta is None else delta[:live], None if index is None else index[:live])
        for target in (residual, tap):
            if target is not None:
                target[:live] = h
        out[:live] = y
        return out

    def turn_and_store(
        self, queries: Tensor, latents: Tensor, l_weight: Tensor, turns: Tensor, positions: Tensor, slots: Tensor, cache: Tensor,
        eps: float, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        n = queries.shape[0]
        norm_op._turns_fit(turns, queries.shape[2])
        norm_op._longs_fit(n, positions=positions, slots=slots)
        norm_op._rows_fit("latents", latents, n, cache.shape[1])
        assert cache.is_contiguous() and cache.dtype == BF16
        self.calls.add("turn_and_store")
        live = _live(rows, n)
        stored = norm_ref.latent(latents[:live], l_weight, turns, positions[:live], eps)
        at = slots[:live]
        cache[at[at >= 0]] = stored[at >= 0]
        queries[:live] = norm_ref.turn_pairs(queries[:live], norm_ref.at_positions(turns, positions[:live]).unsqueeze(1))

    def route(
        self, x: Tensor, router: route_op.Router, live: Tensor, out: route_op.Lists, tile: int, rows: int | None = None,
        pdl: bool = True, form: str = "parts",
    ) -> None:  # fmt: skip
        n = x.shape[0] if rows is None else rows
        route_op._check(x, router, live, out, tile, n)
        self.calls.add("moe_route", route_op.launches(form))
        if form == "scores":
            return
        weight = self._unpacked(router, lambda: _router(router))
        count, shape = _live(live, n), router.shape
        chosen = route_ref.choose(x[:count], weight, router.bias, shape.topk, router.scale, torch.float64)
        out.experts[:count] = chosen.experts.int()
        out.weights[:count] = route_ref.held_weights(chosen.experts, chosen.weights, out.first, out.held)
        pairs, jobs = route_ref.lists(chosen.experts.tolist(), out.first, out.held, tile)
        out.pairs[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
        assert len(jobs) <= route_op.most_jobs(n, shape.topk, out.held, tile)
        if jobs:
            out.jobs[: len(jobs)] = torch.tensor(jobs, dtype=torch.int32)
        out.njobs.fill_(len(jobs))

    def moe_int4(
        self, x: Tensor, weights: repack.Packed, lists: route_op.Lists, live: Tensor, shared: Tensor | None, out: Tensor,
        work: moe_op.Workspace, plan: moe_op.Plan, rows: int | None = None, pdl: bool = True, early: bool = False,
        summed: bool = True,
    ) -> None:  # fmt: skip
        n = x.shape[0] if rows is None else rows
        moe_op.Call(x, weights, lists, live, shared, out, work, plan, n, summed=summed).check()
        crew = moe_op.HOPPER[plan.gate_up].file == "crew"
        self.calls.add("moe_int4", (2 if plan.sums or not summed else 3) + crew)
        count = _live(live, n)
        dense = self._unpacked(weights, dict)

        def get(e: int) -> moe_ref.Expert:
            if e not in dense:
                dense[e] = repack.expert(weights, e)
            found: moe_ref.Expert = dense[e]
            return found

        if count:
            y = _experts(x[:count], get, lists.experts[:count].long(), lists.weights[:count], lists.first, lists.held)
            self.sums = (y if shared is None else y + shared[:count].double()).to(BF16)
            if summed:
                out[:count] = self.sums

    def head_norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, turns: Tensor, lengths: Tensor, kv_heads: int, eps: float,
        pairs: bool = False, rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        r, block, heads, d = qkv.shape
        norm_op._longs_fit(r, lengths=lengths)
        norm_op._turns_fit(turns, d)
        self.calls.add("head_norm_rope")
        live = _live(rows, r)
        positions = (lengths[:live, None] + torch.arange(block)).flatten()
        flat, q = qkv.view(r * block, heads, d)[: live * block], heads - 2 * kv_heads
        flat[:, :q] = norm_ref.heads(flat[:, :q], q_weight, turns, positions, eps, pairs)
        flat[:, q : q + kv_heads] = norm_ref.heads(flat[:, q : q + kv_heads], k_weight, turns, positions, eps, pairs)
        return qkv

    def ring_write(
        self, kv: Tensor, k_weights: Tensor, turns: Tensor, lengths: Tensor, counts: Tensor, ids: Tensor, keys: Tensor,
        values: Tensor, eps: float, pairs: bool = False, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        r = kv.shape[0]
        norm_op._longs_fit(r, lengths=lengths, counts=counts, ids=ids)
        assert keys.dtype == values.dtype == BF16 and keys.is_contiguous() and values.is_contiguous()
        self.calls.add("ring_write")
        n = _live(rows, r)
        norm_ref.ring_write(kv[:n], k_weights, turns, lengths[:n], counts[:n], ids[:n], keys, values, eps, pairs)

    def draft_attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, ids: Tensor, out: Tensor | None = None,
        workspace: Tensor | None = None, rows: Tensor | None = None, cluster: int | None = None,
    ) -> Tensor:  # fmt: skip
        draft_op._check(qkv, keys, values, lengths, ids, rows)
        r, block, heads, d = qkv.shape
        capacity, kv_heads = keys.shape[1:3]
        share = heads // kv_heads - 2
        out = torch.empty(r, block, share * kv_heads, d, dtype=BF16) if out is None else out
        assert tuple(out.shape) == (r, block, share * kv_heads, d) and out.is_contiguous()
        wanted = draft_op.workspace_numel(r, kv_heads, share, block, capacity, d)
        assert workspace is None or workspace.numel() >= wanted
        self.calls.add("draft_attention")
        n = _live(rows, r)
        out[:n] = draft_ref.draft_attention(qkv[:n], keys, values, lengths[:n], ids[:n], torch.float64)
        return out

    # ----------------------------------------------------------------------------------------------------- engine

    def candidates(
        self, logits: Tensor, temperature: Tensor, budgets: Tensor, given: tree_op.Knobs, buffers: tree_op.Buffers,
        seeds: Tensor | None = None, lengths: Tensor | None = None, rows: Tensor | None = None, norms: int | None = None,
        pdl: bool = True,
    ) -> tree_ref.Candidates:  # fmt: skip
        r, d, _ = logits.shape
        tree_op._check_logits(logits, given, buffers)
        tree_op._vectors_fit(r, torch.float32, temperature=temperature)
        tree_op._vectors_fit(r, torch.int32, budgets=budgets)
        self.calls.add("candidates", 2)
        wanted = (torch.arange(r) < _live(rows, r)) & (budgets > 0)
        at = wanted.nonzero().squeeze(1)
        if len(at):
            noise = (None, None) if seeds is None or lengths is None else (seeds[at], lengths[at])
            z = tree_ref.heated(logits[at].float(), temperature[at], given.options.beta, *noise)
            found = tree_ref.candidates(z, d if norms is None else norms)
            for name in ("ids", "z", "places", "norm"):
                getattr(buffers.found, name)[at] = getattr(found, name)
        return buffers.found

    def grow(
        self, found: tree_ref.Candidates, roots: Tensor, lengths: Tensor, budgets: Tensor, temperature: Tensor,
        given: tree_op.Knobs, out: tree_ref.Trees, table: tree_ref.Table | None = None, rows: Tensor | None = None,
        lists: tree_op.Lists | None = None, pdl: bool = True,
    ) -> tree_ref.Trees:  # fmt: skip
        r = len(roots)
        tree_op._vectors_fit(r, torch.int64, roots=roots, lengths=lengths)
        tree_op._vectors_fit(r, torch.int32, budgets=budgets)
        tree_op._vectors_fit(r, torch.float32, temperature=temperature)
        self.calls.add("grow", 2 if table is not None and given.beta.shape[0] > 1 else 1)
        n = _live(rows, r)
        mine = tree_ref.Candidates(found.ids[:n], found.z[:n], found.places[:n], found.norm[:n])
        trees = tree_ref.grow(mine, roots[:n], lengths[:n], budgets[:n], temperature[:n], given.options, table)
        for name, value in vars(trees).items():
            getattr(out, name)[:n] = value
        return out

    def flatten(
        self, trees: tree_ref.Trees, lengths: Tensor, table: Tensor, page: int, out: tree_ref.Flat, rows: Tensor | None = None,
        pdl: bool = True,
    ) -> tree_ref.Flat:  # fmt: skip
        r = len(lengths)
        tree_op._vectors_fit(r, torch.int64, lengths=lengths)
        assert table.dtype == torch.int32 and table.shape[0] == r and table.is_contiguous()
        self.calls.add("flatten")
        trees.counts[_live(rows, r) : r] = 0
        mine = tree_ref.Trees(**{name: value[:r] for name, value in vars(trees).items()})
        flat = tree_ref.flatten(mine, lengths, table, page)
        total = int(flat.total)
        out.starts[:r], out.slots[:r] = flat.starts, flat.slots
        out.total.copy_(flat.total)
        for name in ("tokens", "positions", "places", "rows", "nodes", "ancestors"):
            getattr(out, name)[:total] = getattr(flat, name)
        return out

    def choose(
        self, logits: Tensor, at: accept_ref.Nodes, params: accept_ref.Params, buffers: accept_op.Buffers,
        live: Tensor | None = None, logprobs: bool = True, filters: bool = True, levels: int | None = None, pdl: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        accept_op._check(logits, at, params, buffers, live)
        self.calls.add("choose", 3 if filters else 2)
        n = _live(live, len(logits))
        if n:
            rows, nodes = at.rows[:n], at.nodes[:n]
            by_node = {k: v[:n] for k, v in vars(at).items() if k in ("rows", "nodes", "mask_lines") and v is not None}
            mine = dataclasses.replace(at, **by_node)
            buffers.choices[:n], scores = accept_ref.choose(logits[:n], mine, params)
            if logprobs:
                buffers.scores[:n] = scores
            buffers.where[rows, nodes] = torch.arange(n, dtype=torch.int32)
        return buffers.choices, buffers.scores

    def walk(
        self, at: accept_ref.Nodes, counts: Tensor, buffers: accept_op.Buffers, out: accept_ref.Path, rows: Tensor | None = None,
        logprobs: bool = True, pdl: bool = True,
    ) -> accept_ref.Path:  # fmt: skip
        self.calls.add("walk")
        n = _live(rows, len(counts))
        width = out.nodes.shape[1]
        for r in range(n):
            places = buffers.where[r, : int(counts[r])].long()
            mine = accept_ref.Nodes(
                at.tokens[r : r + 1], at.parents[r : r + 1], at.depths[r : r + 1], at.lengths[r : r + 1],
                torch.zeros(len(places), dtype=torch.int64), torch.arange(len(places)),
                None if at.forced is None else at.forced[r : r + 1],
            )  # fmt: skip
            path = accept_ref.walk(mine, counts[r : r + 1], buffers.choices[places], buffers.scores[places], width)
            for name, value in vars(path).items():
                getattr(out, name)[r] = value[0]
            shown = out.chosen[r] >= 0
            out.chosen[r, shown] = places[out.chosen[r, shown]]
        return out

    def commit_latents(
        self, cache: Tensor, slots: Tensor, path: Tensor, counts: Tensor, rows: Tensor | None = None, pdl: bool = True
    ) -> Tensor:
        self.calls.add("commit_latents")
        n = _live(rows, len(counts))
        for r in range(n):
            _compact(cache, slots[r : r + 1], path[r : r + 1], counts[r : r + 1])
        return cache


def _compact(data: Tensor, slots: Tensor, path: Tensor, counts: Tensor) -> None:
    """kv_commit.ref.compact in place, without a copy of all data. A path longer than the kernel's moves nothing."""
    n = min(int(counts[0]), path.shape[1])
    nodes = path[0, :n]
    if n == 0 or bool((nodes == torch.arange(n)).all()):
        return
    data[:, slots[0, :n]] = data[:, slots[0, nodes]]


def _experts(x: Tensor, get: Callable[[int], moe_ref.Expert], chosen: Tensor, weights: Tensor, first: int, held: int) -> Tensor:
    """`moe_ref.experts` in float64, an expert's tokens together: a third of its time."""
    parts = torch.zeros(*chosen.shape, x.shape[1], dtype=torch.float64)
    for e in chosen.unique().tolist():
        if first <= e < first + held:
            gate, up, down = get(e - first)
            tokens, slots = (chosen == e).nonzero(as_tuple=True)
            parts[tokens, slots] = moe_ref.hidden(x[tokens], gate, up) @ down.T
    return (weights.double()[..., None] * parts).sum(1)


def _router(router: route_op.Router) -> Tensor:
    """Undo `moe_route.op.repack`: int32 [parts, E/16, H/16, 32, 4] -> float32 [E, H]."""
    e, h = router.shape.experts, router.shape.hidden
    total = torch.zeros(e, h)
    for part in router.weight:
        words = part.view(e // 16, h // 32, 2, 8, 4, 2, 2).permute(0, 6, 3, 1, 4, 2, 5).contiguous()
        total += words.view(e, h // 2).view(BF16).float()
    return total


class RefAttention:
    """`MlaAttention` by its reference."""

    calls = Calls()

    def __init__(
        self, rows: int, nodes: int, heads: int, context: int, scale: float, device: torch.device, latent: int = 512,
        rope: int = 64, tokens: int | None = None, scratch: attention_op.Scratch | None = None, **given: Any,
    ) -> None:  # fmt: skip
        self.rows, self.nodes, self.heads, self.latent, self.rope = rows, nodes, heads, latent, rope
        self.tokens = rows * nodes if tokens is None else tokens
        self.scale, self.context = scale, context

    def plan(self, lengths: Tensor, counts: Tensor, starts: Tensor) -> None:
        for name, x in (("lengths", lengths), ("counts", counts), ("starts", starts)):
            attention_op._expect(name, x, (self.rows,), (torch.int32, torch.int64))
        self.calls.add("attention plan")
        self.step = (lengths.clone(), counts.clone(), starts.clone())
        assert int(counts.max()) <= self.nodes and int((lengths * (counts > 0)).max()) <= self.context

    def __call__(self, q: Tensor, q_pe: Tensor, cache: Tensor, table: Tensor, masks: Tensor, out: Tensor) -> Tensor:
        for name, x in (("q", q), ("out", out)):
            attention_op._expect(name, x, (self.tokens, self.heads, self.latent), (BF16,))
        attention_op._expect("table", table, (self.rows, table.shape[1]), (torch.int32,))
        attention_op._expect("masks", masks, (self.tokens, masks.shape[1]), (torch.int64,))
        self.calls.add("attention", 2)
        lengths, counts, starts = self.step
        seen = attention_ref.attend(q, q_pe, cache, table, lengths, counts, starts, masks, self.scale)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            out[start : start + count] = seen[start : start + count].to(BF16)
        return out


def _counted(calls: Calls, name: str, *args: Any, **given: Any) -> Any:
    """A function of kernels/rows/ref.py, which writes into the same outputs as the kernel."""
    calls.add(name)
    return getattr(rows_ref, name)(*args, **given)


def replace(patch: pytest.MonkeyPatch) -> Calls:
    """Put the references in place of the kernels until `patch` is undone; return the count of launches."""
    calls = Calls()
    refs = Refs(calls)
    for module, names in (
        (linear_op, ("linear",)),
        (norm_op, ("add_norm", "turn_and_store", "head_norm_rope", "ring_write")),
        (route_op, ("route",)),
        (moe_op, ("moe_int4",)),
        (draft_op, ("draft_attention",)),
        (tree_op, ("candidates", "grow", "flatten")),
        (accept_op, ("choose", "walk")),
        (commit_op, ("commit_latents",)),
    ):
        for name in names:
            patch.setattr(module, name, getattr(refs, name))
    for name in ("begin", "select", "advance", "synthetic", "guesses"):
        patch.setattr(rows_op, name, functools.partial(_counted, calls, name))
    for name in ("fit", "learn"):
        patch.setattr(sizes_op, name, getattr(sizes_ref, name))
    attention = type("CountedRefAttention", (RefAttention,), {"calls": calls})
    patch.setattr(attention_op, "MlaAttention", attention)
    patch.setattr(attention_op, "arch", lambda device: "sm_90a")
    return calls


@pytest.fixture
def cuda_refs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Run the CUDA model and engine on the CPU by the kernels' references."""
    yield replace(monkeypatch)
