"""`draftwood train bigram`: the sparse table equals a dense count, whatever the chunks; its size obeys the limit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from draftwood.errors import ConfigError
from draftwood.train import bigram

VOCAB, K = 50, 100.0


def tokens(count: int = 20_000, seed: int = 0) -> np.ndarray:
    """Zipf-like ids with structure: [count] uint16."""
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.3, count) - 1) % VOCAB
    ids[1::3] = (ids[::3][: len(ids[1::3])] * 7 + 3) % VOCAB
    return ids.astype(np.uint16)


def dense(streams: list[np.ndarray], k: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts [V, V], PMI [V, V] and base [V], by the definition."""
    seen = np.zeros((VOCAB, VOCAB))
    for ids in streams:
        np.add.at(seen, (ids[:-1], ids[1:]), 1)
    share = (seen.sum(0) + 1) / (seen.sum() + VOCAB)
    rows = seen.sum(1, keepdims=True)
    return seen, np.log((seen + k * share) / ((rows + k) * share)), np.log(k / (rows[:, 0] + k))


def expand(table: dict[str, np.ndarray]) -> np.ndarray:
    """The file's values as [V, V]."""
    full = np.repeat(table["base"].astype(np.float32)[:, None], VOCAB, 1)
    for row in range(VOCAB):
        part = slice(table["row_ptr"][row], table["row_ptr"][row + 1])
        assert (np.diff(table["cols"][part].astype(int)) > 0).all()
        full[row, table["cols"][part]] = table["vals"][part]
    return full


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bigram.add_arguments(parser)
    return parser.parse_args([*words, "--vocab", str(VOCAB)])


@pytest.mark.parametrize("min_count", [1, 5, 40])
def test_table_equals_a_dense_count(min_count: int) -> None:
    streams = [tokens(), tokens(7000, 1)]
    seen, values, base = dense(streams, K)
    table = bigram.table(bigram.count([[ids] for ids in streams], VOCAB), K, min_count)
    expected = np.where(seen >= min_count, values, base[:, None])
    np.testing.assert_allclose(expand(table), expected, rtol=2e-3, atol=2e-3)
    assert table["row_ptr"].dtype == np.int32
    assert table["cols"].dtype == np.uint16
    assert table["vals"].dtype == table["base"].dtype == np.float16


@pytest.mark.parametrize("size", [1, 2, 999, 20_000])
def test_chunked_equals_whole(size: int) -> None:
    ids = tokens(3000)
    whole = bigram.count([[ids]], VOCAB)
    cut = bigram.count([[ids[i : i + size] for i in range(0, len(ids), size)]], VOCAB)
    for name in ("keys", "counts", "previous", "following"):
        assert (getattr(whole, name) == getattr(cut, name)).all()


def test_large_vocabularies_use_wide_columns() -> None:
    seen = bigram.count([[np.array([163_839, 0, 163_839, 0], np.uint32)]], 163_840)
    table = bigram.table(seen, K, 1)
    assert table["cols"].dtype == np.int32
    assert table["cols"].tolist() == [163_839, 0]


def test_size_limit_chooses_the_least_count() -> None:
    seen = bigram.count([[tokens()]], VOCAB)
    fixed = 4 * (VOCAB + 1) + 2 * VOCAB + 1024
    limit = bigram.fitting_count(seen, fixed + 4 * 100)
    assert (seen.counts >= limit).sum() <= 100 < (seen.counts >= limit - 1).sum()
    assert bigram.fitting_count(seen, 10**6) == 1


def test_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens().astype("<u2").tofile(tmp_path / "a.bin")
    out = tmp_path / "bigram.safetensors"
    assert bigram.run(arguments("--tokens", str(tmp_path / "a.bin"), "--out", str(out), "--max-bytes", "3000")) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["bytes"] == out.stat().st_size <= 3000
    assert set(load_file(out)) == {"row_ptr", "cols", "vals", "base"}
    with safe_open(out, "np") as file:
        about = file.metadata()
    assert (about["alpha"], about["vocab_size"], about["source_tokens"]) == ("0.4", "50", "20000")
    assert int(about["min_count"]) == facts["min_count"] > 1


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "none.bin"],
        ["--tokens", "large.bin"],
        ["--tokens", "one.bin"],
        ["--tokens", "good.bin", "--max-bytes", "100"],
        ["--tokens", "good.bin", "--k", "0"],
    ],
)
def test_bad_input_is_one_line(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.array([1, VOCAB], "<u2").tofile("large.bin")
    np.array([1], "<u2").tofile("one.bin")
    tokens(100).astype("<u2").tofile("good.bin")
    with pytest.raises(ConfigError) as caught:
        bigram.run(arguments(*words, "--out", "out.safetensors"))
    assert "\n" not in str(caught.value)
