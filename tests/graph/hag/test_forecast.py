"""forecast.py: random graphs are refused, graphs with much to share are not, and quickly."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph import Graph
from plait.graph.hag import forecast, search

from .graphs import ODD_GRAPHS, graph_of, real_graph


def random_edges(num_nodes: int, num_edges: int) -> Graph:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, num_nodes, (2, num_edges))
    return Graph.from_edge_index(src, dst, num_nodes)


def test_a_random_graph_of_three_million_edges_is_refused() -> None:
    answer = forecast(random_edges(100_000, 3_000_000))
    assert not answer.worth_trying
    assert answer.expected_traffic_ratio == pytest.approx(1.0, abs=0.05)
    assert "little in common" in answer.reason


def test_sparse_graphs_are_refused_for_their_degree() -> None:
    answer = forecast(graph_of([[1], [0, 2], [1]]))
    assert (answer.worth_trying, answer.expected_traffic_ratio) == (False, 1.0)
    assert "too few" in answer.reason


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_have_a_forecast(name: str) -> None:
    assert forecast(ODD_GRAPHS[name]).expected_traffic_ratio >= 1.0


def test_cliques_are_worth_trying() -> None:
    rows = [[30 * k + u for u in range(30)] for k in range(40) for _ in range(30)]
    answer = forecast(graph_of(rows))
    assert answer.worth_trying
    assert answer.expected_traffic_ratio > 5


def test_the_forecast_is_deterministic() -> None:
    graph = random_edges(500, 20_000)
    assert forecast(graph) == forecast(graph)


@pytest.mark.parametrize("name", ["amazon_photo", "squirrel", "chameleon", "pubmed", "mesh_4elt", "cora"])
def test_the_forecast_is_near_what_the_search_finds(name: str) -> None:
    graph = real_graph(name)
    saved = search(graph, max_depth=10).traffic_ratio - 1
    expected = forecast(graph).expected_traffic_ratio - 1
    assert abs(expected - saved) <= 0.5 * saved + 0.05
