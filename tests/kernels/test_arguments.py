"""What a launch takes as an argument: tensors, and numbers that say how wide they are."""

import ctypes

import numpy as np
import pytest
import torch

from draftwood.kernels.jit import _argument


def test_numbers_with_a_width_are_passed_on_and_python_numbers_are_refused() -> None:
    for value in (np.int32(3), np.int64(3), np.uint64(0), np.float32(0.5), np.float64(0.6), ctypes.c_int(3)):
        assert _argument(value) is value
    for value in (3, 0.6, True):
        with pytest.raises(TypeError, match="no width"):
            _argument(value)


def test_a_tensor_becomes_its_address() -> None:
    x = torch.zeros(3)
    assert _argument(x) == x.data_ptr()
