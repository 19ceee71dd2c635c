"""Products and weight gradients of a block of rows in cache; the rows may be sums over neighbours.

A layer's step is a few products of the same rows: gather neighbours, times a weight, and in the backward
pass the weight's gradient from the rows just gathered. Done one after the other, each writes its rows to
memory and the next reads them back. Here a block of some ten rows goes through all of them before the next
one starts: the gathered rows need not exist in memory at all, and an operand shared by two products is read
once.

A thread takes a chunk of rows. Weight gradients are added up chunk by chunk; how rows are cut into chunks
depends on the shapes alone, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, njit, types

from plait.kernels.arguments import Arguments
from plait.kernels.gemm.cpu import accumulate_rows, finished, multiply_rows, total_of
from plait.kernels.spmm.cpu import sum_row
from plait.kernels.vector import fetch_add, load_index, load_scalar, next_piece

__all__ = ["CHAIN", "MOST_PRODUCTS", "MOST_SUMS", "kernel"]

MOST_PRODUCTS = 2
MOST_SUMS = 3

CHAIN = Arguments(
    # addresses of counters: scratch rows that are taken, chunks that are finished
    "slots done chunks bounds block_rows "
    # the block: gathered where indptr is given, kept where `block` is, in scratch else
    "indptr indices x[] factor target addend[] addend_scale last_edge block_width scratch block[] "
    # the products' rows
    "out[] width plus[] bias products sums slot_counter done_counter",
    # rows @ w, added to the rows of `out`; rows = 0 means the block in hand
    product=(MOST_PRODUCTS, "rows[] inner w[]"),
    # left.T @ right, added to the chunk's part; left or right = 0 means the block in hand. total: where the
    # parts are added up when all chunks are done, 0 where that is done elsewhere
    sum=(MOST_SUMS, "left[] height right[] across part total"),
)
_HEIGHT = 4  # rows of a product held in registers


@functools.cache
def kernel(float_bits: int, index_bits: int, mode: str) -> Any:
    """The compiled kernel; mode is plain, edge or source (see kernels/spmm), or rows: nothing is gathered."""
    gathers = mode != "rows"
    gather = _gather(float_bits, index_bits, mode if gathers else "plain")
    multiply, accumulate = multiply_rows(float_bits, _HEIGHT), accumulate_rows(float_bits, _HEIGHT)
    bound, total = load_index(64), total_of(float_bits)
    size = float_bits // 8
    read, read_product, read_sum = CHAIN.reader(), CHAIN.group_reader("product"), CHAIN.group_reader("sum")

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        mine = a.scratch + fetch_add(a.slots) * a.block_rows * a.block_width * size
        while True:
            chunk = next_piece(a.team, a.chunks)
            if chunk >= a.chunks:
                break
            first, last = bound(a.bounds, chunk), bound(a.bounds, chunk + 1)
            is_first = 1
            while first < last or is_first == 1:
                rows = min(a.block_rows, last - first)
                block, stride = mine, a.block_width * size
                if a.block != 0:
                    block, stride = a.block + first * a.block_row, a.block_row
                if gathers:
                    gather(arguments, first, rows, block, stride)
                to = a.out + first * a.out_row
                for k in range(a.products):
                    p = read_product(arguments, k)
                    left, left_row = block, stride
                    if p.rows != 0:
                        left, left_row = p.rows + first * p.rows_row, p.rows_row
                    above, above_row, q = to, a.out_row, 0
                    if k == 0:
                        above, above_row, q = (
                            a.plus + first * a.plus_row if a.plus != 0 else 0,
                            a.plus_row,
                            a.bias,
                        )
                    multiply(
                        left, left_row, rows, p.inner, p.w, p.w_row, a.width, to, a.out_row, above,
                        above_row, q,
                    )  # fmt: skip
                for k in range(a.sums):
                    s = read_sum(arguments, k)
                    left, left_row, right, right_row = block, stride, block, stride
                    if s.left != 0:
                        left, left_row = s.left + first * s.left_row, s.left_row
                    if s.right != 0:
                        right, right_row = s.right + first * s.right_row, s.right_row
                    to = s.part + chunk * s.height * s.across * size
                    accumulate(left, left_row, s.height, right, right_row, s.across, rows, to, is_first)
                is_first = 0
                first += rows
            if a.sums > 0 and finished(a.done) == a.chunks - 1:  # the last one: all parts are there
                for k in range(a.sums):
                    s = read_sum(arguments, k)
                    if s.total != 0:
                        total(s.part, a.chunks, s.height * s.across, s.total)

    return run


def _gather(float_bits: int, index_bits: int, mode: str) -> Any:
    """A numba function: rows [first, first + rows) of the sparse product, written to `block`."""
    write = sum_row(float_bits, index_bits, mode)
    index, scalar = load_index(index_bits), load_scalar(float_bits)
    read = CHAIN.reader()

    @njit(inline="never")
    def gather(arguments, first, rows, block, stride):  # type: ignore[no-untyped-def]
        a = read(arguments)
        for i in range(first, first + rows):
            start, end = index(a.indptr, i), index(a.indptr, i + 1)
            t, s = scalar(a.target, i), scalar(a.addend_scale, i)
            row, plus = block + (i - first) * stride, a.addend + i * a.addend_row if a.addend != 0 else 0
            write(
                a.x, a.x_row, a.indices, a.factor, start, end, row, plus, 0, a.last_edge, a.block_width, t, s
            )

    return gather
