"""Sums over edges in the order they are listed: for graphs that come once, nothing is sorted.

Threads share out the columns, and each walks the whole list: no two write to the same place, and the order of
a sum is that of the list whoever computes it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.listed import cpu
from plait.kernels.operands import float_bits, read_numbers, read_rows, write_rows

__all__ = ["LOOPS", "SCALES", "Entries", "entries", "listed_sum"]

LOOPS = ("none", "remaining", "replace", "add")
"""What happens to the edges v -> v."""
SCALES = ("none", "symmetric", "mean")
"""How the matrix is normalised."""

Array = np.ndarray[Any, Any]
_SERIAL_BELOW = 1 << 18  # multiply-adds (some 40 us of one core) under which no second thread is woken
_LEAST_COLUMNS = 8
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
    bits, width, count = float_bits("x", x), x.shape[1], matrix.source.size
    number = _FLOATS[bits]
    if matrix.own.dtype != number or matrix.value.dtype != number:
        raise InputError(f"x: {x.dtype}, but the matrix has {matrix.own.dtype}; convert one of them")
    out = torch.empty((num_rows, width), dtype=x.dtype)
    words, one = _block.words(), _identity(identity, bits)
    x = read_rows(words, 4, "x", x, x.dtype, num_columns, width)
    write_rows(words, 6, "out", out, out.dtype, num_rows, width)
    read_numbers(words, 9, "source", matrix.source, 32, count)
    read_numbers(words, 10, "target", matrix.target, 32, count)
    words[3], words[8], words[12], words[14] = width, num_rows, count, one.ctypes.data
    words[11], words[13] = _floats("value", matrix.value, count), _floats("own", matrix.own, num_rows)
    threads = launch.num_threads() if (count + num_rows) * width > _SERIAL_BELOW else 1
    words[2] = columns = width if threads == 1 else max(_LEAST_COLUMNS, -(-width // threads) // 8 * 8)
    words[1] = -(-width // columns) if width else 0
    _block.run(_address(bits, bool(matrix.value.size)), words, threads)
    return out


_block = Block(cpu.WORDS)


@functools.cache
def _address(bits: int, is_weighted: bool) -> int:
    name = f"listed-f{bits}-{'weighted' if is_weighted else 'plain'}"
    return address_of(name, lambda: cpu.sum_kernel(bits, is_weighted))


@functools.lru_cache(maxsize=64)
def _identity(multiple: float, bits: int) -> Array:
    return np.array([multiple], _FLOATS[bits])


def _floats(name: str, array: Array, count: int) -> int:
    """The address of one number for each of `count`, 0 where there are none."""
    if not array.size:
        return 0
    if array.shape != (count,) or not array.flags.c_contiguous:
        raise InputError(f"{name}: shape {list(array.shape)} of the matrix, wanted {count} in one piece")
    return int(array.ctypes.data)
