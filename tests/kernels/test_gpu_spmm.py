"""Products by rows in bins and pieces against the reference: every reduction, dtype and option, cut small."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from plait.graph import Graph
from plait.kernels.spmm import reference
from tests.graph.hag.graphs import graph_of
from tests.kernels.interpreted import GRAPHS

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.csr.gpu import Rows, transposed
from plait.kernels.spmm import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = gpu.Tiles(short=2, most=3, columns=4, slots=2, ahead=2, warps=1)
"""Rows of three edges and more go in pieces of three, columns in blocks of four."""
SMALL = graph_of([[0, 1, 1, 2, 3, 4, 5], [], [2, 5], [0, 1, 2], [4]], 6)


def rows_of(graph: Graph, dtype: torch.dtype = torch.int32) -> Rows:
    return Rows(
        *(torch.from_numpy(a).to(DEVICE, dtype) for a in (graph.indptr, graph.indices)), graph.num_sources
    )


def drawn(*shape: int, seed: int = 0, values: int = 0) -> np.ndarray[Any, Any]:
    """Normal numbers, or whole ones up to `values`, so that some are equal."""
    rng = np.random.default_rng(seed)
    return rng.integers(-values, values + 1, shape).astype(float) if values else rng.standard_normal(shape)


def place(array: np.ndarray[Any, Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE, dtype)


def poisoned(rows: int, width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full((rows, width), float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("name", GRAPHS)
def test_extrema_and_their_gradient_equal_the_reference(name: str, reduce: str) -> None:
    graph, width = GRAPHS[name], 5
    x, grad = drawn(graph.num_sources, width, values=2), drawn(graph.num_nodes, width, seed=1)
    csr = (graph.indptr, graph.indices)
    best = reference.extremum(*csr, x, reduce)
    rows = rows_of(graph)
    out, ties = poisoned(graph.num_nodes, width), torch.full((graph.num_nodes, width), -9, dtype=torch.int32)
    ties = ties.to(DEVICE)
    gpu.spmm(rows, place(x), out, reduce=reduce, ties=ties, tiles=TINY)
    np.testing.assert_array_equal(out.cpu(), best)
    to_x = poisoned(graph.num_sources, width)
    gpu.extremum_gather(transposed(rows), place(x), out, place(grad) / ties, to_x, tiles=TINY)
    np.testing.assert_allclose(to_x.cpu(), reference.extremum_backward(*csr, x, best, grad), atol=1e-12)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 4, 7, 9])
def test_all_options_of_a_sum_equal_the_reference(width: int, index: torch.dtype) -> None:
    options = {
        "edge": drawn(SMALL.num_edges, seed=1), "source": drawn(6, seed=2), "target": drawn(5, seed=3),
        "addend": drawn(5, width, seed=4), "addend_scale": drawn(5, seed=5), "bias": drawn(width, seed=6),
    }  # fmt: skip
    x, out = drawn(6, width), poisoned(5, width)
    gpu.spmm(rows_of(SMALL, index), place(x), out, tiles=TINY, **{n: place(a) for n, a in options.items()})
    expected = reference.spmm(SMALL.indptr, SMALL.indices, x, **options)
    np.testing.assert_allclose(out.cpu(), expected, atol=1e-12)


def test_the_addend_may_be_the_output() -> None:
    x, addend = drawn(6, 4), drawn(5, 4, seed=1)
    expected = reference.spmm(SMALL.indptr, SMALL.indices, x, addend=addend)
    into = place(addend)
    gpu.spmm(rows_of(SMALL), place(x), into, addend=into, tiles=TINY)
    np.testing.assert_allclose(into.cpu(), expected, atol=1e-12)


def test_a_mean_is_the_sum_over_the_edges() -> None:
    x, out = drawn(6, 4), poisoned(5, 4)
    gpu.spmm(rows_of(SMALL), place(x), out, reduce="mean", tiles=TINY)
    inverse = 1.0 / np.maximum(SMALL.degrees, 1)
    expected = reference.spmm(SMALL.indptr, SMALL.indices, x, target=inverse)
    np.testing.assert_allclose(out.cpu(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_small_floats_are_summed_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    """A hub of 600 ones: a 16-bit sum would stop growing before."""
    graph = graph_of([[0] * 600, [0]], 1)
    x = torch.ones((1, 8), dtype=dtype, device=DEVICE)
    out = poisoned(2, 8, dtype)
    gpu.spmm(rows_of(graph), x, out)
    np.testing.assert_allclose(out.float().cpu(), [[600.0] * 8, [1.0] * 8], rtol=tolerance)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_the_gradient_of_the_weights_equals_the_reference(width: int) -> None:
    x, grad = drawn(6, width), drawn(5, width, seed=1)
    out = torch.full((SMALL.num_edges,), float("nan"), dtype=torch.float64, device=DEVICE)
    gpu.weight_gradient(rows_of(SMALL), place(x), place(grad), out, tiles=TINY)
    expected = reference.spmm_weight_backward(SMALL.indptr, SMALL.indices, x, grad)
    np.testing.assert_allclose(out.cpu(), expected, atol=1e-12)


def test_a_number_that_is_none_spreads_to_its_row_alone() -> None:
    x = drawn(6, 4)
    x[5] = np.nan
    for reduce in ("sum", "max", "min"):
        out = poisoned(5, 4)
        gpu.spmm(rows_of(SMALL), place(x), out, reduce=reduce, tiles=TINY)
        assert out.isnan().all(1).tolist() == [True, False, True, False, False]


@pytest.mark.parametrize("width", [1, 3, 16, 100, 300, 4096])
def test_tiles_fit_every_width(width: int) -> None:
    tiles = gpu.tiles_of(width)
    assert tiles.columns & (tiles.columns - 1) == 0
    assert 2 <= tiles.slots <= 32
    assert -(-width // tiles.columns) * tiles.columns <= max(1.5 * width, 64)
    x, out = drawn(2, width), poisoned(2, width)
    gpu.spmm(rows_of(graph_of([[0, 1], [1]])), place(x), out)
    np.testing.assert_allclose(out.cpu(), [x[0] + x[1], x[1]], atol=1e-12)
