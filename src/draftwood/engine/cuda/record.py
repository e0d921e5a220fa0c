"""How a sequence of launches becomes one that costs the host nothing: as a CUDA graph, or, for tests on a CPU, as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Launch = Callable[[], None]


class Recorder(Protocol):
    """Makes a sequence of launches repeatable."""

    def record(self, run: Launch) -> Launch:
        """Return what does again all that `run` launches. `run` may be called for that, any number of times."""


class Immediate:
    """Nothing is kept: launches are made again."""

    def record(self, run: Launch) -> Launch:
        """Return `run`."""
        return run


class Graphs:
    """CUDA graphs that share their memory: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Launch) -> Launch:
        """Run once, so that all kernels are loaded, then capture. Behind what the current stream has been given."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            run()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        replay: Launch = graph.replay
        return replay
