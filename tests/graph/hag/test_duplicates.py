"""duplicates.py: equal rows are summed once, and only where that saves traffic."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph.hag import merge_equal_rows

from .graphs import ODD_GRAPHS, graph_of, random_graph


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_are_covered(name: str) -> None:
    assert merge_equal_rows(ODD_GRAPHS[name]).check(ODD_GRAPHS[name])


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_are_covered_without_more_traffic(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    hag = merge_equal_rows(graph)
    assert hag.check(graph)
    assert hag.traffic <= hag.graph_traffic
    assert hag.num_levels <= 1


def test_equal_rows_share_one_sum() -> None:
    hag = merge_equal_rows(graph_of([[0, 1, 2]] * 4 + [[3]] * 4, 4))
    assert hag.num_aggregation_nodes == 1
    assert hag.aggregations == 2


def test_two_rows_of_two_are_left_alone() -> None:
    assert merge_equal_rows(graph_of([[0, 1], [0, 1]])).num_aggregation_nodes == 0
