"""Kernels of a GPU against the references: on one where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import InputError
from plait.graph import Graph, generate
from plait.graph.hag import difference_rows, difference_schedule, search, tile_schedule
from plait.kernels.partial import Sums
from plait.kernels.spmm import Pattern, reference
from tests.graph.hag.graphs import ODD_GRAPHS, random_graph
from tests.kernels.test_partial import TOLERANCE, dense, options_of

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.partial import gpu
from plait.kernels.spmm import gpu as csr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_equal(graph: Graph, x: torch.Tensor, **options: Any) -> None:
    """CSR and every schedule give the reference's product, whatever was in the output before."""
    arrays = {n: v.double().numpy() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    csr_of, values = (graph.indptr, graph.indices), x.double().numpy()
    if "reduce" in options:
        expected = reference.extremum(*csr_of, values, options["reduce"])
    else:
        expected = reference.spmm(*csr_of, values, **arrays)
    moved = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    found = search(graph, min_count=2)
    schedules = (tile_schedule(found), tile_schedule(found, 1))
    for run in (
        lambda out: csr.spmm(
            Pattern(graph.indptr, graph.indices, graph.num_sources), x.to(DEVICE), out, **moved
        ),
        *(lambda out, s=s: gpu.partial_sums(Sums(s), x.to(DEVICE), out, **moved) for s in schedules),
    ):
        out = torch.full((graph.num_nodes, x.shape[1]), float("nan"), dtype=x.dtype, device=DEVICE)
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(run(out).cpu().numpy(), expected, atol=TOLERANCE[x.dtype] * scale, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    graph, rng = ODD_GRAPHS[name], np.random.default_rng(0)
    for width in (1, 20):
        x = dense(rng, graph.num_sources, width, dtype)
        assert_equal(graph, x)
        assert_equal(graph, x, **options_of(graph, width, dtype, rng))


@pytest.mark.parametrize("width", [0, 7, 33, 64, 130])
def test_every_width_equals_the_reference(width: int) -> None:
    rng = np.random.default_rng(width)
    graph = random_graph(rng, repeats=True)
    assert_equal(graph, dense(rng, graph.num_sources, width, torch.float32))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_equal_the_reference(reduce: str) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng)
        assert_equal(graph, dense(rng, graph.num_sources, 5, torch.float32), reduce=reduce)


def test_a_hub_and_edge_weights_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    graph = generate.star(200)
    x, edge = dense(rng, 200, 9, torch.float64), dense(rng, graph.num_edges, 1, torch.float64)[:, 0]
    out = x.new_full((200, 9), float("nan")).to(DEVICE)
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    csr.spmm(pattern, x.to(DEVICE), out, edge=edge.contiguous().to(DEVICE))
    expected = reference.spmm(graph.indptr, graph.indices, x.numpy(), edge=edge.numpy())
    np.testing.assert_allclose(out.cpu().numpy(), expected, atol=1e-11)


def test_the_transposed_schedule_gives_the_gradient() -> None:
    rng = np.random.default_rng(1)
    graph = random_graph(rng)
    found = search(graph, min_count=2)
    grad = dense(rng, graph.num_nodes, 6, torch.float64).to(DEVICE)
    out = grad.new_full((graph.num_sources, 6), float("nan"))
    gpu.partial_sums(Sums(tile_schedule(found.transpose(graph))), grad, out)
    turned = graph.transpose
    expected = reference.spmm(turned.indptr, turned.indices, grad.cpu().numpy())
    np.testing.assert_allclose(out.cpu().numpy(), expected, atol=1e-12)


def test_what_has_no_kernel_is_refused_with_the_next_step() -> None:
    graph = generate.cliques(3, 6)
    x = torch.ones((18, 4), device=DEVICE)
    with pytest.raises(InputError, match="CPU"):
        gpu.partial_sums(Sums(tile_schedule(search(graph))), x, x.clone(), reduce="max", ties=x.clone())
    with pytest.raises(InputError, match="hag or csr"):
        gpu.partial_sums(Sums(difference_schedule(difference_rows(graph, least_saving=0))), x, x.clone())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_two_runs_give_the_same_bits() -> None:
    graph = generate.rmat(12, 60_000)
    pattern = Pattern(graph.indptr, graph.indices, graph.num_sources)
    x = torch.randn((graph.num_sources, 48), device=DEVICE)
    first, again = (csr.spmm(pattern, x, torch.empty_like(x)).clone() for _ in range(2))
    assert torch.equal(first, again)
