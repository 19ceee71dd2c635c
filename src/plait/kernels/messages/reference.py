"""What the sums of known messages compute, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FORMS", "message", "sums"]

Array = np.ndarray[Any, Any]

FORMS = {"film": (2, 1, 0, 1), "crystal": (2, 2, 2, 1), "gated": (1, 2, 2, 1), "softmax": (1, 1, 1, 2)}
"""Sections of the targets', the sources' and the edges' rows, and of the result, by the message's name."""


def _logistic(z: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-z)))


def message(
    form: str, near: Array, far: Array, edge: Array | None, t: float = 1.0, eps: float = 0.0
) -> Array:
    """The message of one edge from the sections of its rows: near[k], far[k], edge[k] are rows of columns."""
    more = np.zeros_like(far) if edge is None else edge
    if form == "film":
        return np.asarray(np.maximum(near[1] * far[0] + near[0], 0.0))[None]
    if form == "crystal":
        z = near + far + more
        return np.asarray(_logistic(z[0]) * np.log1p(np.exp(z[1])))[None]
    if form == "gated":
        return np.asarray(_logistic(near[0] + far[0] + more[0]) * (far[1] + more[1]))[None]
    m = np.maximum(far[0] + more[0], 0.0) + eps
    power = np.exp(t * m - near[0])
    return np.stack([power, power * m])


def sums(
    form: str,
    indptr: Array,
    indices: Array,
    near: Array,
    far: Array,
    edge: Array | None,
    t: float,
    eps: float,
) -> Array:
    """[rows, sections * width]: the messages of each row's edges added up; sections lie side by side."""
    parts_near, parts_far, _, parts_out = FORMS[form]
    width = far.shape[1] // parts_far
    out = np.zeros((len(indptr) - 1, parts_out, width))
    for i in range(len(indptr) - 1):
        for e in range(indptr[i], indptr[i + 1]):
            own = None if edge is None else edge[e].reshape(-1, width)
            ends = near[i].reshape(parts_near, width), far[indices[e]].reshape(parts_far, width)
            out[i] += message(form, *ends, own, t, eps)
    return out.reshape(len(out), parts_out * width)
