"""What the sparse product computes, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["extremum", "extremum_backward", "spmm", "spmm_weight_backward"]

Array = np.ndarray[Any, Any]


def spmm(
    indptr: Array,
    indices: Array,
    x: Array,
    *,
    edge: Array | None = None,
    source: Array | None = None,
    target: Array | None = None,
    addend: Array | None = None,
    addend_scale: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """out[i] = target[i] * sum over edges e of row i of edge[e] * source[j] * x[j]
    + addend_scale[i] * addend[i] + bias; what is not given is one (or, for the summands, zero)."""
    out = np.zeros((len(indptr) - 1, x.shape[1]), x.dtype)
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            out[i] += (1 if edge is None else edge[e]) * (1 if source is None else source[j]) * x[j]
        if target is not None:
            out[i] *= target[i]
        if addend is not None:
            out[i] += (1 if addend_scale is None else addend_scale[i]) * addend[i]
        if bias is not None:
            out[i] += bias
    return out


def spmm_weight_backward(indptr: Array, indices: Array, x: Array, grad: Array) -> Array:
    """d edge[e] = grad[i] . x[j] for the edge e from j to i (a sampled dense-dense product)."""
    out = np.zeros(len(indices), x.dtype)
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            out[e] = grad[i] @ x[indices[e]]
    return out


def extremum(indptr: Array, indices: Array, x: Array, name: str) -> Array:
    """out[i] = the element-wise max (or min) of x[j] over the edges of row i; 0 for a row without edges."""
    out = np.zeros((len(indptr) - 1, x.shape[1]), x.dtype)
    for i in range(len(indptr) - 1):
        rows = x[indices[indptr[i] : indptr[i + 1]]]
        if len(rows):
            out[i] = rows.max(axis=0) if name == "max" else rows.min(axis=0)
    return out


def extremum_backward(indptr: Array, indices: Array, x: Array, out: Array, grad: Array) -> Array:
    """The gradient of `extremum`, shared evenly by all edges that attain it.

    torch's scatter_reduce, and so PyG, counts its zero-filled output as one more tie where the result is 0;
    we follow it, since a ReLU before the layer makes such ties common.
    """
    grad_x = np.zeros_like(x)
    for i in range(len(indptr) - 1):
        neighbours = indices[indptr[i] : indptr[i + 1]]
        attains = x[neighbours] == out[i]
        ties = attains.sum(axis=0) + (out[i] == 0)
        for j, winners in zip(neighbours, attains, strict=True):
            grad_x[j] += np.where(winners, grad[i] / np.maximum(ties, 1), 0)
    return grad_x
