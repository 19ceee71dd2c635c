"""The analysis of a model on a graph: counts, strategies, pipelines, advice; one value that prints itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.analysis import cut
from plait.analysis.advice import Advice, advise
from plait.analysis.between import (
    BATCH_SECONDS,
    DRAWN_EDGE_SECONDS,
    LOADED_SECONDS,
    SAMPLED_EDGE_SECONDS,
    SPREAD_SECONDS,
    STEP_SECONDS,
    Beside,
    after,
    looked_up_row_seconds,
    loss_seconds,
)
from plait.analysis.fetch import Fetch, drawn, expected
from plait.analysis.growth import FANOUT, Growth, fanouts_of, grow
from plait.analysis.layers import Layer
from plait.analysis.network import Network, network_of
from plait.analysis.pipeline import MODES, Schedule, schedule
from plait.analysis.published import LOCAL, Row
from plait.analysis.schemes import Scheme, schemes_of
from plait.analysis.shards import Shards
from plait.analysis.statistics import Statistics
from plait.analysis.strategies import Cluster, Strategy, price, stage_times
from plait.analysis.workload import Workload, workload_of
from plait.cost.machine import MachineProfile
from plait.cost.price import Pricer
from plait.errors import InputError
from plait.graph import Graph

__all__ = ["Analysis", "Options", "Roof", "analyse", "check_workers", "cores_of", "halo_of", "memory_of"]

Partition = NDArray[np.int64]
_MOST_DRAWN = 8  # partitions of the pipelines shown: more would show nothing new
_CURVE = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Options:
    """The options of an analysis besides model and graph."""

    workers: tuple[int, ...] = (4,)
    network: Network = field(default_factory=lambda: network_of("10gbit"))
    memory: float = 16e9  # bytes of one worker
    partitions: Mapping[int, Partition] = field(default_factory=dict)  # of the nodes, by number of parts
    partitioned_by: str = "given"
    halo: float | None = None  # remote rows over owned ones, of a partition known elsewhere
    batch_size: int = 1024
    fanouts: tuple[int | None, ...] | None = None
    train_share: float = 1.0
    seeds: NDArray[np.int64] | None = None  # nodes mini-batches start from; None: a share of all
    graphs: int = 1
    parameters: int | None = None  # of the whole model; None: those of the layers that were counted
    threads: int | None = None  # of one worker; None: those of the machine's profile
    sharing: float = 1.0  # how much slower a worker computes while the others on its machine do
    cores: float | None = None  # of one worker; None: the machine's, divided where workers share it
    wire_bytes: int = 4  # of one number of a feature row of mini-batches; may be fewer than the model's
    shards: Mapping[int, Mapping[str, Shards]] = field(default_factory=dict)  # by workers and split
    beside: Beside | None = None  # what the model does outside its layers, where it was called
    batch_seconds: float | None = None  # of a model's layers and what is outside them, on a drawn mini-batch
    timed_batch_seconds: tuple[float, float] | None = None  # of steps on drawn mini-batches (workload.py)


@dataclass(frozen=True)
class Roof:
    """What the machine can do at most: operations and bytes per second."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """Operations per byte from which on arithmetic is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def bound(self, intensity: float) -> str:
        """Whether memory or arithmetic is the limit."""
        return "memory" if intensity < self.ridge else "arithmetic"

    @classmethod
    def of(cls, machine: MachineProfile) -> Roof:
        """The roof of a machine profile."""
        best = max(max(map(max, rates.gflops)) for rates in machine.gemm.values())
        return cls(best * 1e9, machine.stream_bytes_per_s)


@dataclass(frozen=True)
class Analysis:
    """Work and depth of every layer, the price of every parallelisation strategy, and which one pays."""

    model: str
    statistics: Statistics
    layers: tuple[Layer, ...]
    strategies: tuple[Strategy, ...]
    scaling: Mapping[int, tuple[Strategy, ...]]
    pipelines: tuple[Schedule, ...]
    advice: Advice | None
    growth: Growth
    options: Options
    machine: str
    roof: Roof
    work: Workload
    schemes: tuple[Scheme, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """The largest number of workers analysed."""
        return max(self.options.workers)

    @property
    def published(self) -> tuple[Row, ...]:
        """The paper's rows for the kinds of layers of this model."""
        text = " ".join([self.model, *(layer.name for layer in self.layers)]).lower()
        return tuple(row for row in LOCAL if any(word in text for word in _WORDS.get(row.model, ())))

    @property
    def published_values(self) -> dict[str, int]:
        """What the published rows are evaluated with: k is the largest width of a layer's output."""
        widths = [layer.width_out for layer in self.layers if layer.width_out] or [1]
        found = self.statistics
        counts = {"n": found.nodes, "m": found.edges, "d": max(1, found.bins.largest)}
        return {**counts, "k": max(widths), "L": len(self.layers), "K": 2}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        nodes, memory = self.statistics.nodes, self.options.memory
        return {
            "format": "plait-analysis-1",
            "model": self.model,
            "graph": {
                "nodes": nodes,
                "edges": self.statistics.edges,
                "degrees": self.statistics.degrees,
                "max_degree": self.statistics.bins.largest,
            },
            "machine": self.machine,
            "network": {
                "name": self.options.network.name,
                "bytes_per_s": self.options.network.bytes_per_s,
                "latency": self.options.network.latency,
                "meeting": self.options.network.meeting,
                "busy": self.options.network.busy,
            },
            "workers": self.workers,
            "layers": [layer.to_dict() for layer in self.layers],
            "strategies": {s.name: s.to_dict(nodes, memory) for s in self.strategies},
            "scaling": {
                str(count): {s.name: s.seconds_per_epoch for s in found}
                for count, found in self.scaling.items()
            },
            "pipelines": {
                run.mode.name: {"makespan": run.makespan, "bubble": run.bubble} for run in self.pipelines
            },
            "growth": {
                "batch": self.growth.batch,
                "nodes": list(self.growth.nodes),
                "edges": list(self.growth.edges),
                "is_measured": self.growth.is_measured,
            },
            "schemes": [scheme.to_dict() for scheme in self.schemes],
            "advice": None if self.advice is None else self.advice.to_dict(),
            "published": [self._row_dict(row) for row in self.published],
            "notes": list(self.notes),
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        values = self.published_values
        return {
            "model": row.model,
            "work": str(row.work),
            "work_value": row.work(**values),
            "depth": str(row.depth),
            "executed_work": str(row.executed_work),
            "executed_value": row.executed_work(**values),
            "executed_by": row.executed_by,
            "because": row.because,
        }

    def __str__(self) -> str:
        from plait.analysis.text import lines

        return "\n".join(lines(self))


# words of a model's or layer's name -> rows of the paper
_WORDS: Mapping[str, tuple[str, ...]] = {
    "GCN": (" gcnconv", "gcn"),
    "GraphSAGE mean": ("sageconv", "sage"),
    "GIN": ("ginconv", "gin"),
    "CommNet": ("commnet",),
    "Vanilla attention": ("vanilla-attention", "transformer"),
    "AGNN": ("agnn",),
    "MoNet": ("monet", "gmmconv"),
    "GAT": ("gatconv", "gat"),
    "G-GCN": ("g-gcn", "resgated"),
    "GraphSAGE pool": ("sage-pool", "sage-max"),
    "EdgeConv-1": ("edgeconv-1",),
    "EdgeConv-5": ("edgeconv-5", "edgeconv "),
}


def check_workers(workers: Any, nodes: int) -> tuple[int, ...]:
    """One number of workers or several, ascending; InputError where there are none or more than nodes."""
    asked = workers if isinstance(workers, tuple | list) else (workers,)
    if not asked:
        raise InputError("workers: none given; give at least 1")
    for count in asked:
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise InputError(f"workers: {count!r}; give a whole number of at least 1")
        if count > max(1, nodes):
            raise InputError(f"workers: {count} workers for {nodes} nodes; give at most one for each node")
    return tuple(sorted({int(count) for count in asked}))


def halo_of(given: Any) -> float | None:
    """Remote rows over owned ones, where they are given."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and (not is_number or not 0 <= given < math.inf):
        raise InputError(f"halo: {given!r}; give remote rows over owned ones, a number of at least 0")
    return None if given is None else float(given)


def cores_of(given: Any) -> float | None:
    """The cores of one worker, where they are given."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if given is not None and (not is_number or not 0 < given < math.inf):
        raise InputError(f"cores: {given!r}; give the cores of one worker, a number above 0")
    return None if given is None else float(given)


_MEMORY_UNITS = {"": 1.0, "B": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30}


def memory_of(given: Any) -> float:
    """Bytes: a number, or text such as "16GB"."""
    value = given
    if isinstance(given, str):
        text = given.strip().upper()
        unit = next((u for u in sorted(_MEMORY_UNITS, key=len, reverse=True) if u and text.endswith(u)), "")
        try:
            value = float(text.removesuffix(unit)) * _MEMORY_UNITS[unit]
        except ValueError:
            value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise InputError(f"memory: {given!r}; give the bytes of a worker, e.g. 16e9 or 16GB")
    return float(value)


def analyse(
    model: str,
    layers: Sequence[Layer],
    statistics: Statistics,
    machine: MachineProfile,
    options: Options,
    notes: Sequence[str] = (),
) -> Analysis:
    """The analysis of layers that were counted (layers.py, models.py) on a graph or its statistics."""
    counted = [layer for layer in layers if not layer.is_black_box]
    depth = max(1, len(counted))
    fanouts = fanouts_of(options.fanouts, depth)
    growth = grow(statistics, options.batch_size, fanouts)
    features = counted[0].width_in if counted else 0
    threads = options.threads or machine.threads
    is_timed = options.timed_batch_seconds is not None
    work = workload_of(
        layers, statistics.nodes, statistics.edges, features, graphs=options.graphs,
        parameters=options.parameters,
        after=after(statistics.nodes, Pricer(machine, threads=options.threads), threads, options.beside),
        sampled_edge_seconds=DRAWN_EDGE_SECONDS if is_timed else SAMPLED_EDGE_SECONDS,
        loss_seconds=_loss_seconds(counted, statistics.nodes, threads, options.beside, machine),
        planned_batch_seconds=options.batch_seconds,
        timed_batch_seconds=options.timed_batch_seconds,
        looked_up_row_seconds=looked_up_row_seconds(machine, features),
        step_seconds=STEP_SECONDS,
        spread_seconds=SPREAD_SECONDS,
        batch_seconds=LOADED_SECONDS if is_timed else BATCH_SECONDS,
    )  # fmt: skip
    clusters = _Clusters(statistics, options, growth, fanouts, (threads, machine.threads))
    most = max(options.workers)
    curve = sorted({*options.workers, *(c for c in _CURVE if c <= max(16, 2 * most))})
    scaling = {count: tuple(price(work, clusters(count))) for count in curve if count <= max(1, work.nodes)}
    strategies = scaling[most]
    advice = advise(work, clusters(most), strategies, options.memory, clusters) if work.loads else None
    partitions = min(max(most, 4), _MOST_DRAWN)
    runs = tuple(schedule(stage_times(work, partitions, 0), mode) for mode in MODES) if work.loads else ()
    width = max((layer.width_out for layer in counted), default=1)
    schemes = schemes_of(
        counted, statistics, growth, fanouts[0] or FANOUT, clusters(most).edge_cut, width
    )  # fmt: skip
    return Analysis(
        model=model,
        statistics=statistics,
        layers=tuple(layers),
        strategies=strategies,
        scaling=scaling,
        pipelines=runs,
        advice=advice,
        growth=growth,
        options=options,
        machine=machine.name,
        roof=Roof.of(machine),
        work=work,
        schemes=tuple(schemes) if counted else (),
        notes=(*notes, *_notes(layers, statistics, options, clusters)),
    )


def _loss_seconds(
    counted: Sequence[Layer], rows: int, threads: int, beside: Beside | None, machine: MachineProfile
) -> float:
    """Of the loss of all rows, forward and backward."""
    if not counted or "backward" not in counted[-1].phases:
        return 0.0
    width = counted[-1].width_out if beside is None or beside.width is None else beside.width
    return sum(loss_seconds(rows, width, machine)) / threads


def _notes(
    layers: Sequence[Layer], statistics: Statistics, options: Options, clusters: _Clusters
) -> list[str]:
    found = []
    boxes = [layer.name for layer in layers if layer.is_black_box]
    if boxes:
        found.append(f"black boxes, in no count below: {', '.join(boxes)}")
    if statistics.graph is None:
        found.append(
            f"without a graph: degrees are assumed {statistics.degrees}, cuts are those of random "
            "partitions unless halo= is given; a partitioner finds smaller ones"
        )
    elif not options.partitions and max(options.workers) > 1:
        found.append(f"cuts: {clusters(max(options.workers)).edge_cut.by}")
    return found


class _Clusters:
    """The cluster of any number of workers: cuts counted where a partition is given, else expected.

    For numbers without a partition the expectation is corrected by what the given one is better.
    """

    def __init__(
        self, statistics: Statistics, options: Options, growth: Growth, fanouts: Sequence[int | None],
        threads: tuple[int, int],
    ) -> None:  # fmt: skip
        """`threads`: those that train in one worker, and those of the whole machine."""
        self.statistics, self.options, self.growth, self.fanouts = statistics, options, growth, fanouts
        self._threads, self._every = threads
        self._made: dict[int, Cluster] = {}
        self._quality = (1.0, 1.0)
        graph = statistics.graph
        for parts, part in options.partitions.items():
            if graph is None:
                raise InputError("partition: given without a graph; pass halo= with statistics")
            if int(part.max(initial=0)) >= parts:
                raise InputError(f"partition: part {int(part.max())} of {parts}; number them from 0")
            edges = cut.edge_cut(graph, part, options.partitioned_by)
            if edges.parts != parts:
                raise InputError(f"partition: {edges.parts} parts for {parts} workers; give as many")
            self._made[parts] = self._cluster(
                parts, edges, cut.vertex_cut(graph, part, options.partitioned_by), self._drawn(graph, part)
            )
            if parts > 1:
                self._quality = self._compared(parts, edges, self._made[parts].vertex_cut)

    def __call__(self, workers: int) -> Cluster:
        if workers not in self._made:
            edges = cut.expected_edge_cut(self.statistics, workers)
            vertices = cut.expected_vertex_cut(self.statistics, workers)
            better, copies = self._quality
            if better != 1.0:
                by = f"random, times {better:.2f} as at the partition given"
                rows = tuple(better * rows for rows in edges.halo)
                edges = cut.EdgeCut(
                    edges.nodes, edges.edges, rows, rows, edges.peers, edges.cut_edges * better, by
                )
                pairs = zip(vertices.copies, vertices.owned, strict=True)
                held = tuple(own + copies * (all_held - own) for all_held, own in pairs)
                vertices = cut.VertexCut(vertices.edges, held, vertices.owned, by)
            self._made[workers] = self._cluster(workers, edges, vertices)
        return self._made[workers]

    def _drawn(self, graph: Graph, part: Partition) -> Fetch:
        """What mini-batches of every part's own seeds fetch."""
        seeds, rng = self.options.seeds, np.random.default_rng(0)
        if seeds is None:
            count = max(1, round(self.options.train_share * graph.num_nodes))
            seeds = np.sort(rng.choice(graph.num_nodes, min(count, graph.num_nodes), False))
        return drawn(graph, part, seeds, self.growth.batch, self.fanouts, rng)

    def _cluster(
        self, workers: int, edges: cut.EdgeCut, vertices: cut.VertexCut, fetch: Fetch | None = None
    ) -> Cluster:
        if self.options.halo is not None and workers > 1:
            edges = edges.with_halo(self.options.halo)
        if fetch is None:
            seeds = max(1.0, self.statistics.nodes * self.options.train_share)
            fetch = expected(self.growth, seeds, workers, self._quality[0])
        asked = self.options
        return Cluster(
            workers, asked.network, edges, vertices, self.growth, fetch, asked.sharing, asked.wire_bytes,
            asked.shards.get(workers, {}), self._threads, self._cores(workers),
        )  # fmt: skip

    def _cores(self, workers: int) -> float:
        """Of one worker: as given, else the machine's, which workers share if they slow each other down."""
        if self.options.cores is not None:
            return self.options.cores
        return self._every / (workers if self.options.sharing > 1 else 1)

    def _compared(self, parts: int, edges: cut.EdgeCut, vertices: cut.VertexCut) -> tuple[float, float]:
        """Halos and mirrors of a partition over those of a random one."""
        random = cut.expected_edge_cut(self.statistics, parts)
        copies = cut.expected_vertex_cut(self.statistics, parts)
        mirrors = sum(vertices.copies) - vertices.nodes
        expected = sum(copies.copies) - copies.nodes
        return (
            sum(edges.halo) / max(1.0, sum(random.halo)),
            mirrors / expected if expected > 0 else 1.0,
        )
