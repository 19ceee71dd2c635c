"""graph/twins: closed twins against the definition, on random symmetric graphs."""

from __future__ import annotations

import numpy as np
import pytest

from plait.graph import Graph, generate
from plait.graph.twins import closed_twins


def dense(graph: Graph) -> np.ndarray:
    matrix = np.zeros((graph.num_nodes, graph.num_sources), np.int64)
    np.add.at(matrix, (graph.edge_rows(), graph.indices), 1)
    return matrix


def random_symmetric(rng: np.random.Generator, n: int) -> Graph:
    """Few nodes and many edges, so that twins happen; loops and repeated edges now and then."""
    upper = np.triu(rng.random((n, n)) < rng.choice([0.0, 0.1, 0.6, 0.95]), 1).astype(np.int64)
    matrix = upper + upper.T + np.diag(rng.integers(0, 2, n) * (rng.random() < 0.3))
    if rng.random() < 0.3:
        matrix = matrix * 2
    target, source = np.nonzero(matrix)
    times = matrix[target, source]
    return Graph.from_edge_index(np.repeat(source, times), np.repeat(target, times), n)


def test_classes_are_the_equal_rows_of_a_plus_i() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        graph = random_symmetric(rng, int(rng.integers(1, 14)))
        twins = closed_twins(graph)
        assert twins is not None
        closed = dense(graph) + np.eye(graph.num_nodes, dtype=np.int64)
        equal = (closed[:, None, :] == closed[None, :, :]).all(2)
        assert ((twins.members[:, None] == twins.members[None, :]) == equal).all()
        assert (twins.members[twins.representatives] == np.arange(twins.num_classes)).all()
        assert (np.bincount(twins.members) == twins.sizes).all()


def test_the_quotient_is_the_matrix_between_classes() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        graph = random_symmetric(rng, int(rng.integers(1, 14)))
        twins = closed_twins(graph)
        assert twins is not None
        spread = np.eye(twins.num_classes, dtype=np.int64)[twins.members]
        closed = dense(graph) + np.eye(graph.num_nodes, dtype=np.int64)
        between = dense(twins.between(graph)) + np.eye(twins.num_classes, dtype=np.int64)
        assert (closed[twins.representatives] @ spread == between * twins.sizes).all()


def test_the_nodes_of_a_class_are_listed() -> None:
    twins = closed_twins(generate.cliques(4, 5))
    assert twins is not None
    indptr, nodes = twins.by_class()
    assert twins.num_classes == 4
    assert all(set(twins.members[nodes[indptr[c] : indptr[c + 1]]]) == {c} for c in range(4))


def test_a_directed_graph_has_none() -> None:
    assert closed_twins(Graph.from_edge_index([0, 0], [1, 2], 3)) is None


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_edges(n: int) -> None:
    twins = closed_twins(Graph.from_edge_index([], [], n))
    assert twins is not None
    assert twins.num_classes == n


def test_a_collision_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same:
        def integers(self, low: int, high: int, n: int, dtype: object) -> np.ndarray:
            return np.ones(n, np.uint64)  # every row of equal length has the same sum

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Same())
    graph = Graph.from_edge_index([0, 1, 2, 3], [1, 0, 3, 2], 4)
    twins = closed_twins(graph)
    assert twins is not None
    assert twins.members[0] == twins.members[1]
    assert (
        len({twins.members[0], twins.members[2], twins.members[3]}) == 3
        or twins.members[2] == twins.members[3]
    )
    assert twins.members[0] != twins.members[2]
