"""`check` passes only what is identical or a near-tie, and covers every combination it was asked for."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from draftwood import cli, nano, samples
from draftwood.commands import check
from draftwood.commands.check import NEAR_TIES, Answer, Tally, Task, compare, count, near_tie, plan_tasks, tally
from draftwood.config import Options

NEAR_TIE = NEAR_TIES["float32"]
PLAIN = Answer((5, 6, 7), "length", 2, (3.0, NEAR_TIE / 2, 2.0))
STOPPED = Answer((5, 6), "stop", 1, (3.0, NEAR_TIE / 2))


def test_equal_runs_are_identical():
    assert compare(PLAIN, Answer((5, 6, 7), "length", 1)) is None


@pytest.mark.parametrize(
    ("plain", "other", "place", "near"),
    [
        (PLAIN, Answer((5, 9, 7), "length", 1), 1, True),
        (PLAIN, Answer((9, 9, 9), "length", 1), 0, False),
        (PLAIN, Answer((5, 6), "length", 1), 2, False),
        (PLAIN, Answer((5, 6, 7), "stop", 1), 3, False),
        (PLAIN, Answer((5, 6, 7, 8), "length", 1), 3, False),
        (PLAIN, Answer((5,), "stop", 1), 1, True),
        (PLAIN, Answer((5,), "length", 1), 1, False),
        (STOPPED, Answer((5, 8, 9), "length", 1), 1, True),
        (PLAIN, Answer((), "stop", 1), 0, False),
    ],
)
def test_only_the_first_difference_at_a_small_gap_is_a_near_tie(plain, other, place, near):
    found = compare(plain, other)
    assert (found.place, found.near_tie) == (place, near)


def test_how_wide_a_near_tie_may_be_depends_on_the_type():
    other, wide = Answer((9, 6, 7), "length", 1), Answer((5, 6, 7), "length", 2, (0.2, 3.0, 2.0))
    assert not compare(wide, other).near_tie and compare(wide, other, NEAR_TIES["bfloat16"]).near_tie
    assert near_tie(Options("nano", device="cpu")) == near_tie(Options("nano", dtype="float32")) == NEAR_TIE
    assert near_tie(Options("nano", device="cpu", dtype="bfloat16")) == near_tie(Options("nano", device="cuda")) == 0.25
    counts = Tally(0.0, 8, 1)
    count(counts, wide, other, 0.25)
    assert (counts.near_ties, counts.different, counts.widest) == (1, 0, 0.2)


def test_every_run_is_identical_or_near_tie_or_different():
    counts = Tally(0.0, 8, 1)
    for tokens in ((5, 6, 7), (5, 9, 9), (1, 1, 1)):
        count(counts, PLAIN, Answer(tokens, "length", 1))
    assert (counts.runs, counts.identical, counts.near_ties, counts.different) == (3, 1, 1, 1)
    assert counts.widest == NEAR_TIE / 2
    assert counts.accept_length == 2.0


@pytest.mark.parametrize("prompts", [1, 5, 16])
def test_tasks_cover_every_prompt_once_in_every_combination(prompts):
    tasks = list(plan_tasks(prompts, (1, 8), (0.0, 1.0), (1, 3), 16, 1))
    runs = [(t.plain, t.temperature, t.budget, t.batch, i) for t in tasks for i in t.indexes]
    assert len(runs) == len(set(runs)) == prompts * 2 * (1 + 2 * 2)
    assert all(t.budget == 0 and t.batch == 1 and len(t.indexes) == 1 for t in tasks if t.plain)


def test_the_seed_of_a_prompt_depends_on_nothing_but_the_prompt():
    assert {Task(1.0, b, batch, (2,), 8, 5).params(2).seed for b in (0, 8) for batch in (1, 4)} == {7}


def wrong(llm, task):
    """Answers of an engine whose trees of 8 change the second prompt's text."""
    plain = Answer((1, 2, 3), "length", 2, (1.0, 1.0, 1.0))
    return [Answer((1, 9, 3), "length", 1) if task.budget == 8 and i == 1 else plain for i in task.indexes]


def run(monkeypatch, capsys, answers, *flags):
    fake = SimpleNamespace(
        fitting=lambda options: 1, spread=lambda options, jobs, work, tasks: ((t, answers(None, t)) for t in tasks)
    )
    monkeypatch.setattr(check, "workers", fake)
    code = cli.main(["check", "nano", "--prompts", "2", "--batch", "1,2", "--temperatures", "0", "--json", *flags])
    shown = capsys.readouterr()
    return code, json.loads(shown.out.splitlines()[-1]), shown.err


def test_a_difference_is_exit_1_and_named(monkeypatch, capsys):
    code, line, notes = run(monkeypatch, capsys, wrong, "--budgets", "1,8")
    assert code == 1
    assert (line["runs"], line["identical"], line["near_ties"], line["different"]) == (8, 6, 0, 2)
    assert f"{samples.SAMPLES[1].name}, T 0, budget 8, batch 2: after 1 equal tokens plain has token 2" in notes


def test_no_difference_is_exit_0(monkeypatch, capsys):
    code, line, _ = run(monkeypatch, capsys, wrong, "--budgets", "1,4")
    assert (code, line["different"], line["identical"]) == (0, 0, 8)
    assert line["near_tie_bound"] == NEAR_TIE


@pytest.mark.parametrize(("budgets", "code"), [("8", 1), ("4", 0)])
def test_a_reader_that_has_gone_changes_neither_code_nor_ends_in_a_traceback(monkeypatch, budgets, code):
    fake = SimpleNamespace(fitting=lambda _: 1, spread=lambda options, jobs, work, tasks: ((t, wrong(None, t)) for t in tasks))
    monkeypatch.setattr(check, "workers", fake)
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    assert cli.main(["check", "nano", "--prompts", "2", "--batch", "1", "--temperatures", "0", "--budgets", budgets]) == code


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompts", "99"),
        ("--budgets", "65"),
        ("--budgets", "x"),
        ("--temperatures", "-1"),
        ("--batch", "0"),
        ("--max-tokens", "0"),
        ("--draft", "none"),
        ("--tp", "3"),
        ("--jobs", "-1"),
        ("--jobs", "2", "--tp", "2"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, flags):
    assert cli.main(["check", "nano", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1


def test_tallies_are_by_temperature_batch_and_budget():
    tasks = list(plan_tasks(2, (1, 8), (0.0,), (1, 2), 8, 1))
    tallies, lines = tally(samples.first(2), [(t, wrong(None, t)) for t in tasks])
    assert [(t.batch, t.budget, t.different) for t in tallies] == [(1, 1, 0), (1, 8, 1), (2, 1, 0), (2, 8, 1)]
    assert len(lines) == 2


def test_nano_is_identical_with_trees_in_batches(capfd):
    flags = ("--prompts", "3", "--max-tokens", "12", "--budgets", "3,64", "--temperatures", "0,1", "--batch", "1,3", "--json")
    assert cli.main(["check", str(nano.path()), "--jobs", "2", *flags]) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert line["different"] == 0
    assert line["runs"] == 3 * 2 * 2 * 2


def test_logits_with_other_bits_are_a_difference_even_where_the_tokens_are_equal():
    plain = Answer((5, 6, 7), "length", 2, (), (11, 12, 13))
    assert compare(plain, Answer((5, 6, 7), "length", 1, (), (11, 12, 13))) is None
    found = compare(plain, Answer((5, 6, 7), "length", 1, (), (11, 99, 13)))
    assert found.place == 1 and found.logits and not found.near_tie and "other bits" in found.describe()
    # Where a token differs, the logits before it count first; those behind it belong to another text.
    assert compare(plain, Answer((5, 8, 7), "length", 1, (), (11, 12, 99))).logits is False
    counts = Tally(0.0, 8, 1)
    count(counts, plain, Answer((5, 6, 7), "length", 1, (), (11, 99, 13)))
    assert counts.different == 1


def test_bits_are_compared_on_a_gpu_only(capsys):
    assert cli.main(["check", "nano", "--device", "cpu", "--bitwise"]) != 0
    assert "--bitwise is a promise of the CUDA kernels" in capsys.readouterr().err
