"""What the passes over a block of edges compute, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["marked", "pair", "scatter"]

Array = np.ndarray[Any, Any]


def pair(indptr: Array, indices: Array, near: Array, far: Array, first: int, last: int) -> Array:
    """near[i] + far[j], one row for each edge of the rows first <= i < last, in edge order."""
    edges = [(i, indices[e]) for i in range(first, last) for e in range(indptr[i], indptr[i + 1])]
    return np.array([near[i] + far[j] for i, j in edges], far.dtype).reshape(len(edges), far.shape[1])


def scatter(rows: Array, values: Array, out: Array) -> Array:
    """out[rows[e]] += values[e] for every e."""
    for row, value in zip(rows, values, strict=True):
        out[row] += value
    return out


def marked(rows: Array, best: Array, values: Array, share: Array) -> Array:
    """share[i] where values[e] attains best[i], else 0; rows[e] is the target i of edge e."""
    return np.where(values == best[rows], share[rows], 0)
