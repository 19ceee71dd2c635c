"""The taxonomy of parallel training, priced: what each strategy sends, holds, waits for and takes.

An epoch is one pass over all nodes, forward and backward. Seconds are those of the most loaded worker (its
share of the planner's price) plus its communication. Nothing overlaps, except inside a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.analysis.cut import EdgeCut, VertexCut
from plait.analysis.fetch import Fetch
from plait.analysis.growth import Growth
from plait.analysis.network import Network, Traffic, all_gather, all_reduce, all_to_all
from plait.analysis.pipeline import MODES, Mode, Schedule, schedule
from plait.analysis.preparing import HEADER, ID_BYTES, MET, Crew, Preparing, fetched, preparing
from plait.analysis.shards import Shards
from plait.analysis.workload import Load, Workload

__all__ = ["Cluster", "Strategy", "price", "stage_times"]

_OPTIMISER = 4  # copies of the weights: themselves, gradients, two moments
_NUMBER_BYTES = 8  # of a count that workers add up
_QUESTION_HEAD, _COUNT_BYTES = 4, 4  # numbers before the nodes of a request; of the count of a node's edges
_ASKING = 5  # messages of a round of requests: the bell, lengths, nodes, counts, edges


@dataclass(frozen=True)
class Strategy:
    """One parallelisation strategy on this model, graph and network."""

    name: str
    family: str
    workers: int
    traffic_per_layer: tuple[Traffic, ...]
    traffic: Traffic  # of an epoch, everything together
    compute_seconds: float
    seconds_per_epoch: float
    flops_per_worker: float
    memory_per_worker: float
    fixed_memory: float  # the part of it that does not grow with the graph
    synchronisations: int
    same_numbers: bool = True  # as one worker computes; else staleness or sampling changes the training
    note: str = ""
    bubble: float | None = None
    run_by: str = ""  # what in plait runs it; "": nothing, it is only priced
    preparing: Preparing | None = None  # of mini-batches, in an epoch of one worker
    lost_seconds: float = 0.0  # of the computing: what threads beside training take from it

    @property
    def communication_seconds(self) -> float:
        """Seconds of an epoch spent communicating."""
        return max(0.0, self.seconds_per_epoch - self.compute_seconds)

    def largest_nodes(self, nodes: int, memory: float) -> float:
        """How many nodes a graph like this one may have to fit workers with this memory."""
        growing = (self.memory_per_worker - self.fixed_memory) / max(1, nodes)
        return max(0.0, (memory - self.fixed_memory) / growing) if growing > 0 else math.inf

    def seconds_at(self, network: Network) -> float:
        """The epoch on another network."""
        return self.compute_seconds + network.seconds(self.traffic)

    def to_dict(self, nodes: int, memory: float) -> dict[str, Any]:
        """The strategy as plain data."""
        largest = self.largest_nodes(nodes, memory)
        return {
            "family": self.family,
            "workers": self.workers,
            "bytes_per_epoch": self.traffic.total,
            "bytes_per_worker": self.traffic.busiest,
            "bytes_per_layer": [traffic.total for traffic in self.traffic_per_layer],
            "messages_per_worker": self.traffic.messages,
            "meetings": self.traffic.meetings,
            "memory_per_worker": self.memory_per_worker,
            "synchronisations": self.synchronisations,
            "seconds_per_epoch": self.seconds_per_epoch,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "prepare_seconds": 0.0 if self.preparing is None else self.preparing.own,
            "answer_seconds": 0.0 if self.preparing is None else self.preparing.answering,
            "lost_seconds": self.lost_seconds,
            "flops_per_worker": self.flops_per_worker,
            "largest_nodes": largest if math.isfinite(largest) else None,  # None: any number
            "same_numbers": self.same_numbers,
            "bubble": self.bubble,
            "note": self.note,
            "run_by": self.run_by or None,
        }


@dataclass(frozen=True)
class Cluster:
    """Workers, what lies between them, how the graph is cut for them, and how mini-batches are drawn."""

    workers: int
    network: Network
    edge_cut: EdgeCut
    vertex_cut: VertexCut
    growth: Growth
    fetch: Fetch
    sharing: float = 1.0  # how much slower a worker computes while the others on its machine do
    wire_bytes: int = 4  # of one number of a feature row, kept and on its way to a mini-batch
    shards: Mapping[str, Shards] = field(default_factory=dict)  # plans of plait.shard by split, where known
    threads: int = 1  # of one worker, that train
    cores: float = math.inf  # of one worker


def price(work: Workload, cluster: Cluster) -> list[Strategy]:
    """Every strategy that can be used here, the fastest first."""
    made = [_alone(work)]
    if cluster.workers > 1:
        ways: tuple[Callable[[Workload, Cluster], Strategy | None], ...] = (
            _edge_cut, _vertex_cut, _features, _operator_features, _operator_structure, _ann, _hybrid,
            _dependent, _parted,
        )  # fmt: skip
        made += [found for way in ways if (found := way(work, cluster)) is not None]
        made += [_independent(work, cluster)] if work.graphs >= cluster.workers else []
        made += [_pipeline(work, cluster, mode) for mode in MODES]
    return sorted(made, key=lambda strategy: strategy.seconds_per_epoch)


# Shared arithmetic ------------------------------------------------------------------------------------------


def _strategy(
    work: Workload, cluster: Cluster, name: str, family: str, per_layer: Sequence[Traffic],
    compute: float, memory: float, synchronisations: int, *, share: float | None = None,
    others: Traffic | None = None, steps: int = 1, is_batch: bool = False,
    **more: Any,
) -> Strategy:  # fmt: skip
    """A strategy whose workers sum weight gradients once per epoch, unless `others` says otherwise."""
    once = _agreed(work, cluster.workers) if others is None else others
    traffic = sum(per_layer, once)
    compute += steps * (work.batch_seconds if is_batch else work.step_seconds + work.spread_seconds)
    compute = _shared(compute, cluster.network.seconds(traffic), cluster.sharing)
    return Strategy(
        name=name,
        family=family,
        workers=cluster.workers,
        traffic_per_layer=tuple(per_layer),
        traffic=traffic,
        compute_seconds=compute,
        seconds_per_epoch=compute + cluster.network.seconds(traffic),
        flops_per_worker=work.flops * (1.0 / cluster.workers if share is None else share),
        memory_per_worker=memory + _OPTIMISER * work.weight_bytes,
        fixed_memory=_OPTIMISER * work.weight_bytes,
        synchronisations=synchronisations + (1 if others is None else 0),
        **more,
    )


def _shared(compute: float, waiting: float, sharing: float) -> float:
    """Seconds of work beside other workers of a machine, who slow it down unless they wait."""
    return compute * (1.0 + (sharing - 1.0) * compute / (compute + waiting)) if compute else 0.0


def _agreed(work: Workload, workers: int) -> Traffic:
    """Gradients are added up at the end, and before it how many rows the loss is a mean of: one number."""
    count = replace(all_reduce(_NUMBER_BYTES, workers), messages=1)
    return all_reduce(work.weight_bytes, workers) + count


def _alone(work: Workload) -> Strategy:
    memory = work.feature_bytes + work.graph_bytes + work.held_bytes + _OPTIMISER * work.weight_bytes
    nothing = tuple(Traffic() for _ in work.loads)
    seconds = work.seconds + work.step_seconds
    return Strategy(
        "one worker", "none", 1, nothing, Traffic(), seconds, seconds, work.flops, memory,
        _OPTIMISER * work.weight_bytes, 0, run_by="plait.compile",
    )  # fmt: skip


def _graph_seconds(work: Workload) -> float:
    return sum(sum(load.graph_seconds) for load in work.loads)


def _narrow_seconds(work: Workload, workers: int) -> float:
    return sum(load.narrow_seconds(workers) for load in work.loads)


def _dense_seconds(work: Workload) -> float:
    return sum(load.row_seconds for load in work.loads)


def _after_seconds(work: Workload) -> float:
    return sum(sum(load.after_seconds) for load in work.loads)


# Graph-partition parallelism --------------------------------------------------------------------------------


def _halo_traffic(work: Workload, cut: EdgeCut, load: Load) -> Traffic:
    """Every product with the graph needs the remote rows, backwards their gradients, on the same ways."""
    columns = sum(load.gathers) * work.float_bytes
    busiest = max((max(h, s) for h, s in zip(cut.halo, cut.sent, strict=True)), default=0.0)
    messages = max(cut.peers, default=0) * len(load.gathers)
    return Traffic(sum(cut.halo) * columns, busiest * columns, messages, len(load.gathers))


def _edge_cut(work: Workload, cluster: Cluster) -> Strategy:
    cut, planned = cluster.edge_cut, cluster.shards.get("nodes")
    per_layer = [_halo_traffic(work, cut, load) for load in work.loads]
    exchanges = sum(len(load.gathers) for load in work.loads)
    if planned is not None:
        per_layer, exchanges = planned.traffic, planned.exchanges
    share, rows = _shares(cut, work)
    halo = max(cut.halo, default=0.0)
    compute = _graph_seconds(work) * share + _dense_seconds(work) * rows
    # a layer that is not a matrix expression computes its halo's rows again
    compute += sum(sum(l.dense_seconds) for l in work.loads if l.takes_halo) * halo / max(1, work.nodes)
    if planned is not None:
        compute = planned.seconds + _after_seconds(work) * rows
    held = (
        work.held_bytes * rows + halo * sum(max(l.gathers, default=0) for l in work.loads) * work.float_bytes
    )
    memory = work.feature_bytes * rows + work.graph_bytes * share + held
    remote = sum(cut.halo) / max(1, work.nodes)
    note = f"{cut.by}: {remote:.2f} remote rows per node, {cut.imbalance:.2f} imbalance"
    return _strategy(
        work, cluster, "edge cut", "data: graph partition", per_layer, compute, memory,
        exchanges, share=share, note=note, run_by="plait.shard",
    )  # fmt: skip


def _shares(cut: EdgeCut, work: Workload) -> tuple[float, float]:
    """The largest part's share of the edges and of the nodes."""
    return max(cut.edges) / max(1.0, sum(cut.edges)), max(cut.nodes) / max(1.0, sum(cut.nodes))


def _mirror_traffic(work: Workload, cut: VertexCut, load: Load) -> Traffic:
    """Each product: copies send partial sums to their master, and get rows from it."""
    mirrors = [held - own for held, own in zip(cut.copies, cut.owned, strict=True)]
    columns = 2 * sum(load.gathers) * work.float_bytes
    messages = 2 * (cut.parts - 1) * len(load.gathers)
    return Traffic(sum(mirrors) * columns, max(mirrors) * columns, messages, 2 * len(load.gathers))


def _vertex_cut(work: Workload, cluster: Cluster) -> Strategy:
    cut = cluster.vertex_cut
    per_layer = [_mirror_traffic(work, cut, load) for load in work.loads]
    edges, copies = max(cut.edges) / max(1.0, sum(cut.edges)), max(cut.copies) / max(1.0, cut.nodes)
    compute = _graph_seconds(work) * edges + _dense_seconds(work) / cluster.workers
    memory = work.feature_bytes / cluster.workers + work.graph_bytes * edges + work.held_bytes * copies
    return _strategy(
        work, cluster, "vertex cut", "data: graph partition", per_layer, compute, memory,
        2 * sum(len(load.gathers) for load in work.loads), share=edges,
        note=f"{cut.by}: {cut.replication:.2f} copies per node",
    )  # fmt: skip


def _switch_traffic(work: Workload, workers: int, load: Load) -> Traffic:
    """Rows to columns before the products with the graph and back after them, in both directions."""
    traffic = Traffic()
    for gathers in (load.ahead, load.behind):
        if gathers:
            traffic += all_to_all(work.rows_bytes(gathers[0]), workers)
            traffic += all_to_all(work.rows_bytes(gathers[-1]), workers)
    return traffic


def _features(work: Workload, cluster: Cluster) -> Strategy:
    P, planned = cluster.workers, cluster.shards.get("features")
    per_layer = [_switch_traffic(work, P, load) for load in work.loads]
    switches = sum(2 * (bool(load.ahead) + bool(load.behind)) for load in work.loads)
    compute = _narrow_seconds(work, P) + _dense_seconds(work) / P
    if planned is not None and planned.is_split:
        per_layer, switches = planned.traffic, planned.exchanges
        compute = planned.seconds + _after_seconds(work) / P
    memory = work.graph_bytes + (work.feature_bytes + 2 * work.held_bytes) / P
    return _strategy(
        work, cluster, "feature partition", "data: graph partition", per_layer, compute, memory,
        switches, note="every worker holds the whole graph and some columns of every row",
        run_by="" if planned is not None and not planned.is_split else "plait.shard",
    )  # fmt: skip


# Operator and ANN parallelism -------------------------------------------------------------------------------


def _operator_features(work: Workload, cluster: Cluster) -> Strategy:
    P = cluster.workers
    per_layer = []
    for load in work.loads:
        outputs = sum(load.gathers) + 2 * load.width_out + load.width_in
        products = len(load.gathers) + 3
        gathered = all_gather(work.rows_bytes(outputs), P)
        per_layer.append(replace(gathered, messages=gathered.messages * products, meetings=products))
    memory = work.feature_bytes + work.graph_bytes + work.held_bytes
    return _strategy(
        work, cluster, "operator, features", "model: operator", per_layer,
        _narrow_seconds(work, P) + _dense_seconds(work) / P, memory,
        sum(len(load.gathers) + 3 for load in work.loads), others=Traffic(),
        note="columns of every product are divided, its result is gathered by all workers",
    )  # fmt: skip


def _operator_structure(work: Workload, cluster: Cluster) -> Strategy:
    P = cluster.workers
    per_layer = []
    for load in work.loads:
        traffic = all_gather(work.rows_bytes(2 * load.width_out + load.width_in), P)
        for columns in load.gathers:
            traffic += all_reduce(work.rows_bytes(columns), P)
        per_layer.append(traffic)
    memory = work.feature_bytes + work.graph_bytes / P + work.held_bytes
    return _strategy(
        work, cluster, "operator, structure", "model: operator", per_layer, work.seconds / P, memory,
        sum(len(load.gathers) + 3 for load in work.loads),
        note="edges of every sum are divided, partial sums are reduced over all workers",
    )  # fmt: skip


def _ann(work: Workload, cluster: Cluster) -> Strategy:
    P = cluster.workers
    per_layer = [
        all_gather(work.rows_bytes(load.width_out), P) + all_reduce(work.rows_bytes(load.width_in), P)
        for load in work.loads
    ]
    compute = _graph_seconds(work) + _dense_seconds(work) / P
    memory = work.feature_bytes + work.graph_bytes + work.held_bytes
    alone = _graph_seconds(work) / max(work.seconds, 1e-300)
    return _strategy(
        work, cluster, "ANN", "model: ANN", per_layer, compute, memory, 2 * len(work.loads),
        share=alone + (1 - alone) / P, others=Traffic(),
        note="weights are divided; every worker repeats the products with the graph",
    )  # fmt: skip


def _hybrid(work: Workload, cluster: Cluster) -> Strategy | None:
    """Each layer in the split that costs it least, rows lying between layers; None where all agree."""
    P, network = cluster.workers, cluster.network
    share, rows = _shares(cluster.edge_cut, work)
    spread = max(cluster.vertex_cut.edges) / max(1.0, sum(cluster.vertex_cut.edges))
    chosen, per_layer, compute = [], [], 0.0
    for load in work.loads:
        graph, dense = sum(load.graph_seconds), load.row_seconds * rows
        options = {
            "edge cut": (graph * share, _halo_traffic(work, cluster.edge_cut, load)),
            "vertex cut": (graph * spread, _mirror_traffic(work, cluster.vertex_cut, load)),
            "features": (load.narrow_seconds(P), _switch_traffic(work, P, load)),
        }
        name, (seconds, traffic) = min(
            options.items(), key=lambda item: item[1][0] + network.seconds(item[1][1])
        )
        chosen.append(name if load.gathers else "rows alone")
        per_layer.append(traffic)
        compute += seconds + dense
    if len(set(chosen) - {"rows alone"}) < 2:
        return None
    is_whole = "features" in chosen
    memory = (
        work.feature_bytes * rows
        + work.graph_bytes * (1.0 if is_whole else share)
        + 2 * work.held_bytes * rows
    )
    syncs = sum(max(1, len(load.gathers)) * 2 for load in work.loads)
    return _strategy(
        work, cluster, "hybrid", "hybrid", per_layer, compute, memory, syncs, share=share,
        note="by layer: " + ", ".join(chosen),
    )  # fmt: skip


# Mini-batches -----------------------------------------------------------------------------------------------


def _dependent(work: Workload, cluster: Cluster) -> Strategy:
    """Neighbours are sampled around seeds of one graph whose edges every worker holds; features are sent."""
    P, growth, fetch, layers = cluster.workers, cluster.growth, cluster.fetch, len(work.loads)
    seconds = flops = held = 0.0
    # PyG's models take all nodes and edges of a batch through every layer
    edges, rows = sum(growth.edges) / max(1, work.edges), growth.nodes[-1] / max(1, work.nodes)
    for load in work.loads:
        seconds += (sum(load.graph_seconds) + load.once_seconds) * edges + load.row_seconds * rows
        flops += load.flops * max(edges, rows)
        held += load.held_bytes * rows
    seconds -= work.loss_seconds * rows
    if work.planned_batch_seconds is not None:
        seconds = work.planned_batch_seconds
    seconds += work.loss_seconds * growth.nodes[0] / max(1, work.nodes)  # of the seeds alone
    prepared, crew = preparing(work, growth, fetch, cluster.network, P), Crew(cluster.threads, cluster.cores)
    batches = fetch.nodes / max(1.0, growth.nodes[-1])  # the last one of an epoch is short
    always, more = work.timed_batch_seconds or (0.0, seconds)
    trained = fetch.steps * always + batches * more
    lost = crew.lost(trained + prepared.own, prepared.answering)
    remote = fetched(fetch, P, work.features * cluster.wire_bytes)
    weights = all_reduce(work.weight_bytes, P) * fetch.steps
    rows_kept = work.nodes * work.features * cluster.wire_bytes / P
    memory = rows_kept + work.graph_bytes / 2 + held  # edges by target are enough
    inflation = batches * P * sum(growth.edges) / max(1, work.edges * layers)
    return _strategy(
        work, cluster, "mini-batch, dependent", "data: mini-batch",
        [*([Traffic()] * (layers - 1)), remote][-layers:] if layers else [],
        trained + prepared.drawing + prepared.collecting + lost, memory, fetch.steps * (MET + 1),
        share=batches * flops / max(1.0, work.flops), others=weights, steps=fetch.steps, is_batch=True,
        same_numbers=False, run_by="plait.distributed",
        preparing=prepared, lost_seconds=lost,
        note=f"batches of {growth.batch}: {growth.nodes[-1]:,.0f} nodes each, edges x {inflation:.2f}, "
        f"{fetch.total / max(1, P * fetch.steps):,.0f} of them remote; {prepared.note(crew, lost)}",
    )  # fmt: skip


def _parted(work: Workload, cluster: Cluster) -> Strategy:
    """The same with every worker holding the edges into its own nodes: owners draw the neighbours of theirs.

    A question is its head and the numbers of nodes; the answer is how many edges each has, and their ends and
    numbers. All ask in one series of rounds: those that ask at the same time share one, others do not.
    """
    P, found, fetch = cluster.workers, _dependent(work, cluster), cluster.fetch
    asked, index = fetch.asked, work.index_bytes
    head = asked.questions * _QUESTION_HEAD * ID_BYTES
    size = asked.nodes * (ID_BYTES + _COUNT_BYTES) + asked.edges * 2 * index + head
    rounds = asked.hops * (P + 1) / (2 * P)
    counts = rounds * (P - 1) * ID_BYTES * HEADER
    messages = _ASKING * asked.hops / P * (P - 1)
    met = (_ASKING - 1) * asked.hops / P  # no worker waits for the first
    more = Traffic(size + counts * P, size / P + counts, messages, met)
    traffic = found.traffic + more
    return replace(
        found,
        name="mini-batch, topology partitioned",
        traffic=traffic,
        traffic_per_layer=(*found.traffic_per_layer[:-1], found.traffic_per_layer[-1] + more)
        if found.traffic_per_layer
        else (),
        seconds_per_epoch=found.compute_seconds + cluster.network.seconds(traffic),
        memory_per_worker=found.memory_per_worker - work.graph_bytes / 2 * (1 - 1 / P),
        synchronisations=found.synchronisations + fetch.steps * _ASKING * max(0, len(work.loads) - 1),
        note=f"{found.note}; neighbours of {asked.nodes / max(1, P * fetch.steps):,.0f} are requested",
    )


def _independent(work: Workload, cluster: Cluster) -> Strategy:
    """Separate graphs: nothing is shared but the weights."""
    P = cluster.workers
    share = math.ceil(work.graphs / P) / work.graphs
    memory = (work.feature_bytes + work.graph_bytes + work.held_bytes) * share
    return _strategy(
        work, cluster, "mini-batch, independent", "data: mini-batch", [Traffic()] * len(work.loads),
        work.seconds * share, memory, 0, share=share, note=f"{work.graphs:,} separate graphs",
    )  # fmt: skip


# Pipelines --------------------------------------------------------------------------------------------------


def stage_times(work: Workload, partitions: int, direction: int) -> list[list[list[float]]]:
    """Seconds of graph, neural and activation stage of every layer on each of equal partitions."""
    loads = work.loads if direction == 0 else tuple(reversed(work.loads))
    return [
        [
            [load.graph_seconds[direction] / partitions] * partitions,
            [load.dense_seconds[direction] / partitions] * partitions,
            [load.after_seconds[direction] / partitions] * partitions,
        ]
        for load in loads
    ]


def _pipeline(work: Workload, cluster: Cluster, mode: Mode) -> Strategy:
    """A worker for every stage of every layer, as many partitions as workers; stages share where few."""
    P = cluster.workers
    runs: list[Schedule] = [schedule(stage_times(work, P, way), mode) for way in (0, 1)] if work.loads else []
    spans, busy = sum(run.makespan for run in runs), sum(run.busy for run in runs)
    stages = 3 * len(work.loads)
    compute = max(spans, busy / min(P, max(1, stages)))
    used = min(P, max(1, stages))
    per_layer, barriers = [], (not mode.is_micro_async) + (not mode.is_macro_async)
    for load in work.loads:
        # what passes from stage to stage: sums, products, activations; and their gradients back
        passed = work.rows_bytes(max(load.ahead, default=load.width_in) + 2 * load.width_out)
        passed += work.rows_bytes(max(load.behind, default=load.width_in) + 2 * load.width_out)
        per_layer.append(Traffic(passed, passed / used, 6 * P / used, 2 * barriers))
    memory = work.graph_bytes + work.feature_bytes + work.held_bytes / max(1, min(P, len(work.loads)))
    waits = 2 * len(work.loads) * barriers
    bubble = 1.0 - busy / (used * compute) if compute else 0.0
    is_stale = mode.is_micro_async or mode.is_macro_async
    return _strategy(
        work, cluster, f"pipeline, {mode.name}", "model: pipeline", per_layer, compute, memory, waits,
        share=1.0 / used, same_numbers=not is_stale, bubble=bubble, others=Traffic(),
        note=f"{stages} stages on {used} workers, {P} partitions"
        + ("; remote rows may be of an earlier step" if is_stale else ""),
    )  # fmt: skip
