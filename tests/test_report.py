"""Tables align, lists of numbers are checked, and the built-in prompts are a mixture."""

import pytest

from draftwood import report, samples
from draftwood.errors import ConfigError


def test_columns_align_numbers_right_and_text_left():
    text = report.table(("name", "n", "share"), [("a", 1, 0.5), ("long name", 100, None)])
    assert text.splitlines() == ["name         n  share", "a            1    0.5", "long name  100      -"]


def test_a_table_without_rows_is_its_header():
    assert report.table(("a", "b"), []) == "a  b"


def test_numbers_keep_their_order_and_come_once():
    assert report.numbers("--budgets", "8,1,8,64", int, 0, 64) == (8, 1, 64)
    assert report.numbers("--temperatures", "0,0.6", float, 0.0, 2.0) == (0.0, 0.6)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1.5", "65", "-1", "1 2"])
def test_other_lists_are_one_line_errors_that_name_the_flag(text):
    with pytest.raises(ConfigError, match="--budgets") as caught:
        report.numbers("--budgets", text, int, 0, 64)
    assert "\n" not in str(caught.value)


def test_the_first_prompts_are_of_every_kind_and_all_differ():
    assert {s.kind for s in samples.first(3)} == {"code", "chat", "prose"}
    assert len({s.text for s in samples.SAMPLES}) == len({s.name for s in samples.SAMPLES}) == len(samples.SAMPLES) >= 32


@pytest.mark.parametrize("count", [0, 37])
def test_prompts_that_are_not_there_are_refused(count):
    with pytest.raises(ConfigError, match=f"--prompts {count}"):
        samples.first(count)
