"""The passes over the entries of a matrix, compiled by numba for one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.graph.compiled import compiled
from plait.kernels.listed.cpu import ADD, MEAN, REMAINING, SYMMETRIC

__all__ = ["gradient", "normalised"]


@compiled
def normalised(
    order: Any, rows: Any, columns: Any, loop_order: Any, loop_nodes: Any, weight: Any, loops: int,
    fill: float, scale: int, values: Any, own: Any, raw: Any, plain: Any, scales: Any,
) -> None:  # fmt: skip
    """See the package; `plain` is l, `own` is p @ l @ q."""
    one = values.dtype.type(1)
    plain[:] = fill
    scales[:] = 0
    if plain.size:
        for k in range(loop_order.size):
            if loops == REMAINING:
                plain[loop_nodes[k]] = weight[loop_order[k]]
            elif loops == ADD:
                plain[loop_nodes[k]] += weight[loop_order[k]]
    for k in range(order.size):
        w = weight[order[k]]
        raw[k] = w
        scales[rows[k]] += w if scale == SYMMETRIC else one
    for i in range(scales.size):
        if scale == SYMMETRIC:
            degree = scales[i] + plain[i] if plain.size else scales[i]
            scales[i] = one / np.sqrt(degree) if degree != 0 else values.dtype.type(0)
        elif scale == MEAN:
            scales[i] = one / max(scales[i] + one if plain.size else scales[i], one)
        else:
            scales[i] = one
        if plain.size:
            own[i] = plain[i] * scales[i] * (scales[i] if scale == SYMMETRIC else one)
    for k in range(order.size):
        values[k] = raw[k] * scales[rows[k]] * (scales[columns[k]] if scale == SYMMETRIC else one)


@compiled
def gradient(
    order: Any, rows: Any, columns: Any, loop_order: Any, loop_nodes: Any, raw: Any, plain: Any, scales: Any,
    by_values: Any, by_own: Any, loops: int, scale: int, work: Any, out: Any,
) -> None:  # fmt: skip
    """See the package; `work` starts as zeros and becomes the gradient by the sums of the rows."""
    is_symmetric = scale == SYMMETRIC
    half = raw.dtype.type(0.5)
    if is_symmetric:
        for k in range(order.size):
            i = rows[k]
            j = columns[k]
            moved = by_values[k] * raw[k]
            work[i] += moved * scales[j]
            work[j] += moved * scales[i]
        for i in range(work.size):
            s = scales[i]
            if by_own.size:
                work[i] += by_own[i] * plain[i] * (s + s)
            # torch differentiates 0 ** -0.5 to NaN, even if the infinity is masked afterwards
            work[i] = -half * work[i] * s * s * s if s != 0 else raw.dtype.type(np.nan)
    for k in range(order.size):
        i = rows[k]
        s = scales[i] * scales[columns[k]] if is_symmetric else scales[i]
        out[order[k]] = by_values[k] * s + work[i]
    if plain.size and loops in (REMAINING, ADD):
        for k in range(loop_order.size):
            i = loop_nodes[k]
            g = work[i]
            if by_own.size:
                g += by_own[i] * scales[i] * (scales[i] if is_symmetric else raw.dtype.type(1))
            out[loop_order[k]] = g
