"""What the dense products compute, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gemm", "gemm_transposed"]

Array = np.ndarray[Any, Any]


def gemm(x: Array, w: Array, *, addend: Array | None = None, bias: Array | None = None) -> Array:
    """out[i, m] = sum over k of x[i, k] * w[k, m], plus addend[i, m] and bias[m] where given."""
    out = np.zeros((x.shape[0], w.shape[1]), x.dtype)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            out[i] += x[i, k] * w[k]
        if addend is not None:
            out[i] += addend[i]
        if bias is not None:
            out[i] += bias
    return out


def gemm_transposed(left: Array, right: Array) -> Array:
    """out[a, b] = sum over rows i of left[i, a] * right[i, b]: the gradient of a weight."""
    out = np.zeros((left.shape[1], right.shape[1]), left.dtype)
    for i in range(left.shape[0]):
        for a in range(left.shape[1]):
            out[a] += left[i, a] * right[i]
    return out
