"""runtime/spread.py: a rank's constants are rows of the whole graph's, one rank runs what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import InputError, PlanError
from plait.graph import Graph
from plait.ir import Barrier, Diagonal, Expr, Fold, MatMul, Sparse
from plait.ir.build import propagation
from plait.plan.exchange import Link
from plait.pyg.layers.base import bias, features, weight
from plait.runtime.constants import Constants, SparseValue
from plait.runtime.spread import Peers, RankConstants, Runs

NODES = 9
A = Sparse("A", "N", "N")


class _Share:
    """Rank 1 of two as constants see it: nodes 4 to 8, with 1 and 3 as their halo."""

    rank, size, begin, num_rows, num_shared, num_nodes = 1, 2, 4, 5, 3, NODES
    columns = np.array([4, 5, 6, 7, 8, 1, 3])


def whole(is_weighted: bool = False) -> tuple[Constants, np.ndarray]:
    """The constants of a graph of nine nodes, and its matrix with zeros."""
    source = np.array([0, 1, 3, 4, 5, 6, 8, 8, 2, 3])
    target = np.array([1, 4, 8, 4, 6, 5, 4, 7, 0, 5])
    graph = Graph.from_edge_index(source, target, NODES)
    values = torch.arange(1.0, 11.0) if is_weighted else None
    dense = np.zeros((NODES, NODES), np.float32)
    in_order = np.ones(10) if values is None else values.numpy()
    np.add.at(dense, (graph.edge_rows(), graph.indices), in_order)
    diagonals = {"p": torch.rand(NODES), "q": torch.rand(NODES)}
    return Constants(graph, values, diagonals, torch.float32), dense


def dense(value: SparseValue) -> np.ndarray:
    out = np.zeros((value.graph.num_nodes, value.graph.num_sources), np.float32)
    entries = np.ones(value.graph.num_edges) if value.weight is None else value.weight.numpy()
    np.add.at(out, (value.graph.edge_rows(), value.graph.indices), entries)
    return out


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_ranks_matrices_are_rows_of_the_whole(is_weighted: bool) -> None:
    constants, matrix = whole(is_weighted)
    share: Peers = _Share()  # type: ignore[assignment]
    rank = RankConstants(constants, share)
    rows = matrix[4:][:, _Share.columns]
    assert np.array_equal(dense(rank.matrix(A)), rows)
    assert np.array_equal(dense(rank.matrix(Barrier("own", A))), rows[:, :5])
    assert np.array_equal(dense(rank.matrix(Barrier("remote", A))), rows[:, 5:])
    assert np.array_equal(dense(rank.matrix(Barrier("all", A))), matrix)
    p, q = (constants.diagonals[name] for name in "pq")
    assert torch.equal(rank.vector(Diagonal("p", "N")), p[4:])
    assert torch.equal(rank.vector(Barrier("halo", Diagonal("q", "N"))), q[_Share.columns])
    assert torch.equal(rank.vector(Barrier("border", Diagonal("q", "N"))), q[[1, 3]])
    scaled: Expr = Fold(MatMul(MatMul(Diagonal("p", "N"), A), Diagonal("q", "N")))
    expected = p[4:, None].numpy() * rows * q[_Share.columns].numpy()
    np.testing.assert_allclose(dense(rank.matrix(scaled)), expected, rtol=1e-6)
    assert rank.cost_matrix(A).columns == 7
    assert rank.cost_matrix(Barrier("remote", A)).edges == np.count_nonzero(rows[:, 5:])
    assert rank.cost_matrix(Barrier("all", A)).rows == NODES


@pytest.mark.parametrize("is_weighted", [False, True])
def test_constants_of_a_ranks_own_nodes_and_halo_are_those_cut_from_the_whole(is_weighted: bool) -> None:
    constants, _ = whole(is_weighted)
    share: Peers = _Share()  # type: ignore[assignment]
    cut = RankConstants(constants, share)
    # the same by the numbers of this rank: its rows have their edges, those of the halo none
    rows, reads = constants.graph.edge_rows(), _Share.columns
    is_own, place = rows >= 4, np.full(NODES, -1)
    place[reads] = np.arange(reads.size)
    near = Graph.from_edge_index(place[constants.graph.indices[is_own]], place[rows[is_own]], reads.size)
    weight = None if constants.weight is None else constants.weight[torch.from_numpy(is_own)]
    if weight is not None and near.order is not None:
        weight = weight[torch.from_numpy(np.asarray(near.order, np.int64))]
    diagonals = {name: value[torch.from_numpy(reads)] for name, value in constants.diagonals.items()}
    asked = []
    own = Constants(near.with_order(None), weight, diagonals, torch.float32)
    rank = RankConstants(own, share, lambda: asked.append(1) or constants)
    p, q = Diagonal("p", "N"), Diagonal("q", "N")
    for vector in (p, Barrier("halo", q), Barrier("border", q)):
        assert torch.equal(rank.vector(vector), cut.vector(vector))
    for matrix in (A, Barrier("own", A), Barrier("remote", A), Fold(MatMul(MatMul(p, A), q))):
        assert np.array_equal(dense(rank.matrix(matrix)), dense(cut.matrix(matrix)))
        assert rank.cost_matrix(matrix).edges == cut.cost_matrix(matrix).edges
    assert not asked  # the whole graph is made when something asks for it, once
    for _ in range(2):
        assert np.array_equal(dense(rank.matrix(Barrier("all", A))), dense(cut.matrix(Barrier("all", A))))
    assert rank.cost_matrix(Barrier("all", A)).rows == NODES
    assert len(asked) == 1


class _Alone:
    """One rank with everything: nothing is sent."""

    rank, size, begin, num_rows, num_shared, num_nodes = 0, 1, 0, NODES, 0, NODES
    columns = np.arange(NODES)

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def give_back(self, grad: torch.Tensor) -> torch.Tensor:
        return grad

    def share_of(self, width: int) -> int:
        return width

    def agree(self, prices: dict[str, float]) -> dict[str, float]:
        return prices


def test_runs_are_kept_and_gradients_are_right() -> None:
    constants, matrix = whole()
    share: Peers = _Alone()  # type: ignore[assignment]
    runs, rank = Runs(share, Link(1e9, 1e-5, 0)), RankConstants(constants, share)
    forms = ((propagation() @ features()) @ weight() + bias(),)
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((NODES, 6), (6, 3), (3,)))
    for _ in range(2):
        out = runs.apply("layer", rank, forms, {"X": x, "W": w, "b": b, "e": None}, False)
    expected = torch.from_numpy(matrix) @ x @ w + b
    torch.testing.assert_close(out, expected)
    direction = torch.randn(NODES, 3)
    found = torch.autograd.grad(out, (x, w, b), direction)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, w, b), direction))
    assert len(runs._runs) == 1
    assert runs.choices["layer", "training"].split == "by nodes"
    with pytest.raises((InputError, PlanError), match="layer: W has 5"):
        runs.apply("layer", rank, forms, {"X": x, "W": torch.randn(5, 3), "b": b}, False)
