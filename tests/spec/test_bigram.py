"""The previous-token table: what is read, and what is refused with one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import torch as torch_file
from safetensors.numpy import save_file

from draftwood.errors import ConfigError
from draftwood.spec.bigram import Bigram


def tensors(**changed: np.ndarray) -> dict[str, np.ndarray]:
    good = {
        "row_ptr": np.array([0, 2, 2, 3, 3], np.int32),
        "cols": np.array([1, 3, 0], np.uint16),
        "vals": np.array([1.5, -0.5, 2.0], np.float16),
        "base": np.array([-1.0, -2.0, -3.0, 0.25], np.float16),
    }
    return {**good, **changed}


@pytest.mark.parametrize("width", [np.uint16, np.int32])
def test_scores_are_the_entries_and_the_rows_base_elsewhere(tmp_path, width):
    save_file(tensors(cols=np.array([1, 3, 0], width)), tmp_path / "t.safetensors")
    table = Bigram.load(tmp_path / "t.safetensors", 4)
    every = np.arange(4)
    assert table.scores(0, every).tolist() == [-1.0, 1.5, -1.0, -0.5]
    assert table.scores(1, every).tolist() == [-2.0] * 4
    assert table.scores(2, every[::-1]).tolist() == [-3.0, -3.0, -3.0, 2.0]
    assert table.scores(3, np.array([-1, 2])).tolist() == [0.25, 0.25]
    assert table.scores(4, every).tolist() == table.scores(-1, every).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"row_ptr": np.array([0, 2, 1, 3, 3], np.int32)}, "row_ptr"),
        ({"row_ptr": np.array([0, 2, 2, 3, 4], np.int32)}, "row_ptr"),
        ({"row_ptr": np.array([0, 3], np.int32)}, "4 tokens"),
        ({"cols": np.array([3, 1, 0], np.uint16)}, "ascending"),
        ({"cols": np.array([1, 4, 0], np.uint16)}, "outside the vocabulary"),
        ({"vals": np.array([1.0], np.float16)}, "values"),
        ({"vals": np.array([1.0, np.nan, 0.0], np.float16)}, "finite"),
        ({"base": np.zeros(5, np.float16)}, "5 tokens"),
        ({"base": np.zeros((4, 1), np.float16)}, "no vector"),
    ],
)
def test_a_broken_table_is_refused_in_one_line(tmp_path, changed, words):
    save_file(tensors(**changed), tmp_path / "t.safetensors")
    with pytest.raises(ConfigError, match=words) as caught:
        Bigram.load(tmp_path / "t.safetensors", 4)
    assert "\n" not in str(caught.value)


def test_missing_truncated_and_foreign_files_are_refused_in_one_line(tmp_path):
    save_file({"weights": np.zeros(3)}, tmp_path / "foreign.safetensors")
    torch_file.save_file({"row_ptr": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "weights.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    faults = {"none": "cannot be read", "short": "cannot be read", "foreign": "row_ptr", "weights": "cannot be read"}
    for name, words in faults.items():
        with pytest.raises(ConfigError, match=words) as caught:
            Bigram.load(tmp_path / f"{name}.safetensors", 4)
        assert "\n" not in str(caught.value)
