"""Attention in pieces, for scores that no fused pass computes: dots of edges, sums by weights, softmax.

Values of edges are [edges, lanes]: one number per head, heads padded to a power of two, edges by target. A
side that is "shared" has one row for all heads instead of a part for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import cfunc, types

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.attention import products, rows, softmax
from plait.kernels.attention.rows import BLOCK
from plait.kernels.compiled import stored
from plait.kernels.operands import float_bits as bits_of
from plait.kernels.operands import read_flat, read_numbers, read_rows, write_flat, write_rows
from plait.kernels.spmm import Pattern
from plait.kernels.vector import load_index, load_scalar, next_piece

__all__ = ["edge_dots", "edge_softmax", "edge_softmax_gradient", "edge_sums", "padded"]

_SERIAL_BELOW = 1 << 16
_EDGES = f"{PATTERN} last_edge order heads width"
_DOTS = Arguments(f"{_EDGES} near[] near_head far[] far_head out numbers")
_SUMS = Arguments(f"{_EDGES} weight far[] far_head out[] out_head numbers")
_SOFTMAX = Arguments(f"{PATTERN} values gradient out")


def padded(heads: int) -> int:
    """Heads as kernels lay them out: the next power of two."""
    return 1 << (heads - 1).bit_length()


def _dots_kernel(float_bits: int, index_bits: int, lanes: int) -> Any:
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = rows.block(float_bits, lanes)
    clear, store = rows.clear(float_bits), softmax.store_heads(float_bits, lanes)
    dots = products.grouped_dots(float_bits, index_bits, lanes, False)
    size = float_bits // 8
    slot = lanes * size
    read = _DOTS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        slope = scalar(a.numbers, 0)
        block = block_of()
        clear(block, (BLOCK + 4) * lanes)
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                k, end = index(a.indptr, i), index(a.indptr, i + 1)
                while k < end:
                    count = min(BLOCK, end - k)
                    dots(
                        a.near + i * a.near_row, a.near_head, a.far, a.far_row, a.far_head, a.indices, k,
                        count, block, a.heads, a.width, 0, a.last_edge, slope,
                    )  # fmt: skip
                    store(a.out + k * slot, block, count)
                    k += count

    return run


def _sums_kernel(float_bits: int, index_bits: int, lanes: int) -> Any:
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = rows.block(float_bits, lanes)
    clear, gather = rows.clear(float_bits), softmax.gather_heads(float_bits, index_bits, lanes)
    sums = products.grouped_sums(float_bits, index_bits, lanes, False)
    read = _SUMS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        slope = scalar(a.numbers, 0)
        block = block_of()
        whole = a.width if a.out_head == 0 else a.heads * a.width
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                row = a.out + i * a.out_row
                if start >= end:
                    clear(row, whole)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    gather(block, a.weight, a.order, k, count)
                    sums(
                        a.far, a.far_row, a.far_head, a.indices, k, count, block, row, a.out_head, first,
                        a.heads, a.width, 0, 0, slope,
                    )  # fmt: skip
                    k += count

    return run


def _softmax_kernel(float_bits: int, index_bits: int, lanes: int, is_gradient: bool) -> Any:
    forward, backward = softmax.softmax(float_bits, lanes), softmax.softmax_gradient(float_bits, lanes)
    slot = lanes * float_bits // 8

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        at = start * slot
        if start < end:
            if is_gradient:
                backward(a.out + at, a.values + at, a.gradient + at, end - start)
            else:
                forward(a.out + at, a.values + at, end - start)

    return _SOFTMAX.row_kernel(index_bits, each)


_dots_address = stored("edge-dots", _dots_kernel)
_sums_address = stored("edge-sums", _sums_kernel)
_softmax_address = stored("edge-softmax", _softmax_kernel)


def edge_dots(
    pattern: Pattern, near: torch.Tensor, far: torch.Tensor, heads: int, *, is_shared: bool = False
) -> torch.Tensor:
    """[edges, lanes]: near[i, h] . far[j, h] for every edge and head; is_shared: far[j] serves all heads."""
    lanes, size, dtype, edges = padded(heads), near.element_size(), near.dtype, pattern.num_edges
    width = near.shape[-1] // heads
    columns = heads * width
    address = _dots_address(bits_of("near", near), pattern.index_bits, lanes)
    out = torch.empty((edges, lanes), dtype=dtype)
    at = _DOTS
    words = at.over(pattern.addresses)
    words[at.last_edge], words[at.order] = max(0, edges - 1), 0
    words[at.heads], words[at.width] = heads, width
    words[at.near_head], words[at.far_head] = width * size, 0 if is_shared else width * size
    held = (
        read_rows(words, at.near, "near", near, dtype, pattern.num_rows, columns),
        read_rows(
            words, at.far, "far", far, dtype, pattern.num_columns, width if is_shared else columns, True
        ),
        read_flat(words, at.numbers, "numbers", torch.zeros(1, dtype=dtype), dtype, 1),
    )
    write_flat(words, at.out, "out", out, dtype, edges * lanes)
    at.run(address, words, pattern.threads(columns, _SERIAL_BELOW))
    del held
    return out


def edge_sums(
    pattern: Pattern,
    order: np.ndarray[Any, Any] | None,
    weight: torch.Tensor,
    far: torch.Tensor,
    heads: int,
    *,
    far_is_shared: bool = False,
    out_is_shared: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i, h] = sum over edges e of weight[e, h] * far[j, h].

    order[k] is where the weights of the pattern's edge k lie (None: at k). A shared far row serves all heads,
    a shared out row is the sum over them.
    """
    size, dtype, rows, edges = far.element_size(), far.dtype, pattern.num_rows, pattern.num_edges
    width, lanes = far.shape[-1] if far_is_shared else far.shape[-1] // heads, weight.shape[1]
    columns = width if out_is_shared else heads * width
    address = _sums_address(bits_of("far", far), pattern.index_bits, lanes)
    out = torch.empty((rows, columns), dtype=dtype) if out is None else out
    at = _SUMS
    words = at.over(pattern.addresses)
    words[at.last_edge], words[at.heads], words[at.width] = max(0, edges - 1), heads, width
    words[at.far_head] = 0 if far_is_shared else width * size
    words[at.out_head] = 0 if out_is_shared else width * size
    read_numbers(words, at.order, "order", order, pattern.index_bits, edges)
    held = (
        read_flat(words, at.weight, "weight", weight, dtype, edges * lanes),
        read_rows(words, at.far, "far", far, dtype, pattern.num_columns, far.shape[-1], True),
        read_flat(words, at.numbers, "numbers", torch.zeros(1, dtype=dtype), dtype, 1),
    )
    write_rows(words, at.out, "out", out, dtype, rows, columns)
    at.run(address, words, pattern.threads(heads * width, _SERIAL_BELOW))
    del held
    return out


def edge_softmax(pattern: Pattern, scores: torch.Tensor) -> torch.Tensor:
    """The softmax of [edges, lanes] over the edges of each row."""
    return _run_softmax(pattern, scores, None)


def edge_softmax_gradient(pattern: Pattern, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """weight * (grad - sum over the row of weight * grad)."""
    return _run_softmax(pattern, weight, grad)


def _run_softmax(pattern: Pattern, values: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    dtype, lanes = values.dtype, values.shape[-1]
    count = pattern.num_edges * lanes
    address = _softmax_address(bits_of("values", values), pattern.index_bits, lanes, grad is not None)
    out = torch.empty(values.shape, dtype=dtype)
    at = _SOFTMAX
    words = at.over(pattern.addresses)
    values_held = read_flat(words, at.values, "values", values, dtype, count)
    grad_held = read_flat(words, at.gradient, "grad", grad, dtype, count)
    write_flat(words, at.out, "out", out, dtype, count)
    at.run(address, words, pattern.threads(4 * lanes, _SERIAL_BELOW))
    del values_held, grad_held
    return out
