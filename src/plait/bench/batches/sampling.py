"""Drawing batches, with and without features, against DGL and PyG's own NeighborLoader."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from plait.bench.batches.part import Bar, Measured, Options, edge_list, load
from plait.errors import PlaitError
from plait.graph import Graph
from plait.loader import NeighborLoader, Sampler
from plait.measure import time_calls

__all__ = ["loading", "sampling"]

FANOUTS = ((10, 10), (15, 10, 5))
BATCH = 1024
WIDTH = 128
# batches a call draws; PyG's loader takes over ten times as long a batch
BATCHES, PYG_BATCHES = 12, 2
_LOADER = "plait's loader"
_SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class Drawn:
    """A batch in global numbers, to be held against the graph."""

    source: Any
    target: Any
    num_first: int


@dataclass(frozen=True)
class Way:
    """One way to draw batches: `draw` returns the number of edges it drew, `one` a batch to check."""

    draw: Callable[[], int]
    one: Callable[[], Drawn]


def sampling(options: Options) -> Iterator[Measured]:
    """Edges per second of plait's sampler, DGL's, and PyG's loader where a wheel for it is there."""
    yield from _cells(options, _samplers, {"dgl": 2.5, "pyg": 15.0}, 0)


def loading(options: Options) -> Iterator[Measured]:
    """The same with rows of features gathered for every batch."""
    yield from _cells(options, _loaders, {"dgl": 2.5}, WIDTH)


def _cells(options: Options, ways: Any, limits: dict[str, float], width: int) -> Iterator[Measured]:
    before = torch.get_num_threads()
    try:
        for name, source in options.graphs.items():
            graph = load(source, options.data_dir)
            ends = edge_list(graph)
            for fanout in FANOUTS:
                for threads in (1, 2):
                    _use(threads)
                    case = {"graph": name, "fanout": list(fanout), "batch": BATCH, "threads": threads}
                    made, missing = ways(graph, ends, fanout, threads)
                    yield (
                        case | {"num_edges": graph.num_edges, "width": width},
                        *_timed(graph, fanout, made, missing, limits, options),
                    )
    finally:
        _use(before)


def _timed(
    graph: Graph,
    fanout: Sequence[int],
    ways: dict[str, Way],
    missing: dict[str, str],
    limits: dict[str, float],
    options: Options,
) -> tuple[dict[str, object], tuple[Bar, ...]]:
    lines: dict[str, dict[str, object]] = {
        name: {"status": "missing", "reason": why} for name, why in missing.items()
    }
    wrong = {name: _fault(graph, fanout, way.one()) for name, way in ways.items()}
    lines |= {name: {"status": "wrong", "reason": why} for name, why in wrong.items() if why}
    sound = {name: way for name, way in ways.items() if not wrong[name]}
    edges = {name: way.draw() for name, way in sound.items()}
    timings = time_calls(
        {name: way.draw for name, way in sound.items()},
        warmup=1,
        budget_seconds=options.budget_seconds,
        max_repeats=3 if options.is_small else 25,
        min_repeats=3 if options.is_small else 5,
        # a thread pool spins for some milliseconds after its last call, on the core the next one needs
        before=lambda: time.sleep(_SETTLE_SECONDS),
    )
    for name, timing in timings.items():
        rate = {"edges_per_second": edges[name] / timing.median, "edges": edges[name]}
        lines[name] = {"status": "timed", **rate, **timing.to_dict()}
    rates = {name: edges[name] / timing.median for name, timing in timings.items()}
    bars = tuple(
        # PyG has no sampler apart from its loader: it is held against the loader
        Bar(f"edges/s over {name}'s", rates[_LOADER if name == "pyg" else "plait"] / rates[name], limit)
        for name, limit in limits.items()
        if name in rates
    )
    return {"peers": lines}, bars


def _fault(graph: Graph, fanout: Sequence[int], drawn: Drawn) -> str:
    """What is wrong with a batch: an edge the graph has not, or too few for the seeds; else nothing."""
    targets = graph.edge_rows().astype(np.int64)
    known = np.unique(targets * graph.num_nodes + graph.indices)
    keys = np.asarray(drawn.target, np.int64) * graph.num_nodes + np.asarray(drawn.source, np.int64)
    places = np.searchsorted(known, keys).clip(max=known.size - 1)
    if not (known[places] == keys).all():
        return "a sampled edge is none of the graph's"
    wanted = int(np.minimum(graph.degrees[_seeds(graph, 1)[0]], fanout[0]).sum())
    return "" if drawn.num_first == wanted else f"{drawn.num_first} edges into the seeds, not {wanted}"


def _seeds(graph: Graph, batches: int) -> list[Any]:
    order = np.random.default_rng(2).permutation(graph.num_nodes)
    size = min(BATCH, graph.num_nodes // 2)
    return [np.roll(order, -size * b)[:size] for b in range(batches)]


def _samplers(
    graph: Graph, ends: Any, fanout: Sequence[int], threads: int
) -> tuple[dict[str, Way], dict[str, str]]:
    seeds = _seeds(graph, BATCHES)
    sampler = Sampler(Graph.from_edge_index(ends[0], ends[1], graph.num_nodes), list(fanout))

    def draw() -> int:
        return sum(sample.num_edges for sample in sampler.sample_many(seeds, threads=threads))

    def one() -> Drawn:
        sample = sampler.sample(seeds[0])
        assert sample.num_sampled_edges is not None
        return Drawn(sample.n_id[sample.row], sample.n_id[sample.col], sample.num_sampled_edges[0])

    ways, missing = {"plait": Way(draw, one)}, {}
    if importlib.util.find_spec("dgl") is None:
        missing["dgl"] = "dgl is not installed"
    else:
        ways["dgl"] = _dgl(graph, ends, fanout, None)
    _add_pyg(ways, missing, graph, ends, fanout, threads)
    return ways, missing


def _loaders(
    graph: Graph, ends: Any, fanout: Sequence[int], threads: int
) -> tuple[dict[str, Way], dict[str, str]]:
    x = torch.randn(graph.num_nodes, WIDTH, generator=torch.Generator().manual_seed(0))
    data = Data(x=x, edge_index=torch.from_numpy(ends))
    seeds = torch.from_numpy(np.concatenate(_seeds(graph, BATCHES)))
    size = seeds.numel() // BATCHES
    prefetch = threads if threads > 1 else 0
    loader = NeighborLoader(data, list(fanout), seeds, batch_size=size, seed=0, prefetch=prefetch)
    ways, missing = {"plait": Way(lambda: _edges(loader), lambda: _first(loader, x))}, {}
    if importlib.util.find_spec("dgl") is None:
        missing["dgl"] = "dgl is not installed"
    else:
        ways["dgl"] = _dgl(graph, ends, fanout, x)
    return ways, missing


def _edges(loader: Any) -> int:
    return sum(int(batch.edge_index.size(1)) for batch in loader)


def _first(loader: Any, x: Tensor | None) -> Drawn:
    batch = next(iter(loader))
    if x is not None and not torch.equal(batch.x, x[batch.n_id]):
        return Drawn(np.array([-1]), np.array([-1]), -1)
    source, target = batch.n_id[batch.edge_index].numpy()
    return Drawn(source, target, int((batch.edge_index[1] < batch.batch_size).sum()))


def _dgl(graph: Graph, ends: Any, fanout: Sequence[int], x: Tensor | None) -> Way:
    """DGL's sampler, its rows read by torch as its own examples do."""
    import dgl

    whole = dgl.graph(tuple(torch.from_numpy(ends)), num_nodes=graph.num_nodes).formats(["csc"])
    whole.create_formats_()
    sampler = dgl.dataloading.NeighborSampler(list(fanout)[::-1])  # DGL lists fanouts from the last hop
    seeds = [torch.from_numpy(s) for s in _seeds(graph, BATCHES)]

    def draw() -> int:
        count = 0
        for batch in seeds:
            nodes, _, blocks = sampler.sample_blocks(whole, batch)
            if x is not None:
                _ = x[nodes]
            count += sum(block.num_edges() for block in blocks)
        return count

    def one() -> Drawn:
        blocks = sampler.sample_blocks(whole, seeds[0])[2]
        parts = []
        for block in blocks:
            source, target = block.edges()
            parts.append((block.srcdata[dgl.NID][source], block.dstdata[dgl.NID][target]))
        sources, targets = (torch.cat([part[k] for part in parts]).numpy() for k in range(2))
        return Drawn(sources, targets, blocks[-1].num_edges())

    return Way(draw, one)


def _add_pyg(
    ways: dict[str, Way],
    missing: dict[str, str],
    graph: Graph,
    ends: Any,
    fanout: Sequence[int],
    threads: int,
) -> None:
    import torch_geometric.typing as installed
    from torch_geometric.loader import NeighborLoader as PyGNeighborLoader

    if threads > 1:
        missing["pyg"] = "PyG's sampling is serial; see the cell of one thread"
        return
    if not (installed.WITH_PYG_LIB or installed.WITH_TORCH_SPARSE):
        missing["pyg"] = "PyG's NeighborLoader needs pyg-lib or torch-sparse; neither is installed"
        return
    data = Data(edge_index=torch.from_numpy(ends), num_nodes=graph.num_nodes)
    few, many = (torch.from_numpy(np.concatenate(_seeds(graph, count))) for count in (PYG_BATCHES, BATCHES))
    size = many.numel() // BATCHES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PyGNeighborLoader(data, list(fanout), few, batch_size=size)
    ours = NeighborLoader(data, list(fanout), many, batch_size=size, seed=0)
    ways["pyg"] = Way(lambda: _edges(theirs), lambda: _first(theirs, None))
    ways[_LOADER] = Way(lambda: _edges(ours), lambda: _first(ours, None))


def _use(threads: int) -> None:
    torch.set_num_threads(threads)
    if importlib.util.find_spec("dgl") is not None:
        try:
            import dgl

            dgl.utils.set_num_threads(threads)
        except (ImportError, AttributeError) as error:  # a DGL that cannot be told runs as torch does
            raise PlaitError(f"dgl: cannot be told to use {threads} threads ({error})") from error
