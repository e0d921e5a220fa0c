"""CUDA C++ source -> cubin by NVRTC, cached on disk; cubin -> callable kernel on torch's current stream.

Compiling needs no GPU and no driver (`build`); loading and launching do (`Kernel`). A cubin's cache key covers the
source with every project header it includes, the macros, the options, the architecture and the NVRTC version, so a
stale file can never be used. Files are written aside and renamed: several processes may build at once.

The packages `cuda.core` and `nvidia-cuda-nvrtc` are the optional extra `gpu`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftwood import env
from draftwood.errors import ConfigError, KernelBuildError

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Architectures every kernel must compile for; `a` because plain sm_120 lacks features that we use."""

SHARED_LIMIT = {"sm_90a": 232_448, "sm_100a": 232_448, "sm_103a": 232_448, "sm_120a": 101_376}
"""Most dynamic shared memory of one block, bytes (CUDA C++ programming guide, compute capabilities)."""

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_USED = re.compile(
    r"Compiling entry function '(\w+)'|(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r"|Used (\d+) registers(?:.*?(\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Source:
    """What to compile: one .cu file, its extern "C" entry, and the macros that fix its template parameters."""

    file: Path
    entry: str
    macros: Mapping[str, int | str] = field(default_factory=dict)

    def label(self) -> str:
        """Return `entry[A=1 B=2]`, for tables and messages."""
        given = " ".join(f"{k}={v}" for k, v in sorted(self.macros.items()))
        return f"{self.entry}[{given}]" if given else self.entry


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture and what ptxas said about it (bytes, except registers per thread)."""

    arch: str
    code: bytes
    registers: int
    spill_bytes: int
    static_shared: int


def arch_of(capability: tuple[int, int]) -> str:
    """Return the architecture name of a device's compute capability. Raises ConfigError for one never compiled for."""
    known = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
    if capability not in known:
        have = ", ".join(f"{a}.{b}" for a, b in known)
        raise ConfigError(f"compute capability {capability[0]}.{capability[1]} has no kernels; supported: {have}; use --device cpu")
    return known[capability]


def cache_folder() -> Path:
    """Return the folder of compiled kernels: DRAFTWOOD_CACHE, else ~/.cache/draftwood/kernels."""
    chosen = env.read("DRAFTWOOD_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "draftwood" / "kernels"


@functools.cache
def _toolchain() -> tuple[Any, Any, Any]:
    """Import cuda.core, its NVRTC bindings and the header finder; raise ConfigError when the extra is missing."""
    try:
        import cuda.core as core
        import cuda.pathfinder as pathfinder
        from cuda.bindings import nvrtc
    except ImportError as missing:
        raise ConfigError(f"CUDA kernels need {missing.name}, which is not installed; pip install 'draftwood[gpu]'") from None
    return core, nvrtc, pathfinder


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version, e.g. "13.0". Raises ConfigError when it cannot be loaded."""
    _, nvrtc, _ = _toolchain()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as broken:
        raise ConfigError(f"NVRTC cannot be loaded ({str(broken).splitlines()[0]}); pip install 'draftwood[gpu]'") from None
    if int(status) != 0:
        raise ConfigError(f"NVRTC answered status {int(status)} to a version query; reinstall nvidia-cuda-nvrtc")
    return f"{major}.{minor}"


@functools.cache
def _header_folder() -> str:
    _, _, pathfinder = _toolchain()
    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise ConfigError("the CUDA runtime headers (cuda_bf16.h) were not found; pip install 'draftwood[gpu]'")
    return str(folder)


def _with_headers(file: Path) -> str:
    """Return the text of the file and of every project header it includes, for the cache key; KernelBuildError."""
    seen: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        try:
            seen[path] = path.read_text(encoding="utf-8")
        except OSError as error:
            raise KernelBuildError(f"kernel source {path.name} cannot be read: {error.strerror}", source=str(path)) from None
        waiting += [(path.parent / name).resolve() for name in _INCLUDE.findall(seen[path])]
    return "\0".join(seen[path] for path in sorted(seen, key=lambda p: p.name))


def _options(arch: str) -> dict[str, Any]:
    # NVRTC has a cache of its own (on machines with a driver), and what comes out of it comes without ptxas's report.
    return {"std": "c++17", "arch": arch, "lineinfo": True, "no_cache": True, "ptxas_options": ["-v"]}


def _key(source: Source, arch: str) -> str:
    parts = [
        _with_headers(source.file),
        source.entry,
        json.dumps(sorted((k, str(v)) for k, v in source.macros.items())),
        json.dumps(_options(arch), sort_keys=True),
        nvrtc_version(),
    ]
    return hashlib.sha256("\1".join(parts).encode()).hexdigest()[:40]


def build(source: Source, arch: str) -> Cubin:
    """Compile `source` for `arch`, or take it from the cache.

    Raises KernelBuildError with the compiler's output and the path of the kept source; ConfigError for an unknown
    architecture or a missing toolchain.
    """
    if arch not in ARCHS:
        raise ConfigError(f"architecture {arch!r} is not one of {', '.join(ARCHS)}")
    key = _key(source, arch)
    found = _from_cache(key, arch)
    if found is None:
        found = _compile(source, arch, key)
        _to_cache(key, found)
    return found


def _compile(source: Source, arch: str, key: str) -> Cubin:
    core, _, _ = _toolchain()
    text = source.file.read_text(encoding="utf-8")
    log = io.StringIO()
    options = core.ProgramOptions(
        name=source.file.name,
        include_path=[str(source.file.parent), str(source.file.parent.parent), _header_folder()],
        define_macro=[(name, str(value)) for name, value in sorted(source.macros.items())] or None,
        **_options(arch),
    )
    try:
        code = core.Program(text, "c++", options).compile("cubin", logs=log).code
    except Exception as failed:
        if type(failed).__name__ != "NVRTCError":  # its class is private to cuda.core; anything else is not about the source
            raise
        raise _refused(source, arch, key, text, f"{log.getvalue()}\n{failed}") from None
    return Cubin(arch, bytes(code), *_parse_ptxas(log.getvalue(), source.entry))


def _refused(source: Source, arch: str, key: str, text: str, log: str) -> KernelBuildError:
    """Keep the source for the reader and put the compiler's first error into one line."""
    kept = cache_folder() / f"failed-{key}.cu"
    _write_aside(kept, text.encode())
    first = next((line.strip() for line in log.splitlines() if "error:" in line), "see the log")
    message = f"{source.label()} does not compile for {arch}: {first} (source kept at {kept})"
    return KernelBuildError(message, log=log, source=str(kept))


def _parse_ptxas(log: str, entry: str) -> tuple[int, int, int]:
    """Return (registers, spill bytes, static shared bytes) of `entry` from ptxas -v's output."""
    name, spill, result = "", 0, None
    for match in _USED.finditer(log):
        if match[1]:
            name, spill = match[1], 0
        elif match[3]:
            spill = int(match[3]) + int(match[4])
        elif name == entry:
            result = int(match[5]), spill, int(match[6] or 0)
    if result is None:
        raise KernelBuildError(
            f'the compiler\'s report does not name the entry {entry!r}; is it extern "C" and __global__?', log=log
        )
    return result


def _from_cache(key: str, arch: str) -> Cubin | None:
    folder = cache_folder()
    try:
        facts = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        code = (folder / f"{key}.cubin").read_bytes()
        if hashlib.sha256(code).hexdigest() != facts["sha256"]:
            return None
        return Cubin(arch, code, int(facts["registers"]), int(facts["spill_bytes"]), int(facts["static_shared"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: it is built again and replaced


def _to_cache(key: str, cubin: Cubin) -> None:
    facts = {
        "registers": cubin.registers,
        "spill_bytes": cubin.spill_bytes,
        "static_shared": cubin.static_shared,
        "arch": cubin.arch,
        "sha256": hashlib.sha256(cubin.code).hexdigest(),
    }
    _write_aside(cache_folder() / f"{key}.cubin", cubin.code)
    _write_aside(cache_folder() / f"{key}.json", json.dumps(facts).encode())


def _write_aside(path: Path, content: bytes) -> None:
    """Write under another name, then rename: a reader sees the old file or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".building-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(
            f"the kernel cache {path.parent} cannot be written ({error.strerror}); set DRAFTWOOD_CACHE to another"
        ) from None


class Kernel:
    """A loaded kernel of one device. `dynamic_shared` is the largest size any launch will ask for, in bytes."""

    def __init__(self, source: Source, device: int, dynamic_shared: int = 0) -> None:
        import torch

        core, _, _ = _toolchain()
        self.arch = arch_of(torch.cuda.get_device_capability(device))
        if dynamic_shared > SHARED_LIMIT[self.arch]:
            raise ConfigError(
                f"{source.label()} needs {dynamic_shared} B of shared memory; {self.arch} has {SHARED_LIMIT[self.arch]}"
            )
        self.cubin = build(source, self.arch)
        torch.cuda.init()
        core.Device(device).set_current()
        self._kernel = core.ObjectCode.from_cubin(self.cubin.code).get_kernel(source.entry)
        self._label, self._arguments = source.label(), self._kernel.num_arguments
        self._shared = dynamic_shared
        self._configs: dict[tuple[int | tuple[int, ...], int, int, bool], Any] = {}
        if dynamic_shared > 49_152:  # above 48 KB the driver wants to be told, once, the largest size
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", dynamic_shared, device)
        # A multiprocessor drains before its split of shared memory and L1 changes, so that kernels that follow each other want the
        # same one: all shared memory (a step of budget 8 of K2.6 22.8 -> 22.55 ms, of one row 10.31 -> 10.26).
        self._set("PREFERRED_SHARED_MEMORY_CARVEOUT", 100, device)

    def _set(self, attribute: str, value: int, device: int) -> None:
        from cuda.bindings import driver

        named = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        (status,) = driver.cuKernelSetAttribute(named, value, driver.CUkernel(int(self._kernel.handle)), driver.CUdevice(device))
        if int(status) != 0:
            raise ConfigError(f"{self._label}: the driver refused {attribute.lower()} {value} (status {int(status)})")

    def __call__(
        self, grid: int | tuple[int, ...], block: int, args: Sequence[Any], shared: int | None = None, pdl: bool = False
    ) -> None:
        """Launch on torch's current stream. `args`: tensors (their addresses), numpy scalars or ctypes values.

        pdl: programmatic stream serialization (the kernel may start before its predecessor ends and must
        wait with griddepcontrol.wait before it reads what the predecessor wrote).
        """
        if len(args) != self._arguments:  # the driver would read beyond the end of a short list
            raise TypeError(f"{self._label} takes {self._arguments} arguments; a launch gives {len(args)}")
        config = self._config(grid, block, self._shared if shared is None else shared, pdl)
        _toolchain()[0].launch(_current_stream(), config, self._kernel, *[a if type(a) in _SCALARS else _argument(a) for a in args])

    def _config(self, grid: int | tuple[int, ...], block: int, shared: int, pdl: bool) -> Any:
        """How a launch is made, kept: few ways come again and again."""
        how = (grid, block, shared, pdl)
        config = self._configs.get(how)
        if config is None:
            if shared > self._shared:
                raise ConfigError(f"a launch asks for {shared} B of shared memory; its kernel was loaded with {self._shared}")
            core, _, _ = _toolchain()
            config = core.LaunchConfig(grid=grid, block=block, shmem_size=shared, programmatic_stream_serialization=pdl)
            self._configs[how] = config
        return config


def _current_stream() -> Any:
    import torch

    return _stream(torch.cuda.current_stream().cuda_stream)


@functools.lru_cache(maxsize=8)
def _stream(handle: int) -> Any:
    """A stream of torch as cuda.core's, which only keeps the handle."""
    core, _, _ = _toolchain()
    return core.Stream.from_handle(handle)


_SCALARS = frozenset({np.int32, np.int64, np.uint64, np.float32})
"""Types of most arguments that are passed on as they are."""


def _argument(value: Any) -> Any:
    """A tensor becomes its address; plain ints and floats are refused because their width would be guessed."""
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if isinstance(value, bool | int | float) and not hasattr(value, "itemsize"):  # numpy.float64 is a float, and has a width
        raise TypeError(f"kernel argument {value!r} has no width; pass numpy.int32 / numpy.int64 / numpy.float32")
    return value
