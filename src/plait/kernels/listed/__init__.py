"""Sums over edges in the order they are listed: for graphs that come once, nothing is sorted.

One thread walks the list: a sum of the size this is made for takes less time than waking another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError
from plait.kernels.listed import cpu
from plait.kernels.operands import float_bits

__all__ = ["LOOPS", "SCALES", "Entries", "entries", "listed_sum"]

LOOPS = ("none", "remaining", "replace", "add")
"""What happens to the edges v -> v."""
SCALES = ("none", "symmetric", "mean")
"""How the matrix is normalised."""

Array = np.ndarray[Any, Any]
_FLOATS: dict[int, np.dtype[Any]] = {32: np.dtype(np.float32), 64: np.dtype(np.float64)}


class Entries(NamedTuple):
    """A sparse matrix as a list: value[e] at (target[e], source[e]) and own[i] at (i, i).

    An empty `value` stands for ones, an empty `own` for zeros.
    """

    source: Array
    target: Array
    value: Array
    own: Array

    @property
    def turned(self) -> Entries:
        """The transpose."""
        return Entries(self.target, self.source, self.value, self.own)


def entries(
    edge_index: Tensor,
    weight: Tensor | None,
    shape: tuple[int, int],
    like: Tensor,
    loops: str = "none",
    fill: float = 1.0,
    scale: str = "none",
) -> Entries | None:
    """p @ (A + l) @ q of edges [2, E] between `shape` = (targets, sources), in numbers like those of `like`.

    A has the weights, ones for None. l takes the place of the edges v -> v as `loops` says: `fill`; with
    "remaining" the weight of a node's last loop where it has one; with "add" the weights of its loops more.
    "symmetric": p = q = 1 / sqrt(row sums of A + l), 0 where they are 0. "mean": p = 1 / the number of
    entries in the row, at least 1. None where an end of an edge is out of range.
    """
    if shape[0] != shape[1] and (loops != "none" or scale == "symmetric"):
        raise InputError(f"shape: {shape}; with loops or a symmetric scale targets and sources are the same")
    number, count = _FLOATS[float_bits("x", like)], edge_index.shape[1]
    source, target = map(_positions, edge_index.numpy())
    given = np.empty(0, number)
    if weight is not None:
        given = np.ascontiguousarray(weight.detach().numpy(), number)
        if given.shape != (count,):
            raise InputError(f"edge_weight: shape {list(given.shape)} for {count} edges; pass one per edge")
    kept_source, kept_target = np.empty((2, count), np.int32)
    value = np.empty(0 if weight is None and scale == "none" else count, number)
    own = np.empty(0 if loops == "none" else shape[0], number)
    scales = np.empty(0 if scale == "none" else shape[0], number)
    kept = cpu.entries(
        source, target, given, shape[0], shape[1], LOOPS.index(loops), float(fill), SCALES.index(scale),
        kept_source, kept_target, value, own, scales,
    )  # fmt: skip
    if kept < 0:
        return None
    return Entries(kept_source[:kept], kept_target[:kept], value[:kept], own)


def _positions(ends: Array) -> Array:
    return np.ascontiguousarray(ends, np.int64)


def listed_sum(matrix: Entries, num_rows: int, num_columns: int, x: Tensor, identity: float = 0.0) -> Tensor:
    """The matrix, plus a multiple of the identity, times x.

    out[i] = (own[i] + identity) * x[i] + the sum over its entries e in row i of value[e] * x[j].
    """
    if x.dim() != 2 or x.shape[0] != num_columns or not x.is_cpu:
        raise InputError(f"x: shape {list(x.shape)} on {x.device}; pass [{num_columns}, width] on the CPU")
    float_bits("x", x)
    x = x.detach()
    if not x.is_contiguous() or x.is_neg():
        x = x.resolve_neg().contiguous()
    numbers = x.numpy()
    if matrix.own.dtype != numbers.dtype or matrix.value.dtype != numbers.dtype:
        raise InputError(f"x: {x.dtype}, but the matrix has {matrix.own.dtype}; convert one of them")
    out = torch.empty((num_rows, x.shape[1]), dtype=x.dtype)
    cpu.listed_sum(*matrix, identity, numbers, out.numpy())
    return out
