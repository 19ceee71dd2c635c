"""Attention in pieces on a GPU against plain loops: on one where there is one, else interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from plait.graph import Graph
from plait.kernels.attention.pieces import padded
from tests.kernels.interpreted import GRAPHS, RUNS, skip_if_walked_alike

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.attention import gpu_pieces as gpu
from plait.kernels.csr.gpu import Rows, transposed
from plait.kernels.spmm.gpu import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Tiles(short=2, most=3, columns=4, slots=2, ahead=1, warps=1)
"""Rows of three edges and more go in pieces of three, columns in blocks of four."""
Array = np.ndarray[Any, Any]


def place(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)


def rows_of(graph: Graph) -> Rows:
    return Rows(place(graph.indptr), place(graph.indices), graph.num_sources)


def assert_same(make: Callable[[], torch.Tensor], expected: Array) -> None:
    results = [make() for _ in range(RUNS)]
    assert torch.equal(results[0], results[-1])
    np.testing.assert_allclose(results[0].cpu(), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    ("heads", "width", "is_shared"), [(3, 5, False), (3, 5, True), (1, 1, False), (4, 70, False)]
)
@pytest.mark.parametrize("name", GRAPHS)
def test_dots_of_edges(name: str, heads: int, width: int, is_shared: bool) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(0)
    near = rng.standard_normal((graph.num_nodes, heads, width))
    far = rng.standard_normal((graph.num_sources, 1 if is_shared else heads, width))
    targets = graph.edge_rows()
    expected = np.zeros((graph.num_edges, padded(heads)))
    expected[:, :heads] = (near[targets] * far[graph.indices]).sum(-1)
    given = (place(targets), place(graph.indices), place(near.reshape(-1, heads * width)))
    given = (*given, place(far.reshape(graph.num_sources, far.shape[1] * width)), heads)  # type: ignore[assignment]
    assert_same(lambda: gpu.edge_dots(*given, is_shared=is_shared), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "width", "far_is_shared", "out_is_shared"),
    [(3, 5, False, False), (3, 5, True, False), (3, 5, False, True), (1, 1, False, False)],
)
@pytest.mark.parametrize("name", GRAPHS)
def test_sums_by_weights(name: str, heads: int, width: int, far_is_shared: bool, out_is_shared: bool) -> None:
    skip_if_walked_alike(name, heads == 3 and not (far_is_shared or out_is_shared))
    graph, rng = GRAPHS[name], np.random.default_rng(0)
    weight = rng.standard_normal((graph.num_edges, padded(heads)))
    targets, rows = graph.edge_rows(), rows_of(graph)
    for is_turned in (False, True):
        pattern = transposed(rows) if is_turned else rows
        near, other = (graph.indices, targets) if is_turned else (targets, graph.indices)
        far = rng.standard_normal((pattern.num_columns, 1 if far_is_shared else heads, width))
        expected = np.zeros((pattern.num_rows, heads, width))
        np.add.at(expected, near, weight[:, :heads, None] * far[other])
        expected = expected.sum(1) if out_is_shared else expected.reshape(-1, heads * width)
        sums = partial(
            gpu.edge_sums,
            pattern,
            pattern.order if is_turned else None,
            place(weight),
            place(far.reshape(len(far), far.shape[1] * width)),
            heads,
            far_is_shared=far_is_shared,
            out_is_shared=out_is_shared,
            tiles=TINY,
        )
        blank = torch.full(expected.shape, float("nan"), dtype=torch.float64, device=DEVICE)
        assert_same(lambda sums=sums, blank=blank: sums(out=blank.clone()), expected)  # type: ignore[misc]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_softmax_and_its_gradient(name: str, lanes: int) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(0)
    scores, grad = (30 * rng.standard_normal((graph.num_edges, lanes)) for _ in range(2))
    expected, wanted = np.zeros_like(scores), np.zeros_like(scores)
    for start, end in zip(graph.indptr, graph.indptr[1:], strict=False):
        powers = np.exp(scores[start:end] - scores[start:end].max(axis=0, initial=-np.inf))
        expected[start:end] = powers / powers.sum(0)
        inner = (expected[start:end] * grad[start:end]).sum(0)
        wanted[start:end] = expected[start:end] * (grad[start:end] - inner)
    rows = rows_of(graph)
    for sizes in ((2, 3), (64, 512)):
        assert_same(partial(gpu.edge_softmax, rows, place(scores), *sizes), expected)
        gradient = partial(gpu.edge_softmax_gradient, rows, place(expected), place(grad), *sizes)
        assert_same(gradient, wanted)
