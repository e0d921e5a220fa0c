import io
import os
import subprocess
import sys

import pytest

from draftwood import report
from draftwood.commands import console


def test_tables_align_text_left_and_numbers_right():
    assert console.table([("a", 1), ("bcd", 100)]) == "  a      1\n  bcd  100"
    assert console.table([]) == ""


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (594 * 1024**3, "594.00 GiB")])
def test_sizes_use_binary_units(count, text):
    assert console.size(count) == text


def test_text_outside_the_terminals_encoding_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.write("é世")
    assert raw.getvalue() == b"\\xe9\\u4e16"


def test_no_colours_off_a_terminal():
    assert console.dim("a", io.StringIO()) == "a"
    assert console.bold("a", io.StringIO()) == "a"


def test_a_closed_pipe_ends_quietly(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    with report.closed_pipe_is_fine():
        console.write("x" * 100_000)
    sys.stdout.write("more")
    sys.stdout.flush()


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["env"]])
def test_any_command_may_lose_its_reader(argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run([sys.executable, "-m", "draftwood", *argv], stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
