"""What the gated pass computes, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gate", "gate_backward"]

Array = np.ndarray[Any, Any]


def _message(kind: str, z: Array) -> tuple[Array, Array]:
    """(the gate, its derivative) at z."""
    if kind == "sigmoid":
        s = 1.0 / (1.0 + np.exp(-z))
        return s, s * (1.0 - s)
    return np.maximum(z, 0.0), (~(z <= 0)).astype(z.dtype)  # NaN passes, as in torch


def gate(
    indptr: Array,
    indices: Array,
    kind: str,
    near: Array,
    far: Array,
    value: Array | None = None,
    addend: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array]:
    """(out, slopes): out[i] = sum over edges j -> i of act(near[i] + far[j]) * value[j] + addend[i] + bias;
    slopes[i] = the same sum with act's derivative. kind: sigmoid, relu; no value: ones."""
    out, slopes = (np.zeros((len(indptr) - 1, far.shape[1]), far.dtype) for _ in range(2))
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            act, slope = _message(kind, near[i] + far[j])
            worth = 1 if value is None else value[j]
            out[i] += act * worth
            slopes[i] += slope * worth
        if addend is not None:
            out[i] += addend[i]
        if bias is not None:
            out[i] += bias
    return out, slopes


def gate_backward(
    indptr: Array, indices: Array, kind: str, near: Array, far: Array, value: Array | None, grad: Array
) -> dict[str, Array]:
    """Gradients of near, far and value."""
    result = {"near": np.zeros_like(near), "far": np.zeros_like(far), "value": np.zeros_like(far)}
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            j = indices[e]
            act, slope = _message(kind, near[i] + far[j])
            worth = 1 if value is None else value[j]
            result["near"][i] += grad[i] * slope * worth
            result["far"][j] += grad[i] * slope * worth
            result["value"][j] += grad[i] * act
    return result
