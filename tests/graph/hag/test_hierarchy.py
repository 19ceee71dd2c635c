"""hierarchy.py: counts, and the proof that catches every wrong cover."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.errors import GraphError, InputError
from plait.graph.hag import search

from .graphs import ODD_GRAPHS, graph_of

CLIQUE = ODD_GRAPHS["clique"]
ORDERS = ["set", "idempotent"]


def test_the_counts_follow_from_the_rows() -> None:
    hag = search(graph_of([[0, 1, 2, 3]] * 5 + [[]], 6))
    assert (hag.num_edges, hag.num_aggregation_nodes, hag.num_outputs) == (9, 1, 5)
    assert (hag.aggregations, hag.reads, hag.writes, hag.traffic) == (3, 9, 6, 15)
    assert (hag.graph_aggregations, hag.graph_traffic) == (15, 25)
    assert (hag.aggregation_ratio, hag.traffic_ratio) == (5.0, 25 / 15)
    assert hag.num_levels == 1


@pytest.mark.parametrize("order", ORDERS)
def test_check_finds_a_changed_column(order: str) -> None:
    hag = search(CLIQUE, order=order)
    for position in range(0, hag.num_edges, 3):
        indices = hag.indices.copy()
        indices[position] = (indices[position] + 1) % CLIQUE.num_sources
        with pytest.raises(GraphError):
            replace(hag, indices=indices).check(CLIQUE)


@pytest.mark.parametrize("order", ORDERS)
def test_check_finds_a_missing_and_a_doubled_neighbour(order: str) -> None:
    graph = graph_of([[0, 1, 2], [1, 2]], 3)
    hag = search(graph, capacity=0, order=order)
    fewer = replace(hag, indices=hag.indices[:-1], indptr=np.array([0, 3, 4]))
    with pytest.raises(GraphError, match="node 1"):
        fewer.check(graph)
    doubled = replace(hag, indices=np.append(hag.indices, 2).astype(np.int32), indptr=np.array([0, 3, 6]))
    if order == "idempotent":
        assert doubled.check(graph)
    else:
        with pytest.raises(GraphError, match="node 1"):
            doubled.check(graph)


@pytest.mark.parametrize(
    "damage",
    [
        {"indices": np.array([99], np.int32), "indptr": np.array([0] * 9 + [1])},
        {"indptr": np.array([0, 1])},
        {"indptr": np.arange(10)[::-1].copy()},
        {"level": np.array([1], np.int32)},
        {"order": "none"},
    ],
)
def test_a_damaged_structure_is_refused(damage: dict[str, object]) -> None:
    hag = replace(search(CLIQUE, capacity=0), **damage)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="hag"):
        hag.check(CLIQUE)


def test_a_cycle_is_refused() -> None:
    hag = search(graph_of([[0, 1, 2]] * 4, 3))
    indices = hag.indices.copy()
    indices[-1] = 3  # the partial sum reads itself
    with pytest.raises(GraphError, match="levels"):
        replace(hag, indices=indices).check(graph_of([[0, 1, 2]] * 4, 3))


def test_the_check_of_another_graph_is_refused() -> None:
    with pytest.raises(GraphError, match="another graph"):
        search(CLIQUE).check(ODD_GRAPHS["path"])


def test_only_sums_have_a_transpose() -> None:
    with pytest.raises(InputError, match="transpose"):
        search(CLIQUE, order="idempotent").transpose(CLIQUE)


def test_the_transpose_of_a_directed_graph_covers_the_out_neighbours() -> None:
    graph = graph_of([[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], [3], []], 4)
    back = search(graph).transpose(graph)
    assert back.check(graph.transpose)
    assert back.num_aggregation_nodes == 1
