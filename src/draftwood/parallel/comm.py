"""Collectives between the ranks of one model: a small protocol, the identity for one rank, and Gloo for CPU ranks.

Every rank must get bitwise the same sum, because every rank decides by itself which token was chosen. A ring or
tree all-reduce adds in an order that differs between ranks, so here the parts are exchanged and each rank adds them
in rank order.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from draftwood import env
from draftwood.errors import ConfigError, DeviceLost

T = TypeVar("T")

_HEADER = 8
_FIRST = 8192
"""Bytes of an object's first message: its length and as much of it as fits; plans of a step fit."""
_FOREVER = timedelta(days=365)
_MOST_SECONDS = 7 * 24 * 3600
_SUPERVISOR_GRACE = 10.0


class Comm(Protocol):
    """What model and engine may ask of the other ranks. All ranks call the same methods in the same order."""

    rank: int
    world: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `x` (same shape and type), added in rank order; `x` is not changed."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return every rank's `x` (same shape everywhere) joined along `dim` in rank order."""
        ...

    def broadcast(self, x: T, src: int = 0) -> T:
        """Return rank `src`'s `x`: a tensor (shape and type known to all) or a small picklable object.

        For an object the other ranks pass anything that is no tensor, and wait as long as it takes: an idle
        engine's ranks wait here for the next step. A rank that died is noticed at once all the same.
        """
        ...

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        ...

    def close(self) -> None:
        """Let go of the connections; the object is of no use afterwards."""
        ...


class Local:
    """One rank: every collective is the identity."""

    rank = 0
    world = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def broadcast(self, x: T, src: int = 0) -> T:
        return x

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None


class Gloo:
    """CPU ranks over TCP. Parts travel pairwise, so that an error belongs to one peer and can name it.

    `timeout` is the most seconds a tensor collective waits for a living peer. Every method but `close` raises
    DeviceLost when a peer is gone or late.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout: float, address: str = "") -> None:
        self.rank = rank
        self.world = world
        self._timeout = timedelta(seconds=timeout)
        self._peers = [r for r in range(world) if r != rank]
        backend: Any = ProcessGroupGloo
        loopback = address in ("localhost", "::1") or address.startswith("127.")
        options = backend._Options()
        options._timeout = self._timeout
        options._devices = [backend.create_device(hostname="127.0.0.1") if loopback else backend.create_default_device()]
        self._group = backend(store, rank, world, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def broadcast(self, x: T, src: int = 0) -> T:
        if isinstance(x, torch.Tensor):
            flat = x.contiguous() if self.rank == src else torch.empty_like(x, memory_format=torch.contiguous_format)
            self._from(src, flat, self._timeout)
            return cast(T, flat)
        return cast(T, pickle.loads(self._broadcast_bytes(pickle.dumps(x) if self.rank == src else b"", src)))

    def barrier(self) -> None:
        self._exchange(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        self._group = None

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `x` in rank order; the own part is `x` itself."""
        own = x.contiguous()
        parts = [own if r == self.rank else torch.empty_like(own) for r in range(self.world)]
        receives = [(r, self._post("recv", parts[r], r)) for r in self._peers]
        sends = [(r, self._post("send", own, r)) for r in self._peers]
        self._wait(receives + sends, self._timeout)
        return parts

    def _broadcast_bytes(self, data: bytes, src: int) -> bytes:
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        if self.rank == src:
            head = len(data).to_bytes(_HEADER, "little") + data[: _FIRST - _HEADER]
            first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._from(src, first, _FOREVER)
        received = bytes(first.numpy())
        size = int.from_bytes(received[:_HEADER], "little")
        missing = size - (_FIRST - _HEADER)
        if missing <= 0:
            return received[_HEADER : _HEADER + size]
        rest = torch.empty(missing, dtype=torch.uint8)
        if self.rank == src:
            rest = torch.frombuffer(bytearray(data[_FIRST - _HEADER :]), dtype=torch.uint8)
        self._from(src, rest, self._timeout)
        return received[_HEADER:] + bytes(rest.numpy())

    def _from(self, src: int, x: torch.Tensor, timeout: timedelta) -> None:
        """Fill `x` on every other rank with rank `src`'s."""
        if self.rank == src:
            self._wait([(r, self._post("send", x, r)) for r in self._peers], timeout)
        else:
            self._wait([(src, self._post("recv", x, src))], timeout)

    def _post(self, kind: str, x: torch.Tensor, peer: int) -> Any:
        try:
            return getattr(self._group, kind)([x], peer, 0)
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _wait(self, works: Iterable[tuple[int, Any]], timeout: timedelta) -> None:
        for peer, work in works:
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> DeviceLost:
        """Make the error of a failed exchange; a supervised rank first gives its supervisor time to end it.

        The supervisor reaped the process and so knows the signal or exit code; its line is the better one.
        """
        if env.read("DRAFTWOOD_SUPERVISED"):
            time.sleep(_SUPERVISOR_GRACE)
        if "timed out" in str(error).lower():
            seconds = f"{self._timeout.total_seconds():g}"
            return DeviceLost(
                f"rank {peer} did not answer rank {self.rank} within {seconds} s; look at that process, "
                f"or raise DRAFTWOOD_RANK_TIMEOUT"
            )
        return DeviceLost(f"rank {peer} is gone: its connection to rank {self.rank} closed; look at that process's output")


def connect(world: int) -> Comm:
    """Return the Comm of this process for a model on `world` = tp * ep ranks.

    One rank needs nothing. More ranks read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun or
    `parallel.launch` set. Raises ConfigError when they do not fit `world` or the address cannot be used, DeviceLost
    when another rank does not come within DRAFTWOOD_RANK_TIMEOUT.
    """
    rank, size = env.read_int("RANK"), env.read_int("WORLD_SIZE")
    if world == 1 and size in (None, 1):
        return Local()
    if rank is None or size is None:
        raise ConfigError(f"{world} ranks (--tp x --ep) need {world} processes; start with the draftwood command or torchrun")
    if size != world:
        raise ConfigError(f"WORLD_SIZE={size} but --tp x --ep is {world}; start {world} processes or change --tp and --ep")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is outside 0..{size - 1}; give each process its own rank below WORLD_SIZE")
    timeout = env.read_int("DRAFTWOOD_RANK_TIMEOUT")
    if timeout is None or not 1 <= timeout <= _MOST_SECONDS:
        raise ConfigError(f"DRAFTWOOD_RANK_TIMEOUT={timeout} is outside 1..{_MOST_SECONDS} seconds; choose one in that range")
    address = env.read("MASTER_ADDR")
    store = _rendezvous(rank, size, address, timeout)
    try:
        return Gloo(store, rank, size, timeout, address)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceLost(f"rank {rank} could not connect to the other {size - 1} ranks within {timeout} s: {reason}") from None


def _rendezvous(rank: int, world: int, address: str, timeout: int) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT, where ranks learn each other's addresses; rank 0 serves it.

    Under torchrun its agent serves the store instead; torch's env:// rendezvous knows the difference.
    """
    port = env.read_int("MASTER_PORT")
    if not address or port is None:
        raise ConfigError("RANK is set but MASTER_ADDR or MASTER_PORT is not; start all ranks by torchrun or by draftwood")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is outside 1..65535; choose a free port in that range")
    try:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout)))
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error)
        where = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if "EADDRINUSE" in text or "already in use" in text:
            raise ConfigError(f"{where}: the port is in use; set MASTER_PORT to a free one") from None
        if rank == 0:
            raise ConfigError(f"{where}: rank 0 cannot serve there; set an address of this machine and a free port") from None
        raise ConfigError(f"{where}: rank 0 did not answer there within {timeout} s; check the address and rank 0") from None
    return PrefixStore("draftwood", store)
