"""A compiled model on batches of a loader: against PyG, and what a batch never seen before costs."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import plait
from plait.bench.batches.part import Bar, Measured, Options, edge_list, load
from plait.bench.task import build_model
from plait.features.rows import gather
from plait.graph import Graph
from plait.kernels.spmm import Pattern, spmm
from plait.loader import NeighborLoader
from plait.measure import Timing, processor_clock, time_calls, wall_clock
from plait.pyg.edges import Demand, attach, read

__all__ = ["gathering", "training"]

FANOUTS = ((10, 5), (15, 10, 5))
SIZES = (64, 256, 1024)
MODELS = ("sage", "gcn")
WIDTH = 64
CLASSES = 16
WARM_UP = 6
# edges of all the batches of a cell: few large batches tell as much as many small ones
MOST_EDGES, MOST_BATCHES, FEWEST_BATCHES = 1_500_000, 60, 8
TOLERANCE = 1e-3


def training(options: Options) -> Iterator[Measured]:
    """Forward and backward passes, each batch met once, as an epoch does.

    Seconds are those of the training thread's processor where torch has one thread, else of the clock.
    """
    name, source = next(iter(options.graphs.items()))
    graph = load(source, options.data_dir)
    x = torch.randn(graph.num_nodes, WIDTH, generator=torch.Generator().manual_seed(0))
    data = Data(x=x, edge_index=torch.from_numpy(edge_list(graph)))
    for fanout, size in itertools.product(FANOUTS, SIZES[:1] if options.is_small else SIZES):
        batches = _batches(data, fanout, size)
        for kind in MODELS:
            case = {"graph": name, "model": kind, "fanout": list(fanout), "batch": size}
            edges = float(np.mean([b.num_edges for b in batches]))
            facts = {"width": WIDTH, "threads": torch.get_num_threads(), "edges_per_batch": edges}
            yield case | facts, *_trained(kind, batches, size)


def _batches(data: Data, fanout: Any, size: int) -> list[Any]:
    loader = NeighborLoader(data, list(fanout), batch_size=size, shuffle=True, seed=0)
    found: list[Any] = []
    for batch in loader:
        found.append(batch)
        enough = max(FEWEST_BATCHES, min(MOST_BATCHES, MOST_EDGES // max(1, batch.num_edges)))
        if len(found) >= WARM_UP + enough:
            break
    return found


def _trained(kind: str, batches: list[Any], size: int) -> tuple[dict[str, object], tuple[Bar, ...]]:
    model = build_model(kind, WIDTH, CLASSES)
    fast, bare = (plait.compile(copy.deepcopy(model)) for _ in range(2))
    samples: dict[str, list[float]] = {name: [] for name in ("pyg", "plait", "plait-bare", "again", "graph")}
    error, demand = 0.0, Demand()
    for number, batch in enumerate(batches):
        seconds, building = {}, _ready(batch, demand)
        # every call has inputs of its own: what is met twice is computed once
        seconds["plait"], ours = _step(fast, batch.x.clone(), batch.edge_index, size)
        seconds["pyg"], theirs = _step(model, batch.x, batch.edge_index, size)
        seconds["again"], _ = _step(fast, batch.x.clone(), batch.edge_index, size)
        seconds["plait-bare"], _ = _step(bare, batch.x.clone(), batch.edge_index.clone(), size)
        error = max(error, _difference(ours, theirs))
        if number >= min(WARM_UP, len(batches) - 2):
            for name, value in {**seconds, "graph": building}.items():
                samples[name].append(value)
    overhead = float(np.median([a - b for a, b in zip(samples["plait"], samples["again"], strict=True)]))
    lookup = _lookup_seconds(batches[-1])
    timings = {name: Timing(tuple(found), WARM_UP) for name, found in samples.items()}
    result = {
        "peers": {name: timing.to_dict() for name, timing in timings.items()},
        "overhead_seconds": overhead,
        "lookup_seconds": lookup,
        "error": error,
    }
    ratio = timings["pyg"].median / timings["plait"].median
    bars = (
        Bar("pyg / plait", ratio, 1.0),
        Bar("overhead of a new batch, us", overhead * 1e6, 100.0, is_least=False),
        Bar("difference to PyG", error, TOLERANCE, is_least=False),
    )
    return result, bars


def _ready(batch: Any, demand: Demand) -> float:
    """Has edge_index carry its graph, as a loader whose graphs are asked for does; the seconds it takes."""
    listed = batch.edge_index.plait_graph
    begin = _now()
    attach(batch.edge_index, listed.source, listed.pointer, listed.num_nodes, demand)
    return _now() - begin


def _step(model: nn.Module, x: Tensor, edge_index: Tensor, size: int) -> tuple[float, list[Tensor]]:
    begin = _now()
    out = model(x, edge_index)[:size]
    torch.autograd.backward(out.square().mean())
    seconds = _now() - begin
    found = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return seconds, found


def _now() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(ours, theirs, strict=True)
    )


def _lookup_seconds(batch: Any) -> float:
    count = int(batch.num_nodes)
    timing = time_calls(
        {"lookup": lambda: read(batch.edge_index, None, count, count, False).build()}, repeats=5
    )
    return timing["lookup"].median


def gathering(options: Options) -> Iterator[Measured]:
    """Rows gathered and then summed along the edges, against sums that read the whole feature matrix.

    The second reads a row once for every edge instead of once, saves writing the rows, and does in the
    training thread what the loader's threads do beside it. Bars: none; this decides whether to fuse.
    """
    for name, source in options.graphs.items():
        graph = load(source, options.data_dir)
        edge_index = torch.from_numpy(edge_list(graph))
        for fanout, width in itertools.product(FANOUTS, (32,) if options.is_small else (32, 128, 512)):
            x = np.random.default_rng(0).standard_normal((graph.num_nodes, width), np.float32)
            data = Data(edge_index=edge_index, num_nodes=graph.num_nodes)
            size = min(1024, graph.num_nodes // 4)
            batch = next(iter(NeighborLoader(data, list(fanout), batch_size=size, shuffle=True, seed=0)))
            yield (
                {
                    "graph": name,
                    "fanout": list(fanout),
                    "batch": size,
                    "width": width,
                    "threads": torch.get_num_threads(),
                },
                _gathered(batch, x, options),
                (),
            )


def _gathered(batch: Any, x: Any, options: Options) -> dict[str, object]:
    listed, nodes = batch.edge_index.plait_graph, batch.n_id.numpy()
    local: Graph = listed.graph()
    targets = listed.pointer.size - 1  # the last hop sends and does not receive
    indptr = np.ascontiguousarray(local.indptr[: targets + 1])
    near = Pattern(indptr, local.indices, local.num_nodes)
    far = Pattern(indptr, nodes[local.indices].astype(np.int32), x.shape[0])
    rows = torch.empty(nodes.size, x.shape[1])
    sums, fused = (torch.empty(targets, x.shape[1]) for _ in range(2))
    features = torch.from_numpy(x)

    def in_turn() -> None:
        gather(x, nodes, rows.numpy())
        spmm(near, rows, sums)

    def at_once() -> None:
        spmm(far, features, fused)

    def with_targets() -> None:
        gather(x, nodes[:targets], rows.numpy()[:targets])
        spmm(far, features, fused)

    in_turn()
    at_once()
    clock = processor_clock if torch.get_num_threads() == 1 else wall_clock
    timings = time_calls(
        {
            "gather, then sum": in_turn,
            "sum from the whole": at_once,
            "the same, targets' rows gathered": with_targets,
            "sum alone": lambda: spmm(near, rows, sums),
        },
        budget_seconds=options.budget_seconds / 3,
        clock=clock,
    )
    medians = {name: timing.median for name, timing in timings.items()}
    return {
        "peers": {name: timing.to_dict() for name, timing in timings.items()},
        "fused_over_separate": medians["sum from the whole"] / medians["gather, then sum"],
        "with_targets_over_separate": medians["the same, targets' rows gathered"]
        / medians["gather, then sum"],
        "fused_over_sum_alone": medians["sum from the whole"] / medians["sum alone"],
        "edges_per_row": local.num_edges / nodes.size,
        "error": float((sums - fused).abs().max()),
    }
