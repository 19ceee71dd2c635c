"""Several aggregators on a GPU against the reference: on one where there is one, else interpreted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from plait.kernels.multi import Layout, reference
from tests.kernels.interpreted import GRAPHS, RUNS, skip_if_walked_alike

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.csr.gpu import Rows, transposed
from plait.kernels.multi import gpu
from plait.kernels.spmm.gpu import Tiles
from tests.kernels.test_multi import NAMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Tiles(short=2, most=3, columns=4, slots=2, ahead=2, warps=1)
"""Rows of three edges and more go in pieces of three, columns in blocks of four."""


def columns(values: torch.Tensor, layout: Layout, name: str) -> np.ndarray:  # type: ignore[type-arg]
    """One aggregator's columns, towers side by side."""
    by_tower = values.view(values.shape[0], layout.towers, len(layout.kept), layout.width)
    return by_tower[:, :, layout.kept.index(name)].reshape(values.shape[0], layout.columns).numpy()


TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4}


CASES = [(5, 2, torch.float64, names) for names in NAMES]
CASES += [(1, 1, torch.float64, NAMES[-1]), (3, 1, torch.float32, NAMES[0])]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(("width", "towers", "dtype", "names"), CASES, ids=str)
def test_outputs_and_gradients_equal_the_reference(
    width: int, towers: int, dtype: torch.dtype, names: tuple[str, ...], name: str
) -> None:
    skip_if_walked_alike(name, towers == 2 and names == max(NAMES, key=len))
    graph, rng = GRAPHS[name], np.random.default_rng(width)
    layout, whole = Layout(names, width, towers), width * towers
    values = rng.standard_normal((graph.num_sources, whole))
    values[:, : whole // 2 + 1] = values[:, : whole // 2 + 1].round()  # ties between different sources
    x = torch.from_numpy(values).to(DEVICE, dtype)
    rows = Rows(*(torch.from_numpy(a).to(DEVICE) for a in (graph.indptr, graph.indices)), graph.num_sources)
    kept, nothing = len(layout.kept) * whole, float("nan")

    def made() -> list[torch.Tensor]:
        out = torch.full((graph.num_nodes, kept), nothing, dtype=dtype, device=DEVICE)
        ties = torch.full_like(gpu.ties_like(x, graph.num_nodes, layout), nothing)
        gpu.aggregate(rows, x, layout, out, ties, tiles=TINY)
        grad = torch.from_numpy(np.random.default_rng(1).standard_normal((graph.num_nodes, kept)))
        shares = gpu.aggregate_shares(rows, layout, grad.to(out), out, ties)
        to_x = torch.full_like(x, nothing)
        return [out, grad, gpu.aggregate_sources(transposed(rows), x, layout, shares, to_x, tiles=TINY)]

    runs = [made() for _ in range(RUNS)]
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[-1], strict=True))
    out, grad, to_x = runs[0]
    tolerance = TOLERANCE[dtype]
    wide = x.cpu().double().numpy()
    expected = reference.aggregate(graph.indptr, graph.indices, wide, list(layout.kept))
    grads = {n: columns(grad, layout, n) for n in layout.kept}
    for n in layout.kept:
        mine = columns(out.cpu().double(), layout, n)
        np.testing.assert_allclose(mine, expected[n], rtol=tolerance, atol=tolerance, err_msg=n)
    slow = reference.aggregate_backward(graph.indptr, graph.indices, wide, grads)
    np.testing.assert_allclose(to_x.cpu().double(), slow, rtol=tolerance, atol=40 * tolerance)


def test_nan_and_infinity_go_where_they_belong() -> None:
    x = torch.tensor([[1.0], [float("nan")], [float("inf")]], device=DEVICE)
    rows = Rows(torch.tensor([0, 2, 4, 4], device=DEVICE), torch.tensor([0, 1, 0, 2], device=DEVICE), 3)
    layout = Layout(("max", "min", "sum"), 1)
    out = gpu.aggregate(rows, x, layout, torch.empty((3, 3), device=DEVICE))
    assert out[0].isnan().all()
    assert out[1].tolist() == [float("inf"), 1.0, float("inf")]
    assert out[2].tolist() == [0.0, 0.0, 0.0]
