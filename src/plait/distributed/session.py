"""One rank's place among the others: its parts, the graph, the exchanges of feature rows and neighbours."""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from plait.distributed.exchange import WIRE, Exchange, LocalRows
from plait.distributed.frontier import FrontierExchange
from plait.distributed.parts import Parts, shares
from plait.distributed.rounds import naming, timeout_of
from plait.errors import InputError, PartsError, PlaitError, unknown
from plait.graph import Graph
from plait.loader.owned import OwnedEdges
from plait.measure.environment import available_bytes

__all__ = ["Session", "init", "join"]

# How long one rank waits for another, in DDP's all-reduce and in exchanges, before it gives up.
TIMEOUT_SECONDS = 300.0
_LONGEST = 1000  # bytes of a rank's error that are sent to the others
# The graph's structure is replicated where it takes no more of the memory that is free on any machine.
_TOPOLOGY_SHARE = 0.5


class Session:
    """What `init` returns: the parts of this rank, and access to the rows of the others.

    Rank r of `size` owns the neighbouring parts `owned`. All ranks close it at the end; a `with` block does.
    """

    def __init__(
        self, parts: Parts, local: LocalRows, rank: int, size: int, timeout_seconds: float, ends_group: bool
    ) -> None:
        every = shares(parts.num_parts, size)
        self.parts, self.rank, self.size, self.owned = parts, rank, size, every[rank]
        self.wire, self._timeout = local.precision or "float32", timeout_seconds
        self.topology_fits = True
        """Whether every machine has room for the structure of the whole graph."""
        self._frontiers: FrontierExchange | None = None
        self._ends_group = ends_group
        self.bounds = parts.bounds[[share.start for share in every] + [parts.num_parts]]
        self.exchange = Exchange(local, self.bounds, rank, timeout_seconds=timeout_seconds)
        atexit.register(self._leave)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        return f"Session(rank {self.rank} of {self.size}, parts {list(self.owned)} of {self.parts.folder})"

    @cached_property
    def graph(self) -> Graph:
        """The whole graph, mapped."""
        return self.parts.graph()

    def frontiers(self) -> FrontierExchange:
        """The in-edges of all nodes, this rank's own mapped; the first call is made by all ranks together."""
        if self._frontiers is None:
            begin, end = int(self.bounds[self.rank]), int(self.bounds[self.rank + 1])
            edges = OwnedEdges(*self.parts.edges(begin, end), begin, self.parts.num_nodes)
            self._frontiers = FrontierExchange(edges, self.bounds, self.rank, timeout_seconds=self._timeout)
        return self._frontiers

    @property
    def local(self) -> Any:
        """Which nodes this rank owns, one truth value each."""
        mask = np.zeros(self.parts.num_nodes, bool)
        mask[self.bounds[self.rank] : self.bounds[self.rank + 1]] = True
        return mask

    @property
    def halo(self) -> Any:
        """Which nodes of other ranks have an edge into this one's, one truth value each."""
        mask = np.zeros(self.parts.num_nodes, bool)
        for part in self.owned:
            mask[self.parts.halo(part)] = True
        return mask & ~self.local

    def traffic(self) -> tuple[int, int]:
        """Bytes that came in and went out so far, of feature rows and of neighbours."""
        used = [self.exchange.counters, *([self._frontiers.counters] if self._frontiers is not None else [])]
        return sum(one.bytes_in for one in used), sum(one.bytes_out for one in used)

    def add(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over all ranks."""
        if self.size > 1:
            with naming(self.rank, "all-reduce"):
                dist.all_reduce(tensor)

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sums of these over all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self.add(total)
        return list(total.tolist())

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(own) for _ in range(self.size)]
        with naming(self.rank, "all-gather"):
            dist.all_gather(every, own)
        return [one.tolist() for one in every]

    def close(self) -> None:
        """Ends the exchange, and the process group if `init` made it; a second call does nothing."""
        atexit.unregister(self._leave)
        self.exchange.close()
        if self._frontiers is not None:
            self._frontiers.close()
        if self._ends_group and dist.is_initialized():
            dist.destroy_process_group()
        self._ends_group = False

    def abandon(self) -> None:
        """Ends this rank's part without waiting for the others, which notice when the process ends."""
        atexit.unregister(self._leave)
        self.exchange.abandon()
        if self._frontiers is not None:
            self._frontiers.abandon()

    def _leave(self) -> None:
        """At the end of the process: a process that ends with an error does not wait for others."""
        if hasattr(sys, "last_value"):
            self.abandon()
        else:
            self.close()


def init(
    folder: str | os.PathLike[str],
    *,
    wire: str = "float32",
    timeout_seconds: float = TIMEOUT_SECONDS,
    interface: str | None = None,
    verify: bool = False,
) -> Session:
    """This process's session over the parts in `folder`, under torchrun or alone.

    The default process group is used if there is one; else it is made (gloo) from torchrun's environment;
    without torchrun there is one rank. `interface` is the network interface the ranks use; the default is the
    loopback interface if the master is this machine. `verify` compares every file with its checksum first.

    `wire` "float16" or "bfloat16" rounds all features to it, wherever they live, and sends and caches them in
    half the bytes: the model then trains on rounded features, the same for any number of processes.
    """
    if wire not in WIRE:
        raise InputError(f"wire={wire!r} is unknown; choose one of {', '.join(WIRE)}")
    made = join(timeout_seconds, interface)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = opened(folder, verify, rank, size)
    session = Session(parts, _rows_of(parts, wire, rank, size), rank, size, timeout_seconds, made)
    _check_agreement(session)
    return session


def opened(folder: str | os.PathLike[str], verify: bool, rank: int, size: int) -> Parts:
    """The parts of a folder; where one rank cannot open them, an error on all names it and the reason."""
    found: Parts | None = None
    error: PlaitError | None = None
    try:
        found = Parts(folder, verify)
        if not found.has_features:
            raise InputError(
                f"{folder} holds no features to exchange; partition a file with x, or with --features WIDTH"
            )
        shares(found.num_parts, size)
        for part in shares(found.num_parts, size)[rank]:
            found.x(part)  # its length, type and shape
    except PlaitError as refusal:
        error = refusal
    _raise_together(error, rank, size)
    assert found is not None
    return found


def _rows_of(parts: Parts, wire: str, rank: int, size: int) -> LocalRows:
    """The feature rows of this rank's parts; where those of one cannot be rounded, an error on all."""
    found: LocalRows | None = None
    error: PlaitError | None = None
    own = shares(parts.num_parts, size)[rank]
    try:
        found = LocalRows([parts.x(part) for part in own], int(parts.bounds[own.start]), wire)
    except PlaitError as refusal:
        error = InputError(f"wire={wire!r}: {refusal}")
    _raise_together(error, rank, size)
    assert found is not None
    return found


def _raise_together(error: PlaitError | None, rank: int, size: int) -> None:
    """Raises a rank's error on all of them."""
    if size == 1 and error is not None:
        raise error
    if size == 1:
        return
    said = b"" if error is None else f"rank {rank}: {error}".encode()[:_LONGEST]
    own = torch.zeros(_LONGEST, dtype=torch.uint8)
    own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else 0
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own)
    texts = [bytes(one.tolist()).rstrip(bytes(1)).decode(errors="replace") for one in every]
    if any(texts):
        kind = PartsError if error is None else type(error)
        raise kind("; ".join(text for text in texts if text)) from error


def join(timeout_seconds: float, interface: str | None, backend: str = "gloo") -> bool:
    """Makes the default process group where torchrun started this process; whether it did."""
    wait, known = timedelta(seconds=timeout_of(timeout_seconds)), [name for _, name in socket.if_nameindex()]
    for name in () if interface is None else interface.split(","):
        if name not in known:
            raise InputError(unknown("interface", name, known))
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    lacking = [name for name in ("RANK", "MASTER_PORT") if name not in os.environ]
    if lacking:
        raise InputError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {' and '.join(lacking)} not set; start the "
            "processes with torchrun, or unset WORLD_SIZE to run alone"
        )
    master = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if interface is None and (master == "localhost" or master.startswith("127.")):
        interface = next((name for name in ("lo", "lo0") if name in known), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store, rank, size = next(rendezvous("env://", timeout=wait))
    # torchrun's store outlives a restart, and with it the addresses of dead processes under the same names
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"plait/attempt-{attempt}", store)  # type: ignore[attr-defined]  # torch's lack
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    return True


def _check_agreement(session: Session) -> None:
    """InputError on every rank when their folders or wire types differ; notes whether the structure fits."""
    digest = [float(b) for b in bytes.fromhex(session.parts.manifest.inputs)]
    own = [*digest, float(WIRE.index(session.wire))]
    free = available_bytes()
    every = session.gathered([*own, math.inf if free is None else float(free)])
    least = min(other.pop() for other in every)
    session.topology_fits = session.parts.topology_bytes <= _TOPOLOGY_SHARE * least
    differing = [rank for rank, other in enumerate(every) if other != every[0]]
    if differing:
        session.close()  # on all of them
        raise InputError(
            f"folder: ranks {differing} opened other parts, or chose another wire type, than rank 0; give "
            "all of them the same"
        )
