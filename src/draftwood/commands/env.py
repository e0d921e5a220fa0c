"""Show versions, devices, compilers and environment variables; the last line is the same as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

from draftwood import __version__, env
from draftwood.commands import console
from draftwood.report import closed_pipe_is_fine, json_line

PACKAGES = (
    "torch", "numpy", "safetensors", "tiktoken", "jinja2", "huggingface_hub", "rich", "tokenizers", "transformers",
    "compressed-tensors", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: the command tells all it finds."""


def run(args: argparse.Namespace) -> int:
    """Print the findings as a table, then as one JSON line."""
    found = findings()
    with closed_pipe_is_fine():
        for title, values in found.items():
            console.write(f"{title}\n")
            rows = values.items() if isinstance(values, dict) else [(v["name"], _device(v)) for v in values]
            console.write(console.table([(k, "-" if v in (None, "") else str(v)) for k, v in rows]) + "\n")
        console.write(json_line(found), end="\n")
    return 0


def findings() -> dict[str, Any]:
    """Return what was found, by group: versions, machine, devices, kernels, environment."""
    return {
        "versions": {"draftwood": __version__, "python": platform.python_version(), **_packages()},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count() or 1,
            "memory": console.size(_memory()) if _memory() else None,
        },
        "devices": _devices(),
        "kernels": _toolchain(),
        "environment": {name: env.read(name) for name in env.TABLE},
    }


def _packages() -> dict[str, str | None]:
    """Versions of the packages that matter here; None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _memory() -> int:
    """Bytes of main memory, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _devices() -> list[dict[str, Any]]:
    """The CPU, and each CUDA device with its architecture, multiprocessors and memory in bytes."""
    import torch

    threads = torch.get_num_threads()
    kind = platform.processor() or platform.machine()
    found: list[dict[str, Any]] = [{"name": "cpu", "kind": kind, "threads": threads}]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        device = {"name": f"cuda:{i}", "kind": p.name, "architecture": f"sm_{p.major}{p.minor}"}
        found.append(device | {"multiprocessors": p.multi_processor_count, "memory": p.total_memory})
    return found


def _device(found: dict[str, Any]) -> str:
    """One device in words."""
    if "threads" in found:
        return f"{found['kind']}, {found['threads']} threads"
    return f"{found['kind']}, {found['architecture']}, {found['multiprocessors']} multiprocessors, {console.size(found['memory'])}"


def _toolchain() -> dict[str, str | None]:
    """What compiles kernels at run time: CUDA of torch, cuda.core, NVRTC; None where it is missing."""
    import torch

    from draftwood.kernels import jit

    return {
        "cuda of torch": torch.version.cuda,
        "cuda.core": "found" if _importable("cuda.core") else None,
        "nvrtc": _nvrtc(),
        "cache": str(jit.cache_folder()),
    }


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _nvrtc() -> str | None:
    """Version of the NVRTC library that loads, None without one."""
    if not _importable("cuda.bindings"):
        return None
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError):
        return None
    return f"{major}.{minor}"
