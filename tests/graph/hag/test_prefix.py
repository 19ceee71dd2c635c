"""prefix.py: every distinct prefix is computed once, and the neighbours' order is kept."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph import Graph
from plait.graph.hag import PrefixLevels, prefix_levels

from .graphs import ODD_GRAPHS, random_graph, rows_of


def lists_of(levels: PrefixLevels) -> list[list[int]]:
    """The whole list of every row, read back from its last prefix."""
    rows = []
    for at in levels.last:
        row = []
        for first in levels.start[:-1][::-1]:
            row.append(int(levels.column[first + at]))
            at = levels.parent[first + at]
        rows.append(row[::-1])
    return rows


def assert_shared(graph: Graph, rows: list[list[int]]) -> None:
    levels = prefix_levels(graph)
    padded = [row + [graph.num_sources] * (levels.length - len(row)) for row in rows]
    assert levels.length == max(map(len, rows), default=0)
    assert lists_of(levels) == padded
    assert levels.num_steps == len({tuple(row[: k + 1]) for row in padded for k in range(len(row))})


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_take_one_step_per_distinct_prefix(name: str) -> None:
    assert_shared(ODD_GRAPHS[name], rows_of(ODD_GRAPHS[name]))


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_take_one_step_per_distinct_prefix(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    assert_shared(graph, rows_of(graph))


def test_the_order_is_that_of_the_callers_edges() -> None:
    src, dst = [5, 1, 3, 5, 1, 4], [0, 0, 0, 1, 1, 1]
    assert_shared(Graph.from_edge_index(src, dst, 6), [[5, 1, 3], [5, 1, 4], [], [], [], []])
