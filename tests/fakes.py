"""A toy target whose every node can be checked against plain decoding, and drafters from good to hostile.

The toy language model's logits are a hash of all tokens before: any wrong token, order, position or missing latent
changes everything after it. The target keeps (token, position, layer) in its latent cache and asserts on each forward
that what it reads back is exactly the committed text.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from draftwood.config import Options, Plan
from draftwood.engine.loop import Engine
from draftwood.engine.step import Parts
from draftwood.kv.store import DraftStore, LatentStore
from draftwood.parallel.comm import Local

PRIME = 2147483629
VOCAB = 48
LAYERS, WIDTH, TAPS = 2, 3, 2


class Toy:
    """A deterministic language model over `vocab` tokens: a state per text, logits per state."""

    def __init__(self, vocab: int = VOCAB, seed: int = 0, scale: float = 9.0):
        g = torch.Generator().manual_seed(seed)
        self.vocab, self.scale = vocab, scale
        self._a, self._b = (int(x) for x in torch.randint(1 << 20, PRIME, (2,), generator=g))
        self._mul, self._add = torch.randint(1 << 20, PRIME, (2, vocab), generator=g)
        self.start = 12345

    def extend(self, state: int, token: int) -> int:
        return (state * self._a + (token + 1) * self._b) % PRIME

    def state(self, tokens) -> int:
        h = self.start
        for t in tokens:
            h = self.extend(h, int(t))
        return h

    def logits(self, state: int | Tensor) -> Tensor:
        """[..., V] float32"""
        state = torch.as_tensor(state)[..., None]
        return ((state * self._mul + self._add) % PRIME).double().div(PRIME).pow(3).mul(self.scale).float()

    def greedy(self, prompt, n: int) -> list[int]:
        """Plain decoding, written without any of the engine."""
        state, out = self.state(prompt), []
        for _ in range(n):
            out.append(int(self.logits(state).argmax()))
            state = self.extend(state, out[-1])
        return out


class FakeTarget:
    """The model's Target: same call, same slots; checks that each row's cache holds its committed text in every layer."""

    def __init__(self, toy: Toy):
        self.toy = toy
        self.forwards = 0
        self.nodes = 0

    def forward(self, tokens, positions, slots, ancestors, counts, verified):
        self.forwards += 1
        rows, nodes = tokens.shape
        taps = torch.full((rows, nodes, TAPS), float("nan"))
        states: list[list[int]] = []
        for r in range(rows):
            length, live = int(slots.lengths[r]), int(counts[r])
            self.nodes += live
            states.append(self._row(tokens[r], positions[r], slots, r, length, live, ancestors[r]))
            own = torch.tensor(states[-1])
            taps[r, :live] = torch.stack([own >> 16, own & 0xFFFF], -1).float()
            for layer in range(LAYERS):
                kept = torch.stack([tokens[r], positions[r], torch.full_like(tokens[r], layer)], -1).float()
                slots.cache[layer, slots.nodes[r, :live]] = kept[:live]
            slots.cache[:, slots.nodes[r, live:]] = float("nan")
        chosen = [states[r][i] for r, i in zip(*(v.tolist() for v in verified), strict=True)]
        return self.toy.logits(torch.tensor(chosen)), taps

    def _row(self, tokens, positions, slots, r, length, live, ancestors):
        kept = slots.cache[:, slots.prefix[r, :length]]
        where = torch.arange(length, dtype=kept.dtype)
        for layer in range(LAYERS):
            assert torch.equal(kept[layer, :, 1], where), f"row {r}: positions {kept[layer, :, 1].tolist()}"
            assert bool((kept[layer, :, 2] == layer).all())
            assert torch.equal(kept[layer, :, 0], kept[0, :, 0])
        own = slots.nodes[r, :live].tolist()
        assert len(set(own)) == live and not set(own) & set(slots.prefix[r, :length].tolist())
        base = self.toy.state(kept[0, :, 0].long().tolist())
        states, masks = [], []
        tokens, positions, ancestors = tokens.tolist(), positions.tolist(), ancestors.tolist()
        for i in range(live):
            mask = sum((word & (1 << 64) - 1) << 64 * w for w, word in enumerate(ancestors[i]))
            assert mask >> i == 1, f"node {i} sees nodes after it, or not itself"
            parents = [j for j in range(i) if masks[j] | 1 << i == mask and positions[j] == positions[i] - 1]
            if i == 0:
                assert mask == 1 and positions[0] == length
            else:
                assert len(parents) == 1, f"node {i} has no parent whose path it extends"
            masks.append(mask)
            states.append(self.toy.extend(states[parents[0]] if i else base, tokens[i]))
        return states


class FakeDrafter:
    """The model's Drafter, guessing the toy's own greedy text; `kind` bends the guesses.

    good: the toy's logits along its greedy text. blurred: half of the places replaced by noise. random, nan, inf, flat:
    of no use on purpose. Context features are the toy's states; what the window holds is asserted before each guess.
    """

    KINDS = ("good", "blurred", "random", "nan", "inf", "flat")

    def __init__(self, toy: Toy, kind: str = "good", seed: int = 0):
        self.toy, self.kind = toy, kind
        self.proposals = self.observed = 0
        self._noise = torch.Generator().manual_seed(seed)

    def propose(self, roots, window, block):
        self.proposals += 1
        out = torch.empty(len(roots), block - 1, self.toy.vocab)
        for r, root in enumerate(roots.tolist()):
            state = self.toy.extend(self._context(window, r), root)
            for d in range(block - 1):
                out[r, d] = self.toy.logits(state)
                state = self.toy.extend(state, int(out[r, d].argmax()))
        return self._bend(out)

    def _context(self, window, r) -> int:
        length, row, capacity = int(window.lengths[r]), int(window.row_ids[r]), window.keys.shape[2]
        if length == 0:
            return self.toy.start
        held = torch.arange(max(0, length - capacity), length)
        assert torch.equal(window.values[0, row, held % capacity, 0, 0].long(), held), "the window misses a position"
        high, low = window.keys[0, row, (length - 1) % capacity, 0].long().tolist()
        return high << 16 | low

    def _bend(self, out):
        out = out * 40  # sure of itself
        if self.kind == "good":
            return out
        noise = torch.randn(out.shape, generator=self._noise) * 20
        if self.kind == "blurred":
            return torch.where(torch.rand(out.shape[:2], generator=self._noise)[..., None] < 0.5, noise, out)
        if self.kind == "random":
            return noise
        if self.kind == "flat":
            return torch.zeros_like(out)
        bad = float("nan") if self.kind == "nan" else float("inf")
        pick = torch.rand(out.shape, generator=self._noise)
        out = torch.where(pick < 0.3, torch.full_like(out, bad), out)
        out = torch.where(pick > 0.8, torch.full_like(out, -float("inf")), out)
        out[torch.rand(out.shape[:2], generator=self._noise) < 0.2] = bad  # whole places
        return out

    def observe(self, taps, positions, path, window):
        for r in range(path.shape[0]):
            kept = path[r][path[r] >= 0].tolist()[-window.keys.shape[2] :]
            self.observed += len(kept)
            for node in kept:
                state = taps[r, node]
                assert not bool(state.isnan().any()), "a padding node was observed"
                position, row = int(positions[r, node]), int(window.row_ids[r])
                window.keys[0, row, position % window.keys.shape[2], 0] = state
                window.values[0, row, position % window.keys.shape[2], 0] = position


def fake_plan(budget: int | str = 8, block: int = 8, **changes) -> Plan:
    """A Plan of small sizes; `changes` are fields of Plan, or of its Options."""
    fields = {f.name for f in dataclasses.fields(Plan)}
    options = {k: v for k, v in changes.items() if k not in fields}
    chunk = changes.get("prefill_chunk", 64)
    values = {
        "options": Options(tree_budget=budget, **{"max_num_batched_tokens": max(chunk, 64), **options}),
        "model_path": "", "draft_path": None, "device": "cpu", "dtype": "float32", "world": 1, "max_model_len": 512,
        "max_num_seqs": 8, "prefill_chunk": chunk, "page_size": 16, "num_pages": 400, "block": block, "window": 2048,
        "max_budget": 64,
    }  # fmt: skip
    return Plan(**{**values, **{k: v for k, v in changes.items() if k in fields}})


def draft_store(plan: Plan) -> DraftStore:
    """Windows as the plan says; what a prefix cache keeps of them begins as garbage that no drafter may see."""
    slots = (plan.num_pages + 1) * plan.page_size if plan.options.enable_prefix_caching else 0
    store = DraftStore(1, plan.max_num_seqs, plan.window, 1, TAPS, torch.float32, "cpu", slots)
    store.kept_keys.fill_(-7)
    store.kept_values.fill_(-7)
    return store


def fake_engine(kind: str | None = "good", plan: Plan | None = None, toy: Toy | None = None, stop_ids=(), **parts) -> Engine:
    """An engine on the toy target with a drafter of `kind`, or none."""
    toy = toy or Toy()
    plan = plan or fake_plan()
    if kind is None:
        plan = dataclasses.replace(plan, block=0)
    return Engine(
        Parts(
            target=FakeTarget(toy),
            kv=LatentStore(LAYERS, plan.num_pages, plan.page_size, WIDTH, torch.float32, "cpu"),
            comm=Local(),
            vocab=toy.vocab,
            positions=plan.max_model_len,
            drafter=FakeDrafter(toy, kind) if kind else None,
            draft_kv=draft_store(plan) if kind else None,
            block=plan.block,
            **parts,
        ),
        plan,
        stop_ids,
    )


def run(engine: Engine, requests) -> dict[int, list[int]]:
    """Add (prompt, params) pairs at once, run to the end, return token ids by request id; pages must be had again.

    An engine without a drafter, which refuses trees, is asked for none.
    """
    if engine.plan.block == 0:
        requests = [(prompt, dataclasses.replace(params, tree_budget=None)) for prompt, params in requests]
    out: dict[int, list[int]] = {engine.add(prompt, params): [] for prompt, params in requests}
    while not engine.idle:
        for output in engine.step():
            out[output.request_id] += output.token_ids
    assert engine.scheduler.available == engine.plan.num_pages
    return out
