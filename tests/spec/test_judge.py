"""Grammars are judged by the CPU time that they cost, so a busy machine refuses none that an idle one takes."""

import subprocess
import sys
import time

import pytest

pytest.importorskip("xgrammar")

import xgrammar

from draftwood.spec import judge

WORDS = judge.Vocabulary([b"a", b"b", b"</s>"], (2,))


@pytest.fixture(scope="module")
def tool():
    return judge.compiler(WORDS)


def waits(seconds):
    """What a process does while others have the CPU."""
    time.sleep(seconds)
    return "."


def works(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "."


def test_a_try_that_waits_for_the_cpu_goes_on_and_one_that_uses_it_up_is_ended(tool, monkeypatch):
    monkeypatch.setattr(judge, "_tried", lambda *_: waits(0.5))
    assert judge._apart(tool, WORDS, "regex", "a", 0.1) == ""
    monkeypatch.setattr(judge, "_tried", lambda *_: works(2.0))
    assert "longer than 0.1 seconds" in judge._apart(tool, WORDS, "regex", "a", 0.1)
    monkeypatch.setattr(judge, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(judge, "_tried", lambda *_: waits(5.0))
    assert "longer than 0.1 seconds" in judge._apart(tool, WORDS, "regex", "a", 0.1)


@pytest.mark.parametrize(("pause", "said"), [(waits, ""), (works, "too long to follow")])
def test_a_mask_may_wait_for_the_cpu_but_not_use_much_of_it(tool, monkeypatch, pause, said):
    class Slow(xgrammar.GrammarMatcher):
        def fill_next_token_bitmask(self, bits, index):
            pause(judge.MASK_SECONDS + 0.05)
            return super().fill_next_token_bitmask(bits, index)

    monkeypatch.setattr(judge, "MASK_SECONDS", 0.1)
    compiled = judge.compile_text(tool, "regex", "ab")
    monkeypatch.setattr(xgrammar, "GrammarMatcher", Slow)
    found = judge.judge(compiled, WORDS)
    assert said in found and bool(said) == bool(found)


def test_padding_behind_the_vocabulary_is_no_token(tool):
    nothing = judge.compile_text(tool, "regex", "c")  # not in the vocabulary
    assert judge.judge(nothing, WORDS) == "it allows no answer"


def test_a_process_that_stopped_talking_but_lives_is_ended_and_told(monkeypatch):
    deaf = "import os, time; os.close(1); time.sleep(60)"
    monkeypatch.setattr(judge.Judge, "_start", lambda self: self._process)
    one = judge.Judge(WORDS)
    one._process = process = subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert "ended the process" in one.ask("regex", "a")
    assert process.poll() is not None and one._process is None
