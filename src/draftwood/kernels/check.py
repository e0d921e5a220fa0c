"""What every kernel promises, and the compile-time proof of it for all architectures, without a GPU.

Each kernel folder's `op.py` has `variants() -> list[Variant]`: everything its launcher can choose. `compile_all` builds
them and reports registers, spills and shared memory; a promise that does not hold is a KernelBuildError.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from draftwood.errors import ConfigError, KernelBuildError
from draftwood.kernels import jit

REGISTER_FILE = 65_536
"""32-bit registers of one multiprocessor, the same on sm_90, sm_100, sm_103 and sm_120."""


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel and its limits.

    threads: of a block. shared: dynamic shared memory of a block in bytes (the largest the launcher asks for).
    blocks: how many blocks must fit on one multiprocessor. spill: bytes of spills that were measured not to hurt.
    archs: where the launcher may choose it.
    """

    source: jit.Source
    threads: int
    shared: int = 0
    blocks: int = 1
    spill: int = 0
    archs: tuple[str, ...] = field(default=jit.ARCHS)


@dataclass(frozen=True)
class Built:
    """One line of the report."""

    kernel: str
    variant: str
    arch: str
    registers: int
    spill_bytes: int
    shared: int


def kernel_names() -> list[str]:
    """Return the kernel folders, sorted."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/op.py"))


def variants(kernel: str) -> list[Variant]:
    """Return what the kernel's launcher can choose. Raises ConfigError for an unknown name."""
    if kernel not in kernel_names():
        raise ConfigError(f"no kernel {kernel!r}; there are {', '.join(kernel_names())}")
    return list(importlib.import_module(f"draftwood.kernels.{kernel}.op").variants())


def compile_all(archs: tuple[str, ...], kernels: list[str] | None = None) -> Iterator[Built]:
    """Build every variant for every architecture it may run on; yield one line each.

    Raises KernelBuildError for the first one that does not compile or breaks its limits.
    """
    for kernel in kernel_names() if kernels is None else kernels:
        for variant in variants(kernel):
            for arch in archs:
                if arch in variant.archs:
                    yield check(kernel, variant, arch)


def check(kernel: str, variant: Variant, arch: str) -> Built:
    """Build one variant and hold it to its limits. Raises KernelBuildError."""
    cubin = jit.build(variant.source, arch)
    shared = cubin.static_shared + variant.shared
    label = f"{kernel} {variant.source.label()} on {arch}"
    if shared > jit.SHARED_LIMIT[arch]:
        raise KernelBuildError(f"{label}: {shared} B of shared memory, limit {jit.SHARED_LIMIT[arch]}")
    if cubin.spill_bytes > variant.spill:
        raise KernelBuildError(f"{label}: {cubin.spill_bytes} B of spills, limit {variant.spill}")
    if cubin.registers * variant.threads * variant.blocks > REGISTER_FILE:
        raise KernelBuildError(
            f"{label}: {cubin.registers} registers x {variant.threads} threads x {variant.blocks} blocks "
            f"exceed the {REGISTER_FILE} of a multiprocessor"
        )
    return Built(kernel, variant.source.label(), arch, cubin.registers, cubin.spill_bytes, shared)
