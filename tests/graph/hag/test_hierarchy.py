"""hierarchy.py: counts, the proof that catches every wrong cover, and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.errors import GraphError, InputError
from plait.graph import Graph
from plait.graph.hag import Hag, search

from .graphs import ODD_GRAPHS, graph_of

CLIQUE = ODD_GRAPHS["clique"]
ORDERS = ["set", "sequence", "idempotent"]


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


def test_check_finds_a_changed_order_of_a_sequence() -> None:
    graph = graph_of([[0, 1, 2]], 3)
    hag = search(graph, capacity=0, order="sequence")
    with pytest.raises(GraphError, match="node 0"):
        replace(hag, indices=hag.indices[::-1].copy()).check(graph)


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


@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_hierarchy_comes_back(order: str, tmp_path: Path) -> None:
    hag = search(CLIQUE, order=order)
    hag.save(tmp_path / "clique.npz")
    back = Hag.load(tmp_path / "clique.npz", CLIQUE)
    assert back.check(CLIQUE)
    assert back.order == order
    assert np.array_equal(back.indices, hag.indices)
    assert [p.name for p in tmp_path.iterdir()] == ["clique.npz"]


def test_a_hierarchy_of_another_graph_is_refused(tmp_path: Path) -> None:
    search(CLIQUE).save(tmp_path / "clique.npz")
    with pytest.raises(GraphError, match="another graph"):
        Hag.load(tmp_path / "clique.npz", ODD_GRAPHS["path"])
    with pytest.raises(GraphError, match="another graph"):
        search(CLIQUE).check(ODD_GRAPHS["path"])


def test_a_sequence_of_another_edge_order_is_refused(tmp_path: Path) -> None:
    one = Graph.from_edge_index([1, 2, 0, 2], [0, 0, 1, 1], 3)
    other = Graph.from_edge_index([2, 1, 0, 2], [0, 0, 1, 1], 3)
    search(one, order="sequence").save(tmp_path / "one.npz")
    with pytest.raises(GraphError, match="node 0"):
        Hag.load(tmp_path / "one.npz", other)


@pytest.mark.parametrize("content", [b"", b"not a zip file"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hag.npz"
    path.write_bytes(content)
    with pytest.raises(GraphError, match=r"hag\.npz"):
        Hag.load(path, CLIQUE)


def test_a_file_with_pickles_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "hag.npz", meta=np.array([{}], object), allow_pickle=True)
    with pytest.raises(GraphError):
        Hag.load(tmp_path / "hag.npz", CLIQUE)


@pytest.mark.parametrize("order", ["sequence", "idempotent"])
def test_only_sums_have_a_transpose(order: str) -> None:
    with pytest.raises(InputError, match="transpose"):
        search(CLIQUE, order=order).transpose(CLIQUE)


def test_the_transpose_of_a_directed_graph_covers_the_out_neighbours() -> None:
    graph = graph_of([[0, 1, 2, 3], [0, 1, 2], [0, 1, 2], [3], []], 4)
    back = search(graph).transpose(graph)
    assert back.check(graph.transpose)
    assert back.num_aggregation_nodes == 1
