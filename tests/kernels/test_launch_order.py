"""The sources of kernels keep the rules of programmatic dependent launch that common.cuh states. A breach would be a race."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import draftwood.kernels

FOLDER = Path(draftwood.kernels.__file__).parent
SOURCES = sorted(
    path
    for path in FOLDER.rglob("*.cu*")
    if path.suffix in (".cu", ".cuh") and path.name != "common.cuh" and path.parent.name != "emulation"
)
"""All that a step may launch; what lies in a folder `emulation` only tests launch."""
EARLY = "norm_rope/pieces.cuh"
"""The one place where a kernel may go before it waits."""
AHEAD = {
    "norm_rope/sum.cu": ("sum_norm",), "moe_int4/stream.cu": ("down_stream",), "moe_int4/duo.cu": ("down_duo",),
    "moe_int4/one.cu": ("down_one",),
}  # fmt: skip
"""Kernels that read ahead of their wait what a step has written."""
BEFORE_THEM = ("moe_route/route.cu", "moe_int4/moe.cuh")
"""Sources of the kernels before those, or of the function in which these wait and go."""


def code(path: Path) -> list[str]:
    """Lines without comments; empty ones are left out."""
    lines = [re.sub(r"//.*", "", line).strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def kernels(path: Path) -> dict[str, str]:
    """Bodies of a source's kernels by name, up to the next kernel."""
    parts = re.split(r'extern "C" __global__ void', "\n".join(code(path)))[1:]
    named = (re.sub(r"^\s*([A-Z_]+\s+)?(__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*", "", part) for part in parts)
    return {re.match(r"\w+", body).group(): body for body in named}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_kernel_waits_and_goes_after_that(path: Path) -> None:
    name = str(path.relative_to(FOLDER))
    lines = code(path)
    for at, line in enumerate(lines):
        if "pdl_go()" in line and name != EARLY:
            assert "pdl_wait()" in lines[at - 1], f"{name}: pdl_go() does not follow pdl_wait(): {line}"
    for kernel, body in kernels(path).items():
        assert any(f"{wait}()" in body for wait in ("pdl_wait", "go_and_wait", "wait_and_go")), f"{kernel} never waits"


def test_what_reads_ahead_of_its_wait_follows_kernels_that_wait_first() -> None:
    for name, ahead in AHEAD.items():
        found = kernels(FOLDER / name)
        for kernel in ahead:
            before = re.split(r"(pdl|go_and)_wait\(\)", found[kernel])[0]
            read = any(name in before for name in ("*live", "(live)", "*njobs", "(rows)"))
            assert read, f"{kernel} reads nothing ahead any more: forget it here"
    for name in BEFORE_THEM:
        assert "go after wait" in (FOLDER / name).read_text(), f"{name} does not say that its order matters"
