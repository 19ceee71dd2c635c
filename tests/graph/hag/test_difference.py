"""difference.py: every row comes out, forward and backward, with no more additions than the plain graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.errors import GraphError, InputError
from plait.graph import Graph
from plait.graph.hag import Differences, Schedule, difference_rows, difference_schedule
from plait.graph.hag.reference import aggregate, run

from .graphs import ODD_GRAPHS, graph_of, random_graph, real_graph
from .test_schedule import assert_tiles_are_independent


def plain_additions(graph: Graph) -> int:
    return int(np.maximum(graph.degrees - 1, 0).sum())


def assert_computes(graph: Graph, schedule: Schedule) -> None:
    x = np.random.default_rng(1).integers(-50, 50, (graph.num_sources, 2)).astype(np.float64)
    assert np.array_equal(run(schedule, x), aggregate(graph, x))


def assert_right(graph: Graph, rows: Differences) -> None:
    assert rows.check(graph)
    assert rows.aggregations <= plain_additions(graph)
    for tile_nodes in (None, 1, 3):
        assert_computes(graph, difference_schedule(rows, tile_nodes))


@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_come_out(name: str) -> None:
    assert_right(ODD_GRAPHS[name], difference_rows(ODD_GRAPHS[name], least_saving=0))


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_come_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, repeats=seed % 2 == 0)
    limits = {"least_saving": int(rng.integers(0, 3)), "max_depth": int(rng.choice([0, 1, 32]))}
    assert_right(graph, difference_rows(graph, **limits))


def test_tiles_are_independent() -> None:
    rows = difference_rows(real_graph("chameleon"))
    assert_tiles_are_independent(difference_schedule(rows, 64))


def test_equal_rows_cost_one_row() -> None:
    rows = difference_rows(graph_of([[0, 1, 2, 3]] * 5))
    assert (rows.num_roots, rows.columns.size, rows.aggregations) == (1, 4, 3)


def test_max_depth_zero_is_the_plain_graph() -> None:
    graph = ODD_GRAPHS["clique"]
    rows = difference_rows(graph, max_depth=0)
    assert rows.num_roots == graph.num_nodes
    assert rows.aggregations == plain_additions(graph)


def test_without_time_the_graph_stays_plain() -> None:
    graph = ODD_GRAPHS["clique"]
    rows = difference_rows(graph, time_budget=0.0)
    assert_right(graph, rows)
    assert rows.num_roots == graph.num_nodes


def test_check_finds_a_wrong_entry_and_another_graph() -> None:
    graph = ODD_GRAPHS["clique"]
    rows = difference_rows(graph)
    columns = rows.columns.copy()
    columns[-1] = (columns[-1] + 1) % 9
    with pytest.raises(GraphError, match="wrong"):
        replace(rows, columns=columns).check(graph)
    with pytest.raises(GraphError, match="another graph"):
        rows.check(ODD_GRAPHS["path"])
    with pytest.raises(GraphError, match="before"):
        replace(rows, order=rows.order[::-1].copy()).check(graph)


def test_differences_refuse_max_and_bad_limits() -> None:
    graph = ODD_GRAPHS["clique"]
    schedule = difference_schedule(difference_rows(graph))
    with pytest.raises(InputError, match="sums only"):
        run(schedule, np.ones((9, 1)), "max")
    with pytest.raises(InputError, match="max_depth"):
        difference_rows(graph, max_depth=-1)


@pytest.mark.parametrize(("name", "ratio"), [("squirrel", 3.0), ("amazon_photo", 1.1), ("pubmed", 1.0)])
def test_real_graphs_take_fewer_additions(name: str, ratio: float) -> None:
    graph = real_graph(name)
    rows = difference_rows(graph)
    assert rows.check(graph)
    assert plain_additions(graph) >= ratio * rows.aggregations
