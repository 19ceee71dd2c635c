"""What a layer's call hands over: features, numbers of nodes, and the reasons to leave it to PyG."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.pyg.arguments import features_of, node_counts, refused, refused_edges

X = torch.zeros(5, 3)
EDGES = torch.zeros(2, 4, dtype=torch.long)


def test_features_are_one_tensor_or_a_pair() -> None:
    assert features_of(X)[0] is X
    assert features_of((X, None)) == (X, None, True)
    assert features_of([X, X])[2]
    for other in (None, (None, X), (X,), "x"):
        assert features_of(other) == (None, None, False)


@pytest.mark.parametrize(
    ("x", "root", "weight", "reason"),
    [
        (X.long(), None, None, "x is torch.int64"),
        (torch.zeros(2, 5, 3), None, None, "3 dimensions"),
        (X, torch.zeros(2), None, "dimensions"),
        (X, None, torch.zeros(4, dtype=torch.float64), "PyG promotes them"),
        (X.to_sparse(), None, None, "x is a sparse tensor"),
        (X.to("meta"), None, None, "x is on meta"),
    ],
)
def test_arguments_are_refused_with_a_reason(x: Any, root: Any, weight: Any, reason: str) -> None:
    found = refused(x, root, weight)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floats_are_taken(dtype: torch.dtype) -> None:
    assert refused(X.to(dtype), X.to(dtype), torch.zeros(4, dtype=dtype)) is None


def test_edges_are_a_list_or_a_matrix_of_torch() -> None:
    matrix = torch.eye(5)
    for edges in (EDGES, matrix.to_sparse_csr(), matrix.to_sparse()):
        assert refused_edges(edges, None, X) is None
    assert "SparseTensor" in str(refused_edges(type("SparseTensor", (), {})(), None, X))
    assert "sparse_csc" in str(refused_edges(matrix.to_sparse_csc(), None, X))
    assert "its own values" in str(refused_edges(matrix.to_sparse_csr(), torch.zeros(5), X))


def test_targets_are_counted_by_size_then_features_then_edges() -> None:
    assert node_counts(X, None, False, None, EDGES) == (5, 5)
    assert node_counts(X, None, True, (5, 7), EDGES) == (5, 7)
    assert node_counts(X, torch.zeros(2, 3), True, None, EDGES) == (5, 2)
    assert node_counts(X, None, True, None, EDGES) == (5, None)
    assert node_counts(X, None, True, None, torch.eye(4).to_sparse_csr()) == (5, 4)
