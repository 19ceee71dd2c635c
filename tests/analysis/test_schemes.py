"""analysis/schemes.py: epochs of training schemes counted by hand, and by running what they draw."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import GraphConv

import plait
from plait.analysis.cut import edge_cut, expected_edge_cut
from plait.analysis.growth import grow
from plait.analysis.models import layers_by_name
from plait.analysis.published import SCHEMES
from plait.analysis.schemes import Scheme, drawn_rows, edges_between, schemes_of, walked
from plait.analysis.statistics import Statistics
from plait.cost.machine import default_profile
from plait.graph import Graph
from plait.pyg.probe import Probe
from tests.analysis.test_growth import random_graph
from tests.analysis.test_training_steps import Counts
from tests.analysis.test_training_steps import counts as counts

MACHINE = default_profile()


def found(
    statistics: Statistics, batch: int = 50, fanout: int = 5, model: str = "edgeconv-1"
) -> dict[str, Scheme]:
    layers = layers_by_name(model, (16, 16, 16), statistics, MACHINE)
    cut = expected_edge_cut(statistics, 4)
    if statistics.graph is not None:
        cut = edge_cut(statistics.graph, np.arange(statistics.nodes) % 4)
    growth = grow(statistics, batch, (fanout,) * 2)
    return {s.row.model: s for s in schemes_of(layers, statistics, growth, fanout, cut, 16)}


@pytest.mark.parametrize("statistics", [Statistics.of(random_graph(500, 4000)), Statistics(500, 4000)])
def test_every_scheme_of_the_table_is_counted(statistics: Statistics) -> None:
    schemes = found(statistics)
    assert list(schemes) == [row.model for row in SCHEMES]
    assert all(s.work > 0 and s.depth > 0 and s.steps >= 1 and s.published > 0 for s in schemes.values())


def test_a_full_batch_is_both_passes_of_all_layers() -> None:
    statistics = Statistics.of(random_graph(500, 4000))
    layers = layers_by_name("edgeconv-1", (16, 16, 16), statistics, MACHINE)
    assert found(statistics)["Full batch"].work == sum(x.forward.work + x.backward.work for x in layers)
    assert found(statistics)["Full batch"].depth == sum(x.forward.depth + x.backward.depth for x in layers)


def test_clusters_leave_out_the_edges_they_cut() -> None:
    graph = random_graph(500, 4000)
    statistics = Statistics.of(graph)
    schemes = found(statistics)
    part = np.arange(500) % 4
    kept = (part[graph.edge_rows()] == part[graph.indices]).sum()
    assert f"{kept / graph.num_edges:.0%}" in schemes["Cluster-GCN"].note
    assert schemes["Cluster-GCN"].work < schemes["Full batch"].work


def test_one_batch_of_all_nodes_with_all_neighbours_is_a_full_batch_and_what_was_done_once() -> None:
    statistics = Statistics.of(random_graph(200, 900))
    layers = layers_by_name("edgeconv-1", (16, 16, 16), statistics, MACHINE)
    once = sum(x.phases["once"].work for x in layers if "once" in x.phases)
    growth = grow(statistics, 200, (None, None))
    cut = edge_cut(statistics.graph, np.zeros(200, int))  # type: ignore[arg-type]
    schemes = {s.row.model: s for s in schemes_of(layers, statistics, growth, 5, cut, 16)}
    assert schemes["GraphSAGE"].work == pytest.approx(schemes["Full batch"].work + once)
    assert schemes["Cluster-GCN"].work == schemes["Full batch"].work


def test_the_neighbourhood_explodes_with_small_batches() -> None:
    statistics = Statistics.of(random_graph(2000, 30_000))
    assert found(statistics, 10)["GraphSAGE"].work > 2 * found(statistics, 1000)["GraphSAGE"].work


def test_walks_on_a_ring_visit_chains() -> None:
    """Walks of two steps on a directed ring: three nodes a root and the two edges between them."""
    nodes = 3000
    graph = Graph.from_edge_index(np.arange(nodes), (np.arange(nodes) + 1) % nodes, num_nodes=nodes)
    note = found(Statistics.of(graph), 10)["GraphSAINT"].note
    assert "visit 30 nodes with 20 edges" in note


# What is drawn, run -----------------------------------------------------------------------------------------

WIDTH = 16


class Layers(nn.Module):
    """Sums of neighbours' rows times a weight, layer by layer, each on the edges drawn for it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GraphConv(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor, blocks: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        for conv, (edges, rows) in zip(self.convs, blocks, strict=True):
            x = conv((x, None), edges, size=(x.shape[0], rows))
        return x


def _block(graph: Graph, sources: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, int]:
    """The edges between two sets of nodes, both numbered from 0, and how many targets there are."""
    chosen = edges_between(graph, sources, targets)
    place = [np.cumsum(mask) - 1 for mask in (sources, targets)]
    ends = (place[0][graph.indices[chosen]], place[1][graph.edge_rows()[chosen]])
    return torch.from_numpy(np.stack(ends).astype(np.int64)), int(targets.sum())


def _executed(blocks: list[tuple[torch.Tensor, int]], rows: int, counts: Counts) -> int:
    """Operations of a training step on these blocks, carried out by loops that count.

    Of equal prices the planner takes any: here the association whose gradients need no second pass.
    """
    model, x = plait.compile(Layers(len(blocks)), forms=("csr",)), torch.randn(rows, WIDTH)
    found = []

    def step() -> None:
        counts.flops.clear()
        model(x, blocks).sum().backward()
        found.append(sum(counts.flops.values()))

    for rank in range(6):
        Probe(model).take(rank, step)
    return min(found)


def test_vertices_drawn_by_layer_are_trained_on_as_counted(counts: Counts) -> None:
    graph, rng = random_graph(300, 4000), np.random.default_rng(0)
    sets = [drawn_rows(300, 60, rng) for _ in range(3)]
    blocks = [_block(graph, *pair) for pair in itertools.pairwise(sets)]
    scheme = found(Statistics.of(graph), 60)["FastGCN"]
    assert scheme.work == pytest.approx(scheme.steps * _executed(blocks, 60, counts))


def test_walked_subgraphs_are_trained_on_as_counted(counts: Counts) -> None:
    graph = random_graph(300, 4000)
    seen = walked(graph, 40, np.random.default_rng(0))
    blocks = [_block(graph, seen, seen)] * 2
    scheme = found(Statistics.of(graph), 40)["GraphSAINT"]
    assert scheme.work == pytest.approx(scheme.steps * _executed(blocks, int(seen.sum()), counts))


def test_clusters_are_trained_on_as_counted(counts: Counts) -> None:
    """The sums of features inside a cluster are made once, not in every epoch."""
    graph, flops = random_graph(300, 4000), 0
    for part in range(4):
        own = np.arange(300) % 4 == part
        edges, rows = _block(graph, own, own)
        flops += _executed([(edges, rows)] * 2, rows, counts) - edges.shape[1] * WIDTH
    assert found(Statistics.of(graph))["Cluster-GCN"].work == pytest.approx(flops)
