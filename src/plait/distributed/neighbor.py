"""Mini-batches of every rank's own seeds over the whole graph, the same whichever process draws them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch_geometric.data import Data

from plait.distributed.session import Session
from plait.distributed.staging import Staging
from plait.errors import ExchangeError, InputError
from plait.features.cache import Cache
from plait.features.rows import as_rows
from plait.features.scores import degree, inclusion_probability, presample
from plait.features.simulate import policy_name
from plait.features.waiting import Lent
from plait.loader.adapter import picked_seed, to_output
from plait.loader.assemble import Assembler
from plait.loader.draw import stream_key
from plait.loader.epochs import Epochs, Job
from plait.loader.inputs import RowsByAttribute
from plait.loader.prefetch import usable_cores
from plait.loader.sampler import Sample, Sampler
from plait.loader.together import TogetherSampler
from plait.loader.transfer import Transfer

__all__ = ["NeighborLoader", "joined"]

Array = NDArray[Any]

_SCORED = ("degree", "massivegnn", "presample", "vip")  # policies that rank rows before training
_TOPOLOGIES = ("auto", "replicated", "partitioned")
_PRESAMPLED = 64  # batches drawn to rank rows by "presample"


@dataclass
class LoaderSeconds:
    """Time spent on batches so far, in the threads that prepare them."""

    sampling: float = 0.0
    filling: float = 0.0


class NeighborLoader(Epochs):
    """Batches of PyG's NeighborLoader, for the ranks of a session.

    Step s of an epoch takes `batch_size` seeds of every part; a rank's batch holds those of its own parts. So
    the seeds and neighbourhoods of a step depend on (seed, epoch, step) and on the parts, not on how many
    ranks share the parts: one process that owns them all trains on the same global batch as one per part.

    input_nodes: "train", "val", "test", or nodes or a mask in the numbering of the parts.
    pad: (default) every part gets as many seeds as the largest one: a smaller part repeats its first seeds of
        the epoch, `padding` in all. So every rank runs `len(loader)` steps, and a mean over ranks is the mean
        over seeds. With pad=False no seed is repeated and ranks run different numbers of steps, as evaluation
        needs.
    cache: the number of remote rows that `policy` keeps. Below 1 it is a share of the memory of the halo's
        float32 rows, which holds twice as many rows where the session's `wire` has 16 bits.
    prefetch, coalesce: the number of batches prepared ahead, and of batches whose rows are requested in one
        exchange.
    topology: "replicated" maps the structure of the whole graph in every process. "partitioned" maps only a
        rank's own rows, and the neighbours of other nodes are drawn by the ranks that own them. "auto" is
        replicated where every machine has enough memory. The batches are the same.
    """

    num_workers = 0
    pin_memory = False

    def __init__(
        self,
        session: Session,
        num_neighbors: Sequence[int],
        input_nodes: Any = "train",
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        replace: bool = False,
        cache: float = 0,
        policy: str = "auto",
        shared: str | None = None,
        prefetch: int = 2,
        coalesce: int = 2,
        pad: bool = True,
        seed: int | None = None,
        topology: str = "auto",
        transform: Callable[[Any], Any] | None = None,
        device: Any = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("coalesce", coalesce)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r}: give a whole number of at least 1")
        self.session, self.batch_size, self.shuffle, self.pad = session, batch_size, shuffle, pad
        self.coalesce, self.transform = coalesce, transform
        self._inputs = _inputs(session, input_nodes)
        self.seed = seed = _common_seed(session, seed)
        self.topology = _topology(session, topology)
        self._sampler: Sampler | TogetherSampler
        # with a partitioned topology samples are drawn in groups, which must not span two epochs
        self._sees_past_epochs = self.topology == "replicated"
        if self.topology == "partitioned":
            self._sampler = TogetherSampler(session.frontiers(), num_neighbors, seed=seed, replace=replace)
        else:
            self._sampler = Sampler(session.graph, num_neighbors, seed=seed, replace=replace)
        self.seconds = LoaderSeconds()
        self._first = (-1, 0)  # the epoch that begins with a later step, and that step
        self._staging = Staging(session.exchange)
        rows = self._cache(cache, policy, shared)
        self._set_out(seed, prefetch, None, rows, None, device)
        self._transfer = Transfer(device, False)
        features: RowsByAttribute = {(None, "x"): as_rows(rows), **_labels(session)}
        self._assemble = Assembler(_frame(session), features)

    @property
    def fanouts(self) -> tuple[int | None, ...]:
        """Neighbours drawn in every hop; None: all of them."""
        return tuple(None if count < 0 else int(count) for count in self._sampler.fanout)

    @property
    def padding(self) -> int:
        """How many seeds of all parts are repeated within one epoch."""
        return len(self._inputs) * self._most() - sum(map(len, self._inputs)) if self.pad else 0

    def __len__(self) -> int:
        """Steps of this rank per epoch, which with `pad` are those of every rank."""
        most = self._most() if self.pad else max(self._inputs[p].size for p in self.session.owned)
        return math.ceil(most / self.batch_size)

    @property
    def topology_bytes(self) -> int:
        """Memory of the part of the graph's structure that this process reads, mapped from the files."""
        session = self.session
        is_parted = self.topology == "partitioned"
        return session.frontiers().edges.nbytes if is_parted else session.parts.topology_bytes

    def _most(self) -> int:
        return max(map(len, self._inputs))

    def start_at(self, epoch: int, step: int) -> None:
        """Makes the next iterator that of `epoch` from `step` on, as after an interrupted run."""
        if not 0 <= step <= len(self):
            raise InputError(f"step={step}: an epoch has {len(self)} steps")
        self.set_epoch(epoch)
        self._first = (epoch, step)

    def _jobs(self, epoch: int) -> Iterator[Job]:
        seeds = {part: self._seeds(epoch, part) for part in self.session.owned}
        first = self._first[1] if epoch == self._first[0] else 0
        for step in range(first, len(self)):
            begin, end = step * self.batch_size, (step + 1) * self.batch_size
            yield Job(epoch, step, {part: ids[begin:end] for part, ids in seeds.items()})

    def _seeds(self, epoch: int, part: int) -> Array:
        """The seeds of a part in the order of the epoch, padded."""
        own = self._inputs[part]
        if self.pad and own.size == 0:
            own = np.concatenate(self._inputs)  # a part without seeds takes seeds of the others
        if self.shuffle:
            key = int(stream_key(self.seed, epoch, 0x5EED, part))
            own = np.random.Generator(np.random.Philox(key)).permutation(own)
        return np.resize(own, self._most()) if self.pad else own

    def draw(self, job: Job) -> Any:
        """The sample of a job as PyG's SamplerOutput; those of several parts side by side."""
        return self._drawn([job])[0]

    def _drawn(self, jobs: Sequence[Job]) -> list[Any]:
        """The samples of jobs of one epoch."""
        begin = time.perf_counter()
        parts = self.session.parts.num_parts
        # of every job the parts that have seeds left, and the number of each of their batches
        owners = [{part: seeds for part, seeds in job.index.items() if seeds.size} for job in jobs]
        numbers = [job.number * parts + part for job, own in zip(jobs, owners, strict=True) for part in own]
        samples = iter(self._sampled([s for own in owners for s in own.values()], jobs[0].epoch, numbers))
        found = []
        for own in owners:
            some = list(itertools.islice(samples, len(own)))
            out = to_output(some[0] if len(some) == 1 else joined(some))
            out.metadata = sum(seeds.size for seeds in own.values())
            found.append(out)
        end = time.perf_counter()
        self.seconds.sampling += end - begin
        self._traced("sampling", begin, end)
        return found

    def _sampled(self, seeds: Sequence[Array], epoch: int, numbers: Sequence[int]) -> list[Sample]:
        if isinstance(self._sampler, TogetherSampler):
            return self._sampler.sample_many(seeds, epoch, numbers)
        return [self._sampler.sample(own, epoch, k) for own, k in zip(seeds, numbers, strict=True)]

    def _samples(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        """Every job with its sample; of a partitioned topology several are drawn together, hop by hop."""
        if self.topology == "replicated":
            return super()._samples(jobs)
        return self._in_groups(jobs)

    def _in_groups(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, Any]]:
        groups = iter(lambda: list(itertools.islice(jobs, self.coalesce)), [])

        def together(group: list[Job]) -> list[tuple[Job, Any]]:
            return list(zip(group, self._naming_batch(group[0], lambda: self._drawn(group)), strict=True))

        # two threads on one core too: while one waits for other ranks, the other draws
        ahead = self._ahead(together, groups, threads=max(2, usable_cores()))
        try:
            for group in ahead:
                yield from group
        finally:
            close = getattr(ahead, "close", None)
            if close is not None:
                close()

    def _traced(self, name: str, begin: float, end: float) -> None:
        trace = self.session.exchange.trace
        if trace is not None:
            trace.add(name, begin, end)

    def fill(self, drawn: Any) -> Any:
        """The batch of a sample."""
        begin = time.perf_counter()
        try:
            data = self._assemble(drawn)
        except InputError as error:
            lost = _exchange_error(error)
            raise error if lost is None else lost from error
        self._staging.done()
        data._store["batch_size"] = drawn.metadata
        end = time.perf_counter()
        self.seconds.filling += end - begin
        self._traced("look-up", begin, end)
        return data if self.transform is None else self.transform(data)

    def _start_over(self) -> None:
        self._staging.forget()

    def _book(self, cache: Cache, group: Sequence[tuple[Job, Any]]) -> list[tuple[Job, Any, Lent | None]]:
        """Requests the missing rows of several samples together."""
        booked = super()._book(cache, group)
        if booked and self.session.size > 1:
            self._stage(cache, booked)
        return booked

    def _stage(self, cache: Cache, group: Sequence[tuple[Job, Any, Lent | None]]) -> None:
        """Requests the rows that the batches of a group lack."""
        nodes = [sample.node.numpy() for _, sample, _ in group]
        # of a booked batch what no slot and no batch before it has
        lacking = [lent.wanted for *_, lent in group if lent is not None]
        if len(lacking) < len(group):
            others = [ids for ids, (*_, lent) in zip(nodes, group, strict=True) if lent is None]
            lacking.append(cache.missing(np.concatenate(others)))
        self._staging.stage(np.unique(np.concatenate(lacking)), nodes)

    def _cache(self, size: float, policy: str, shared: str | None) -> Cache:
        """The cache in front of the exchange; an empty one without `cache=` or without remote rows."""
        session, policy = self.session, policy_name(policy)
        if not 0 <= size < math.inf:
            raise InputError(f"cache={size}: give a number of rows, or a share of the halo below 1")
        precision = self._staging.precision
        # a share is one of the memory that the halo's float32 rows would take
        fold = 1 if precision is None else 2
        capacity = round(size * fold * int(session.halo.sum())) if 0 < size < 1 else int(size)
        options: dict[str, Any] = {"local": session.local, "retries": 0, "precision": precision}
        if capacity == 0 or session.size == 1:
            return Cache(self._staging, 0, "none", **options)
        if policy in _SCORED:
            options["scores"] = np.where(session.local, 0, self._scores(policy))
        return Cache(self._staging, capacity, policy, halo=session.halo, shared=shared, **options)

    def _scores(self, policy: str) -> Array:
        """How often each row is expected to be requested, by degree or by the fanouts."""
        is_parted, count = self.topology == "partitioned", self.session.parts.num_nodes
        if policy == "presample":
            jobs = itertools.islice(self._jobs(0), _PRESAMPLED)
            return presample((self.draw(job).node.numpy() for job in jobs), count)
        if policy != "vip" and is_parted:
            own = torch.from_numpy(np.bincount(self.session.frontiers().edges.sources, minlength=count))
            self.session.add(own)
            return own.numpy()
        if is_parted:
            raise InputError(
                "policy='vip' walks the whole graph, of which topology='partitioned' has a part; choose "
                "presample, which draws batches instead, or auto"
            )
        graph = self.session.graph
        if policy in ("degree", "massivegnn"):
            return degree(graph)
        seeds = np.concatenate([self._inputs[p] for p in self.session.owned])
        chance = inclusion_probability(graph, self._sampler.fanout, seeds, self.batch_size)
        return np.asarray(chance)


def joined(samples: Sequence[Sample]) -> Sample:
    """Samples side by side as one, no node shared: all seeds first, then all nodes of hop one, and so on."""
    hops = np.array([sample.num_sampled_nodes for sample in samples])
    edges = np.array([sample.num_sampled_edges for sample in samples])
    offsets = np.concatenate(([0], np.cumsum(hops.T.reshape(-1))))[:-1].reshape(hops.shape[1], -1)
    places = [
        np.concatenate([np.arange(size) + offsets[hop, s] for hop, size in enumerate(hops[s])])
        for s in range(len(samples))
    ]
    n_id = np.empty(int(hops.sum()), np.int64)
    for sample, place in zip(samples, places, strict=True):
        n_id[place] = sample.n_id
    starts = np.concatenate((np.zeros((len(samples), 1), np.int64), np.cumsum(edges, axis=1)), axis=1)
    order = [
        (s, slice(starts[s, h], starts[s, h + 1])) for h in range(edges.shape[1]) for s in range(len(samples))
    ]
    both = np.empty((2, int(edges.sum())), np.int64)
    np.concatenate([places[s][samples[s].row[cut]] for s, cut in order], out=both[0])
    np.concatenate([places[s][samples[s].col[cut]] for s, cut in order], out=both[1])
    e_id = np.concatenate([samples[s].e_id[cut] for s, cut in order])
    expanded = int(hops[:, :-1].sum())
    pointer = np.searchsorted(both[1], np.arange(expanded + 1))
    by_hop = (tuple(hops.sum(axis=0).tolist()), tuple(edges.sum(axis=0).tolist()))
    return Sample(n_id, both[0], both[1], e_id, *by_hop, indptr=pointer)


def _exchange_error(error: BaseException | None) -> ExchangeError | None:
    """The failure of other ranks that the cache in front of the exchange reports as its source's."""
    while error is not None and not isinstance(error, ExchangeError):
        error = error.__cause__
    return error


def _topology(session: Session, wanted: str) -> str:
    """Where the structure of the graph lies: all of it in every process, or of each rank its own rows."""
    if wanted not in _TOPOLOGIES:
        raise InputError(f"topology={wanted!r} is unknown; choose one of {', '.join(_TOPOLOGIES)}")
    if wanted == "auto":
        return "replicated" if session.size == 1 or session.topology_fits else "partitioned"
    return wanted


def _frame(session: Session) -> Data:
    """Data that describes to the assembler what a batch has, without holding it."""
    return Data(edge_index=torch.empty((2, 0), dtype=torch.long), num_nodes=session.parts.num_nodes)


def _labels(session: Session) -> RowsByAttribute:
    labels = session.parts.y()
    return {} if labels is None else {(None, "y"): as_rows(labels)}


def _inputs(session: Session, given: Any) -> list[Array]:
    """The seeds of every part, ascending."""
    parts = session.parts
    nodes = parts.split(given) if isinstance(given, str) else _nodes(given, parts.num_nodes)
    if nodes.size == 0:
        raise InputError("input_nodes holds no node; give at least one")
    return np.split(np.sort(nodes), np.searchsorted(np.sort(nodes), parts.bounds[1:-1]))


def _nodes(given: ArrayLike, count: int) -> Array:
    nodes = np.asarray(given)
    if nodes.dtype == np.bool_ and nodes.shape == (count,):
        return np.flatnonzero(nodes)
    if nodes.ndim != 1 or nodes.dtype.kind not in "iu":
        raise InputError(
            f"input_nodes has shape {nodes.shape} and type {nodes.dtype}; give train, val, test, nodes or a "
            "mask"
        )
    if nodes.size and not 0 <= nodes.min() <= nodes.max() < count:
        raise InputError(f"input_nodes: nodes are numbered 0 to {count - 1}")
    return nodes.astype(np.int64)


def _common_seed(session: Session, seed: int | None) -> int:
    """The seed as given; without one that of rank 0, so that all ranks draw the same."""
    if seed is not None:
        return seed
    return int(session.gathered([float(picked_seed(None) % 2**52)])[0][0])
