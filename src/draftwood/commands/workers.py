"""Independent work on one model by several processes, each with the weights and a share of the cores.

Small models on CPUs gain little from more threads and much from a second process. Ranks split one model; workers here
each hold all of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, TypeVar

from draftwood.config import Options
from draftwood.errors import ConfigError, DeviceLost, DraftwoodError

if TYPE_CHECKING:
    from draftwood.llm import LLM

Task = TypeVar("Task")
Result = TypeVar("Result")
_LEAVE_SECONDS = 2.0
"""A worker that is idle leaves by itself; one that is not is ended after this long."""


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fitting(options: Options) -> int:
    """Return how many workers suit `options`: one for each core where all of them fit a CPU's memory, else one.

    Raises ConfigError for options that fit no checkpoint or device.
    """
    from draftwood import devices, plan

    if options.tp * options.ep > 1:
        return 1
    device = devices.detect(options.device)
    made = plan.decide(options, plan.find(options), device)
    if device.kind != "cpu":
        return 1
    return max(1, min(cores(), device.memory // max(1, sum(size for _, size in made.memory))))


def spread(
    options: Options, jobs: int, work: Callable[[LLM, Task], Result], tasks: Iterable[Task]
) -> Iterator[tuple[Task, Result]]:
    """Yield (task, work(llm, task)) as they are done, by `jobs` processes that load the model once each.

    `work` is a module's own function; tasks and results can be pickled. Raises what a worker met as
    ConfigError or DeviceLost, DeviceLost when one died.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, options, work, max(1, cores() // jobs)), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield from _share(list(connections), iter(tasks))
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(_LEAVE_SECONDS)
            process.terminate()
            process.join()


def _share(idle: list[Connection], tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Keep every worker busy until the tasks are done."""
    busy: dict[Connection, Any] = {}
    while True:
        while idle and (task := next(tasks, None)) is not None:
            connection = idle.pop()
            connection.send(task)
            busy[connection] = task
        if not busy:
            return
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            try:
                result = ready.recv()
            except EOFError:
                raise DeviceLost("a worker process ended before its work was done; see what it wrote above") from None
            if isinstance(result, DraftwoodError):
                raise result
            yield busy.pop(ready), result
            idle.append(ready)


def _serve(connection: Connection, options: Options, work: Callable[[LLM, Any], Any], threads: int) -> None:
    """The worker: load the model, then work on what comes until the other end is gone."""
    import torch

    from draftwood.llm import LLM

    torch.set_num_threads(threads)
    try:
        with LLM(options) as llm:
            while True:
                connection.send(work(llm, connection.recv()))
    except DraftwoodError as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send(ConfigError(str(error)) if error.exit_code == ConfigError.exit_code else DeviceLost(str(error)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
