"""Edge weights normalised by the sums of their rows, p @ (A + l) @ q as values, and the gradient of that."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.kernels.listed import LOOPS, SCALES
from plait.kernels.normalised import cpu

__all__ = ["Normalised", "Places", "gradient", "normalised"]

Array = np.ndarray[Any, Any]


class Places(NamedTuple):
    """Where the weights of a list of edges go; the same for as long as the graph is."""

    order: Array
    """The number in the list of every entry of A."""
    rows: Array
    columns: Array
    loop_order: Array
    """The numbers of the edges v -> v that are no entries of A, in the list's order for each node."""
    loop_nodes: Array
    num_nodes: int


class Normalised(NamedTuple):
    """The values of the entries and of the diagonal, and what their gradient reads."""

    values: Array
    own: Array
    """Empty where there are no loops beside A."""
    raw: Array
    """The weights in the order of the entries."""
    loops: Array
    scales: Array


def normalised(places: Places, weight: Array, loops: str, fill: float, scale: str) -> Normalised:
    """values[k] = p[i] * weight * q[j] of every entry and own[i] = p[i] * l[i] * q[i]; see kernels/listed."""
    count, dtype = places.order.size, weight.dtype
    values, raw = np.empty((2, count), dtype)
    own, plain = np.empty((2, 0 if loops == "none" else places.num_nodes), dtype)
    scales = np.empty(places.num_nodes, dtype)
    cpu.normalised(
        *places[:5], weight, LOOPS.index(loops), fill, SCALES.index(scale), values, own, raw, plain, scales
    )
    return Normalised(values, own, raw, plain, scales)


def gradient(
    places: Places, made: Normalised, by_values: Array, by_own: Array, loops: str, scale: str, count: int
) -> Array:
    """The gradient of `count` listed weights, from those of the values and of the diagonal (empty: none)."""
    out = np.zeros(count, made.values.dtype)
    work = np.zeros(places.num_nodes, made.values.dtype)
    cpu.gradient(
        *places[:5], *made[2:], by_values, by_own, LOOPS.index(loops), SCALES.index(scale), work, out
    )
    return out
