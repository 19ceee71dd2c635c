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
    """The numbers of the edges v -> v that are not entries of A, in the list's order for each node."""
    loop_nodes: Array
    num_nodes: int


class Normalised(NamedTuple):
    """The values of the entries, those of the diagonal behind them, and what their gradient reads."""

    entries: Array
    raw: Array
    """The weights in the order of the entries."""
    loops: Array
    """Empty where there are none besides A; then there is no diagonal."""
    scales: Array


def normalised(places: Places, weight: Array, loops: str, fill: float, scale: str) -> Normalised:
    """values[k] = p[i] * weight * q[j] of every entry and own[i] = p[i] * l[i] * q[i]; see kernels/listed."""
    count, dtype = places.order.size, weight.dtype
    raw, plain = np.empty(count, dtype), np.empty(0 if loops == "none" else places.num_nodes, dtype)
    entries, scales = np.empty(count + plain.size, dtype), np.empty(places.num_nodes, dtype)
    cpu.normalised(
        *places[:5], weight, LOOPS.index(loops), fill, SCALES.index(scale), entries[:count], entries[count:],
        raw, plain, scales,
    )  # fmt: skip
    return Normalised(entries, raw, plain, scales)


def gradient(places: Places, made: Normalised, by_entries: Array, loops: str, scale: str) -> Array:
    """The gradient of the listed weights, from that of the entries and of the diagonal behind them."""
    count, dtype = places.order.size, made.entries.dtype
    out, work = np.zeros(count + places.loop_order.size, dtype), np.zeros(places.num_nodes, dtype)
    cpu.gradient(
        *places[:5], *made[1:], by_entries[:count], by_entries[count:], LOOPS.index(loops),
        SCALES.index(scale), work, out,
    )  # fmt: skip
    return out
