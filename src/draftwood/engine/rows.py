"""The state of every persistent row: how long it is, its root, its pages, how it samples. Every rank keeps the same.

A row's state begins with the StepPlan that starts it and then moves only by what steps accept, so ranks that follow
the same plans agree without being told, and on a GPU nothing here has to be read by the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.engine.request import SamplingParams
from draftwood.engine.scheduler import Start, StepPlan
from draftwood.spec.accept import Path
from draftwood.spec.echo import Echo
from draftwood.spec.grammar import Constraint, Grammars
from draftwood.spec.sampling import Floor, History, Sampling, uses_history


@dataclass(frozen=True)
class View:
    """The rows of one step, in the plan's order."""

    plan: StepPlan
    ids: Tensor
    """[R] persistent row ids."""
    lengths: Tensor
    """[R] committed tokens."""
    roots: Tensor
    """[R] the last known token; of no meaning where a chunk is forced."""
    tables: Tensor
    """[R, pages]"""
    sampling: Sampling
    warm: Tensor | None
    """Places of the rows whose drafter context is kept; None: all of them."""
    logprobs: int | None
    """Most log-probabilities that a row wants beside the chosen token's; None where not even that one's is wanted."""
    constraints: tuple[Constraint | None, ...] = ()
    """By row, how far along its grammar it is; empty where no row has one."""
    echoes: tuple[Echo | None, ...] = ()
    """By row, its text, where that helps to draft; empty where it helps no row."""

    def noise(self, vocab: int) -> Tensor | None:
        """Gumbel noise [R, depth + 1, V] of the positions that are chosen in this step; None when all rows are greedy."""
        ahead = torch.tensor([len(chunk) or 1 for chunk in self.plan.chunks])
        return self.sampling.noise(self.lengths.cpu() + ahead, self.plan.depth + 1, vocab)


class Rows:
    """State of `count` persistent rows with page tables `width` pages wide, padded with the `sink` page.

    `stop_ids` are the model's own end tokens, which an answer with min_tokens waits for; `grammars` are there where
    rows may have one; with `echo` the texts of rows that draft are kept for their trees.
    """

    def __init__(
        self,
        count: int,
        width: int,
        sink: int,
        vocab: int,
        device: torch.device | str,
        stop_ids: Iterable[int] = (),
        grammars: Grammars | None = None,
        echo: bool = False,
    ) -> None:
        self._grammars, self._echo = grammars, echo
        self._stop_ids = frozenset(stop_ids)
        self.vocab = vocab
        self.lengths = torch.zeros(count, dtype=torch.long, device=device)
        self.roots = torch.zeros(count, dtype=torch.long, device=device)
        self.tables = torch.full((count, width), sink, dtype=torch.long, device=device)
        self._sink = sink
        self._starts: dict[int, Start] = {}
        self._histories: dict[int, History | None] = {}
        self._floors: dict[int, Floor | None] = {}
        self._constraints: dict[int, Constraint] = {}
        self._echoes: dict[int, Echo | None] = {}
        self._kept: View | None = None

    def view(self, plan: StepPlan) -> View:
        """Begin the rows that start with this plan, lengthen the tables that grow, and return all rows of the step."""
        for start in plan.starts:
            self._begin(start)
        for grown in plan.growths:
            pages = torch.tensor(grown.pages, device=self.tables.device)
            self.tables[grown.row, grown.place : grown.place + len(pages)] = pages
        if self._kept is None or self._kept.plan.rows != plan.rows:
            self._kept = self._collect(plan)
        elif plan.growths:
            self._kept = dataclasses.replace(self._kept, tables=self.tables[self._kept.ids])
        ids = self._kept.ids
        self._kept = dataclasses.replace(self._kept, plan=plan, lengths=self.lengths[ids], roots=self.roots[ids])
        return self._kept

    def _begin(self, start: Start) -> None:
        self._kept = None
        self.lengths[start.row] = start.cached
        self.tables[start.row] = self._sink
        self.tables[start.row, : len(start.pages)] = torch.tensor(start.pages, device=self.tables.device)
        self._starts[start.row] = start
        history = self._histories[start.row] = History(start.prompt, self.vocab) if uses_history(start.params) else None
        floor = self._floors[start.row] = self._floor(start.params)
        self._constraints.pop(start.row, None)
        self._echoes[start.row] = Echo((*start.prompt, *start.generated)) if self._echo and start.drafts else None
        if start.params.grammar is not None and self._grammars is not None:
            self._constraints[start.row] = self._grammars.start(start.params.grammar)
        # An answer that was interrupted: what was generated is known again before its first chunk is forced.
        if history is not None:
            history.extend(start.generated)
        if floor is not None:
            floor.extend(len(start.generated))
        if start.row in self._constraints:
            self._constraints[start.row].commit(start.generated)

    def _floor(self, params: SamplingParams) -> Floor | None:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._stop_ids)
        if not params.min_tokens or not ends:
            return None
        return Floor(np.array(sorted(ends), np.int64), params.min_tokens)

    def _collect(self, plan: StepPlan) -> View:
        """Gather what stays the same while the same rows run."""
        ids = torch.tensor(plan.rows, device=self.lengths.device)
        starts = [self._starts[row] for row in plan.rows]
        params = [start.params for start in starts]
        drafts = [start.drafts for start in starts]
        constraints = tuple(self._constraints.get(row) for row in plan.rows)
        echoes = tuple(self._echoes[row] for row in plan.rows)
        return View(
            plan=plan,
            ids=ids,
            lengths=self.lengths[ids],
            roots=self.roots[ids],
            tables=self.tables[ids],
            sampling=Sampling.build(
                params,
                [p.seed or 0 for p in params],
                [self._histories[row] for row in plan.rows],
                [self._floors[row] for row in plan.rows],
            ),
            warm=None if all(drafts) else torch.from_numpy(np.flatnonzero(drafts)),
            logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
            constraints=constraints if any(constraints) else (),
            echoes=echoes if any(echoes) else (),
        )

    def advance(self, view: View, path: Path) -> None:
        """Commit what a step accepted: lengths grow, the final choice is the new root, penalties count the tokens."""
        self.lengths[view.ids] = view.lengths + path.counts.to(self.lengths.device)
        self.roots[view.ids] = path.final.to(self.roots.device)
        for place, history in enumerate(view.sampling.history):
            if history is not None and view.plan.emits[place]:
                history.extend(path.tokens[place, : int(path.emitted[place])].tolist())
        for place, floor in enumerate(view.sampling.floors):
            if floor is not None and view.plan.emits[place]:
                floor.extend(int(path.emitted[place]))
        for place, echo in enumerate(view.echoes):
            if echo is not None and view.plan.emits[place]:
                echo.extend(path.tokens[place, : int(path.emitted[place])].tolist())
        for place, constraint in enumerate(view.constraints):
            if constraint is not None and view.plan.emits[place]:
                constraint.commit(path.tokens[place, : int(path.emitted[place])].tolist())
