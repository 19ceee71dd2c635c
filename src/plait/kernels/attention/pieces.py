"""Attention in pieces, for scores that no fused pass computes: dots of edges, sums by weights, softmax.

Values of edges are [edges, lanes]: one number a head, heads padded to a power of two, edges by target. A side
that is "shared" has one row for all heads instead of a part for each.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import cfunc, types

from plait.kernels import launch
from plait.kernels.attention import products, rows, softmax
from plait.kernels.attention.rows import BLOCK
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.operands import float_bits as bits_of
from plait.kernels.operands import read_flat, read_numbers, read_rows, write_flat, write_rows
from plait.kernels.spmm import Pattern
from plait.kernels.vector import load_index, load_scalar, next_piece

__all__ = ["edge_dots", "edge_softmax", "edge_softmax_gradient", "edge_sums", "padded"]

_SERIAL_BELOW = 1 << 16
_EDGES = "counter pieces bounds indptr indices last_edge order heads width"
_DOTS = f"{_EDGES} near near_row near_head far far_row far_head out numbers".split()
_SUMS = f"{_EDGES} weight far far_row far_head out out_row out_head numbers".split()
_SOFTMAX = ["counter", "pieces", "bounds", "indptr", "indices", "values", "gradient", "out"]


def padded(heads: int) -> int:
    """Heads as kernels lay them out: the next power of two."""
    return 1 << (heads - 1).bit_length()


@functools.cache
def _dots_kernel(float_bits: int, index_bits: int, lanes: int) -> Any:
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = rows.block(float_bits, lanes)
    clear, store = rows.clear(float_bits), softmax.store_heads(float_bits, lanes)
    dots = products.grouped_dots(float_bits, index_bits, lanes, False)
    size = float_bits // 8
    slot = lanes * size

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices, last = a[0], a[1], a[2], a[3], a[4], a[5]
        heads, width, near, near_row, near_head = a[7], a[8], a[9], a[10], a[11]
        far, far_row, far_head, out = a[12], a[13], a[14], a[15]
        slope = scalar(a[16], 0)
        block = block_of()
        clear(block, (BLOCK + 4) * lanes)
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                k, end = index(indptr, i), index(indptr, i + 1)
                while k < end:
                    count = min(BLOCK, end - k)
                    dots(near + i * near_row, near_head, far, far_row, far_head, indices, k, count, block,
                         heads, width, 0, last, slope)  # fmt: skip
                    store(out + k * slot, block, count)
                    k += count

    return run


@functools.cache
def _sums_kernel(float_bits: int, index_bits: int, lanes: int) -> Any:
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = rows.block(float_bits, lanes)
    clear, gather = rows.clear(float_bits), softmax.gather_heads(float_bits, index_bits, lanes)
    sums = products.grouped_sums(float_bits, index_bits, lanes, False)

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices, order = a[0], a[1], a[2], a[3], a[4], a[6]
        heads, width, weight, far, far_row, far_head = a[7], a[8], a[9], a[10], a[11], a[12]
        out, out_row, out_head, numbers = a[13], a[14], a[15], a[16]
        slope = scalar(numbers, 0)
        block = block_of()
        whole = width if out_head == 0 else heads * width
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, i), index(indptr, i + 1)
                row = out + i * out_row
                if start >= end:
                    clear(row, whole)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    gather(block, weight, order, k, count)
                    sums(far, far_row, far_head, indices, k, count, block, row, out_head, first, heads,
                         width, 0, 0, slope)  # fmt: skip
                    k += count

    return run


@functools.cache
def _softmax_kernel(float_bits: int, index_bits: int, lanes: int, is_gradient: bool) -> Any:
    index, bound = load_index(index_bits), load_index(64)
    forward, backward = softmax.softmax(float_bits, lanes), softmax.softmax_gradient(float_bits, lanes)
    slot = lanes * float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, values, gradient, out = a[0], a[1], a[2], a[3], a[5], a[6], a[7]
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, i), index(indptr, i + 1)
                at = start * slot
                if start < end:
                    if is_gradient:
                        backward(out + at, values + at, gradient + at, end - start)
                    else:
                        forward(out + at, values + at, end - start)

    return run


@functools.cache
def _address(name: str, float_bits: int, index_bits: int, lanes: int) -> int:
    build = {
        "dots": lambda: _dots_kernel(float_bits, index_bits, lanes),
        "sums": lambda: _sums_kernel(float_bits, index_bits, lanes),
        "softmax": lambda: _softmax_kernel(float_bits, index_bits, lanes, False),
        "softmax-gradient": lambda: _softmax_kernel(float_bits, index_bits, lanes, True),
    }[name]
    return address_of(f"edge-{name}-f{float_bits}-i{index_bits}-h{lanes}", build)


_dots_block, _sums_block, _softmax_block = Block(_DOTS), Block(_SUMS), Block(_SOFTMAX)


def _threads(pattern: Pattern, width: int) -> int:
    return launch.num_threads() if (pattern.num_edges + pattern.num_rows) * width > _SERIAL_BELOW else 1


def edge_dots(
    pattern: Pattern, near: torch.Tensor, far: torch.Tensor, heads: int, *, is_shared: bool = False
) -> torch.Tensor:
    """[edges, lanes]: near[i, h] . far[j, h] for every edge and head; is_shared: far[j] serves all heads."""
    lanes, size, dtype, edges = padded(heads), near.element_size(), near.dtype, pattern.num_edges
    width = near.shape[-1] // heads
    columns = heads * width
    address = _address("dots", bits_of("near", near), pattern.index_bits, lanes)
    out = torch.empty((edges, lanes), dtype=dtype)
    words = _dots_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6], words[7], words[8] = max(0, edges - 1), 0, heads, width
    words[11], words[14] = width * size, 0 if is_shared else width * size
    held = (
        read_rows(words, 9, "near", near, dtype, pattern.num_rows, columns),
        read_rows(words, 12, "far", far, dtype, pattern.num_columns, width if is_shared else columns, True),
        read_flat(words, 16, "numbers", torch.zeros(1, dtype=dtype), dtype, 1),
    )
    write_flat(words, 15, "out", out, dtype, edges * lanes)
    _dots_block.run(address, words, _threads(pattern, columns))
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
    address = _address("sums", bits_of("far", far), pattern.index_bits, lanes)
    out = torch.empty((rows, columns), dtype=dtype) if out is None else out
    words = _sums_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[7], words[8] = max(0, edges - 1), heads, width
    words[12], words[15] = 0 if far_is_shared else width * size, 0 if out_is_shared else width * size
    read_numbers(words, 6, "order", order, pattern.index_bits, edges)
    held = (
        read_flat(words, 9, "weight", weight, dtype, edges * lanes),
        read_rows(words, 10, "far", far, dtype, pattern.num_columns, far.shape[-1], True),
        read_flat(words, 16, "numbers", torch.zeros(1, dtype=dtype), dtype, 1),
    )
    write_rows(words, 13, "out", out, dtype, rows, columns)
    _sums_block.run(address, words, _threads(pattern, heads * width))
    del held
    return out


def edge_softmax(pattern: Pattern, scores: torch.Tensor) -> torch.Tensor:
    """The softmax of [edges, lanes] over the edges of each row."""
    return _run_softmax("softmax", pattern, scores, None)


def edge_softmax_gradient(pattern: Pattern, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """weight * (grad - sum over the row of weight * grad)."""
    return _run_softmax("softmax-gradient", pattern, weight, grad)


def _run_softmax(
    name: str, pattern: Pattern, values: torch.Tensor, grad: torch.Tensor | None
) -> torch.Tensor:
    dtype, lanes = values.dtype, values.shape[-1]
    count = pattern.num_edges * lanes
    address = _address(name, bits_of("values", values), pattern.index_bits, lanes)
    out = torch.empty(values.shape, dtype=dtype)
    words = _softmax_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    values_held = read_flat(words, 5, "values", values, dtype, count)
    grad_held = read_flat(words, 6, "grad", grad, dtype, count)
    write_flat(words, 7, "out", out, dtype, count)
    _softmax_block.run(address, words, _threads(pattern, 4 * lanes))
    del values_held, grad_held
    return out
