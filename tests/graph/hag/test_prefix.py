"""prefix.py: every distinct prefix is computed once, and the neighbours' order is kept."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph import Graph
from plait.graph.hag import search

from .graphs import ODD_GRAPHS, graph_of, random_graph, real_graph, rows_of


def distinct_prefixes(rows: list[list[int]]) -> int:
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_take_one_step_per_distinct_prefix(name: str) -> None:
    graph = ODD_GRAPHS[name]
    hag = search(graph, order="sequence")
    assert hag.check(graph)
    assert hag.num_input_reads == distinct_prefixes(rows_of(graph))


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_take_one_step_per_distinct_prefix(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    hag = search(graph, order="sequence")
    assert hag.check(graph)
    assert hag.num_input_reads == distinct_prefixes(rows_of(graph))


@pytest.mark.parametrize("seed", range(30))
def test_limits_keep_the_order_and_bound_the_nodes(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed))
    hag = search(graph, capacity=2, max_depth=1, order="sequence")
    assert hag.check(graph)
    assert hag.num_aggregation_nodes <= 2
    assert hag.num_levels <= 1


def test_the_order_is_that_of_the_callers_edges() -> None:
    src, dst = [5, 1, 3, 5, 1, 4], [0, 0, 0, 1, 1, 1]
    graph = Graph.from_edge_index(src, dst, 6)
    hag = search(graph, order="sequence")
    assert hag.check(graph)
    assert hag.num_input_reads == 4  # 5, 5 1, then 3 or 4
    assert hag.indices[hag.indptr[6] : hag.indptr[7]].tolist() == [5, 1]


def test_equal_lists_are_computed_once() -> None:
    assert search(graph_of([[0, 1, 2]] * 4, 3), order="sequence").num_input_reads == 3


def test_a_dense_graph_with_sorted_neighbours_takes_far_fewer_steps() -> None:
    graph = real_graph("tu_proteins")
    hag = search(graph, order="sequence")
    assert hag.check(graph)
    assert hag.num_input_reads < hag.num_graph_edges
