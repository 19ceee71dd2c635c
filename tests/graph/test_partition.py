"""Parts that are whole, level and cut few edges; a missing pymetis says what to install."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph, generate, partition
from plait.graph.partition import METHODS, assign, balance, fennel, has_metis, loads, metis, undirected

needs_metis = pytest.mark.skipif(not has_metis(), reason="pymetis is not installed")
RNG = np.random.default_rng(0)


def two_rings(size: int) -> Graph:
    node = np.arange(size)
    source = np.concatenate((node, size + node, [0, 3]))
    target = np.concatenate(((node + 1) % size, size + (node + 1) % size, [size, 3]))
    return Graph.from_any(np.stack((source, target)), 2 * size)


def cut(graph: Graph, part: np.ndarray) -> int:
    return int((part[graph.edge_rows()] != part[graph.indices]).sum())


@needs_metis
@pytest.mark.parametrize("recursive", [True, False])
def test_two_rings_are_two_parts(recursive: bool) -> None:
    part = metis(two_rings(20), 2, recursive=recursive)
    assert len(set(part[:20])) == len(set(part[20:])) == 1
    assert part[0] != part[20]


def test_one_part_needs_no_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has_metis", lambda: False)
    assert metis(two_rings(3), 1).tolist() == [0] * 6


def test_a_missing_pymetis_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has_metis", lambda: False)
    with pytest.raises(InputError, match=r"pip install pymetis"):
        metis(two_rings(3), 2)


@pytest.mark.parametrize("parts", [0, 7, 1.5, True])
def test_bad_numbers_of_parts_are_refused(parts: int) -> None:
    with pytest.raises(InputError, match="parts="):
        metis(two_rings(3), parts)
    with pytest.raises(InputError, match="parts="):
        assign(two_rings(3), parts, "random")


def test_undirected_rows_are_the_distinct_neighbours_both_ways() -> None:
    graph = Graph.from_edge_index(RNG.integers(0, 9, 60), RNG.integers(0, 9, 60), num_nodes=12)
    pointer, neighbours = undirected(graph)
    pairs = set(zip(graph.indices.tolist(), graph.edge_rows().tolist(), strict=True))
    for v in range(12):
        expected = sorted({u for u, w in pairs if w == v} | {w for u, w in pairs if u == v})
        assert neighbours[pointer[v] : pointer[v + 1]].tolist() == [u for u in expected if u != v]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_level_on_nodes_edges_and_training_nodes(method: str) -> None:
    if method == "metis" and not has_metis():
        pytest.skip("pymetis is not installed")
    graph = generate.sbm(3000, 8, degree_in=10, degree_out=2, features=1).graph
    train = np.arange(3000) < 300  # not spread evenly over node numbers
    part = assign(graph, 4, method, train=train)
    held = np.stack([loads(graph, train)[part == i].sum(axis=0) for i in range(4)])
    assert (held <= 1.06 * held.mean(axis=0) + 1).all()
    if method != "random":
        assert cut(graph, part) < 0.5 * cut(graph, assign(graph, 4, "random"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "graph",
    [
        Graph.from_edge_index([], [], num_nodes=5),
        Graph.from_edge_index([0, 0, 1, 1], [0, 1, 1, 1], num_nodes=7),
        generate.star(40),
    ],
    ids=["no edges", "loops, repeats, isolated", "hub"],
)
def test_odd_graphs_get_a_part_for_every_node(method: str, graph: Graph) -> None:
    if method == "metis" and not has_metis():
        pytest.skip("pymetis is not installed")
    part = assign(graph, 3, method)
    assert part.shape == (graph.num_nodes,)
    assert 0 <= part.min() <= part.max() < 3


def test_an_empty_graph_is_one_empty_part() -> None:
    assert assign(Graph.from_edge_index([], [], num_nodes=0), 1, "random").size == 0


def test_fennel_keeps_cliques_together() -> None:
    graph = generate.cliques(8, 20)
    part = fennel(graph, 4, loads(graph, np.zeros(160, bool)))
    assert cut(graph, part) == 0


def test_balance_moves_nodes_that_cut_nothing_first() -> None:
    graph = two_rings(50)
    weights = loads(graph, np.zeros(100, bool))
    lopsided = np.r_[np.zeros(80, np.int64), np.ones(20, np.int64)]
    part = balance(graph, lopsided, weights, 2)
    assert 47 <= (part == 0).sum() <= 53
    assert cut(graph, part) <= 8


def test_an_assignment_repeats_with_its_seed() -> None:
    graph = two_rings(30)
    assert np.array_equal(assign(graph, 3, "random", seed=4), assign(graph, 3, "random", seed=4))
    assert not np.array_equal(assign(graph, 3, "random", seed=4), assign(graph, 3, "random", seed=5))


def test_bad_arguments_are_refused() -> None:
    graph = two_rings(5)
    with pytest.raises(InputError, match="method='cut'"):
        assign(graph, 2, "cut")
    with pytest.raises(InputError, match="train"):
        assign(graph, 2, "random", train=np.ones(3, bool))
    with pytest.raises(InputError, match="train"):
        assign(graph, 2, "random", train=[11])
    with pytest.raises(InputError, match="different node sets"):
        assign(Graph.from_edge_index([0], [1], 3, 4), 2, "random")
