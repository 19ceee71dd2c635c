"""What the attention kernels compute, as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["attend", "attend_backward", "edge_score"]

Array = np.ndarray[Any, Any]


def edge_score(kind: str, near: Array, far: Array, edge: Array, att: Array | None, slope: float) -> Array:
    """The score of one edge by head: near and far are the score inputs of target and source."""
    if kind == "gat":  # near, far, edge: [heads]
        total = near + far + edge
        return np.where(total > 0, total, slope * total)
    if kind == "dot":  # [heads, width]
        return np.sum(near * far, axis=1)  # type: ignore[no-any-return]
    assert att is not None
    total = near + far
    return np.sum(att * np.where(total > 0, total, slope * total), axis=1)  # type: ignore[no-any-return]


def attend(
    indptr: Array,
    indices: Array,
    kind: str,
    near: Array,
    far: Array,
    value: Array,
    *,
    edge: Array | None = None,
    att: Array | None = None,
    slope: float = 0.2,
    factor: Array | None = None,
) -> tuple[Array, Array]:
    """(out[targets, heads, width], weights[edges, heads]): softmax of the scores over each target's edges.

    factor[edges, heads] multiplies the weights after the softmax (dropout).
    """
    heads, width = value.shape[1:]
    out = np.zeros((len(indptr) - 1, heads, width), value.dtype)
    weights = np.zeros((len(indices), heads), value.dtype)
    for i in range(len(indptr) - 1):
        edges = range(indptr[i], indptr[i + 1])
        if not edges:
            continue
        zero = np.zeros(heads, value.dtype)
        scores = [
            edge_score(kind, near[i], far[indices[e]], zero if edge is None else edge[e], att, slope)
            for e in edges
        ]
        powers = np.exp(np.array(scores) - np.max(scores, axis=0))
        weights[indptr[i] : indptr[i + 1]] = powers / powers.sum(axis=0)
        for e in edges:
            kept = 1.0 if factor is None else factor[e]
            out[i] += (weights[e] * kept)[:, None] * value[indices[e]]
    return out, weights


def attend_backward(
    indptr: Array,
    indices: Array,
    kind: str,
    near: Array,
    far: Array,
    value: Array,
    grad: Array,
    *,
    edge: Array | None = None,
    att: Array | None = None,
    slope: float = 0.2,
    factor: Array | None = None,
) -> dict[str, Array]:
    """The gradients of near, far, value, edge and att, by the chain rule edge by edge."""
    _, weights = attend(indptr, indices, kind, near, far, value, edge=edge, att=att, slope=slope)
    heads = value.shape[1]
    result = {name: np.zeros_like(array) for name, array in (("near", near), ("far", far), ("value", value))}
    result["edge"] = np.zeros((len(indices), heads), value.dtype)
    result["att"] = np.zeros_like(near[:1].reshape(-1) if att is None else att)
    kept = np.ones_like(weights) if factor is None else factor
    for i in range(len(indptr) - 1):
        edges = range(indptr[i], indptr[i + 1])
        to_weight = {e: kept[e] * (grad[i] * value[indices[e]]).sum(axis=1) for e in edges}
        mean = sum((weights[e] * to_weight[e] for e in edges), np.zeros(heads))
        for e in edges:
            j = indices[e]
            result["value"][j] += (weights[e] * kept[e])[:, None] * grad[i]
            to_score = weights[e] * (to_weight[e] - mean)
            if kind == "gat":
                total = near[i] + far[j] + (0 if edge is None else edge[e])
                to_score = to_score * np.where(total > 0, 1.0, slope)
                result["near"][i] += to_score
                result["far"][j] += to_score
                result["edge"][e] = to_score
            elif kind == "dot":
                result["near"][i] += to_score[:, None] * far[j]
                result["far"][j] += to_score[:, None] * near[i]
            else:
                assert att is not None
                total = near[i] + far[j]
                bent = att * np.where(total > 0, 1.0, slope) * to_score[:, None]
                result["near"][i] += bent
                result["far"][j] += bent
                result["att"] += np.where(total > 0, total, slope * total) * to_score[:, None]
    return result
