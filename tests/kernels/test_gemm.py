"""kernels/gemm against its reference: every tile, masked rests, strides, accumulation, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.kernels import gemm as k
from plait.kernels.arguments import Arguments
from plait.kernels.gemm import column_sums, reference

SHAPES = [
    (0, 3, 4),
    (1, 1, 1),
    (5, 0, 3),
    (7, 3, 5),
    (33, 64, 64),
    (50, 17, 130),
    (13, 200, 7),
    (9, 5, 33),
    (400, 9, 48),
]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}


def dense(seed: int, n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, width))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, inner, width = shape
    x, w = dense(0, n, inner, dtype), dense(1, inner, width, dtype)
    addend, bias = dense(2, n, width, dtype), dense(3, 1, width, dtype)[0]
    out = torch.full((n, width), float("nan"), dtype=dtype)
    k.gemm(x, w, out)
    np.testing.assert_allclose(out.numpy(), reference.gemm(x.numpy(), w.numpy()), atol=TOLERANCE[dtype])
    k.gemm(x, w, out, addend=addend, bias=bias)
    expected = reference.gemm(x.numpy(), w.numpy(), addend=addend.numpy(), bias=bias.numpy())
    np.testing.assert_allclose(out.numpy(), expected, atol=TOLERANCE[dtype])
    accumulated = addend.clone()
    k.gemm(x, w.t().contiguous().t(), accumulated, addend=accumulated, bias=bias)
    np.testing.assert_allclose(accumulated.numpy(), expected, atol=TOLERANCE[dtype])
    k.gemm(x, w.t().contiguous(), out, addend=addend, bias=bias, is_turned=True)
    np.testing.assert_allclose(out.numpy(), expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 6, 20)])
def test_weight_gradient_equals_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    n, height, width = shape
    left, right = dense(0, n, height, dtype), dense(1, n, width, dtype)
    out = k.gemm_transposed(left, right)
    expected = left.double().numpy().T @ right.double().numpy()
    if n < 500:
        np.testing.assert_allclose(
            reference.gemm_transposed(left.numpy(), right.numpy()), expected, atol=1e-3
        )
    np.testing.assert_allclose(out.numpy(), expected, atol=TOLERANCE[dtype] * 10)


@pytest.mark.parametrize("rows", [900, 9000])
def test_bits_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    left, right = dense(0, rows, 40, torch.float32), dense(1, rows, 30, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = k.gemm_transposed(left, right), k.gemm(left, right[:40], torch.empty(rows, 30))
        torch.set_num_threads(2)
        both = k.gemm_transposed(left, right), k.gemm(left, right[:40], torch.empty(rows, 30))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_a_weight_gradient_of_few_rows_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = dense(0, 1000, 64, torch.float32), dense(1, 1000, 64, torch.float32)
    run, seen = Arguments.run, []

    def watched(self: Arguments, address: int, words: Any, threads: int) -> None:
        seen.append((words[self.chunks], threads))
        run(self, address, words, threads)

    monkeypatch.setattr(Arguments, "run", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        made = k.gemm_transposed(left, right)
    finally:
        torch.set_num_threads(before)
    assert seen == [(4, 2)]
    torch.testing.assert_close(made, left.t() @ right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5000, 33), (4096, 32), (20000, 8), (9000, 130)])
def test_column_sums_do_not_depend_on_the_number_of_threads(shape: tuple[int, int]) -> None:
    x, before, found = torch.randn(shape), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(column_sums(x))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], x.double().sum(0).float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
