"""Sparse times dense: sums, maxima and minima over neighbours, scalings, added term and bias fused in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from plait.graph.compiled import compiled
from plait.kernels import launch
from plait.kernels.arguments import Arguments
from plait.kernels.compiled import stored
from plait.kernels.operands import Words, float_bits, read_flat, read_rows, write_flat, write_rows
from plait.kernels.spmm import cpu, marked

__all__ = [
    "Pattern", "extremum", "extremum_gather", "marked_gather", "marks_bytes", "spmm", "sum_address",
    "sum_threads", "weight_gradient",
]  # fmt: skip

# multiply-adds (some 6 us of one core) under which a second thread does not pay, see kernels/gemm
_SERIAL_BELOW = 1 << 18
_EDGE_COST = 32  # columns an edge costs besides those it adds
_PIECE_COST = 1 << 13  # edges (a row counts as 4) in one piece of work
_FEW_PIECES, _LEAST_COST = 16, 1 << 10  # a small graph is cut finer: two pieces wait for the slower thread
_ROW_COST = 4


class Pattern:
    """The non-zero pattern of a sparse matrix, ready for kernels: CSR arrays, rows in even pieces."""

    def __init__(self, indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], num_columns: int):
        self.indptr = np.ascontiguousarray(indptr)
        self.indices = np.ascontiguousarray(indices)
        if self.indptr.dtype != self.indices.dtype:
            wider = np.promote_types(self.indptr.dtype, self.indices.dtype)
            self.indptr, self.indices = self.indptr.astype(wider), self.indices.astype(wider)
        self.index_bits = self.indices.dtype.itemsize * 8
        self.num_rows = len(self.indptr) - 1
        self.num_columns = num_columns
        self.num_edges = len(self.indices)
        self._even: dict[tuple[int, int], tuple[np.ndarray[Any, Any], int]] = {}

    @functools.cached_property
    def bounds(self) -> np.ndarray[Any, Any]:
        """Row numbers that cut the rows into pieces of about equal cost."""
        return _even_pieces(self.indptr)

    def threads(self, width: int, serial_below: int) -> int:
        """Threads for a pass over rows of `width` columns: one below so many columns of edges and rows."""
        return launch.num_threads() if (self.num_edges + self.num_rows) * width > serial_below else 1

    @functools.cached_property
    def csr(self) -> tuple[int, int]:
        """The addresses of indptr and indices, kept because numpy would compute them again on every call."""
        return self.indptr.ctypes.data, self.indices.ctypes.data

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """(number of pieces, addresses of their bounds, of indptr and of indices)."""
        return len(self.bounds) - 1, self.bounds.ctypes.data, *self.csr

    def even_bounds(self, most: int, row_cost: int) -> tuple[np.ndarray[Any, Any], int]:
        """(row numbers that cut the rows into this many chunks of about equal cost, their address).

        A row costs its edges and `row_cost` more, for what is done to it besides the gather.
        """
        found = self._even.get((most, row_cost))
        if found is None:
            bounds = _even_cuts(self.indptr, most, row_cost)
            bounds = bounds if len(bounds) > 1 else np.zeros(2, np.int64)
            found = self._even[most, row_cost] = (bounds, bounds.ctypes.data)
        return found


def _even_pieces(indptr: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Row numbers that cut the rows into pieces of about equal cost."""
    cost = int(indptr[-1]) + _ROW_COST * (len(indptr) - 1)
    pieces = max(1, cost // _PIECE_COST, min(_FEW_PIECES, cost // _LEAST_COST))
    return _even_cuts(indptr, pieces, _ROW_COST)


def _even_cuts(indptr: np.ndarray[Any, Any], pieces: int, row_cost: int) -> np.ndarray[Any, Any]:
    cuts = np.empty(pieces + 1, np.int64)
    return cuts[: _cut(indptr, pieces, row_cost, cuts)]


@compiled
def _cut(indptr: Any, pieces: int, row_cost: int, cuts: Any) -> int:
    """How many row numbers were written; numpy takes 30 us for the same, five times for every mini-batch."""
    rows = indptr.size - 1
    total = indptr[rows] + row_cost * rows
    cuts[0] = 0
    count = 1
    for k in range(1, pieces):
        wanted = total * (k / pieces)
        low, high = cuts[count - 1], rows
        while low < high:
            middle = (low + high) >> 1
            if indptr[middle] + row_cost * middle < wanted:
                low = middle + 1
            else:
                high = middle
        if cuts[count - 1] < low < rows:
            cuts[count] = low
            count += 1
    if rows > 0:
        cuts[count] = rows
        count += 1
    return count


_address = stored("spmm", cpu.kernel)
_extremum_address = stored("ties", cpu.extremum_kernel)
_attained_address = stored("attained", cpu.attained_kernel)
_mark_address = stored("mark", marked.mark_kernel)
_gather_address = stored("marked", marked.gather_kernel)
_weight_address = stored("sddmm", cpu.weight_gradient_kernel)


def spmm(
    pattern: Pattern,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    reduce: str = "sum",
    edge: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    addend_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    slab: int = 0,
) -> torch.Tensor:
    """out[i] = target[i] * sum_e(edge[e] * source[j] * x[j]) + addend_scale[i] * addend[i] + bias.

    `edge` and `source` exclude each other; `reduce` max or min takes neither. addend may be `out` itself.
    `slab` > 0 walks the columns in slabs of that many, so that the gathered part of x stays in cache.
    """
    if x.is_cuda:
        from plait.kernels.spmm import gpu  # here: it needs triton, which a CPU build of torch lacks

        return gpu.spmm(
            pattern, x, out, reduce=reduce, edge=edge, source=source, target=target, addend=addend,
            addend_scale=addend_scale, bias=bias,
        )  # fmt: skip
    scaling = "edge" if edge is not None else "source" if source is not None else "plain"
    mode = scaling if reduce == "sum" else reduce
    dtype, rows, width = x.dtype, pattern.num_rows, x.shape[-1]
    bits = float_bits("x", x)
    is_whole = not 0 < slab < width
    address = sum_address(width if is_whole else 0, bits, pattern.index_bits, mode)
    at = cpu.SPMM
    words = at.over(pattern.addresses)
    x = read_rows(words, at.x, "x", x, dtype, pattern.num_columns, width, True)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    words[at.edge] = words[at.source] = words[at.target] = words[at.addend] = words[at.addend_scale] = words[
        at.bias
    ] = 0
    if edge is not None:
        edge = read_flat(words, at.edge, "edge", edge, dtype, pattern.num_edges)
    if source is not None:
        source = read_flat(words, at.source, "source", source, dtype, pattern.num_columns)
    if target is not None:
        target = read_flat(words, at.target, "target", target, dtype, rows)
    if addend is not None:
        addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    if addend_scale is not None:
        addend_scale = read_flat(words, at.addend_scale, "addend_scale", addend_scale, dtype, rows)
    if bias is not None:
        bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    words[at.last_edge] = max(0, pattern.num_edges - 1)
    words[at.width] = width
    if not is_whole:
        _run_slabs(words, address, pattern.threads(slab + _EDGE_COST, _SERIAL_BELOW), slab, dtype.itemsize)
    elif width:
        at.run(address, words, sum_threads(pattern.num_edges + pattern.num_rows, width))
    return out


def sum_threads(size: int, width: int) -> int:
    """Threads for a sum over so many edges and rows of `width` columns."""
    return launch.num_threads() if size * (width + _EDGE_COST) > _SERIAL_BELOW else 1


@functools.cache
def sum_address(width: int, bits: int, index_bits: int, mode: str) -> int:
    """The address of the kernel for rows of `width` columns (0: any), of which one tile's have their own."""
    if not 0 < width * bits <= 8 * cpu.NARROW_BYTES:
        return _address(bits, index_bits, mode)
    lanes = 1 << (width - 1).bit_length()
    return _address(bits, index_bits, mode, lanes, lanes > width)


def _run_slabs(words: Words, address: int, threads: int, slab: int, size: int) -> None:
    """The kernel on `slab` columns after the other: the addresses of rows and of the bias move on."""
    at = cpu.SPMM
    width = words[at.width]
    for first in range(0, width, slab):
        words[at.width] = min(slab, width - first)
        at.run(address, words, threads)
        for place in (at.x, at.out, at.addend, at.bias):
            if words[place]:
                words[place] += slab * size


def _finish(at: Arguments, words: Words, address: int, pattern: Pattern, width: int) -> None:
    """Fill in the width and the last edge, and run it."""
    words[at.width], words[at.last_edge] = width, max(0, pattern.num_edges - 1)
    at.run(address, words, pattern.threads(width + _EDGE_COST, _SERIAL_BELOW))


def extremum(
    pattern: Pattern,
    x: torch.Tensor,
    out: torch.Tensor,
    ties: torch.Tensor,
    reduce: str,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = the max (min) of x[j] over row i's edges, 0 where it has none; ties[i]: how many attain it.

    torch counts its zero-filled output as one more where the extremum is zero; so do we. Never below one.
    marks[edges, marks_bytes] (uint8), where given: the bits of the columns in which an edge attains it.
    """
    bits, dtype, width = float_bits("x", x), x.dtype, x.shape[-1]
    at = cpu.EXTREMUM if marks is None else marked.MARK
    words = at.over(pattern.addresses)
    if marks is None:
        address = _extremum_address(bits, pattern.index_bits, reduce)
    else:
        address = _mark_address(bits, pattern.index_bits, reduce)
        write_rows(words, at.marks, "marks", marks, torch.uint8, pattern.num_edges, marks_bytes(width, dtype))
    x = read_rows(words, at.x, "x", x, dtype, pattern.num_columns, width, True)
    write_rows(words, at.out, "out", out, dtype, pattern.num_rows, width)
    write_rows(words, at.ties, "ties", ties, dtype, pattern.num_rows, width)
    _finish(at, words, address, pattern, width)
    return out


def extremum_gather(
    transpose: Pattern,
    x: torch.Tensor,
    best: torch.Tensor,
    share: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[j] = sum over the targets i of j of share[i] where best[i] == x[j], + addend[j] (may be `out`)."""
    address = _attained_address(float_bits("x", x), transpose.index_bits)
    dtype, rows, targets, width = x.dtype, transpose.num_rows, transpose.num_columns, x.shape[-1]
    at = cpu.ATTAINED
    words = at.over(transpose.addresses)
    best = read_rows(words, at.best, "best", best, dtype, targets, width, True)
    x = read_rows(words, at.x, "x", x, dtype, rows, width)
    share = read_rows(words, at.share, "share", share, dtype, targets, width, True)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    _finish(at, words, address, transpose, width)
    return out


def marks_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of one edge's marks: one bit per column, in whole words."""
    lanes = marked.mark_lanes(dtype.itemsize * 8)
    return -(-width // lanes) * (lanes // 8)


def marked_gather(
    transpose: Pattern,
    order: torch.Tensor,
    marks: torch.Tensor,
    share: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[j] = sum over the edges from j to i of share[i] where it is marked, + addend[j] (may be `out`).

    `order`: for every edge of the transpose its number among those that were marked.
    """
    address = _gather_address(float_bits("share", share), transpose.index_bits)
    dtype, rows, edges, width = share.dtype, transpose.num_rows, transpose.num_edges, share.shape[-1]
    index = torch.int32 if transpose.index_bits == 32 else torch.int64
    at = marked.GATHER
    words = at.over(transpose.addresses)
    order = read_flat(words, at.order, "order", order, index, edges)
    marks = read_rows(words, at.marks, "marks", marks, torch.uint8, edges, marks_bytes(width, dtype))
    share = read_rows(words, at.share, "share", share, dtype, transpose.num_columns, width, True)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    _finish(at, words, address, transpose, width)
    return out


def weight_gradient(pattern: Pattern, x: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[e] = grad[i] . x[j] for every edge: the gradient of the edge weights of a sum."""
    address = _weight_address(float_bits("x", x), pattern.index_bits)
    dtype, width = x.dtype, x.shape[-1]
    at = cpu.WEIGHT_GRADIENT
    words = at.over(pattern.addresses)
    x = read_rows(words, at.x, "x", x, dtype, pattern.num_columns, width, True)
    grad = read_rows(words, at.grad, "grad", grad, dtype, pattern.num_rows, width)
    write_flat(words, at.out, "out", out, dtype, pattern.num_edges)
    words[at.width] = width
    if width == 0:
        return out.zero_()
    at.run(address, words, pattern.threads(width + _EDGE_COST, _SERIAL_BELOW))
    return out
