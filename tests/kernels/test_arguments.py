"""What a launch takes as an argument: tensors, and numbers that say how wide they are."""

import ctypes

import numpy as np
import pytest
import torch

from draftwood.kernels.jit import _argument
from draftwood.kernels.kv_commit import op
from tests.kernels.emulate import COMPILER, Emulated


def test_numbers_with_a_width_are_passed_on_and_python_numbers_are_refused() -> None:
    for value in (np.int32(3), np.int64(3), np.uint64(0), np.float32(0.5), np.float64(0.6), ctypes.c_int(3)):
        assert _argument(value) is value
    for value in (3, 0.6, True):
        with pytest.raises(TypeError, match="no width"):
            _argument(value)


def test_a_tensor_becomes_its_address() -> None:
    x = torch.zeros(3)
    assert _argument(x) == x.data_ptr()


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("change", ["missing", "one more", "too narrow"])
def test_a_launch_whose_arguments_are_not_the_kernels_is_refused_where_it_is_emulated(change: str) -> None:
    """On a GPU the driver would read what lies behind them."""
    kernel = Emulated(op._source())
    of_size = {4: np.int32(0), 8: np.int64(0)}
    args = [of_size[size] for size in kernel.sizes]
    changed = {"missing": args[:-1], "one more": [*args, np.int32(0)], "too narrow": [np.int32(0), *args[1:]]}[change]
    with pytest.raises(RuntimeError, match="the launch gives"):
        kernel(1, 32, changed)
