"""analysis/cut.py: halos and copies against sets, expectations against random partitions."""

from __future__ import annotations

import numpy as np
import pytest

from plait.analysis.cut import edge_cut, expected_edge_cut, expected_vertex_cut, vertex_cut
from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.graph import Graph
from tests.analysis.test_growth import random_graph


def edges_of(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.indices.tolist(), graph.edge_rows().tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_halos_are_the_remote_sources_of_a_part(seed: int) -> None:
    graph, rng = random_graph(40, 120, seed), np.random.default_rng(seed)
    part = rng.integers(0, 3, 40)
    found = edge_cut(graph, part)
    for p in range(3):
        remote = {s for s, t in edges_of(graph) if part[t] == p != part[s]}
        asked = {(s, part[t]) for s, t in edges_of(graph) if part[s] == p != part[t]}
        assert found.halo[p] == len(remote)
        assert found.sent[p] == len(asked)
        assert found.nodes[p] == (part == p).sum()
        assert found.edges[p] == sum(part[t] == p for _, t in edges_of(graph))
        others = {part[s] for s in remote} | {q for _, q in asked}
        assert found.peers[p] == len(others)
    assert sum(found.halo) == sum(found.sent) <= found.cut_edges
    assert found.cut_edges == sum(part[s] != part[t] for s, t in edges_of(graph))


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_the_nodes_a_parts_edges_touch_and_those_it_owns(seed: int) -> None:
    graph, rng = random_graph(40, 120, seed), np.random.default_rng(seed)
    part = rng.integers(0, 3, 40)
    degree = graph.degrees + graph.out_degrees
    held = {(int(part[v]), v) for v in range(40)}
    for s, t in edges_of(graph):
        owner = int(part[t] if degree[t] < degree[s] else part[s])
        held |= {(owner, s), (owner, t)}
    found = vertex_cut(graph, part)
    assert found.copies == tuple(sum(p == q for q, _ in held) for p in range(3))
    assert sum(found.edges) == graph.num_edges
    assert found.replication == len(held) / 40


def test_a_hub_is_copied_and_nothing_else_crosses() -> None:
    """A star: every edge cut by nodes crosses; cut at the hub, each part holds one more copy."""
    leaves = np.arange(1, 41)
    graph = Graph.from_edge_index(leaves, np.zeros(40, int), num_nodes=41)
    part = np.arange(41) % 4
    assert sum(edge_cut(graph, part).halo) == 30
    assert sum(vertex_cut(graph, part).copies) == 41 + 3


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_expectations_are_those_of_random_partitions(parts: int) -> None:
    graph, rng = random_graph(3000, 20_000), np.random.default_rng(0)
    counted = edge_cut(graph, np.r_[rng.integers(0, parts, 2999), parts - 1])
    told = expected_edge_cut(Statistics.of(graph), parts)
    assert sum(told.halo) == pytest.approx(sum(counted.halo), rel=0.05)
    assert told.cut_edges == pytest.approx(counted.cut_edges, rel=0.05)
    assert expected_vertex_cut(Statistics.of(graph), parts).replication >= 1.0


def test_one_part_cuts_nothing() -> None:
    graph = random_graph(50, 100)
    found = edge_cut(graph, np.zeros(50, int))
    assert (sum(found.halo), found.cut_edges, found.imbalance) == (0, 0, 1.0)
    assert vertex_cut(graph, np.zeros(50, int)).replication == 1.0


def test_a_halo_known_elsewhere_may_be_given() -> None:
    found = expected_edge_cut(Statistics(1000, 5000), 4).with_halo(0.5)
    assert sum(found.halo) == 500


@pytest.mark.parametrize("part", [np.zeros(3, int), np.zeros(50), np.full(50, -1)])
def test_bad_partitions_are_refused(part: np.ndarray) -> None:
    with pytest.raises(InputError, match="partition"):
        edge_cut(random_graph(50, 100), part)
