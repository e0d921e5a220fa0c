"""The program each rank of the tests runs: `ranks_program.py MODE FOLDER [WORLD]`.

torch is imported only by the modes that use it, for it takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import DraftwoodError

if TYPE_CHECKING:
    import torch

    from draftwood.parallel.comm import Comm


def part(rank: int) -> torch.Tensor:
    """The float32 tensor rank `rank` brings: values whose sum depends on the order of adding."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 7, generator=generator) * 10.0 ** (3 * (rank % 3))


def collectives(comm: Comm, folder: Path) -> None:
    """Run every collective once and save what this rank got."""
    import torch

    mine = part(comm.rank)
    results = {
        "sum": comm.all_reduce(mine),
        "sum16": comm.all_reduce(mine.bfloat16()),
        "strided": comm.all_reduce(mine.t()),
        "rows": comm.all_gather(mine, 0),
        "columns": comm.all_gather(mine, -1),
        "integers": comm.all_gather(torch.tensor([comm.rank]), 0),
        "tensor": comm.broadcast(mine, src=comm.world - 1),
        "untouched": mine,
    }
    small = comm.broadcast({"step": 3, "rows": (1, 2)} if comm.rank == 0 else None)
    large = comm.broadcast(list(range(20_000)) if comm.rank == 1 else None, src=1)
    comm.barrier()
    torch.save((results, small, large == list(range(20_000))), folder / f"{comm.rank}.pt")


def die(comm: Comm, folder: Path) -> None:
    """Rank 1 is killed while all others wait for it."""
    (folder / f"{comm.rank}.pid").write_text(str(os.getpid()))
    import torch

    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(3))


def alone(mode: str, rank: int, folder: Path) -> int:
    """Modes without any collective."""
    if mode == "refuse" or (mode == "one-refuses" and rank == 1):
        print("draftwood test: --tp 2 is refused", file=sys.stderr)
        return 2
    if mode == "crash" and rank == 1:
        raise ValueError("a bug in rank 1")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(60)
    return 0


def late(comm: Comm, folder: Path) -> None:
    """Rank 1 lives but does not come."""
    comm.barrier()
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()


def idle(comm: Comm, folder: Path) -> None:
    """Rank 0 has nothing to say for longer than the timeout of a collective."""
    comm.barrier()
    if comm.rank == 0:
        time.sleep(4)
    assert comm.broadcast("next" if comm.rank == 0 else None) == "next"
    comm.barrier()


def together(mode: str, folder: Path, world: int) -> int:
    """Modes in which the ranks connect."""
    from draftwood.parallel.comm import connect

    try:
        comm = connect(world)
        {"collectives": collectives, "die": die, "late": late, "idle": idle}[mode](comm, folder)
        comm.close()
    except DraftwoodError as error:
        print(f"draftwood test: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"rank": comm.rank, "world": comm.world}))
    return 0


def main() -> int:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode in ("collectives", "die", "late", "idle"):
        return together(mode, folder, int(sys.argv[3] if len(sys.argv) > 3 else os.environ["WORLD_SIZE"]))
    return alone(mode, int(os.environ["RANK"]), folder)


if __name__ == "__main__":
    sys.exit(main())
