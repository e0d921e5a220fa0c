"""What a launch gives the driver and what it refuses, with a driver that only writes down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.errors import ConfigError
from draftwood.kernels import jit


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(stream, configuration, arguments) of every launch."""
    found: list[tuple[Any, ...]] = []
    core = SimpleNamespace(
        LaunchConfig=lambda **given: SimpleNamespace(**given),
        Stream=SimpleNamespace(from_handle=lambda handle: ("stream", handle)),
        launch=lambda stream, config, kernel, *arguments: found.append((stream, config, arguments)),
    )
    monkeypatch.setattr(jit, "_toolchain", lambda: (core, None, None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=41))
    jit._stream.cache_clear()
    yield found
    jit._stream.cache_clear()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> jit.Kernel:
    """A kernel of three arguments that was loaded for launches of up to 1,000 bytes of shared memory."""
    made = object.__new__(jit.Kernel)
    made._kernel, made._label, made._arguments, made._shared, made._configs = None, "adds[N=1]", 3, 1000, {}
    return made


def test_tensors_become_addresses_and_numbers_keep_their_width(launched: list[tuple[Any, ...]], kernel: jit.Kernel) -> None:
    x = torch.zeros(4)
    kernel((2, 3), 128, (x[1:], np.int32(7), np.float32(0.5)), shared=500, pdl=True)
    (stream, config, arguments) = launched[0]
    assert arguments == (x.data_ptr() + 4, 7, 0.5) and [type(a) for a in arguments[1:]] == [np.int32, np.float32]
    assert vars(config) == {"grid": (2, 3), "block": 128, "shmem_size": 500, "programmatic_stream_serialization": True}
    assert stream == ("stream", 41)


def test_launches_alike_share_a_configuration_and_others_do_not(launched: list[tuple[Any, ...]], kernel: jit.Kernel) -> None:
    given = (np.int32(1),) * 3
    for grid, shared, pdl in ((4, 10, True), (4, 10, True), (5, 10, True), (4, 11, True), (4, 10, False), (4, None, True)):
        kernel(grid, 64, given, shared=shared, pdl=pdl)
    configs = [config for _, config, _ in launched]
    assert configs[0] is configs[1] and len({id(c) for c in configs}) == 5
    assert [(c.grid, c.shmem_size, c.programmatic_stream_serialization) for c in configs[2:]] == [
        (5, 10, True), (4, 11, True), (4, 10, False), (4, 1000, True),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [5, 0.5, True])
def test_a_number_without_a_width_is_refused(launched: list[tuple[Any, ...]], kernel: jit.Kernel, wrong: object) -> None:
    with pytest.raises(TypeError, match="has no width"):
        kernel(1, 32, (np.int32(1), wrong, np.int32(1)))
    assert not launched


def test_too_few_arguments_and_too_much_memory_are_refused(launched: list[tuple[Any, ...]], kernel: jit.Kernel) -> None:
    with pytest.raises(TypeError, match=r"adds\[N=1\] takes 3 arguments; a launch gives 2"):
        kernel(1, 32, (np.int32(1),) * 2)
    for _ in range(2):  # also when it is asked again
        with pytest.raises(ConfigError, match="asks for 1001 B of shared memory; its kernel was loaded with 1000"):
            kernel(1, 32, (np.int32(1),) * 3, shared=1001)
    assert not launched
