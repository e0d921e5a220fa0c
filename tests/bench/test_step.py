"""`bench step` compares budgets on the same prompts and adds up."""

import json
from types import SimpleNamespace

import pytest

from draftwood import cli, nano
from draftwood.bench.step import Bench, Pass, distinct_bigrams, parse_budgets
from draftwood.config import STAGES
from draftwood.errors import ConfigError


def test_budgets_are_numbers_and_auto_in_the_order_given():
    assert parse_budgets("8,auto,0,8") == (8, "auto", 0)


@pytest.mark.parametrize("text", ["", "65", "auto,x", "0,,8"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match="--budgets"):
        parse_budgets(text)


def test_a_loop_has_few_distinct_bigrams():
    loop = SimpleNamespace(token_ids=[1, 2] * 10)
    line = SimpleNamespace(token_ids=list(range(20)))
    assert distinct_bigrams([line]) == 1.0
    assert distinct_bigrams([loop]) < 0.2
    assert distinct_bigrams([SimpleNamespace(token_ids=[1])]) == 1.0


def completion(tokens: int, steps: int, verify: float):
    ms = dict.fromkeys(STAGES, 0.0) | {"verify": verify}
    accept = (tokens - 1) / steps if steps else 1.0
    return SimpleNamespace(completion_tokens=tokens, steps=steps, accept_length=accept, stage_ms=ms, token_ids=[1] * tokens)


def test_rows_compare_rounds_and_leave_the_warm_up_out(monkeypatch):
    """Budget 0: 8 steps of 2 ms; budget 4: 4 steps of 3 ms. The second round is twice as slow, the warm-up 10 times."""
    speed = {0: 1.0, 4: 0.5}
    rounds: dict[int, int] = {0: 0, 4: 0}

    def once(self, budget, max_tokens=None):
        if max_tokens is not None:
            return Pass([completion(8, 7, 140.0)], 0.005)
        rounds[budget] += 1
        slow = 2.0 if rounds[budget] == 2 else 1.0
        steps = 8 if budget == 0 else 4
        return Pass([completion(9, steps, steps * (2.0 if budget == 0 else 3.0))], speed[budget] * slow)

    monkeypatch.setattr(Bench, "once", once)
    monkeypatch.setattr(Bench, "_bytes", lambda self, budget: None)
    bench = Bench(SimpleNamespace(plan=SimpleNamespace(bandwidth=None)), [[1]], [])
    plain, trees = bench.measure((0, 4), 3)
    assert (plain["accept_length"], trees["accept_length"]) == (1.0, 2.0)
    assert (plain["step_ms"], trees["step_ms"]) == (2.0, 3.0)
    assert (plain["ratio"], trees["ratio"]) == (1.0, 2.0)
    assert (plain["tok_s"], trees["tok_s"]) == (9.0, 18.0)


@pytest.mark.parametrize(
    "flags",
    [("--budgets", "65"), ("--rows", "0"), ("--repeat", "0"), ("--prompts", "99"), ("--temperature", "-1"), ("--draft", "none")],
)
def test_bad_input_is_one_line_and_exit_2(capsys, flags):
    assert cli.main(["bench", "step", "nano", *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1


def test_a_context_above_the_models_positions_is_refused_by_its_flag(capsys):
    assert cli.main(["bench", "step", "nano", "--device", "cuda", "--context", "3000", "--budgets", "0"]) == 2
    said = capsys.readouterr().err
    assert "--context 3000" in said and "4096" in said and "2560 or less" in said


def test_nano_accepts_more_with_larger_trees_and_shared_noise(capfd):
    flags = ("--prompts", "2", "--max-tokens", "32", "--repeat", "1", "--budgets", "0,16", "--temperature", "1", "--json")
    assert cli.main(["bench", "step", str(nano.path()), *flags]) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    plain, trees = line["budgets"]
    assert plain["accept_length"] == 1.0 < trees["accept_length"]
    assert trees["same_tokens"]
    assert trees["noise"]["shared"] > trees["noise"]["own"]
    assert set(trees["stage_ms"]) == set(STAGES)
    assert trees["step_bytes"] > plain["step_bytes"] > 0
