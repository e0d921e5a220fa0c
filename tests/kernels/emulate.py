"""Runs a kernel's CUDA source on the CPU (kernels/emulation.h): `Emulated` stands in for jit.Kernel on CPU tensors."""

import atexit
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.kernels import jit
from draftwood.kernels.linear import op as linear
from draftwood.kernels.linear import plan

COMPILER = shutil.which("g++")
_RUN = os.environ.get("DRAFTWOOD_TEST_RUN")
SHARED = Path(_RUN or tempfile.mkdtemp(prefix="draftwood-emulated-"))
"""Libraries of all workers of a test run: a build takes a second, and a run has 250."""
if _RUN is None:
    atexit.register(shutil.rmtree, SHARED, ignore_errors=True)
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-DEMULATION=1")


@functools.cache
def _library(file: Path, entry: str, macros: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    name = hashlib.sha256(repr((jit._with_headers(file), entry, macros)).encode()).hexdigest()[:16]
    built = SHARED / f"{name}.so"
    if not built.exists():
        _build(built, file, entry, macros)
    library = ctypes.CDLL(str(built))
    library.emulate.restype = ctypes.c_char_p
    library.argument_sizes.restype = ctypes.POINTER(ctypes.c_int)
    return library


def _build(built: Path, file: Path, entry: str, macros: tuple[tuple[str, str], ...]) -> None:
    text = built.with_suffix(f".{os.getpid()}.cpp")
    text.write_text(
        f'#include "{file}"\n'
        "template <class... Given> static const int* sizes_of(void (*)(Given...)) {\n"
        "  static const int sizes[] = {(int)sizeof(Given)..., 0};\n"
        "  return sizes;\n"
        "}\n"
        f'extern "C" const int* argument_sizes() {{ return sizes_of({entry}); }}\n'
        'extern "C" const char* emulate(const int* grid, int threads, const unsigned long long* arguments) {\n'
        f"  return emulated::run_grid({{grid[0], grid[1], grid[2]}}, threads, [&] {{ emulated::call({entry}, arguments); }});\n"
        "}\n"
    )
    _compile("-shared", "-include", str(_parsed_before()), *(f"-D{k}={v}" for k, v in macros), str(text), to=built)


@functools.cache
def _parsed_before() -> Path:
    """A header that includes emulation.h, precompiled: parsing that takes .5 of the 1.2 s of a build without it."""
    header = SHARED / "before.h"
    if not (parsed := SHARED / "before.h.gch").exists():
        own = header.with_suffix(f".{os.getpid()}.h")
        own.write_text(f'#include "{jit.__file__[: -len("jit.py")]}emulation.h"\n')
        os.replace(own, header)
        _compile("-x", "c++-header", str(header), to=parsed)
    return header


def _compile(*arguments: str, to: Path) -> None:
    """Run the compiler. What it makes is renamed, so that other workers see all of it or nothing."""
    aside = to.with_suffix(f".{os.getpid()}")
    subprocess.run([str(COMPILER), *_FLAGS, "-o", str(aside), *arguments], check=True, capture_output=True, text=True)
    os.replace(aside, to)


def _size(value: Any) -> int:
    return 8 if isinstance(value, torch.Tensor) else value.dtype.itemsize


class Emulated:
    """The call of jit.Kernel for tensors in the CPU's memory. Blocks run one after another."""

    def __init__(self, source: jit.Source) -> None:
        macros = tuple(sorted((k, str(v)) for k, v in source.macros.items()))
        self.library = _library(source.file, source.entry, macros)
        sizes = self.library.argument_sizes()
        self.sizes = list(itertools.takewhile(bool, (sizes[i] for i in itertools.count())))
        """Bytes of the kernel's arguments."""

    def __call__(
        self, grid: int | tuple[int, ...], block: int, args: Sequence[Any], shared: int | None = None, pdl: bool = False
    ) -> None:
        """Run the grid to its end. Raises RuntimeError for an address, an alignment or a copy that no GPU would allow, and for
        arguments that are more, fewer or of other sizes than the kernel's: a driver would read beyond them."""
        if (given := [_size(a) for a in args]) != self.sizes:
            raise RuntimeError(f"the kernel has arguments of {self.sizes} bytes; the launch gives {given}")
        sizes = (grid,) if isinstance(grid, int) else grid
        words = np.zeros(len(args), np.uint64)
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                words[i] = a.data_ptr()
            else:
                words[i : i + 1].view(a.dtype)[0] = a
        extent = (ctypes.c_int * 3)(*sizes, *[1] * (3 - len(sizes)))
        failure = self.library.emulate(extent, block, words.ctypes.data_as(ctypes.c_void_p))
        if failure:
            raise RuntimeError(f"emulated kernel: {failure.decode()}")


def emulate_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launcher of `linear` run its sources on the CPU, in the forms of an H200."""
    monkeypatch.setattr(linear, "_kernel", functools.cache(lambda form, device: Emulated(linear.source(form))))
    monkeypatch.setattr(linear, "_machine_of", lambda device: plan.H200)
