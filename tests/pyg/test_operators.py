"""The matrices layers multiply by, entry for entry against a slow reading of PyG's definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import get_laplacian

from plait.errors import InputError, PlanError
from plait.graph import Graph
from plait.pyg.operators import Operator, Propagation, propagate
from tests.pyg.cases import SHAPES, random_edges, random_weights
from tests.pyg.oracle import dense_matrix

DOUBLE = torch.float64
Array = np.ndarray[Any, Any]


def graph_of(edges: Tensor, nodes: int, sources: int | None = None) -> Graph:
    return Graph.from_edge_index(edges[0].numpy(), edges[1].numpy(), nodes, sources)


def whole(made: Propagation) -> Array:
    """p @ (A + l) @ q as one dense array."""
    matrix = dense_matrix(made)
    if made.l is not None:
        matrix = matrix + np.diag(made.l.numpy())
    if made.p is not None:
        matrix = made.p.numpy()[:, None] * matrix
    return matrix if made.q is None else matrix * made.q.numpy()[None, :]


def dense(edges: Tensor, weight: Tensor, nodes: int) -> Array:
    """[target, source], repeated edges added up."""
    matrix = np.zeros((nodes, nodes))
    np.add.at(matrix, (edges[1].numpy(), edges[0].numpy()), weight.numpy())
    return matrix


def instances(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    for shape in SHAPES * 4:
        nodes = 1 if shape == "one node" else int(rng.integers(2, 9))
        edges = random_edges(rng, shape, nodes, nodes)
        yield nodes, edges, random_weights(rng, edges, False, DOUBLE)


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("fill", [1.0, 2.0])
def test_symmetric_is_gcn_norm(is_weighted: bool, fill: float) -> None:
    for nodes, edges, weights in instances(1):
        weight = weights if is_weighted else None
        expected = gcn_norm(edges, weight, nodes, improved=fill == 2.0, dtype=DOUBLE)
        operator = Operator("remaining", fill if is_weighted else 1.0, "symmetric")
        made = propagate(operator, graph_of(edges, nodes), weight, DOUBLE)
        np.testing.assert_allclose(whole(made), dense(*expected, nodes), atol=1e-12)
        assert not made.graph.has_self_loops
        assert (made.edge_weight is None) == (weight is None)


def test_symmetric_without_loops_leaves_those_of_the_graph() -> None:
    for nodes, edges, weight in instances(2):
        expected = gcn_norm(edges, weight, nodes, add_self_loops=False)
        made = propagate(Operator(normalise="symmetric"), graph_of(edges, nodes), weight, DOUBLE)
        np.testing.assert_allclose(whole(made), dense(*expected, nodes), atol=1e-12)
        assert made.l is None


@pytest.mark.parametrize(
    ("loops", "expected"),
    [("none", None), ("remaining", [5.0, 1.5, 1.5]), ("replace", [1.5, 1.5, 1.5]), ("add", [8.5, 1.5, 1.5])],
)
def test_loops_are_taken_out_as_asked(loops: str, expected: list[float] | None) -> None:
    edges = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 1]])  # two loops on node 0, weights 2 and then 5
    made = propagate(Operator(loops, 1.5), graph_of(edges, 3), torch.tensor([2.0, 3.0, 5.0, 4.0]), DOUBLE)
    if expected is None:
        assert made.l is None
        assert made.graph.num_edges == 4
    else:
        assert made.l is not None
        assert made.l.tolist() == expected
        assert made.graph.num_edges == 2
        np.testing.assert_array_equal(dense_matrix(made), [[0, 3, 0], [0, 0, 4], [0, 0, 0]])


def test_the_last_loop_of_the_callers_order_keeps_its_weight() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        edges = torch.from_numpy(rng.integers(0, 3, (2, 12)))
        weight = torch.arange(1, 13, dtype=DOUBLE)
        made = propagate(Operator("remaining", 0.5), graph_of(edges, 3), weight, DOUBLE)
        expected = [0.5] * 3
        for source, target, value in zip(*edges.tolist(), weight.tolist(), strict=True):
            if source == target:
                expected[source] = value
        assert made.l is not None
        assert made.l.tolist() == expected


def test_weights_follow_the_order_of_the_rows() -> None:
    for nodes, edges, weight in instances(4):
        made = propagate(Operator(), graph_of(edges, nodes), weight, DOUBLE)
        np.testing.assert_allclose(dense_matrix(made), dense(edges, weight, nodes))


def test_a_vanished_degree_scales_by_zero_and_a_negative_one_by_nan() -> None:
    edges = torch.tensor([[1, 2, 2, 0], [0, 0, 1, 2]])
    made = propagate(
        Operator(normalise="symmetric"), graph_of(edges, 4), torch.tensor([1.0, -1.0, -2.0, 4.0]), DOUBLE
    )
    assert made.p is not None
    np.testing.assert_array_equal(made.p.numpy(), [0.0, np.nan, 0.5, 0.0])


def test_mean_counts_edges_whatever_their_weight() -> None:
    edges = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 2]])
    made = propagate(
        Operator(normalise="mean"), graph_of(edges, 4), torch.tensor([9.0, 0.0, 3.0, 7.0]), DOUBLE
    )
    expected = [[3, 0, 1, 0], [0] * 4, [0, 0, 7, 0], [0] * 4]
    np.testing.assert_allclose(whole(made), expected)


def test_degree_leaves_the_matrix_and_hands_over_minus_the_row_sums() -> None:
    edges = torch.tensor([[0, 1, 1], [0, 0, 2]])
    weight = torch.tensor([1.0, 2.0, 5.0])
    made = propagate(Operator(normalise="degree"), graph_of(edges, 3, 2), weight, DOUBLE)
    assert made.extra["d"].tolist() == [-3.0, 0.0, -5.0]
    np.testing.assert_allclose(dense_matrix(made), [[1, 2], [0, 0], [0, 5]])


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("kind", ["sym", "rw", None])
@pytest.mark.parametrize("by", ["source", "target"])
def test_laplacian_is_pygs_scaled_and_shifted(kind: str | None, by: str, is_weighted: bool) -> None:
    for nodes, edges, weights in instances(5):
        weight = weights if is_weighted else None
        swapped = edges if by == "source" else edges.flip(0)  # PyG sums degrees over edge_index[0]
        rows, values = get_laplacian(swapped, weight, kind, DOUBLE, nodes)
        if values.max() == 0:
            continue  # PyG divides 0 by 0
        scaled = dense(rows, values / values.max(), nodes) - np.eye(nodes)
        operator = Operator("replace", normalise="laplacian", options=(("kind", kind), ("by", by)))
        made = propagate(operator, graph_of(edges, nodes), weight, DOUBLE)
        expected = scaled if by == "source" else scaled.T
        np.testing.assert_allclose(whole(made), expected, atol=1e-12)


def test_cluster_gcn_without_its_loops_says_what_is_missing() -> None:
    operator = Operator(normalise="clustergcn", options=(("diag_lambda", 0.1), ("by", "target")))
    with pytest.raises(InputError, match="one self loop per node"):
        propagate(operator, graph_of(torch.tensor([[0, 1], [1, 1]]), 3), None, DOUBLE)


@pytest.mark.parametrize("normalise", ["none", "symmetric", "mean", "degree", "laplacian", "clustergcn"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_no_nodes_gives_empty_vectors_of_the_right_dtype(normalise: str, dtype: torch.dtype) -> None:
    operator = Operator("replace", normalise=normalise, options=(("diag_lambda", 0.1), ("by", "target")))
    made = propagate(operator, graph_of(torch.zeros((2, 0), dtype=torch.long), 0), None, dtype)
    vectors = [v for v in (made.p, made.l, made.q, *made.extra.values()) if v is not None]
    assert vectors
    assert all(v.shape == (0,) and v.dtype == dtype for v in vectors)


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(PlanError, match="sideways"):
        propagate(Operator(normalise="sideways"), graph_of(torch.tensor([[0], [1]]), 2), None, DOUBLE)


@pytest.mark.parametrize("normalise", ["none", "symmetric", "mean", "degree"])
@pytest.mark.parametrize("loops", ["none", "remaining", "replace", "add"])
def test_operators_by_rows_read_the_edges_into_a_node_alone(normalise: str, loops: str) -> None:
    rng = np.random.default_rng(3)
    source, target = rng.integers(0, 9, (2, 60))
    weight = torch.from_numpy(rng.random(60))
    operator = Operator(loops, normalise=normalise)
    assert operator.is_by_rows
    is_own = target < 4
    every = propagate(operator, Graph.from_edge_index(source, target, 9), weight, torch.float64)
    own = Graph.from_edge_index(source[is_own], target[is_own], 9)
    near = propagate(operator, own, weight[torch.from_numpy(is_own)], torch.float64)
    for name in ("p", "l", "q"):
        whole, part = getattr(every, name), getattr(near, name)
        assert (whole is None) == (part is None)
        if whole is not None:
            torch.testing.assert_close(part[:4], whole[:4])
    for name, values in every.extra.items():
        torch.testing.assert_close(near.extra[name][:4], values[:4])


def test_laplacians_and_cluster_gcn_look_at_all_edges() -> None:
    assert not any(Operator(normalise=name).is_by_rows for name in ("laplacian", "clustergcn"))
