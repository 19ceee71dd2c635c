"""Sums over edges in the order they are listed: for graphs seen only once, nothing is sorted.

Threads share out whole lines of columns, and each walks the whole list: no two write to the same line, and
the order of a sum is the same whichever thread computes it. For wide rows the entries are grouped by row
while they are made, and kernels/spmm sums them: a row of `out` is then written once, and threads share out
the rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.listed import cpu
from plait.kernels.operands import Words, float_bits, read_flat, read_rows
from plait.kernels.spmm import sum_address, sum_threads
from plait.kernels.spmm.cpu import SPMM
from plait.kernels.vector import LINE

__all__ = ["LOOPS", "SCALES", "Entries", "entries", "listed_sum"]

LOOPS = ("none", "remaining", "replace", "add")
"""What happens to the edges v -> v."""
SCALES = ("none", "symmetric", "mean")
"""How the matrix is normalised."""

_SERIAL_BELOW = 1 << 17  # multiply-adds (some 8 us of one core) under which a second thread does not pay
_PIECES = 64  # of the rows: threads claim them one by one, and some have many more edges than others


class Entries:
    """A sparse matrix as a list: value[e] at (target[e], source[e]) and own[i] at (i, i).

    No `value` stands for ones, no `own` for zeros. The kernel that made the list has checked it against
    `shape`, and only `entries` makes one: so its `addresses` are handed to the sums as they are.
    """

    __slots__ = ("_numbers", "_places", "addresses", "dtype", "pointer", "shape")

    def __init__(
        self,
        places: Tensor,
        numbers: Tensor,
        shape: tuple[int, int],
        addresses: tuple[int, int, int, int, int],
        pointer: int = 0,
    ):
        # [sources | targets | where rows begin, if grouped by them], [values | diagonal | ...]
        self._places, self._numbers = places, numbers
        self.pointer = pointer
        """The address of the numbers of the entries rows begin with, 0 where entries are not grouped."""
        self.shape, self.dtype = shape, numbers.dtype
        self.addresses = addresses
        """Of source, target and value, the number of entries, the address of own; 0 for what is not there."""

    @property
    def turned(self) -> Entries:
        """The transpose."""
        source, target, *rest = self.addresses
        return Entries(self._places, self._numbers, self.shape[::-1], (target, source, *rest))  # type: ignore[arg-type]

    @property
    def indptr(self) -> Tensor | None:
        """The number of the entry each row begins with, int32; None where entries are not grouped by row."""
        return self._part(self._places, self.pointer, self.shape[0] + 1) if self.pointer else None

    @property
    def source(self) -> Tensor:
        """The column of every entry, int32."""
        return self._part(self._places, self.addresses[0], self.addresses[3])

    @property
    def target(self) -> Tensor:
        """The row of every entry, int32."""
        return self._part(self._places, self.addresses[1], self.addresses[3])

    @property
    def value(self) -> Tensor | None:
        """The entries, None for ones."""
        address, count = self.addresses[2:4]
        return self._part(self._numbers, address, count) if address else None

    @property
    def own(self) -> Tensor | None:
        """The diagonal, None for zeros."""
        address = self.addresses[4]
        return self._part(self._numbers, address, min(self.shape)) if address else None

    @staticmethod
    def _part(memory: Tensor, address: int, count: int) -> Tensor:
        start = (address - memory.data_ptr()) // memory.element_size()
        return memory[start : start + count]


def entries(
    edge_index: Tensor,
    weight: Tensor | None,
    shape: tuple[int, int],
    like: Tensor,
    loops: str = "none",
    fill: float = 1.0,
    scale: str = "none",
    is_grouped: bool = False,
) -> Entries | None:
    """p @ (A + l) @ q of edges [2, E] between `shape` = (targets, sources), in numbers like those of `like`.

    A has the weights, ones for None. l takes the place of the edges v -> v as `loops` says: `fill`; with
    "remaining" the weight of a node's last loop where it has one; with "add" the weights of its loops more.
    "symmetric": p = q = 1 / sqrt(row sums of A + l), 0 where they are 0. "mean": p = 1 / the number of
    entries in the row, at least 1. None where an end of an edge is out of range. `is_grouped`: row by row, in
    the list's order inside a row, which pays for sums of wide rows.
    """
    if shape[0] != shape[1] and (loops != "none" or scale == "symmetric"):
        raise InputError(f"shape: {shape}; with loops or a symmetric scale targets and sources are the same")
    dtype, bits, count, (rows, columns) = like.dtype, float_bits("x", like), edge_index.shape[1], shape
    has_own, has_scale = loops != "none", scale != "none"
    room = count if weight is not None or has_scale else 0  # for values
    # one piece of memory for the places and one for the numbers: the kernel is told where in them
    places = torch.empty(2 * count + (rows + 1 if is_grouped else 0), dtype=torch.int32)
    numbers = torch.empty(room + rows * (has_own + has_scale), dtype=dtype)
    source, number, size = places.data_ptr(), numbers.data_ptr(), dtype.itemsize
    target, value = source + 4 * count, number if room else 0
    own = number + room * size if has_own else 0
    at = cpu.ENTRIES
    words = at.words()
    words[at.edges], words[at.num_targets], words[at.num_sources], words[at.loops] = (
        count,
        rows,
        columns,
        LOOPS.index(loops),
    )
    held = _place_ends(words, edge_index, count)
    one = _number(fill, dtype)
    weight = read_flat(
        words, at.weight, "edge_weight", None if weight is None else weight.to(dtype), dtype, count
    )
    words[at.fill], words[at.value], words[at.own] = one.data_ptr(), value, own
    words[at.kept_source], words[at.kept_target] = source, target
    words[at.scales] = number + (room + rows * has_own) * size if has_scale else 0
    pointer = words[at.indptr] = target + 4 * count if is_grouped else 0
    at.run(_entries_address(bits, weight is not None, has_own, SCALES.index(scale), is_grouped), words, 1)
    del held
    kept = words[at.kept]
    return None if kept < 0 else Entries(places, numbers, shape, (source, target, value, kept, own), pointer)


def _place_ends(words: Words, edge_index: Tensor, count: int) -> tuple[Tensor, ...]:
    """Place both rows of edge_index; returns what is to be held."""
    at = cpu.ENTRIES
    if edge_index.is_contiguous():
        whole = read_flat(words, at.source, "edge_index", edge_index, torch.int64, 2 * count)
        words[at.target] = words[at.source] + 8 * count
        return (whole,)
    places = (at.source, at.target)
    return tuple(
        read_flat(words, place, "edge_index", edge_index[k], torch.int64, count)
        for k, place in enumerate(places)
    )


def listed_sum(matrix: Entries, x: Tensor, identity: float = 0.0, bias: Tensor | None = None) -> Tensor:
    """The matrix, plus a multiple of the identity, times x, and a bias on every row.

    out[i] = bias + (own[i] + identity) * x[i] + the sum over its entries e in row i of value[e] * x[j].
    """
    if matrix.pointer and (identity == 0.0 or (identity == 1.0 and not matrix.addresses[4])):
        return _sum_by_rows(matrix, x, identity, bias)
    (rows, columns), addresses, dtype = matrix.shape, matrix.addresses, matrix.dtype
    bits, count, width = float_bits("x", x), addresses[3], x.shape[-1]
    at = cpu.SUM
    words = at.words()
    words[_LIST] = addresses  # type: ignore[call-overload]  # any sequence of that length
    x = read_rows(words, at.x, "x", x, dtype, columns, width)
    bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    out, own = torch.empty(rows, width, dtype=dtype), _number(identity, dtype)
    words[at.out], words[at.out_row], words[at.identity] = (
        out.data_ptr(),
        width * dtype.itemsize,
        own.data_ptr(),
    )
    piece = _columns_of_a_thread((count + rows) * width, width, dtype.itemsize)
    pieces = -(-width // piece) if width else 0
    words[at.pieces], words[at.columns] = pieces, piece
    words[at.width], words[at.rows] = width, rows
    at.run(_sum_address(bits, addresses[2] != 0), words, pieces)
    return out


def _columns_of_a_thread(work: int, width: int, size: int) -> int:
    """Columns that one thread sums: whole lines of the cache, and all of them where rows share lines.

    Two threads that write to one line wait for each other at every entry: 40 columns of 15,000 took 350 us
    instead of 83, 16 of them as twice 8 columns 52 instead of 22.
    """
    lines, rest = divmod(width * size, LINE)
    if rest or work <= _SERIAL_BELOW:
        return width
    return -(-lines // launch.num_threads()) * LINE // size


def _sum_by_rows(matrix: Entries, x: Tensor, identity: float, bias: Tensor | None) -> Tensor:
    """The same of entries that are grouped: an identity is added as it is, or a diagonal times x."""
    (rows, columns), (source, _, value, count, own), dtype = matrix.shape, matrix.addresses, matrix.dtype
    bits, width, at = float_bits("x", x), x.shape[-1], SPMM
    words, threads = at.words(), sum_threads(count + rows, width)
    bounds = _bounds(rows, 1 if threads == 1 else _PIECES)
    words[at.pieces], words[at.bounds], words[at.indptr], words[at.indices] = (
        len(bounds) - 1,
        bounds.ctypes.data,
        matrix.pointer,
        source,
    )
    x = read_rows(words, at.x, "x", x, dtype, columns, width)
    bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    out = torch.empty(rows, width, dtype=dtype)
    words[at.out], words[at.out_row], words[at.width] = out.data_ptr(), width * dtype.itemsize, width
    words[at.edge], words[at.source], words[at.target], words[at.addend_scale] = value, 0, 0, own
    words[at.addend], words[at.addend_row] = words[at.x] if own or identity else 0, words[at.x_row]
    words[at.last_edge] = max(0, count - 1)
    if width:
        at.run(sum_address(width, bits, 32, "edge" if value else "plain"), words, threads)
    return out


@functools.lru_cache(maxsize=64)
def _bounds(rows: int, pieces: int) -> np.ndarray[Any, Any]:
    """Row numbers that cut the rows into this many pieces, as kernels read them."""
    return np.arange(pieces + 1, dtype=np.int64) * rows // pieces


_LIST = slice(cpu.SUM.source, cpu.SUM.own + 1)  # where a sum's arguments are the list's addresses


_entries_address = stored("entries", cpu.entries_kernel)
_sum_address = stored("listed", cpu.sum_kernel)


@functools.lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor([value], dtype=dtype)
