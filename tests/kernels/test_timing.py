"""`time_graph` and the work that its caller has launched before."""

import pytest
import torch

from draftwood.kernels.case import time_graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_timed_begins_after_what_was_launched_before() -> None:
    """A forward that was timed while an earlier one ran wrote over its results (docs/LOG.md)."""
    x = torch.zeros(1 << 28, device="cuda")
    for _ in range(40):  # 20 ms
        x += 1
    time_graph(lambda: x[:1024].zero_(), 1)
    torch.cuda.synchronize()
    assert not x[:1024].any() and bool((x[1024:] == 40).all())
