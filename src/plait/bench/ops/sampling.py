"""Drawing mini-batches: the sampled neighbourhoods of seeds; checked edge by edge: no one draw is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.ops.operation import FORWARD, GRAPH, Operation, Variant, Work
from plait.errors import InputError

__all__ = ["OPERATIONS"]


def _graph_and_seeds(case: Case, draw: Draw) -> dict[str, Tensor]:
    source, target = draw.edges()
    nodes = case.size("nodes")
    seeds = draw.permutation(nodes)[: min(nodes, case.size("batch"))]
    return {"source": source, "target": target, "seed": seeds}


def _fanout(case: Case) -> list[int]:
    words = (case.fanout or "").split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise InputError(f"--fanout: {case.fanout!r} is not a list of counts; write for example 10,5")
    return [int(word) for word in words]


def _work(case: Case) -> Work:
    edges, layer = 0, case.size("batch")
    for count in _fanout(case):
        layer *= count
        edges += layer
    # an index read and a source, target and edge number written per sampled edge
    return Work(0.0, 32.0 * edges, (64.0 + 24.0) * edges)


def _own(inputs: Inputs) -> Callable[[], Any]:
    from plait.graph import Graph
    from plait.loader.sampler import Sampler

    nodes = inputs.case.size("nodes")
    graph = Graph.from_edge_index(inputs["source"].numpy(), inputs["target"].numpy(), nodes)
    sampler = Sampler(graph, _fanout(inputs.case))
    seeds, threads = inputs["seed"].numpy(), torch.get_num_threads()
    return lambda: sampler.sample(seeds, threads=threads)


def _dgl(inputs: Inputs) -> Callable[[], Any]:
    import dgl

    ends = (inputs["source"], inputs["target"])
    graph = dgl.graph(ends, num_nodes=inputs.case.size("nodes")).formats(["csc"])
    # DGL lists fanouts from the last hop to the first
    sampler = dgl.dataloading.NeighborSampler(_fanout(inputs.case)[::-1])
    seeds = inputs["seed"].to(inputs["source"].dtype)
    return lambda: sampler.sample_blocks(graph, seeds)


def _pyg(inputs: Inputs) -> Callable[[], Any]:
    from torch_geometric.data import Data
    from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

    ends = torch.stack([inputs["source"], inputs["target"]])
    data = Data(edge_index=ends, num_nodes=inputs.case.size("nodes"))
    sampler = NeighborSampler(data, _fanout(inputs.case))
    seeds = NodeSamplerInput(input_id=None, node=inputs["seed"])
    return lambda: sampler.sample_from_nodes(seeds)


def _hops(out: Any) -> tuple[Tensor, Tensor, int]:
    """(sources, targets, edges of the first hop) of a sample in global numbers."""
    if isinstance(out, tuple):
        import dgl

        blocks = out[2]
        parts = []
        for block in blocks:
            source, target = block.edges()
            parts.append((block.srcdata[dgl.NID][source.long()], block.dstdata[dgl.NID][target.long()]))
        sources, targets = (torch.cat([part[k] for part in parts]) for k in range(2))
        return sources, targets, blocks[-1].num_edges()
    nodes = torch.as_tensor(out.n_id if hasattr(out, "n_id") else out.node)
    row, col = (torch.as_tensor(end).long() for end in (out.row, out.col))
    return nodes[row], nodes[col], int(out.num_sampled_edges[0])


def _error(out: Any, inputs: Inputs) -> float:
    """0 when every sampled edge is one of the graph and each seed has as many as it can; else infinite."""
    nodes = inputs.case.size("nodes")
    source, target, first = _hops(out)
    known = inputs["source"].long() * nodes + inputs["target"].long()
    known = torch.unique(known)
    drawn = source.long() * nodes + target.long()
    place = torch.searchsorted(known, drawn).clamp(max=known.numel() - 1)
    degree = torch.bincount(inputs["target"].long(), minlength=nodes)
    wanted = int(degree[inputs["seed"]].clamp(max=_fanout(inputs.case)[0]).sum())
    return 0.0 if bool((known[place] == drawn).all()) and first == wanted else float("inf")


_TAKES: Mapping[str, Any] = {k: v for k, v in GRAPH.items() if k not in ("width", "dtype", "order")}

OPERATIONS = (
    Operation(
        name="neighbour_sampling",
        family="sampling",
        about="the sampled in-neighbourhoods of a batch of seeds, hop by hop",
        takes={**_TAKES, "batch": 1024, "fanout": "10,5"},
        draw=_graph_and_seeds,
        variants=(
            Variant("plait", _own, devices=("cpu",), directions=FORWARD, why="plait samples on the CPU"),
            Variant("dgl", _dgl, needs="dgl", directions=FORWARD),
            Variant("pyg", _pyg, needs="pyg_lib", devices=("cpu",), directions=FORWARD),
        ),
        work=_work,
        check=_error,
    ),
)
