"""analysis/statistics.py: bins that hold every node and edge, and misses like those of a simulated cache."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from plait.analysis.statistics import Bins, Popularity, Statistics
from plait.errors import InputError
from plait.graph import Graph
from plait.graph.stats import miss_curve


@pytest.mark.parametrize("degrees", ["powerlaw", "poisson", "regular"])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 1), (10, 200), (1000, 2100), (111_059_956, 1_615_685_872)])
def test_bins_hold_every_node_and_edge(degrees: str, nodes: int, edges: int) -> None:
    bins = Statistics(nodes, edges, degrees).bins
    assert bins.nodes == pytest.approx(nodes)
    assert bins.edges == pytest.approx(edges)
    assert (bins.count >= 0).all()
    assert (bins.degree >= 0).all()


def test_a_power_law_has_hubs_and_a_given_largest_degree_is_kept() -> None:
    free = Statistics(10**6, 10**7)
    capped = Statistics(10**6, 10**7, max_degree=500)
    assert free.bins.largest > 5000
    assert 400 < capped.bins.largest <= 520


@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (5, 0)])
def test_nothing_is_something_too(nodes: int, edges: int) -> None:
    found = Statistics(nodes, edges)
    assert found.bins.nodes == nodes
    assert found.bins.largest == 0
    assert found.locality().miss_rate(10) == 0.0


def test_a_graph_at_hand_is_measured() -> None:
    graph = Graph.from_edge_index(np.array([0, 1, 2, 2]), np.array([1, 1, 1, 0]), num_nodes=4)
    found = Statistics.of(graph)
    assert (found.nodes, found.edges, found.max_degree) == (4, 4, 3)
    assert found.bins.largest == 3
    assert found.out_bins.largest == 2
    assert found.locality() is graph.stats


def test_misses_are_near_those_of_a_cache_read_in_random_order() -> None:
    rng = np.random.default_rng(0)
    weight = rng.pareto(1.5, 2000) + 1
    reads = rng.choice(2000, 40_000, p=weight / weight.sum()).astype(np.int64)
    counted = np.bincount(reads, minlength=2000)
    guessed = Popularity(Bins.of(counted), 100)
    for rows, rate in miss_curve(reads, 2000):
        assert guessed.miss_rate(rows) == pytest.approx(rate, abs=0.03)


def test_a_billion_nodes_take_no_memory() -> None:
    tracemalloc.start()
    found = Statistics(10**9, 2 * 10**10)
    assert 0.0 < found.locality().miss_rate(10**6) < 1.0
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": -1, "edges": 0}, "nodes: -1"),
        ({"nodes": 2.5, "edges": 0}, "nodes: 2.5"),
        ({"nodes": 2, "edges": True}, "edges: True"),
        ({"nodes": 0, "edges": 3}, "between no nodes"),
        ({"nodes": 2, "edges": 3, "degrees": "cauchy"}, "known are powerlaw, poisson, regular"),
        ({"nodes": 2, "edges": 3, "exponent": 2.0}, "above 2"),
        ({"nodes": 2, "edges": 30, "max_degree": 3}, "below the mean"),
    ],
)
def test_bad_statistics_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Statistics(**options)  # type: ignore[arg-type]
