"""Sparse times dense: sums, maxima and minima over neighbours, scalings, added term and bias fused in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import njit

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.spmm import cpu, marked

__all__ = [
    "Pattern",
    "extremum",
    "extremum_gather",
    "marked_gather",
    "marks_bytes",
    "spmm",
    "weight_gradient",
]

# multiply-adds (some 30 us of one core) under which waking a second thread does not pay
_SERIAL_BELOW = 1 << 19
_EDGE_COST = 32  # columns an edge costs beside those it adds
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

    @functools.cached_property
    def csr(self) -> tuple[int, int]:
        """The addresses of indptr and indices; they are asked for on every call, numpy computes them anew."""
        return self.indptr.ctypes.data, self.indices.ctypes.data

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """(number of pieces, addresses of their bounds, of indptr and of indices)."""
        return len(self.bounds) - 1, self.bounds.ctypes.data, *self.csr

    def even_bounds(self, most: int, row_cost: int) -> tuple[np.ndarray[Any, Any], int]:
        """(row numbers that cut the rows into so many chunks of about equal cost, their address).

        A row costs its edges and `row_cost` more, for what is done to it beside the gather.
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@functools.cache
def _address(float_bits: int, index_bits: int, mode: str) -> int:
    return address_of(
        f"spmm-{mode}-f{float_bits}-i{index_bits}", lambda: cpu.kernel(float_bits, index_bits, mode)
    )


_block = Block(cpu.WORDS)


def _threads(pattern: Pattern, width: int) -> int:
    work = (pattern.num_edges + pattern.num_rows) * (width + _EDGE_COST)
    return launch.num_threads() if work > _SERIAL_BELOW else 1


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    size = x.element_size()
    address = _address(size * 8, pattern.index_bits, mode)
    width = x.shape[1]
    words = _block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[6] = x.stride(0) * size
    words[8] = out.stride(0) * size
    words[10] = _pointer(edge)
    words[11] = _pointer(source)
    words[12] = _pointer(target)
    words[14] = 0 if addend is None else addend.stride(0) * size
    words[15] = _pointer(addend_scale)
    words[17] = max(0, pattern.num_edges - 1)
    threads = _threads(pattern, min(width, slab or width))
    slab = slab or max(1, width)
    for first in range(0, width, slab):
        offset = first * size
        words[5] = x.data_ptr() + offset
        words[7] = out.data_ptr() + offset
        words[9] = min(slab, width - first)
        words[13] = 0 if addend is None else addend.data_ptr() + offset
        words[16] = 0 if bias is None else bias.data_ptr() + offset
        _block.run(address, words, threads)
    return out


_PATTERN_WORDS = ["counter", "pieces", "bounds", "indptr", "indices"]
_extremum_block = Block(
    [*_PATTERN_WORDS, *(f"{n}{k}" for n in ("x", "out", "ties") for k in "ps"), "width", "last"]
)
_attained_block = Block(
    [
        *_PATTERN_WORDS,
        *(f"{n}{k}" for n in ("best", "x", "share", "out", "addend") for k in "ps"),
        "width",
        "last",
    ]
)


@functools.cache
def _extremum_address(float_bits: int, index_bits: int, mode: str) -> int:
    name = f"ties-{mode}-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: cpu.extremum_kernel(float_bits, index_bits, mode))


@functools.cache
def _attained_address(float_bits: int, index_bits: int) -> int:
    name = f"attained-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: cpu.attained_kernel(float_bits, index_bits))


def _run_rows(block: Block, address: int, pattern: Pattern, *tensors: torch.Tensor | None) -> None:
    """A kernel over the rows of a pattern: addresses and strides of its tensors, then their width."""
    words = block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    at, width = len(_PATTERN_WORDS), 0
    for tensor in tensors:
        words[at] = _pointer(tensor)
        words[at + 1] = 0 if tensor is None else tensor.stride(0) * tensor.element_size()
        width = tensor.shape[1] if tensor is not None and tensor.is_floating_point() else width
        at += 2
    words[at], words[at + 1] = width, max(0, pattern.num_edges - 1)
    threads = _threads(pattern, width)
    block.run(address, words, threads)


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
    bits = x.element_size() * 8
    if marks is None:
        address = _extremum_address(bits, pattern.index_bits, reduce)
        _run_rows(_extremum_block, address, pattern, x, out, ties)
    else:
        address = _mark_address(bits, pattern.index_bits, reduce)
        _run_rows(_mark_block, address, pattern, marks, x, out, ties)
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
    address = _attained_address(x.element_size() * 8, transpose.index_bits)
    _run_rows(_attained_block, address, transpose, best, x, share, out, addend)
    return out


_mark_block = Block(
    [*_PATTERN_WORDS, *(f"{n}{k}" for n in ("marks", "x", "out", "ties") for k in "ps"), "width", "last"]
)
_gather_block = Block(
    [
        *_PATTERN_WORDS,
        *(f"{n}{k}" for n in ("order", "marks", "share", "out", "addend") for k in "ps"),
        *("width", "last"),
    ]
)


@functools.cache
def _mark_address(float_bits: int, index_bits: int, mode: str) -> int:
    name = f"mark-{mode}-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: marked.mark_kernel(float_bits, index_bits, mode))


@functools.cache
def _gather_address(float_bits: int, index_bits: int) -> int:
    name = f"marked-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: marked.gather_kernel(float_bits, index_bits))


def marks_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of one edge's marks: a bit a column, in whole words."""
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
    address = _gather_address(share.element_size() * 8, transpose.index_bits)
    _run_rows(_gather_block, address, transpose, order, marks, share, out, addend)
    return out


_weight_block = Block(
    [
        "counter",
        "pieces",
        "bounds",
        "indptr",
        "indices",
        "x",
        "x_stride",
        "grad",
        "grad_stride",
        "out",
        "width",
    ]
)


@functools.cache
def _weight_address(float_bits: int, index_bits: int) -> int:
    name = f"sddmm-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: cpu.weight_gradient_kernel(float_bits, index_bits))


def weight_gradient(pattern: Pattern, x: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[e] = grad[i] . x[j] for every edge: the gradient of the edge weights of a sum."""
    size = x.element_size()
    words = _weight_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6] = x.data_ptr(), x.stride(0) * size
    words[7], words[8] = grad.data_ptr(), grad.stride(0) * size
    words[9], words[10] = out.data_ptr(), x.shape[1]
    threads = _threads(pattern, x.shape[1])
    if x.shape[1] == 0:
        return out.zero_()
    _weight_block.run(_weight_address(size * 8, pattern.index_bits), words, threads)
    return out
