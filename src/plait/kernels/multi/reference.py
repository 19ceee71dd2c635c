"""What the pass of several aggregators computes, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["aggregate", "aggregate_backward"]

Array = np.ndarray[Any, Any]
LEAST_VARIANCE = 1e-5  # PyG: a standard deviation is 0 up to here, and has no gradient


def _of_row(rows: Array) -> dict[str, Array]:
    mean = rows.mean(axis=0)
    var = (rows * rows).mean(axis=0) - mean * mean
    std = np.where(var <= LEAST_VARIANCE, 0.0, np.sqrt(np.maximum(var, LEAST_VARIANCE)))
    found = {"mean": mean, "sum": rows.sum(axis=0), "var": var, "std": std}
    return {**found, "max": rows.max(axis=0), "min": rows.min(axis=0)}


def aggregate(indptr: Array, indices: Array, x: Array, names: list[str]) -> dict[str, Array]:
    """By name (mean, sum, var, std, max, min) that of x[j] over the edges of each row; 0 without edges."""
    out = {name: np.zeros((len(indptr) - 1, x.shape[1]), x.dtype) for name in names}
    for i in range(len(indptr) - 1):
        rows = x[indices[indptr[i] : indptr[i + 1]]]
        if len(rows):
            for name in names:
                out[name][i] = _of_row(rows)[name]
    return out


def aggregate_backward(indptr: Array, indices: Array, x: Array, grads: dict[str, Array]) -> Array:
    """The gradient of x; an extremum's is shared evenly by the edges that attain it."""
    out = np.zeros_like(x)
    for i in range(len(indptr) - 1):
        neighbours = indices[indptr[i] : indptr[i + 1]]
        if not len(neighbours):
            continue
        rows = x[neighbours]
        found, count = _of_row(rows), len(neighbours)
        for name, grad in grads.items():
            g = grad[i]
            if name in ("max", "min"):
                attains = rows == found[name]
                parts = np.where(attains, g / attains.sum(axis=0), 0.0)
            elif name in ("mean", "sum"):
                parts = np.broadcast_to(g / (count if name == "mean" else 1), rows.shape)
            else:
                slope = 2.0 * (rows - found["mean"]) / count
                if name == "std":
                    is_flat = found["std"] == 0
                    slope = np.where(is_flat, 0.0, slope / np.where(is_flat, 1.0, 2.0 * found["std"]))
                parts = g * slope
            for j, part in zip(neighbours, parts, strict=True):
                out[j] += part
    return out
