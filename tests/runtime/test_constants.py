"""runtime/constants.py: every constant expression against dense algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import PlanError
from plait.graph import Graph
from plait.ir import Add, Diagonal, Expr, Fold, MatMul, Scale, Sparse
from plait.ir.build import number
from plait.ir.evaluate import evaluate
from plait.runtime.constants import Constants, SparseValue, from_dense

N = 9
A, WEIGHTED = Sparse("A", "N", "N"), Sparse("A", "N", "N", True)
p, l, q, i = (Diagonal(name, "N") for name in "plqi")
E = Sparse("E", "Nr", "N")


def dense(value: SparseValue, is_transposed: bool) -> np.ndarray[Any, Any]:
    pattern, weight = value.operands(is_transposed)
    out = np.zeros((pattern.num_rows, pattern.num_columns))
    for row in range(pattern.num_rows):
        for e in range(pattern.indptr[row], pattern.indptr[row + 1]):
            out[row, pattern.indices[e]] += 1 if weight is None else float(weight[e])
    return out


def setting(seed: int, is_weighted: bool, edges: int = 25) -> tuple[Constants, dict[str, Any]]:
    """Constants of a random graph (repeated edges, loops, empty rows) and the same as dense arrays."""
    rng = np.random.default_rng(seed)
    source, target = rng.integers(0, N, edges), rng.integers(0, N - 2, edges)
    graph = Graph.from_edge_index(source, target, N)
    weight = torch.from_numpy(rng.standard_normal(edges)) if is_weighted else None
    vectors = {name: torch.from_numpy(rng.standard_normal(N)) for name in "plq"}
    rows = torch.tensor([0, 3, 4, 8])
    constants = Constants(graph.with_order(None), weight, vectors, torch.float64, rows)
    matrix = dense(SparseValue(graph.with_order(None), weight), False)
    selection = np.eye(N)[rows.numpy()]
    leaves = {"A": matrix, "E": selection, "i": np.ones(N), "ones": np.ones(N)}
    return constants, {**leaves, **{name: vector.numpy() for name, vector in vectors.items()}}


SHAPES: list[Expr] = [
    A,
    Fold(Add((A, l))),
    Fold(Add((A, i))),
    Fold(Add((A, i, l))),
    Fold(MatMul(p, A)),
    Fold(MatMul(A, q)),
    Fold(MatMul(MatMul(p, Add((A, l))), q)),
    Fold(MatMul(p, MatMul(A, q))),
    Fold(Scale(number(-0.5), A)),
    Fold(Scale(number(2.0), MatMul(p, Add((A, i))))),
    Fold(MatMul(MatMul(p, q), A)),
    E,
    Fold(MatMul(E, A)),
    Fold(MatMul(E, MatMul(MatMul(p, Add((A, l))), q))),
    Fold(MatMul(E, p)),
]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("expr", SHAPES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_folded_matrix_is_the_dense_one_both_ways(expr: Expr, is_weighted: bool, seed: int) -> None:
    constants, leaves = setting(seed, is_weighted)
    expected = evaluate(expr, leaves)
    value = constants.matrix(expr)
    np.testing.assert_allclose(dense(value, False), expected, atol=1e-12)
    np.testing.assert_allclose(dense(value, True), expected.T, atol=1e-12)
    for is_transposed in (False, True):
        made = value.as_torch(is_transposed, torch.float64).to_dense().numpy()
        np.testing.assert_allclose(made, expected.T if is_transposed else expected, atol=1e-12)


@pytest.mark.parametrize(
    "expr", [p, i, MatMul(p, q), Add((p, l)), Scale(number(3.0), p), Fold(MatMul(MatMul(p, l), q))], ids=str
)
def test_a_folded_diagonal_is_the_dense_one(expr: Expr) -> None:
    constants, leaves = setting(3, False)
    np.testing.assert_allclose(constants.vector(expr).numpy(), np.diag(evaluate(expr, leaves)), atol=1e-12)


def test_a_graph_without_edges_still_has_its_loops() -> None:
    constants, leaves = setting(4, False, edges=0)
    expr = Fold(MatMul(p, Add((A, l))))
    np.testing.assert_allclose(dense(constants.matrix(expr), False), evaluate(expr, leaves))


def test_a_constant_is_computed_once() -> None:
    constants, _ = setting(5, True)
    expr = Fold(MatMul(p, A))
    assert constants.matrix(expr) is constants.matrix(Fold(MatMul(p, A)))
    assert constants.remember("k", lambda: torch.ones(1)) is constants.remember("k", lambda: torch.zeros(1))


def test_loops_of_ones_leave_a_matrix_of_ones() -> None:
    constants, _ = setting(6, False)
    assert constants.matrix(Fold(Add((A, i)))).weight is None
    assert constants.matrix(Fold(Add((A, l)))).weight is not None


def test_a_product_of_two_matrices_is_refused() -> None:
    constants, _ = setting(7, False)
    with pytest.raises(PlanError, match="fills in"):
        constants.matrix(Fold(MatMul(A, A)))


@pytest.mark.parametrize("expr", SHAPES, ids=str)
def test_the_cost_model_sees_the_matrix_that_is_made(expr: Expr) -> None:
    constants, _ = setting(8, False)
    seen, made = constants.cost_matrix(expr), constants.matrix(expr)
    assert (seen.rows, seen.columns) == (made.graph.num_nodes, made.graph.num_sources)
    assert seen.edges == made.graph.num_edges
    assert seen.is_weighted == (made.weight is not None)


def test_the_sparse_view_of_features_is_their_nonzeros() -> None:
    x = torch.randn(7, 12) * (torch.rand(7, 12) < 0.3)
    x[2] = 0
    np.testing.assert_array_equal(dense(from_dense(x), False), x.numpy())
    np.testing.assert_array_equal(dense(from_dense(x), True), x.t().numpy())
    assert from_dense(torch.zeros(0, 3)).graph.num_edges == 0
