"""kernels/csr/coalesced.py: what torch is handed keeps torch's rules, whatever the edges were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.graph import Graph
from plait.kernels.csr.coalesced import torch_csr
from plait.runtime.constants import SparseValue, from_dense

EDGES = {
    "unsorted": ([0, 0, 1, 2], [2, 1, 0, 0]),
    "repeated": ([0, 0, 0, 1, 2, 2], [1, 1, 0, 2, 2, 2]),
    "sorted": ([0, 0, 2], [0, 2, 1]),
    "none": ([], []),
}


def checked(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, made anew by torch with all its checks."""
    with torch.sparse.check_sparse_tensor_invariants():
        parts = matrix.crow_indices(), matrix.col_indices(), matrix.values()
        return torch.sparse_csr_tensor(*parts, matrix.shape).to_dense()


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("name", EDGES)
def test_columns_are_sorted_and_entries_added_up(name: str, index: type) -> None:
    rows, columns = (np.array(ends, index) for ends in EDGES[name])
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows.astype(int), minlength=3))]).astype(index)
    values = torch.arange(1.0, len(rows) + 1)
    expected = torch.zeros(3, 4)
    for row, column, value in zip(rows, columns, values, strict=True):
        expected[row, column] += value
    made = torch_csr(indptr, columns, values, 4)
    assert made.col_indices().numpy().dtype == index
    assert torch.equal(checked(made), expected)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_constant_matrix_with_repeated_edges(is_transposed: bool, is_weighted: bool) -> None:
    source, target = np.array([2, 1, 1, 0, 1]), np.array([0, 0, 0, 1, 2])
    graph = Graph.from_edge_index(source, target, 3)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) if is_weighted else None
    expected = torch.zeros(3, 3)
    values = torch.ones(5) if weight is None else weight
    for row, column, value in zip(graph.edge_rows(), graph.indices, values, strict=True):
        expected[row, column] += value
    made = SparseValue(graph, weight).as_torch(is_transposed, torch.float32)
    assert torch.equal(checked(made), expected.t() if is_transposed else expected)


def test_the_sparse_view_of_features_that_lie_otherwise() -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    for given in (x, x.t().contiguous().t(), torch.stack([x, x + 1], -1)[..., 0], x[:1].expand(2, -1)):
        assert torch.equal(checked(from_dense(given).as_torch(False, x.dtype)), given)
