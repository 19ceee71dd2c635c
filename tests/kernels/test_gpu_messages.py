"""Sums of known messages on a GPU against the reference: on one where there is one, else interpreted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from plait.kernels.messages import reference
from tests.kernels.interpreted import GRAPHS, RUNS, skip_if_walked_alike

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.csr.gpu import Rows, transposed
from plait.kernels.messages import gpu
from plait.kernels.spmm.gpu import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Tiles(short=2, most=3, columns=4, slots=2, ahead=1, warps=1)
"""Rows of three edges and more go in pieces of three, columns in blocks of four."""
WIDTH, T, EPS = 5, 0.7, 0.1


def in_torch(form: str, near: Tensor, far: Tensor, edge: Tensor | None) -> Tensor:
    """The messages of edges from the rows of their ends, recorded by torch."""
    n, f = near.split(WIDTH, 1), far.split(WIDTH, 1)
    e = [torch.zeros_like(f[0])] * 2 if edge is None else edge.split(WIDTH, 1)
    if form == "film":
        return (n[1] * f[0] + n[0]).relu()
    if form == "crystal":
        return (n[0] + f[0] + e[0]).sigmoid() * softplus(n[1] + f[1] + e[1])
    if form == "gated":
        return (n[0] + f[0] + e[0]).sigmoid() * (f[1] + e[1])
    m = (f[0] + e[0]).relu() + EPS
    power = (T * m - n[0]).exp()
    return torch.cat([power, power * m], 1)


@pytest.mark.parametrize("has_edges", [False, True])
@pytest.mark.parametrize("form", gpu.FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_and_gradients_equal_the_reference(name: str, form: str, has_edges: bool) -> None:
    parts_near, parts_far, parts_edge, parts_out = gpu.FORMS[form]
    if has_edges and not parts_edge:
        return
    skip_if_walked_alike(name, form == "crystal")
    graph, generator = GRAPHS[name], torch.Generator().manual_seed(0)

    def drawn(rows: int, parts: int) -> Tensor:
        return torch.randn(rows, parts * WIDTH, generator=generator, dtype=torch.float64).requires_grad_()

    near, far = drawn(graph.num_nodes, parts_near), drawn(graph.num_sources, parts_far)
    edge = drawn(graph.num_edges, parts_edge) if has_edges else None
    grad = drawn(graph.num_nodes, parts_out).detach()
    targets, sources = (torch.from_numpy(a.astype(np.int64)) for a in (graph.edge_rows(), graph.indices))
    made = in_torch(form, near[targets], far[sources], edge)
    out = torch.zeros_like(grad).index_add(0, targets, made)
    numbers = [None if v is None else v.detach().numpy() for v in (near, far, edge)]
    slow = reference.sums(form, graph.indptr, graph.indices, *numbers, T, EPS)  # type: ignore[arg-type]
    np.testing.assert_allclose(out.detach(), slow, atol=1e-11, rtol=1e-11)
    wanted = torch.autograd.grad(
        out, [v for v in (near, far, edge) if v is not None], grad, allow_unused=True
    )

    rows = Rows(*(torch.from_numpy(a).to(DEVICE) for a in (graph.indptr, graph.indices)), graph.num_sources)
    given = [None if v is None else v.detach().to(DEVICE) for v in (near, far, edge)]
    t, slope = torch.tensor([T], dtype=torch.float64, device=DEVICE), grad.to(DEVICE)

    def ours() -> list[Tensor]:
        nothing = [None if v is None else torch.full_like(v, float("nan")) for v in given]
        result = gpu.sums(rows, form, *given, t, torch.full_like(slope, float("nan")), EPS, TINY)  # type: ignore[arg-type]
        gpu.sums_targets(rows, form, *given, t, slope, nothing[0], nothing[2], EPS, TINY)  # type: ignore[arg-type]
        if not has_edges:
            gpu.sums_sources(transposed(rows), form, *given[:2], t, slope, nothing[1], EPS, TINY)  # type: ignore[arg-type]
        return [result, *(v for k, v in enumerate(nothing) if v is not None and (k != 1 or not has_edges))]

    runs = [ours() for _ in range(RUNS)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))
    near_wanted = wanted[0] if form != "softmax" else None  # its targets' rows have no gradient
    expected = [out.detach(), near_wanted, *(wanted[2:] if has_edges else wanted[1:])]
    for mine, other in zip(runs[0], expected, strict=True):
        if other is not None:
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-10)
