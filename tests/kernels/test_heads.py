"""kernels/heads against its reference: odd widths, many rows, the added rows, sums, threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.kernels import heads as k
from plait.kernels.heads import reference

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
SHAPES = [(0, 2, 3, 4), (1, 1, 1, 1), (7, 3, 5, 9), (400, 4, 32, 64), (300, 16, 1, 3), (5000, 2, 17, 33)]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def close(result: torch.Tensor, expected: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    np.testing.assert_allclose(result.double().numpy(), expected, atol=TOLERANCE[result.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_skip", [False, True])
def test_products_and_gradients_equal_the_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, has_skip: bool
) -> None:
    n, heads, inner, width = shape
    x, w = drawn(0, n, heads * inner, dtype=dtype), drawn(1, inner, heads * width, dtype=dtype)
    own, skip = drawn(2, n, 6, dtype=dtype), drawn(3, 6, heads * width, dtype=dtype)
    bias, skip_bias = drawn(4, heads * width, dtype=dtype), drawn(5, heads * width, dtype=dtype)
    grad = drawn(6, n, heads * width, dtype=dtype)
    out, to_x = torch.full_like(grad, float("nan")), torch.full_like(x, float("nan"))
    wide = [t.double().numpy() for t in (x, w, own, skip, bias, skip_bias, grad)]
    expected = reference.project_heads(wide[0], wide[1], heads) + wide[4]
    if has_skip:
        k.project_heads(x, w, out, heads, bias=bias, own=own, skip=skip, skip_bias=skip_bias)
        close(out, expected + wide[2] @ wide[3] + wide[5])
    else:
        k.project_heads(x, w, out, heads, bias=bias)
        close(out, expected)
    to_w, to_skip, sums = k.project_heads_backward(grad, x, w, to_x, heads, own=own if has_skip else None)
    expected_x, expected_w = reference.project_heads_backward(wide[6], wide[0], wide[1], heads)
    close(to_x, expected_x)
    close(to_w, expected_w)
    close(sums, wide[6].sum(0))
    assert (to_skip is not None) == has_skip
    if to_skip is not None:
        close(to_skip, wide[2].T @ wide[6])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, w, grad = (drawn(s, *shape) for s, shape in enumerate([(9000, 64), (32, 40), (9000, 40)]))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out, to_x = torch.empty_like(grad), torch.empty_like(x)
            k.project_heads(x, w, out, 2)
            results.append((out, to_x, *k.project_heads_backward(grad, x, w, to_x, 2)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if a is not None)
