"""The passes over a list of edges, compiled by numba for one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.graph.build import kernel

__all__ = ["entries", "listed_sum"]

REMAINING, ADD = 1, 3  # places in LOOPS
SYMMETRIC, MEAN = 1, 2  # places in SCALES


@kernel
def entries(
    source: Any, target: Any, weight: Any, num_targets: int, num_sources: int, loops: int, fill: float,
    scale: int, kept_source: Any, kept_target: Any, value: Any, own: Any, scales: Any,
) -> int:  # fmt: skip
    """How many entries were written; -1 where an end is out of range.

    Empty arrays stand for what is not there: weights, values, the diagonal `own`, the scalings.
    """
    for e in range(source.size):
        if not (0 <= source[e] < num_sources and 0 <= target[e] < num_targets):
            return -1
    one = value.dtype.type(1)
    own[:] = fill
    scales[:] = 0
    count = 0
    for e in range(source.size):
        u = source[e]
        v = target[e]
        w = weight[e] if weight.size else one
        if own.size and u == v:
            if loops == REMAINING:
                own[v] = w
            elif loops == ADD:
                own[v] += w
            continue
        kept_source[count] = u
        kept_target[count] = v
        if value.size:
            value[count] = w
        if scale == SYMMETRIC:
            scales[v] += w
        elif scale == MEAN:
            scales[v] += one
        count += 1
    for v in range(scales.size):
        if scale == SYMMETRIC:
            degree = scales[v] + own[v] if own.size else scales[v]
            scales[v] = one / np.sqrt(degree) if degree != 0 else value.dtype.type(0)
        else:
            scales[v] = one / max(scales[v] + one if own.size else scales[v], one)
    if scale == SYMMETRIC:
        for k in range(count):
            value[k] *= scales[kept_target[k]] * scales[kept_source[k]]
        for v in range(own.size):
            own[v] *= scales[v] * scales[v]
    elif scale == MEAN:
        for k in range(count):
            value[k] *= scales[kept_target[k]]
        for v in range(own.size):
            own[v] *= scales[v]
    return count


@kernel
def listed_sum(source: Any, target: Any, value: Any, own: Any, identity: float, x: Any, out: Any) -> None:
    """out[i] = (own[i] + identity) * x[i] + sum of value[e] * x[source[e]] over target[e] == i."""
    width = x.shape[1]
    if own.size:
        for i in range(out.shape[0]):
            f = own[i] + own.dtype.type(identity)
            for k in range(width):
                out[i, k] = f * x[i, k]
    elif identity != 0:
        for i in range(out.shape[0]):
            for k in range(width):
                out[i, k] = own.dtype.type(identity) * x[i, k]
    else:
        out[:] = 0
    if value.size:
        for e in range(source.size):
            u = source[e]
            v = target[e]
            f = value[e]
            for k in range(width):
                out[v, k] += f * x[u, k]
    else:
        for e in range(source.size):
            u = source[e]
            v = target[e]
            for k in range(width):
                out[v, k] += x[u, k]
