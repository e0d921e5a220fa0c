"""Settings of every test process, and what the processes of a run share."""

import os
import shutil
import tempfile

import pytest
import torch

# Two workers share two cores; with more runnable threads than cores every parallel region of torch waits milliseconds.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
RUN = "DRAFTWOOD_TEST_RUN"
"""Names a folder for all workers of a run, which ends with it."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[RUN] = tempfile.mkdtemp(prefix="draftwood-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(RUN), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: no worker ends alone with one of several minutes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
