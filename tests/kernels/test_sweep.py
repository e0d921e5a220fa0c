"""Sweeps outlive what breaks them: a form that ends its process is left out, and what is done is not done again."""

import json

import pytest

from draftwood.kernels.sweep import Sweep, supervise

CHILD = """
import os, sys, time
from pathlib import Path
from draftwood.kernels.sweep import Sweep
sweep = Sweep(Path(sys.argv[1]), "some", 60, print)
for form in ("good", "bad", "last"):
    if sweep.start(form, f"key {form}"):
        if form == "bad":
            os._exit(9)
        sweep.say(key=f"key {form}")
"""


def lines(folder):
    return [json.loads(line) for line in (folder / "some.jsonl").read_text().splitlines()]


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "sweeping.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "sweeping"


def test_what_is_written_is_told_too(tmp_path):
    told = []
    Sweep(tmp_path, "some", 60, told.append).say(key="first")
    assert [json.loads(line) for line in told] == lines(tmp_path) == [{"key": "first"}]


def test_a_form_that_ends_the_process_is_left_out_and_the_others_are_done_once(tmp_path, child):
    assert supervise(child, tmp_path, "some", 60, print) == 0
    assert lines(tmp_path) == [{"key": "key good"}, {"broken": "bad"}, {"key": "key last"}]


def test_a_child_that_dies_before_it_begins_anything_ends_the_sweep(tmp_path):
    assert supervise("no_such_module", tmp_path, "some", 60, print) == 1
    assert not (tmp_path / "some.jsonl").exists()


def test_nothing_begins_after_the_end(tmp_path):
    assert not Sweep(tmp_path, "some", -1, print).start("good", "key")
    assert not (tmp_path / "some.current").exists()
