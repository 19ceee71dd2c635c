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


def _row(tensor: torch.Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


def _threads(pattern: Pattern, width: int) -> int:
    return launch.num_threads() if (pattern.num_edges + pattern.num_rows) * width > _SERIAL_BELOW else 1


def edge_dots(
    pattern: Pattern, near: torch.Tensor, far: torch.Tensor, heads: int, *, is_shared: bool = False
) -> torch.Tensor:
    """[edges, lanes]: near[i, h] . far[j, h] for every edge and head; is_shared: far[j] serves all heads."""
    lanes, size = padded(heads), near.element_size()
    out = near.new_empty((pattern.num_edges, lanes))
    width = near.shape[1] // heads
    words = _dots_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6], words[7], words[8] = max(0, pattern.num_edges - 1), 0, heads, width
    words[9], words[10], words[11] = near.data_ptr(), _row(near), width * size
    words[12], words[13], words[14] = far.data_ptr(), _row(far), 0 if is_shared else width * size
    numbers = torch.zeros(1, dtype=near.dtype)
    words[15], words[16] = out.data_ptr(), numbers.data_ptr()
    address = _address("dots", size * 8, pattern.index_bits, lanes)
    _dots_block.run(address, words, _threads(pattern, heads * width))
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
    size = far.element_size()
    width = far.shape[1] if far_is_shared else far.shape[1] // heads
    columns = width if out_is_shared else heads * width
    out = far.new_empty((pattern.num_rows, columns)) if out is None else out
    numbers = torch.zeros(1, dtype=far.dtype)
    words = _sums_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6] = max(0, pattern.num_edges - 1), 0 if order is None else order.ctypes.data
    words[7], words[8], words[9] = heads, width, weight.data_ptr()
    words[10], words[11], words[12] = far.data_ptr(), _row(far), 0 if far_is_shared else width * size
    words[13], words[14], words[15] = out.data_ptr(), _row(out), 0 if out_is_shared else width * size
    words[16] = numbers.data_ptr()
    address = _address("sums", size * 8, pattern.index_bits, weight.shape[1])
    _sums_block.run(address, words, _threads(pattern, heads * width))
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
    out = torch.empty_like(values)
    words = _softmax_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6], words[7] = values.data_ptr(), 0 if grad is None else grad.data_ptr(), out.data_ptr()
    address = _address(name, values.element_size() * 8, pattern.index_bits, values.shape[1])
    _softmax_block.run(address, words, _threads(pattern, 4 * values.shape[1]))
    return out
