"""The card states what the logs say, and refuses logs that do not belong together."""

import json

import pytest

from draftwood import cli, nano


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


@pytest.fixture
def flags(tmp_path):
    budgets = dict.fromkeys(("chain", "4", "7", "8", "16", "32", "64"), 2.5)
    kinds = dict.fromkeys(("all", "before_loops", "before_loops_text", "before_loops_chat"), budgets)
    greedy = {"closed": 0.75, "looping": 0.25, "limit": 384}
    scores = {
        "held": 1.5, "held_pairs": 1.25, "chain7": 3.5, "tree16": 4.5, "tree16_table": 5.0, "table_gain": 1.111,
        "tree16_over_chain": 1.286, "alpha": 0.6, "beta": [1.0, 0.75], "bits_per_char": 0.7, "prompts_of_each_kind": 8,
        "chat": {"0.0": greedy}, "accept": [{"temperature": 0.0, "block": 8, "noise": "none", "table": False, **kinds}],
    }  # fmt: skip
    log = {"steps": 12, "tokens": 3_000_000, "trained_seconds": 9.0}
    packages = [
        {"name": "one", "version": "1.0", "licence": "MIT", "split": "train", "files": 3},
        {"name": "two", "version": "2.0", "licence": "BSD-3-Clause | x", "split": "held", "files": 4},
        {"name": "docs", "version": "", "licence": "MIT", "split": "train", "files": 1},
        {
            "name": "three",
            "version": "3",
            "licence": "Some Licence\n    All of its text | License :: OSI Approved :: MIT License",
            "split": "train",
            "files": 1,
        },
    ]
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.safetensors").write_bytes(b"\0" * 1000)
    write(tmp_path / "meta.json", {"corpus": {"tokens": 5e6}, "pairs": {"tokens": 1e6}})
    write(tmp_path / "packages.json", packages)
    return {
        "--model": str(model), "--data": str(tmp_path), "--evaluation": write(tmp_path / "eval.json", scores),
        "--target-log": write(tmp_path / "t.json", log), "--draft-log": write(tmp_path / "d.json", log),
    }  # fmt: skip


def call(flags):
    return cli.main(["train", "card", *(word for pair in flags.items() for word in pair)])


def test_a_card_states_sizes_scores_and_licences(flags, tmp_path, capsys):
    assert call(flags) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "1,000 bytes" in card and "12 steps" in card and "1.500 nats/token" in card
    assert "chain 3.50" in card and "25% loop" in card
    assert "\n- MIT: docs, one 1.0\n" in card and "\n- MIT License: three 3\n" in card and "- BSD-3-Clause: two 2.0" in card
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["folder_bytes"] == 1000 + (tmp_path / "model" / "README.md").stat().st_size


@pytest.mark.parametrize("flag", ["--evaluation", "--target-log"])
def test_a_log_that_lacks_a_number_is_one_line(flags, flag, tmp_path, capsys):
    flags[flag] = write(tmp_path / "empty.json", {})
    assert call(flags) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_bundled_model_is_at_most_40_megabytes_with_its_card():
    files = [p for p in nano.path().rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert nano.path() / "README.md" in files
    assert sum(p.stat().st_size for p in files) <= 40_000_000


def test_a_training_that_went_on_is_counted_whole(flags, tmp_path):
    first = write(tmp_path / "first.json", {"steps": 30, "tokens": 7_000_000, "trained_seconds": 11.0})
    words = [word for pair in flags.items() for word in pair]
    words.insert(words.index("--target-log") + 1, first)
    assert cli.main(["train", "card", *words]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert (
        "| target | 42 steps, 10 M tokens, 20 s on one H200, runs: 2" in card
        and "| drafter | 12 steps, 9 s on one H200, runs: 1" in card
    )
    wrong = write(tmp_path / "wrong.json", {"steps": 1})
    words[words.index(first)] = wrong
    assert cli.main(["train", "card", *words]) == 2
