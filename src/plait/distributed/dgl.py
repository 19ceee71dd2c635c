"""plait's cache and prefetching in front of DistDGL: the script stays, its rows are fetched in advance.

    import plait.distributed.dgl                                                           # 1
    loader = plait.distributed.dgl.prefetched(loader, g, "feat", "label", cache=0.25)      # 2

DistDGL (dgl 1.1.3, `pip install dgl==1.1.3 scipy`) answers one request of a process at a time, so all
requests to a server made here share one lock.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import InputError
from plait.features.cache import Cache
from plait.features.rows import Row, place
from plait.loader.epochs import Epochs, Job
from plait.loader.transfer import Transfer
from plait.runtime.buffers import Buffers

__all__ = ["Ahead", "Prefetched", "PulledRows", "prefetched"]

Array = NDArray[Any]

_HEADROOM = 0.125  # as in loader/assemble.py: batches differ by a few per cent in size
_ASKING = threading.RLock()


class PulledRows:
    """The rows of a DistTensor: those of this machine straight from its shared memory, the others pulled."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        policy = tensor.part_policy
        own = policy.partition_book.partid2nids(policy.part_id, policy.type_name)
        self.begin = int(own[0]) if len(own) else 0
        self.end = self.begin + len(own)
        if len(own) and int(own[-1]) != self.end - 1:
            raise InputError(
                f"{tensor.name}: its nodes are not numbered part by part; divide the graph with "
                "dgl.distributed.partition_graph, which does so"
            )
        local = tensor.local_partition
        if local.dtype == torch.bfloat16 or local.dim() < 1:
            raise InputError(f"{tensor.name}: rows of type {local.dtype} are not cached; store float32")
        self._local: Array = local.detach().numpy()
        self.num_rows: int | None = int(tensor.shape[0])
        self.row: Row = (self._local.shape[1:], self._local.dtype)

    def is_local(self) -> Array:
        """Which nodes are this machine's, one truth value each."""
        mask = np.zeros(int(self.tensor.shape[0]), bool)
        mask[self.begin : self.end] = True
        return mask

    def take(self, ids: Array) -> Array:
        """A fresh array whose row i is row ids[i]."""
        out = np.empty((ids.size, *self.row[0]), self.row[1])
        self.place(ids, np.arange(ids.size), out)
        return out

    def place(self, ids: Array, at: Array, out: Array) -> None:
        """out[at] = the rows of `ids`."""
        is_near = (ids >= self.begin) & (ids < self.end)
        near, far = np.flatnonzero(is_near), np.flatnonzero(~is_near)
        if far.size:
            with _ASKING:
                pulled = self.tensor[torch.from_numpy(ids[far])]
            place(pulled.numpy(), np.arange(far.size), at[far], out)
        place(self._local, ids[near] - self.begin, at[near], out)


class Ahead:
    """Replaces a DistTensor: returns rows that were fetched ahead, and reads everything else from it.

    Announced rows are returned once, when indexed with the very tensor given to `expect`.
    """

    def __init__(self, tensor: Any, cache: Cache | None = None) -> None:
        self._tensor, self._cache = tensor, cache
        self._buffers = Buffers(_HEADROOM)
        self._expected: tuple[Tensor, Tensor] | None = None

    def expect(self, nodes: Tensor, rows: Tensor) -> None:
        """Announce the rows that will be read next."""
        self._expected = (nodes, rows)

    def fetch(self, nodes: Tensor) -> Tensor:
        """One row per node; remote ones through the cache."""
        if self._cache is None or self._cache.row is None:
            with _ASKING:
                found: Tensor = self._tensor[nodes]
            return found
        booked = self._cache.room
        out = self.room(nodes.numel()) if booked is None else torch.from_numpy(booked)
        if booked is not None and isinstance(booked.base, Tensor):
            out = booked.base  # which tells the buffers that it is in use
        self._cache.fill(nodes.numpy(), out.numpy())
        return out

    def room(self, count: int) -> Tensor:
        """Memory for that many rows."""
        assert self._cache is not None
        assert self._cache.row is not None
        shape = self._cache.row[0]
        width = int(np.prod(shape, dtype=np.int64))
        return self._buffers.take(count, width, self._tensor.dtype).view(count, *shape)

    def __getitem__(self, nodes: Any) -> Tensor:
        expected, self._expected = self._expected, None
        if expected is not None and nodes is expected[0]:
            return expected[1]
        self._expected = expected
        return self.fetch(torch.as_tensor(nodes))

    def __setitem__(self, nodes: Any, rows: Any) -> None:
        with _ASKING:
            self._tensor[nodes] = rows
        if self._cache is not None:
            self._cache.clear()

    def __len__(self) -> int:
        return int(self._tensor.shape[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@dataclass
class _Drawn:
    """A batch as DGL's loader gives it; `node` are its input nodes."""

    node: Tensor
    batch: Any
    rows: dict[str, tuple[Tensor, Tensor]]


class Prefetched(Epochs):
    """The batches of a DistNodeDataLoader in their order, with the rows they need fetched `ahead`.

    It yields what the loader yields. Indexing `graph.ndata[name]` with a batch's own tensors of nodes
    finds the rows there. A batch is sampled many ahead of its use where the cache looks ahead.
    """

    num_workers = 0

    def __init__(
        self,
        loader: Any,
        graph: Any,
        inputs: Sequence[str],
        outputs: Sequence[str],
        cache: float,
        policy: str,
        ahead: int,
    ) -> None:
        self.loader = loader
        self._by_input = {name: _cached(graph, name, cache, policy) for name in inputs}
        self._by_output = {name: Ahead(graph.ndata[name]) for name in outputs}
        for name, tensor in {**self._by_input, **self._by_output}.items():
            graph.ndata[name] = tensor
        first = self._by_input[inputs[0]]._cache
        self._set_out(0, ahead, None, first)
        self._transfer = Transfer(None, False)
        self._batches: Iterator[Any] = iter(())
        self.sampling_seconds = self.fetching_seconds = 0.0
        self._counted = self._counts()
        guard()

    def __len__(self) -> int:
        return int(self.loader.expected_idxs)

    def __iter__(self) -> Iterator[Any]:
        self._counted = self._counts()
        for drawn in super().__iter__():
            for name, (nodes, rows) in drawn.rows.items():
                self._tensor(name).expect(nodes, rows)
            batch, drawn.rows = drawn.batch, {}
            yield batch

    def report(self) -> dict[str, float]:
        """This epoch so far: seconds of sampling, fetching and waiting; rows requested and found."""
        passed = {name: now - self._counted[name] for name, now in self._counts().items()}
        hits, requests = passed.pop("hits"), passed.pop("requests")
        return passed | {"stall": self.stalled_seconds, "hit_rate": hits / requests if requests else 0.0}

    def _counts(self) -> dict[str, float]:
        cache = self.cache
        assert cache is not None
        counters = cache.counters
        return {
            "sampling": self.sampling_seconds,
            "exchange": self.fetching_seconds,
            "remote_bytes": float(counters.remote_bytes),
            "hits": float(counters.hits),
            "requests": float(counters.requests),
        }

    def _tensor(self, name: str) -> Ahead:
        return self._by_input[name] if name in self._by_input else self._by_output[name]

    def _jobs(self, epoch: int) -> Iterator[Job]:
        self._batches = iter(self.loader)
        for number in range(len(self)):
            yield Job(epoch, number, None)

    def _ahead(self, work: Any, jobs: Iterator[Any], threads: int | None = None) -> Iterator[Any]:
        return super()._ahead(work, jobs, threads=1)  # one thread reads DGL's loader, in order

    def _room(self, cache: Cache, count: int) -> Array | None:
        for tensor in self._by_input.values():
            if tensor._cache is cache and cache.row is not None:
                return tensor.room(count).numpy()
        return None

    def draw(self, job: Job) -> _Drawn:
        """The next batch of DGL's loader."""
        begin = time.perf_counter()
        batch = next(self._batches)
        self.sampling_seconds += time.perf_counter() - begin
        return _Drawn(batch[0], batch, {})

    def fill(self, drawn: _Drawn) -> _Drawn:
        """The batch with its rows."""
        begin = time.perf_counter()
        nodes, seeds = drawn.batch[0], drawn.batch[1]
        for name, tensor in self._by_input.items():
            drawn.rows[name] = (nodes, tensor.fetch(nodes))
        for name, tensor in self._by_output.items():
            drawn.rows[name] = (seeds, tensor.fetch(seeds))
        self.fetching_seconds += time.perf_counter() - begin
        return drawn


def prefetched(
    loader: Any,
    graph: Any,
    inputs: str | Iterable[str] = "feat",
    outputs: str | Iterable[str] = "label",
    *,
    cache: float = 0.25,
    policy: str = "auto",
    ahead: int = 4,
) -> Prefetched:
    """DistDGL's `loader` over `graph`, its rows fetched ahead and through a cache; iterate it instead.

    `inputs` names the node data that the script indexes with a batch's input nodes, `outputs` that it indexes
    with its seeds. `cache` is the number of remote rows kept of each of `inputs` (a share of the halo when
    below 1), chosen by `policy`; the rows must not change while it is in use. Up to `ahead` batches wait with
    their rows.
    """
    by_input, by_output = _names("inputs", inputs), _names("outputs", outputs)
    if not by_input:
        raise InputError("inputs names no node data; give the features' name, such as feat")
    if not hasattr(loader, "expected_idxs"):
        raise InputError(
            f"loader: {type(loader).__name__} is not one of DistDGL's; give a DistNodeDataLoader"
        )
    for name in (*by_input, *by_output):
        if name not in graph.ndata:
            have = ", ".join(sorted(graph.ndata)) or "none"
            raise InputError(f"{name!r} is no node data of the graph; it has {have}")
        if isinstance(graph.ndata[name], Ahead):
            raise InputError(f"{name!r} is fetched ahead already; wrap one loader per graph")
    return Prefetched(loader, graph, by_input, by_output, cache, policy, ahead)


def guard() -> None:
    """Makes every request of this process to DGL's servers wait for the one before; idempotent."""
    from dgl.distributed import graph_services, kvstore

    if not hasattr(kvstore.KVClient.pull, "is_guarded"):
        kvstore.KVClient.pull = _one_by_one(kvstore.KVClient.pull)
        kvstore.KVClient.push = _one_by_one(kvstore.KVClient.push)
        graph_services._distributed_access = _one_by_one(graph_services._distributed_access)


def _one_by_one(function: Any) -> Any:
    @functools.wraps(function)
    def asked(*given: Any, **named: Any) -> Any:
        with _ASKING:
            return function(*given, **named)

    asked.is_guarded = True  # type: ignore[attr-defined]
    return asked


def _names(argument: str, given: str | Iterable[str]) -> list[str]:
    names = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{argument} holds something else than names; give names of node data")
    return names


def _cached(graph: Any, name: str, size: float, policy: str) -> Ahead:
    """Node data with a cache before it."""
    tensor = graph.ndata[name]
    if size < 0:
        raise InputError(f"cache={size}: give a number of rows, or a share of the halo below 1")
    rows = PulledRows(tensor)
    halo = _halo(graph, rows)
    capacity = round(size * int(halo.sum())) if 0 < size < 1 else int(size)
    options: dict[str, Any] = {"local": rows.is_local(), "retries": 0}
    if capacity == 0:
        return Ahead(tensor, Cache(rows, 0, "none", **options))
    return Ahead(tensor, Cache(rows, capacity, policy, halo=halo, **options))


def _halo(graph: Any, rows: PulledRows) -> Array:
    """Which nodes of other machines have an edge into this one's, one truth value each."""
    mask = np.zeros(int(rows.tensor.shape[0]), bool)
    local = graph.local_partition
    if local is not None:
        mask[local.ndata["_ID"].numpy()[~local.ndata["inner_node"].bool().numpy()]] = True
    return mask & ~rows.is_local()
