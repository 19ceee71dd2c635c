"""Products of groups of rows on a GPU against the reference: on one where there is one, else interpreted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from plait.kernels.gemm import reference
from tests.kernels.interpreted import RUNS

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.gemm import gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = [(0, 3, 3, 90, 91), (0, 0), (0, 130), (0,)]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("inner", "width"), [(1, 1), (5, 70), (40, 3)])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_products_and_gradients_of_groups(
    bounds: tuple[int, ...], inner: int, width: int, blocks: int
) -> None:
    rng, count = np.random.default_rng(0), len(bounds) - 1
    x = rng.standard_normal((bounds[-1], blocks * inner)).astype(np.float32)
    grad = rng.standard_normal((bounds[-1], blocks * width)).astype(np.float32)
    w = rng.standard_normal((count * blocks * inner, width)).astype(np.float32)
    out, to_x, to_w = np.zeros_like(grad), np.zeros_like(x), np.zeros_like(w)
    for g in range(count):
        rows = slice(bounds[g], bounds[g + 1])
        for b in range(blocks):
            at = slice((g * blocks + b) * inner, (g * blocks + b + 1) * inner)
            own, other = slice(b * inner, (b + 1) * inner), slice(b * width, (b + 1) * width)
            out[rows, other] = reference.gemm(x[rows, own], w[at])
            to_x[rows, own] = reference.gemm(grad[rows, other], w[at].T)
            to_w[at] = reference.gemm_transposed(x[rows, own], grad[rows, other])
    rows_ = gpu.GroupedRows(bounds, DEVICE)
    given, slope, weight = (torch.from_numpy(a).to(DEVICE) for a in (x, grad, w))
    pieces = rows_.pieces_of(gpu.ROWS)
    for expected, left, is_transposed in ((out, given, False), (to_x, slope, True)):
        runs = [
            gpu.grouped(
                rows_,
                pieces,
                left,
                weight,
                torch.full(expected.shape, float("nan"), device=DEVICE),
                blocks,
                is_transposed,
            )
            for _ in range(RUNS)
        ]
        assert torch.equal(runs[0], runs[-1])
        np.testing.assert_allclose(runs[0].cpu(), expected, rtol=1e-4, atol=1e-4)
    for chunk in (32, gpu.chunk_of(rows_, blocks, inner, width)):
        parts = rows_.pieces_of(chunk)
        runs = [gpu.grouped_weights(rows_, parts, given, slope, blocks) for _ in range(RUNS)]
        assert torch.equal(runs[0], runs[-1])
        np.testing.assert_allclose(runs[0].cpu(), to_w, rtol=1e-4, atol=1e-3)
