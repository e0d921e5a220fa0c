"""Every environment variable the package reads, in one table. Nothing else touches os.environ."""

from __future__ import annotations

import os
from dataclasses import dataclass

from draftwood.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, its value when unset, and what it is for."""

    name: str
    default: str
    help: str


TABLE: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("RANK", "", "rank of this process, set by torchrun or by draftwood itself"),
        Variable("WORLD_SIZE", "", "number of ranks, set by torchrun or by draftwood itself"),
        Variable("LOCAL_RANK", "", "rank on this machine, set by torchrun"),
        Variable("MASTER_ADDR", "", "address of rank 0, set by torchrun or by draftwood itself"),
        Variable("MASTER_PORT", "", "port of rank 0, set by torchrun or by draftwood itself"),
        Variable("DRAFTWOOD_RANK_TIMEOUT", "600", "seconds a collective may wait for another rank"),
        Variable("DRAFTWOOD_SUPERVISED", "", "set by draftwood for the ranks it starts and watches"),
        Variable("OMP_NUM_THREADS", "", "threads of a rank on CPU (default: the cores, shared by the ranks)"),
        Variable("DRAFTWOOD_CACHE", "", "folder of compiled kernels (default: ~/.cache/draftwood/kernels)"),
        Variable("DRAFTWOOD_API_KEY", "", "key that `draftwood serve` asks for where --api-key is not given"),
        Variable("NO_COLOR", "", "any value: no colours on the terminal"),
    )
}


def read(name: str) -> str:
    """Return the variable's text, or its default. Raises KeyError for a name not in TABLE."""
    return os.environ.get(name, TABLE[name].default)


def read_int(name: str) -> int | None:
    """Return the variable as an integer, None when unset. Raises ConfigError for other text."""
    text = read(name)
    if text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a whole number; unset it or set a number"
        ) from None


def inherit(**changes: str) -> dict[str, str]:
    """Return the environment for a child process: this process's own with `changes`."""
    return {**os.environ, **changes}
