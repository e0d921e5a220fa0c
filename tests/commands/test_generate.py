import io
import json
import shutil
import sys

import pytest

from draftwood import cli
from draftwood.commands.prompts import read_prompts
from draftwood.errors import ConfigError
from tests.commands.tiny import checkpoint

FIELDS = {
    "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "steps", "accept_length", "tree_budget",
    "tok_s", "stage_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("tiny"))


def generate(capsys, model, *argv):
    code = cli.main(["generate", model, "--load-format", "dummy", "--max-tokens", "12", "--ignore-eos", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(capsys, model, *argv):
    code, out, err = generate(capsys, model, "--json", *argv)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def test_json_is_one_object_with_the_promised_fields(capsys, model):
    found = answer(capsys, model, "-p", "def f(x):")
    assert set(found) >= FIELDS
    assert found["completion_tokens"] == len(found["token_ids"]) == 12
    assert found["finish_reason"] == "length"
    assert set(found["stage_ms"]) == {"draft", "tree", "verify", "accept", "commit"}


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_token_ids_do_not_depend_on_budget_or_drafter(capsys, model, temperature):
    base = ["-p", "import os", "--seed", "7", "--temperature", temperature]
    wanted = answer(capsys, model, *base, "--tree-budget", "0")["token_ids"]
    for extra in (["--tree-budget", "8"], ["--tree-budget", "64"], ["--draft", "none"], ["--noise", "own"]):
        assert answer(capsys, model, *base, *extra)["token_ids"] == wanted


def test_text_streams_to_stdout_and_the_cost_to_stderr(capsys, model):
    code, out, err = generate(capsys, model, "-p", "Hi")
    assert code == 0
    assert out.rstrip("\n") == answer(capsys, model, "-p", "Hi")["text"].rstrip("\n")
    assert out.endswith("\n")
    assert err.count("\n") == 1
    for word in ("accept length", "steps", "tok/s"):
        assert word in err


def test_several_prompts_run_together_in_order(capsys, model):
    both = answer(capsys, model, "-p", "Hi", "-p", "the end")["completions"]
    assert [c["token_ids"] for c in both] == [answer(capsys, model, "-p", p)["token_ids"] for p in ("Hi", "the end")]
    code, _, err = generate(capsys, model, "-p", "Hi", "-p", "the end")
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["prompt 1", "prompt 2"]


def test_trees_of_every_step_are_drawn_on_stderr(capsys, model):
    code, out, err = generate(capsys, model, "-p", "Hi", "-p", "the", "--show-tree")
    assert code == 0
    assert "step 1:" not in out
    single = answer_with_trees(capsys, model)
    assert err.count("step 1:") == 2
    assert single.count("\n  > ") == single.count("step ") == single.count("\n  = ")


def answer_with_trees(capsys, model):
    code, out, err = generate(capsys, model, "-p", "Hi", "--show-tree", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == err.count("step ")
    return err


def test_a_prompt_can_come_from_stdin(capsys, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é the end".encode()), encoding="ascii"))
    found = answer(capsys, model, "-p", "-")
    assert found["token_ids"] == answer(capsys, model, "-p", "é the end")["token_ids"]


def test_control_tokens_in_a_prompt_are_text_unless_asked_for(capsys, model):
    assert answer(capsys, model, "-p", "<|im_end|>")["prompt_tokens"] > 1
    assert answer(capsys, model, "-p", "<|im_end|>", "--allow-special")["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no prompt"),
        (["-p", "-", "-p", "-"], "given twice"),
        (["-p", ""], "prompt is empty"),
        (["-p", "a\udcff"], "lone surrogate"),
        (["-p", "the end " * 600], "context holds 512"),
        (["-p", "a", "--tree-budget", "65"], "--tree-budget 65"),
        (["-p", "a", "--tree-budget", "many"], "'many' is neither a whole number nor auto"),
        (["-p", "a", "--temperature", "-1"], "temperature"),
        (["-p", "a", "--topk-cap", "0"], "--topk-cap 0"),
        (["-p", "a", "--draft-block", "16"], "blocks of at most 8"),
        (["-p", "a", "--tp", "3"], "--tp 3"),
        (["-p", "a", "--draft", "/nowhere/at/all"], "no folder"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", "a", "--max-token", "3"], "unrecognized arguments"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys, model, argv, words):
    code, out, err = generate(capsys, model, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_what_the_plan_changed_or_lacks_is_said_on_stderr(capsys, model, tmp_path):
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("draft"))
    code, out, err = generate(capsys, str(tmp_path / "bare"), "-p", "a", "--max-tokens", "2", "--json")
    assert code == 0 and json.loads(out)["tree_budget"] == 0
    assert err.startswith("note: no drafter in ") and err.count("\n") == 1
    assert generate(capsys, model, "-p", "a", "--max-tokens", "2", "--json")[2] == ""


def test_stdin_that_is_not_utf8_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(ConfigError, match="byte 2 is 0xff"):
        read_prompts(["-"])
