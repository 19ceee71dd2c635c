"""What messages relu(near[i] + far[j]) @ w + bias under an extremum compute, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["attain", "gradients"]

Array = np.ndarray[Any, Any]


def attain(
    indptr: Array, indices: Array, reduce: str, near: Array, far: Array, w: Array, bias: Array | None
) -> tuple[Array, Array, Array]:
    """(out, ties, marks[edges, columns]) of every target's edges; torch counts a zero extremum once more."""
    out = np.zeros((len(indptr) - 1, w.shape[1]), w.dtype)
    ties, marks = np.ones_like(out), np.zeros((len(indices), w.shape[1]), bool)
    for i in range(len(out)):
        edges = range(indptr[i], indptr[i + 1])
        rows = [np.maximum(near[i] + far[indices[e]], 0) @ w + (0 if bias is None else bias) for e in edges]
        if not rows:
            continue
        out[i] = np.max(rows, 0) if reduce == "max" else np.min(rows, 0)
        for e, row in zip(edges, rows, strict=True):
            marks[e] = row == out[i]
        ties[i] = np.maximum(1, marks[edges].sum(0) + (out[i] == 0))
    return out, ties, marks


def gradients(
    indptr: Array, indices: Array, near: Array, far: Array, w: Array, share: Array, marks: Array
) -> dict[str, Array]:
    """Gradients of near, far, w and bias, where the marked edges of a target each have its `share`."""
    to = {"near": np.zeros_like(near), "far": np.zeros_like(far), "w": np.zeros_like(w)}
    to["bias"] = np.zeros(w.shape[1], w.dtype)
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            x, g = near[i] + far[indices[e]], np.where(marks[e], share[i], 0)
            back = np.where(x > 0, w @ g, 0)
            to["near"][i] += back
            to["far"][indices[e]] += back
            to["w"] += np.outer(np.maximum(x, 0), g)
            to["bias"] += g
    return to
