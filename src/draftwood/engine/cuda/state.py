"""The state of rows on a GPU, and what the host tells it about a step.

Lengths, roots and counts of generated tokens live on the device and are never read by the host. Everything else about a row
stands still while it runs; it is kept here and sent in the order of a step's places when that order changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.config import PAGE_SIZE
from draftwood.engine.request import MAX_BIASES
from draftwood.engine.scheduler import Growth, Start, StepPlan
from draftwood.kernels.accept.ref import Params
from draftwood.kernels.rows.ref import Places, State
from draftwood.model.cuda import keys
from draftwood.model.cuda.keys import PIECE, Key, Sizes

FLOOR_IDS = keys.FLOOR_IDS
"""Most end tokens of a row."""
BRIDGED = 1 << 18
"""Bytes between two stretches of page tables that are sent with them: a copy takes the host 10 us, as long as these take PCIe."""
_OWN_NOISE = 0x5DEECE66D
"""Flips bits of a seed where the drafter is asked for noise of its own."""
Fields = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


def carve(buffer: Tensor, fields: Fields) -> dict[str, Tensor]:
    """Views of a byte buffer, one after another on 16 bytes."""
    views, at = {}, 0
    for name, dtype, shape in fields:
        size = dtype.itemsize * int(np.prod(shape))
        views[name] = buffer[at : at + size].view(dtype).view(shape)
        at += -(-size // 16) * 16
    return views


@functools.cache
def _places_of(
    fields: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...],
) -> tuple[tuple[str, Any, tuple[int, ...], int, int], ...]:
    """(name, numpy type, shape, first byte, end) of each field."""
    found, at = [], 0
    for name, dtype, shape in fields:
        size = dtype.itemsize * int(np.prod(shape))
        found.append((name, torch.empty(0, dtype=dtype).numpy().dtype, shape, at, at + size))
        at += -(-size // 16) * 16
    return tuple(found)


def carve_host(buffer: Tensor, fields: Fields) -> dict[str, NDArray[Any]]:
    """As `carve`, of a buffer on the host, as arrays."""
    raw = buffer.numpy()
    return {name: raw[a:b].view(dtype).reshape(shape) for name, dtype, shape, a, b in _places_of(tuple(fields))}


def carved_bytes(fields: Fields) -> int:
    """Bytes that `carve` needs."""
    return sum(-(-dtype.itemsize * int(np.prod(shape)) // 16) * 16 for _, dtype, shape in fields)


def pinned(size: int, device: torch.device) -> Tensor:
    """A byte buffer that copies to and from `device` need not wait for; torch reuses its memory only after they ended."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Mirror:
    """A byte buffer on the device and the host's latest version of it. `send` copies, when something changed."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._device, size = device, carved_bytes(fields)
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._here = torch.zeros(size, dtype=torch.uint8)
        self._sent = self._here.numpy().copy()
        self.device = carve(self._there, fields)
        self.host: dict[str, NDArray[Any]] = {k: v.numpy() for k, v in carve(self._here, fields).items()}

    def send(self) -> None:
        """Bring the device's version up to date, behind what runs there."""
        if np.array_equal(self._here.numpy(), self._sent):
            return
        self._sent[:] = self._here.numpy()
        staged = pinned(len(self._here), self._device)
        staged.copy_(self._here)
        self._there.copy_(staged, non_blocking=True)


class _Piece(NamedTuple):
    """A part of a prompt's chunk that takes a place: of which plan row, where it begins in the chunk, its tokens, and if it returns
    one."""

    row: int
    at: int
    size: int
    emits: bool


class _Running:
    """What the host knows of the running rows; arrays are by row, so that a step of many gathers them at once."""

    def __init__(self, rows: int) -> None:
        self.numbers = np.zeros((rows, 8), np.float32)
        self.top_k, self.logprobs = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.seeds, self.draft_seeds = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.history = np.full(rows, -1, np.int64)
        """The row whose line of history it reads, itself, or -1."""
        self.drafts = np.zeros(rows, bool)
        """False when nobody will ever want the drafter's context."""
        self.known = np.zeros(rows, np.int64)
        """Committed tokens of the rows' prompts; lengths beyond are the device's."""
        self.floor_from = np.zeros(rows, np.int64)
        """Tokens of the answer that are still to come, when a row begins, before its end tokens may be chosen."""
        self.floor_ends = np.zeros(rows, np.int64)
        """Tokens of prompt and answer from which on that is; 0 until its prompt is known."""
        self.floors: dict[int, NDArray[np.int32]] = {}
        """Tokens that may not be chosen before, where there are any."""
        self.biases: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}

    def begin(self, start: Start, stop_ids: frozenset[int], own_noise: bool) -> None:
        """A row is taken over."""
        row, params = start.row, start.params
        self.numbers[row, :6] = (params.temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
                                 params.repetition_penalty)  # fmt: skip
        self.top_k[row], self.logprobs[row] = min(params.top_k, (1 << 31) - 1), params.logprobs or 0
        self.seeds[row] = params.seed or 0
        self.draft_seeds[row] = self.seeds[row] ^ (_OWN_NOISE if own_noise else 0)
        self.history[row] = row if params.counts_tokens else -1
        self.drafts[row], self.known[row] = start.drafts, start.cached
        self.floor_from[row], self.floor_ends[row] = params.min_tokens - len(start.generated), 0
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
        self._keep(self.floors, row, np.array(sorted(ends), np.int32) if params.min_tokens and ends else None)
        bias = sorted(params.logit_bias.items())
        pair = np.array([i for i, _ in bias], np.int32), np.array([v for _, v in bias], np.float32)
        self._keep(self.biases, row, pair if bias else None)

    @staticmethod
    def _keep(given: dict[int, Any], row: int, value: Any) -> None:
        given.pop(row, None)
        if value is not None:
            given[row] = value


@dataclass(frozen=True)
class HostPlaces:
    """Of each place: is it a piece of a prompt, and does it return tokens (0 or 1)."""

    forced: NDArray[np.bool_]
    emits: NDArray[np.int64]


@dataclass(frozen=True)
class Staged:
    """A step as its graph sees it: the graph's key, and the place whose result is each plan row's."""

    key: Key
    results: tuple[int, ...]


class DeviceRows:
    """State of `rows` persistent rows; `sink` pads page tables. `noise` as Options has it."""

    def __init__(
        self, sizes: Sizes, rows: int, sink: int, vocab: int, device: torch.device, noise: str, stop_ids: Iterable[int] = ()
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        """The model's end tokens."""
        self.sizes, self.vocab, self.device, self._noise = sizes, vocab, device, noise
        self.state = State(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, vocab, dtype=torch.int32, device=device),
        )
        self._rows = _Running(rows)
        self._steady: object = None
        """What the last step sent was made of, if all its rows decoded; but for their budgets."""
        self._budgets: tuple[int, ...] = ()
        self._pages = np.full((rows, sizes.width), sink, np.int32)
        self._versions = np.zeros(rows, np.int64)
        """How often a row's pages have changed."""
        self._sink = sink
        places, width = sizes.places, sizes.width
        self._inputs = Mirror(_fields(places, max(sizes.pieces, 1)), device)
        self._tables = torch.full((places, width), sink, dtype=torch.int32, device=device)
        self._lines = np.full((places, width), sink, np.int32)
        """The same as the host has sent it."""
        self._shown = np.full((places, 2), -1, np.int64)
        """Of each place: the row whose pages it has in `_tables`, and the version of them."""
        self._bias = Mirror([("ids", torch.int32, (rows * MAX_BIASES,)), ("values", torch.float32, (rows * MAX_BIASES,))], device)
        self._floors = Mirror([("ids", torch.int32, (rows * FLOOR_IDS,))], device)
        self._prompt = Mirror([("tokens", torch.int32, (max(sizes.pieces, 1) * PIECE,))], device)
        self._inputs.host["history_rows"][:] = -1
        self._inputs.send()

    # ------------------------------------------------------------------------------------------------ rows begin and grow

    def begin(self, start: Start) -> None:
        """Take a row over; its length and root come with the last piece of its prompt."""
        self._rows.begin(start, self._stop_ids, self._noise == "own")
        self._pages[start.row] = self._sink
        self._pages[start.row, : len(start.pages)] = start.pages
        self._versions[start.row] += 1
        if start.params.counts_tokens:
            self._count(start)

    def grow(self, growth: Growth) -> None:
        """Lengthen a row's page table."""
        self._versions[growth.row] += 1
        self._pages[growth.row, growth.place : growth.place + len(growth.pages)] = growth.pages

    def _count(self, start: Start) -> None:
        """Set a row's line of history: 2 for each time a token was generated, 1 if it is in the prompt."""
        line = np.zeros(self.vocab, np.int32)
        np.add.at(line, np.array(start.generated, np.int64), 2)
        line[np.unique(np.array(start.prompt, np.int64))] += 1
        staged = pinned(4 * self.vocab, self.device)
        staged.view(torch.int32).copy_(torch.from_numpy(line))
        assert self.state.history is not None
        self.state.history[start.row].copy_(staged.view(torch.int32), non_blocking=True)

    # ---------------------------------------------------------------------------------------------------------- a step

    def key(self, plan: StepPlan) -> Key:
        """The graph of a plan."""
        free = [budget for budget, chunk in zip(plan.budgets, plan.chunks, strict=True) if not chunk]
        begun = {start.row: start.drafts for start in plan.starts}
        drafts = any(begun[row] if row in begun else self._rows.drafts[row] for row in plan.rows)
        return self.sizes.key(max(len(free), 1), max(free, default=0), len(free) < len(plan.rows), drafts)

    def stage(self, plan: StepPlan, key: Key) -> Staged:
        """Begin and lengthen the plan's rows, and send what its graph reads: while the same rows decode alike, their budgets if
        they have changed, the page tables of those that gained pages, and nothing else. No row drafts more than the graph has
        room for."""
        prompts = any(plan.chunks)
        steady, budgets = (plan.rows, plan.auto, plan.emits), plan.budgets
        alike = steady == self._steady and not (plan.starts or prompts)
        for start in plan.starts:
            self.begin(start)
        for growth in plan.growths:
            self.grow(growth)
        if alike:
            if budgets != self._budgets:
                self._budgets = budgets
                self._inputs.host["budgets"][: len(budgets)] = np.minimum(budgets, key.budget)
                self._inputs.send()
            if plan.growths:
                self._show_pages(np.array(plan.rows, np.int64))
            return Staged(key, tuple(range(len(plan.rows))))
        self._steady, self._budgets = None if prompts else steady, budgets
        free = [i for i, chunk in enumerate(plan.chunks) if not chunk]
        pieces = list[_Piece]()
        results = {i: place for place, i in enumerate(free)}
        forced = [i for i, chunk in enumerate(plan.chunks) if chunk]
        for i in forced:
            size = len(plan.chunks[i])
            for at in range(0, size, PIECE):
                results[i] = len(free) + len(pieces)
                pieces.append(_Piece(i, at, min(PIECE, size - at), at + PIECE >= size and plan.emits[i]))
        for i in forced:
            row = plan.rows[i]
            if plan.emits[i] and row in self._rows.floors:
                self._rows.floor_ends[row] = self._rows.known[row] + len(plan.chunks[i]) + self._rows.floor_from[row]
        self._fill(plan, free, pieces, key.budget)
        for i in forced:
            self._rows.known[plan.rows[i]] += len(plan.chunks[i])
        return Staged(key, tuple(results[i] for i in range(len(plan.rows))))

    def rehearse(self, budgets: Sequence[int], context: int, pages: int, automatic: bool = False) -> None:
        """Send a step of greedy rows after `context` tokens, which may draft so many nodes each, or with `automatic` fewer; of no
        request. They use the first of `pages` pages, which nobody has yet."""
        host, self._steady, rows = self._inputs.host, None, len(budgets)
        host["live"][0] = host["free"][0] = rows
        host["ids"][:rows] = np.arange(rows)
        host["budgets"][:rows], host["history_rows"][:rows], host["floor_ends"][:rows] = budgets, -1, 0
        host["bias_ptr"][:] = host["floor_ptr"][:] = 0
        host["automatic"][:rows] = automatic
        for name in ("forced", "temperature", "top_k", "seeds", "draft_seeds", "chunks"):
            host[name][:rows] = 0
        host["emits"][:rows], host["numbers"][:rows] = 1, (0, 1, 0, 0, 0, 1, 0, 0)
        self._inputs.send()
        need = -(-(context + 1 + max(budgets)) // PAGE_SIZE)
        at = np.arange(rows)[:, None] * need + np.arange(self.sizes.width)
        lines = np.where(np.arange(self.sizes.width) < need, at % pages, self._sink).astype(np.int32)
        self._send_tables(np.arange(rows), lines)
        self._shown[:rows] = -1
        self.state.lengths[:rows] = context
        self.state.roots[:rows] = (torch.arange(rows, device=self.device) * 7919 + 17) % self.vocab

    def host_places(self, live: int) -> HostPlaces:
        """What was sent last about the first `live` places."""
        host = self._inputs.host
        return HostPlaces(host["forced"][:live].astype(bool), host["emits"][:live].astype(np.int64))

    def logprobs(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """How many log-probabilities each of some rows wants beside the chosen token's."""
        return self._rows.logprobs[list(rows)]

    def silence(self) -> None:
        """Send a step without rows: a graph that runs on it touches nothing."""
        self._steady = None
        for name in ("live", "free", "pieces", "piece_places"):
            self._inputs.host[name][:] = 0
        self._inputs.send()

    def _fill(self, plan: StepPlan, decoding: list[int], pieces: list[_Piece], budget: int) -> None:
        """decoding: plan rows of the first places; pieces: of those behind. budget: most nodes beyond a root that the graph has
        room for."""
        host, free, live, rows = self._inputs.host, len(decoding), len(decoding) + len(pieces), self._rows
        which = np.array(decoding + [piece.row for piece in pieces], np.int64)
        ids, size, at = np.array(plan.rows, np.int64)[which], np.zeros(live, np.int64), np.zeros(live, np.int64)
        emits = np.array(plan.emits)[which]
        if pieces:
            _, at[free:], size[free:], emits[free:] = zip(*pieces, strict=True)
        host["live"][0], host["free"][0] = live, free
        host["ids"][:live], host["chunks"][:live], host["emits"][:live] = ids, size, emits
        host["forced"][:live] = np.arange(live) >= free
        host["automatic"][:live] = np.array(plan.auto)[which]
        host["budgets"][:live] = np.where(size == 0, np.minimum(np.array(plan.budgets)[which], budget), 0)
        host["bases"][:live] = np.where(size > 0, rows.known[ids] + at, 0)
        host["offsets"][:live] = np.cumsum(size) - size
        host["numbers"][:live], host["temperature"][:live] = rows.numbers[ids], rows.numbers[ids, 0]
        host["top_k"][:live], host["history_rows"][:live] = rows.top_k[ids], rows.history[ids]
        host["seeds"][:live], host["draft_seeds"][:live] = rows.seeds[ids], rows.draft_seeds[ids]
        host["floor_ends"][:live] = rows.floor_ends[ids]
        host["piece_places"][:] = np.minimum(free + np.arange(len(host["piece_places"])), live - 1)
        host["pieces"][0] = live - free
        places = list(zip(ids.tolist(), emits.tolist(), strict=True))
        self._fill_floors([rows.floors.get(row) if emit else None for row, emit in places] if rows.floors else [])
        self._fill_bias([rows.biases.get(row) if emit else None for row, emit in places] if rows.biases else [])
        self._inputs.send()
        self._show_pages(ids)
        if live > free:
            tokens = [token for piece in pieces for token in plan.chunks[piece.row][piece.at : piece.at + piece.size]]
            self._prompt.host["tokens"][: len(tokens)] = tokens
            self._prompt.send()

    def _show_pages(self, ids: NDArray[np.int64]) -> None:
        """Send the page tables of places whose row, or whose row's pages, are not those they had: long contexts have wide tables,
        and in a step of many rows some row nearly always gains a page."""
        now = np.stack((ids, self._versions[ids]), 1)
        changed = np.flatnonzero((now != self._shown[: len(ids)]).any(1))
        if len(changed):
            self._send_tables(changed, self._pages[ids[changed]])
            self._shown[changed] = now[changed]

    def _send_tables(self, places: NDArray[np.int64], lines: NDArray[np.int32]) -> None:
        """Replace the page tables of places, ascending, by `lines`."""
        self._lines[places] = lines
        skipped = (np.diff(places) - 1) * self._lines[0].nbytes
        cuts = np.flatnonzero(skipped > BRIDGED).tolist()
        for first, last in zip([0, *(cut + 1 for cut in cuts)], [*cuts, -1], strict=True):
            part = slice(int(places[first]), int(places[last]) + 1)
            staged = pinned(self._lines[part].nbytes, self.device).view(torch.int32).view(-1, self.sizes.width)
            staged.copy_(torch.from_numpy(self._lines[part]))
            self._tables[part].copy_(staged, non_blocking=True)

    def _fill_bias(self, given: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]] | None]) -> None:
        """given: of each place; none where no row has any."""
        pointers, at = self._inputs.host["bias_ptr"], 0
        pointers[0] = 0
        for place, bias in enumerate(given):
            if bias is not None:
                self._bias.host["ids"][at : at + len(bias[0])] = bias[0]
                self._bias.host["values"][at : at + len(bias[0])] = bias[1]
                at += len(bias[0])
            pointers[place + 1] = at
        pointers[len(given) + 1 :] = at
        if at:
            self._bias.send()

    def _fill_floors(self, given: Sequence[NDArray[np.int32] | None]) -> None:
        """given: of each place; none where no row has any."""
        ends = np.cumsum([0, *(0 if ids is None else len(ids) for ids in given)])
        self._inputs.host["floor_ptr"][: len(ends)] = ends
        self._inputs.host["floor_ptr"][len(ends) :] = ends[-1]
        if ends[-1]:
            self._floors.host["ids"][: ends[-1]] = np.concatenate([ids for ids in given if ids is not None])
            self._floors.send()

    # --------------------------------------------------------------------------------------------- what kernels are given

    def given(self, name: str, places: int) -> Tensor:
        """An input of the first `places` places (or the counters, whole)."""
        x = self._inputs.device[name]
        return x if name in ("live", "free", "pieces", "piece_places") else x[:places]

    def table(self, places: int) -> Tensor:
        """Page tables int32 [places, width]."""
        return self._tables[:places]

    def places(self, places: int) -> Places:
        """What `begin`, `select` and `advance` read."""
        names = ("live", "free", "ids", "bases", "chunks", "offsets", "emits")
        given = {name: self.given(name, places) for name in (*names, "floor_ends")}
        return Places(**given, prompt=self._prompt.device["tokens"])

    def params(self, places: int, floor_left: Tensor) -> Params:
        """What `choose` reads; floor_left int32 [places] as `begin` has left it."""
        return Params(
            self.given("numbers", places), self.given("top_k", places), self.given("seeds", places),
            self.given("bias_ptr", places + 1), self._bias.device["ids"], self._bias.device["values"],
            self.state.history, self.given("history_rows", places), floor_left, self.given("floor_ptr", places + 1),
            self._floors.device["ids"],
        )  # fmt: skip


def _fields(places: int, pieces: int) -> Fields:
    longs, ints = torch.int64, torch.int32
    one = [(name, ints, (1,)) for name in ("live", "free", "pieces")]
    each = [(name, longs, (places,)) for name in ("ids", "bases", "seeds", "draft_seeds")]
    each += [(name, ints, (places,)) for name in ("chunks", "offsets", "budgets", "top_k", "history_rows", "floor_ends")]
    each += [(name, torch.uint8, (places,)) for name in ("emits", "forced", "automatic")]
    rest: Fields = [
        ("numbers", torch.float32, (places, 8)), ("temperature", torch.float32, (places,)),
        ("bias_ptr", ints, (places + 1,)), ("floor_ptr", ints, (places + 1,)), ("piece_places", longs, (pieces,)),
    ]  # fmt: skip
    return [*one, *each, *rest]
