"""What this machine offers: the device a rank runs on, found through torch."""

from __future__ import annotations

from pathlib import Path

import torch

from draftwood.errors import ConfigError
from draftwood.plan import USED_SHARE, Device, bandwidth_of

_CPU_SHARE = 0.7
"""Of the memory that is available; the rest stays the system's."""


def detect(asked: str = "auto", ranks: int = 1, local_rank: int = 0) -> Device:
    """Return the device of a rank: "cpu", "cuda", or "auto" (CUDA where there is one).

    `ranks` share this machine's memory on CPU; each has a GPU of its own otherwise. Raises ConfigError when CUDA is
    asked for and not there.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu, or install a CUDA build of torch")
    if asked == "cpu" or not torch.cuda.is_available():
        return Device("cpu", "this CPU", int(available_memory() * _CPU_SHARE) // ranks)
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(f"rank {local_rank} has no GPU: this machine has {count}; lower --tp or --ep")
    free, total = torch.cuda.mem_get_info(local_rank)
    name = torch.cuda.get_device_name(local_rank)
    return Device("cuda", name, int(min(free, total * USED_SHARE)), bandwidth_of(name))


def available_memory() -> int:
    """Return bytes of main memory that can be had without swapping, container limits respected."""
    found = [_meminfo(), _cgroup()]
    return min((n for n in found if n is not None), default=4 << 30)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return values.get("MemAvailable")


def _cgroup() -> int | None:
    """What a container may still take (cgroup v2), None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
