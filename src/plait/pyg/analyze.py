"""plait.analyze: work and depth of a model on a graph, and the price of every parallelisation strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from plait.analysis.analysis import Analysis, Options, analyse, check_workers, cores_of, halo_of, memory_of
from plait.analysis.growth import check_batches, fanouts_of
from plait.analysis.layers import layers_of
from plait.analysis.models import HEADS, HIDDEN, assumed, layers_by_name
from plait.analysis.network import Network, network_in_use
from plait.analysis.shards import SPLITS, Shards
from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.partition import has_metis, metis
from plait.kernels import launch
from plait.kernels.compiled import cache_folder
from plait.plan.exchange import Link
from plait.plan.plan import Plan
from plait.pyg.batch import Batches
from plait.pyg.beside import beside
from plait.pyg.call import call_of
from plait.pyg.compile import explain
from plait.pyg.foresee import foresee
from plait.pyg.view import CompiledModel
from plait.runtime.machine import is_lent, machine_in_use

__all__ = ["analyze"]


def analyze(
    model: nn.Module | str,
    data: Any,
    workers: int | Sequence[int] = 4,
    network: Any = None,
    *,
    memory: float | str = "16GB",
    widths: Sequence[int] | None = None,
    heads: int = HEADS,
    partition: Any = None,
    halo: float | None = None,
    batch_size: int = 1024,
    fanouts: Sequence[int | None] | None = None,
    train_share: float | None = None,
    sharing: float = 1.0,
    cores: float | None = None,
    mode: str = "training",
) -> Analysis:
    """What a model computes on a graph and which parallelisation strategy pays; the result prints itself.

    model: a PyG model, or the name of one of the paper's ("gcn", "gat", ...) together with `widths` (default:
        those of the features, 64, and the number of classes).
    data: a PyG Data, a plait Graph, or `Statistics(nodes, edges)` of a graph that is not in memory.
    network: a name ("10gbit"), figures ("40gbit,10us"), (bytes per second, latency), the file of a record, or
        the result of `distributed.wire.measure_network`, which includes the cost of a meeting of workers. The
        default is, as for `plait.shard`, the one that `measure_network(keep=True)` kept, else 10gbit.
    partition: the owner of every node (default: by METIS, if pymetis is installed); it decides what an edge
        cut sends. For statistics give `halo` instead: remote rows divided by owned ones.
    batch_size, fanouts, train_share: of sampled mini-batches, and the share of the nodes that are seeds.
    sharing: how many times slower a worker computes while the others do; more than 1 where they share a
        machine (`distributed.wire.measure_sharing`).
    cores: of one worker (default: the machine's, divided by the workers where `sharing` says that they share
        it). Where training has none to spare, it waits for threads that answer other workers' requests.
    """
    statistics = _statistics(data)
    counts = check_workers(list(workers) if isinstance(workers, Sequence) else workers, statistics.nodes)
    if mode not in ("training", "inference"):
        raise InputError(f"mode: {mode!r}; pass 'training' or 'inference'")
    if not 1 <= sharing < float("inf"):
        raise InputError(
            f"sharing: {sharing!r}; give how many times slower a worker is, a number of at least 1"
        )
    check_batches(batch_size, fanouts or ())  # before batches are drawn and timed
    linked, limit, machine = network_in_use(network, cache_folder()), memory_of(memory), machine_in_use()
    notes: tuple[str, ...] = ()
    if isinstance(model, str):
        used, notes = (widths, ()) if widths else _widths_of(data)
        name, is_training = model, mode == "training"
        layers = layers_by_name(model, used, statistics, machine, is_training=is_training, heads=heads)
    else:
        plan = _planned(model, data, mode)
        name, layers = type(model).__name__, layers_of(plan)
        notes = tuple(note for note in plan.notes if "form" not in note and "twins" not in note)
    parts, by = _partitions(partition, counts, statistics)
    shards: dict[int, dict[str, Shards]] = {}
    reason = ""
    if not isinstance(model, str):
        shards, reason = _shards(model, data, parts, linked, mode)
    notes += (f"plait.shard does not run this model, so its bytes are estimates: {reason}",) if reason else ()
    options = Options(
        workers=counts,
        network=linked,
        memory=limit,
        partitions=parts,
        partitioned_by=by,
        halo=halo_of(halo),
        batch_size=batch_size,
        fanouts=None if fanouts is None else tuple(fanouts),
        train_share=_train_share(data) if train_share is None else train_share,
        seeds=_seeds(data) if train_share is None else None,
        parameters=None if isinstance(model, str) else _parameters(model),
        threads=launch.num_threads(),
        sharing=sharing,
        cores=cores_of(cores),
        shards=shards,
        **({} if isinstance(model, str) else _called(model, data, statistics, batch_size, fanouts, mode)),
        graphs=int(getattr(data, "num_graphs", 1) or 1),
    )
    return analyse(name, layers, statistics, machine, options, notes)


def _planned(model: nn.Module, data: Any, mode: str) -> Plan:
    """The plan on CSR kernels: other graph forms are chosen by timing on this machine, not by counts."""
    if isinstance(data, Statistics | Graph):
        raise InputError(
            "data: a PyG model is planned on tensors; pass a Data with x and edge_index, or name the model "
            "(model='gcn', widths=(128, 64, 16)) to analyse statistics"
        )
    return explain(model, data, mode=mode, forms=("csr",))


def _called(
    model: nn.Module,
    data: Any,
    statistics: Statistics,
    batch_size: int,
    fanouts: Sequence[int | None] | None,
    mode: str,
) -> dict[str, Any]:
    """What the model does outside its layers, and the seconds of a mini-batch, measured by calling it."""
    plain = model._plait_model if isinstance(model, CompiledModel) else model
    call = call_of(plain, data)
    if call is None:
        return {}
    noted = beside(plain, call, mode)
    found: dict[str, Any] = {"beside": noted}
    if statistics.graph is not None and statistics.graph.is_square and isinstance(data.get("x"), Tensor):
        if not noted.layers:  # nothing is planned: there are no seconds
            return found
        hops = fanouts_of(fanouts, len(noted.layers))
        batches = Batches(plain, data, statistics.graph, batch_size, hops, mode)
        if batches.can_run and is_lent():
            found["batch_seconds"] = batches.price()
        elif batches.can_run:
            found["timed_batch_seconds"] = batches.seconds()
    return found


def _shards(
    model: nn.Module, data: Any, parts: Mapping[int, Any], network: Network, mode: str
) -> tuple[dict[int, dict[str, Shards]], str]:
    """What plait.shard would choose for each of these partitions and splits, or why it refuses the model."""
    plain = model._plait_model if isinstance(model, CompiledModel) else model
    call, found = call_of(plain, data), {}
    if call is None:
        return {}, "its arguments are not attributes of data"
    try:
        for count, part in parts.items():
            link = Link(network.bytes_per_s, network.latency, count - 1, network.meeting)
            layers = foresee(plain, call, data, np.asarray(part), link, SPLITS, mode)
            found[count] = {str(split): Shards(of_layers) for split, of_layers in layers.items()}
    except InputError as error:
        return {}, str(error).removeprefix("model: ")
    return found, ""


def _statistics(data: Any) -> Statistics:
    if isinstance(data, Statistics):
        return data
    if isinstance(data, Graph):
        return Statistics.of(data)
    edge_index = getattr(data, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise InputError(
            f"data: {type(data).__name__} has no edge_index; pass a PyG Data, a plait.Graph, or "
            "plait.analysis.Statistics(nodes, edges)"
        )
    source, target = edge_index.detach().cpu().numpy()
    return Statistics.of(Graph.from_edge_index(source, target, num_nodes=int(data.num_nodes)))


def _widths_of(data: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(features, hidden, classes) of the data; what it does not have is HIDDEN wide, and a note says so."""
    x, labels = getattr(data, "x", None), getattr(data, "y", None)
    classes = int(labels.max()) + 1 if isinstance(labels, Tensor) and labels.dim() == 1 else HIDDEN
    features = int(x.shape[1]) if isinstance(x, Tensor) else HIDDEN
    used = (features, HIDDEN, classes)
    return used, () if isinstance(x, Tensor) else (f"{assumed(used)}; widths= gives others",)


def _partitions(
    partition: Any, counts: tuple[int, ...], statistics: Statistics
) -> tuple[dict[int, np.ndarray[Any, np.dtype[np.int64]]], str]:
    """The owner of every node, by number of parts: given, or METIS's; empty where neither is available."""
    graph, most = statistics.graph, max(counts)
    if partition is not None:
        given = np.asarray(partition.cpu() if isinstance(partition, Tensor) else partition)
        _check_parts(given, most, statistics.nodes)
        return {most: given}, "given"
    if graph is None or most == 1 or not graph.is_square or not has_metis() or not graph.num_edges:
        return {}, ""
    return {count: metis(graph, count) for count in counts if count > 1}, "METIS"


def _check_parts(part: np.ndarray[Any, Any], count: int, nodes: int) -> None:
    """InputError unless every node has a part from 0 on, below the number of workers."""
    if part.shape != (nodes,) or part.dtype.kind not in "iu":
        raise InputError(
            f"partition: {part.dtype} of shape {part.shape}; give an integer for each of {nodes} nodes"
        )
    if part.size and not 0 <= part.min() <= part.max() < count:
        worst = int(part.max() if part.min() >= 0 else part.min())
        raise InputError(f"partition: part {worst} of {count}; number them from 0")


def _parameters(model: nn.Module) -> int:
    """The number of trained parameters, including layers that run in PyG."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _seeds(data: Any) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    mask = getattr(data, "train_mask", None)
    is_mask = isinstance(mask, Tensor) and mask.dim() == 1 and bool(mask.any())
    return np.flatnonzero(mask.cpu().numpy()) if is_mask and mask is not None else None


def _train_share(data: Any) -> float:
    mask = getattr(data, "train_mask", None)
    if isinstance(mask, Tensor) and mask.dim() == 1 and mask.numel():
        return max(1.0 / mask.numel(), float(mask.float().mean()))
    return 1.0
