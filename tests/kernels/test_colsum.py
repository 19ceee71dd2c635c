"""Sums of columns on a GPU against torch in float64: on one where there is one, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

from plait.kernels.colsum.gpu import column_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(0, 5), (5, 0), (1, 1), (63, 7), (64, 16), (65, 33), (1000, 130), (700, 128), (3, 300)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_equal_torch(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, columns, dtype=torch.float64).to(dtype).to(DEVICE)
    got, want = column_sums(x), x.double().sum(0)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance * max(1.0, rows**0.5))


def test_rows_may_lie_apart_and_two_runs_give_the_same_bits() -> None:
    x = torch.randn(2000, 48, device=DEVICE)
    part = x[:, 8:40]
    assert torch.allclose(column_sums(part), part.double().sum(0).float(), atol=1e-3)
    assert torch.equal(column_sums(part), column_sums(part))
