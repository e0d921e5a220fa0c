import json

import pytest

from draftwood import cli


def run(capsys, *argv):
    code = cli.main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_k26_is_planned_without_weights_for_hardware_that_is_not_here(capsys):
    code, out, _ = run(capsys, "k2.6", "--tp", "8", "--hardware", "b300")
    assert code == 0
    made = json.loads(out.splitlines()[-1])
    assert made["memory"]["target weights"] > 70 << 30
    assert made["step_seconds"] == pytest.approx(sum(made["step_bytes"].values()) / made["bandwidth"])
    times = {(s["rows"], s["nodes"]): s["floor_ms"] for s in made["steps"]}
    assert times[1, 1] < times[1, 9] < times[8, 9]
    assert "memory of a rank" in out


def test_too_little_memory_is_told_not_refused(capsys):
    code, out, _ = run(capsys, "k2.6", "--hardware", "h200")
    assert code == 0
    assert any("does not fit" in note for note in json.loads(out.splitlines()[-1])["notes"])


def test_without_a_drafter_a_budget_of_0_may_be_asked_for(capsys):
    code, out, _ = run(capsys, "k2.6", "--hardware", "b300", "--tp", "8", "--draft", "none", "--tree-budget", "0")
    assert code == 0 and json.loads(out.splitlines()[-1])["max_budget"] == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["k2.6", "--tp", "3"], "--tp 3"),
        (["k2.6", "--tree-budget", "65"], "--tree-budget 65"),
        (["k2.6", "--draft-block", "16", "--hardware", "h200"], "--draft-block 16"),
        (["k2.6", "--topk-cap", "0"], "--topk-cap 0"),
        (["k2.6", "--hardware", "abacus"], "invalid choice"),
        (["k2.6", "--tp", "two"], "invalid int"),
        (["k2.6", "--hardware", "h200", "--device", "cpu"], "--device cpu is not what --hardware h200 is"),
        (["k2.6", "--draft", "none", "--tree-budget", "8"], "--tree-budget 8 has no effect with --draft none"),
        (["k2.6", "--draft", "none", "--tree-budget", "auto"], "--tree-budget auto has no effect"),
        (["k2.6", "--draft", "none", "--draft-block", "8"], "--draft-block 8 has no effect"),
        (["k2.6", "--draft", "none", "--draft-window", "2048"], "--draft-window 2048 has no effect"),
        (["k2.6", "--draft", "none", "--topk-cap", "4"], "--topk-cap 4 has no effect"),
        (["k2.6", "--draft", "none", "--tree-spine"], "--tree-spine has no effect"),
        (["k2.6", "--draft", "none", "--noise", "shared"], "--noise shared has no effect"),
        (["k2.6", "--draft", "none", "--bigram", "none"], "--bigram none has no effect"),
        (["k2.6", "--draft", "none", "--draft-rope", "1"], "--draft-rope 1 has no effect"),
        (["k2.6", "extra"], "unrecognized arguments: extra"),
        (["/nowhere/at/all"], "no folder"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
