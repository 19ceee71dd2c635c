"""Gated sums on a GPU against the reference: on one where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from plait.kernels.gate import reference
from tests.kernels.interpreted import GRAPHS

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.csr.gpu import Rows, transposed
from plait.kernels.gate import gpu
from plait.kernels.spmm.gpu import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Tiles(short=2, most=3, columns=4, slots=2, ahead=1, warps=1)
"""Rows of three edges and more go in pieces of three, columns in blocks of four."""


@pytest.mark.parametrize("kind", ["sigmoid", "relu"])
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_and_gradients_equal_the_reference(name: str, kind: str) -> None:
    graph, rng, width = GRAPHS[name], np.random.default_rng(0), 5
    near, grad, addend = (rng.standard_normal((graph.num_nodes, width)) for _ in range(3))
    far, value = (rng.standard_normal((graph.num_sources, width)) for _ in range(2))
    bias, worth = rng.standard_normal(width), value if kind == "sigmoid" else None
    csr = (graph.indptr, graph.indices)
    expected = reference.gate(*csr, kind, near, far, worth, addend, bias)
    wanted = reference.gate_backward(*csr, kind, near, far, worth, grad)

    def place(array: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(array).to(DEVICE)

    def empty(rows: int) -> torch.Tensor:
        return torch.full((rows, width), float("nan"), dtype=torch.float64, device=DEVICE)

    rows = Rows(*(place(a) for a in csr), graph.num_sources)
    inputs = (place(near), place(far), None if worth is None else place(worth))
    out, slopes = empty(graph.num_nodes), empty(graph.num_nodes)
    gpu.gate(rows, kind, *inputs, out=out, slopes=slopes, addend=place(addend), bias=place(bias), tiles=TINY)
    far_grad, value_grad = empty(graph.num_sources), empty(graph.num_sources)
    gpu.gate_sources(transposed(rows), kind, *inputs, place(grad), far_grad, value_grad, tiles=TINY)
    for got, want in (
        (out, expected[0]),
        (slopes, expected[1]),
        (grad * slopes.cpu().numpy(), wanted["near"]),
    ):
        np.testing.assert_allclose(got if isinstance(got, np.ndarray) else got.cpu(), want, atol=1e-12)
    np.testing.assert_allclose(far_grad.cpu(), wanted["far"], atol=1e-12)
    np.testing.assert_allclose(value_grad.cpu(), wanted["value"], atol=1e-12)


def test_parts_that_nobody_asks_for_are_left_out() -> None:
    rows = Rows(torch.tensor([0, 1], device=DEVICE), torch.tensor([0], device=DEVICE), 1)
    x = torch.ones((1, 3), device=DEVICE)
    out, far_grad = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    gpu.gate(rows, "relu", x, x, None, out=out)
    gpu.gate_sources(rows, "relu", x, x, None, x, far_grad, None)
    assert out.tolist() == [[2.0, 2.0, 2.0]]
    assert far_grad.tolist() == [[1.0, 1.0, 1.0]]
