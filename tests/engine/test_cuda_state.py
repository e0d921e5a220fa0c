"""What a GPU is told about a step: page tables of places are those of their rows, and only what changed is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.engine.cuda.state import DeviceRows
from draftwood.engine.request import SamplingParams
from draftwood.engine.scheduler import Growth, Start, StepPlan
from draftwood.model.cuda.keys import Sizes

ROWS, SINK, WIDTH_PAGES = 5, 999, 6


def device_rows() -> DeviceRows:
    sizes = Sizes.make(WIDTH_PAGES * 64 - 80, ROWS, 8, 8, 64)
    return DeviceRows(sizes, ROWS, SINK, 96, torch.device("cpu"), "shared")


def plan(rows: list[int], starts=(), growths=(), budgets=None) -> StepPlan:
    """A step in which `rows` decode."""
    n = len(rows)
    budgets = (8,) * n if budgets is None else tuple(budgets)
    return StepPlan(tuple(starts), tuple(rows), ((),) * n, (True,) * n, budgets, (False,) * n, 7, 100, tuple(growths))


moves = st.lists(
    st.tuples(st.sampled_from(["start", "grow", "end", "order", "rehearse", "budget", "step"]), st.integers(0, ROWS - 1)),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(moves)
def test_page_tables_and_budgets_of_places_are_those_of_their_rows(steps):
    state, tables, order, fresh = device_rows(), dict[int, list[int]](), list[int](), iter(range(10**6))
    budgets = [8] * ROWS
    for what, row in steps:
        starts, growths = [], []
        if what == "start" and row not in tables:
            tables[row] = [next(fresh), next(fresh)]
            starts.append(Start(row, tuple(tables[row]), SamplingParams(), (), True))
            order.append(row)
        elif what == "grow" and row in tables and len(tables[row]) < WIDTH_PAGES:
            growths.append(Growth(row, len(tables[row]), (next(fresh),)))
            tables[row].append(growths[0].pages[0])
        elif what == "end" and row in tables:
            del tables[row]
            order.remove(row)
        elif what == "order":
            order.reverse()
        elif what == "rehearse":
            state.rehearse([4, 1], 70, 3)
        elif what == "budget":
            budgets[row] = (budgets[row] + 5) % 9
        if not order:
            continue
        step = plan(order, starts, growths, [budgets[row] for row in order])
        state.stage(step, state.key(step))
        assert state.given("budgets", len(order)).tolist() == list(step.budgets)
        assert state.given("ids", len(order)).tolist() == order and int(state.given("live", 1)) == len(order)
        for place, row in enumerate(order):
            line = state.table(place + 1)[place].tolist()
            assert line[: len(tables[row])] == tables[row] and set(line[len(tables[row]) :]) == {SINK}


def test_a_row_that_gains_a_page_sends_its_line_and_no_other(monkeypatch):
    state, sent = device_rows(), []
    send = DeviceRows._send_tables
    monkeypatch.setattr(
        DeviceRows, "_send_tables", lambda self, places, lines: sent.append(places.tolist()) or send(self, places, lines)
    )
    starts = [Start(r, (2 * r, 2 * r + 1), SamplingParams(), (), True) for r in range(4)]
    steps = [
        plan([0, 1, 2, 3], starts),
        plan([0, 1, 2, 3], growths=[Growth(2, 2, (50,))]),
        plan([0, 1, 2, 3]),
        plan([0, 2, 3]),
        plan([0, 2, 3], growths=[Growth(0, 2, (51,)), Growth(3, 2, (52,))]),
    ]
    for step in steps:
        state.stage(step, state.key(step))
    assert sent == [[0, 1, 2, 3], [2], [1, 2], [0, 2]]
    assert np.array_equal(state.table(3)[:, 2].numpy(), [51, 50, 52])


@pytest.mark.parametrize("bridged", [0, 1 << 18])
def test_page_tables_between_two_that_change_stay(bridged, monkeypatch):
    monkeypatch.setattr("draftwood.engine.cuda.state.BRIDGED", bridged)
    state = device_rows()
    starts = [Start(r, (2 * r, 2 * r + 1), SamplingParams(), (), True) for r in range(4)]
    for step in (plan([0, 1, 2, 3], starts), plan([0, 1, 2, 3], growths=[Growth(0, 2, (51,)), Growth(3, 2, (52,))])):
        state.stage(step, state.key(step))
    assert state.table(4)[:, :3].tolist() == [[0, 1, 51], [2, 3, SINK], [4, 5, SINK], [6, 7, 52]]
