"""search.py: every hierarchy covers its graph, arguments are checked, counts are those measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph.hag import forecast, search

from .graphs import ODD_GRAPHS, graph_of, random_graph, real_graph

CLIQUE = ODD_GRAPHS["clique"]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("order", ["set", "idempotent"])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_hierarchies_of_odd_graphs_pass_the_check(name: str, order: str, mode: str) -> None:
    graph = ODD_GRAPHS[name]
    for inline in (True, False):
        hag = search(graph, order=order, min_count=2, mode=mode, inline=inline)
        assert hag.check(graph)
        assert hag.aggregations <= hag.graph_aggregations


@pytest.mark.parametrize("seed", range(60))
def test_hierarchies_of_random_graphs_pass_the_check_and_never_cost_traffic(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    hag = search(graph)
    assert hag.check(graph)
    assert hag.traffic <= graph.num_edges + np.count_nonzero(graph.degrees)


def test_capacity_zero_or_depth_zero_is_the_plain_graph() -> None:
    for hag in (search(CLIQUE, capacity=0), search(CLIQUE, max_depth=0)):
        assert hag.check(CLIQUE)
        assert (hag.num_aggregation_nodes, hag.num_edges, hag.num_levels) == (0, CLIQUE.num_edges, 0)


def test_capacity_is_a_count_or_a_fraction_of_the_nodes() -> None:
    assert search(CLIQUE, capacity=2, inline=False).num_aggregation_nodes == 2
    assert search(CLIQUE, capacity=2 / 9 + 0.01, inline=False).num_aggregation_nodes == 2


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("order", ["set", "idempotent"])
def test_limits_hold_in_every_order_and_mode(order: str, mode: str) -> None:
    graph = real_graph("squirrel")
    hag = search(graph, capacity=300, max_depth=2, order=order, mode=mode, inline=False)
    assert hag.check(graph)
    assert hag.num_aggregation_nodes <= 300
    assert 1 <= hag.num_levels <= 2
    assert search(graph, order=order, mode=mode).num_levels > 2


def test_inlining_keeps_the_additions_and_takes_a_read_and_a_write_off_per_node() -> None:
    graph = graph_of([[0, 1, 2, 3]] * 5)
    binary, joined = search(graph, inline=False), search(graph)
    assert joined.aggregations == binary.aggregations
    saved = binary.num_aggregation_nodes - joined.num_aggregation_nodes
    assert saved == 2
    assert binary.traffic - joined.traffic == 2 * saved


def test_the_search_is_deterministic() -> None:
    graph = random_graph(np.random.default_rng(5))
    one, two = search(graph), search(graph)
    assert np.array_equal(one.indices, two.indices)
    assert np.array_equal(one.indptr, two.indptr)


def test_an_ended_time_budget_returns_the_best_so_far() -> None:
    hag = search(CLIQUE, time_budget=0.0)
    assert hag.check(CLIQUE)
    assert not hag.is_complete


@pytest.mark.parametrize("function", [search, forecast])
def test_what_is_no_graph_is_refused_with_the_next_step(function: Callable[[Any], object]) -> None:
    with pytest.raises(InputError, match=r"ndarray is not a plait.Graph; make one with .*from_edge_index"):
        function(np.zeros((2, 3), int))


def test_a_sum_that_no_graph_has_rows_enough_for_leaves_the_plain_graph() -> None:
    assert search(CLIQUE, min_count=10**20).num_aggregation_nodes == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("capacity", -1),
        ("capacity", -0.5),
        ("capacity", math.nan),
        ("capacity", "many"),
        ("capacity", True),
        ("max_depth", -1),
        ("max_depth", 2.5),
        ("order", "random"),
        ("mode", "slow"),
        ("min_count", 1),
        ("time_budget", -1.0),
        ("time_budget", math.nan),
        ("time_budget", "10 s"),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(InputError, match=argument):
        search(CLIQUE, **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "num_edges", "num_aggregation_nodes"),
    [
        ("amazon_photo", 176_245, 1_912),
        ("coauthor_cs", 141_131, 4_583),
        ("pubmed", 79_977, 3_103),
        ("flickr_attr", 388_425, 1_893),
        pytest.param("ego_twitter", 1_848_555, 20_326, marks=pytest.mark.slow),
        pytest.param("web_cnr2000", 1_237_726, 81_389, marks=pytest.mark.slow),
    ],
)
def test_counts_at_a_quarter_of_the_nodes_are_those_of_the_authors_tie_order(
    name: str, num_edges: int, num_aggregation_nodes: int
) -> None:
    graph = real_graph(name)
    hag = search(graph, capacity=0.25, max_depth=10, inline=False)
    assert hag.check(graph)
    assert (hag.num_edges, hag.num_aggregation_nodes) == (num_edges, num_aggregation_nodes)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("amazon_photo", 2.03),
        pytest.param("tu_collab", 14.8, marks=pytest.mark.slow),
    ],
)
def test_unlimited_search_saves_at_least_this_many_additions(name: str, ratio: float) -> None:
    graph = real_graph(name)
    hag = search(graph, max_depth=10)
    assert hag.check(graph)
    assert hag.aggregation_ratio >= ratio
