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

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from plait.kernels.gemm.cpu import accumulate_rows, multiply_rows
from plait.kernels.spmm.cpu import sum_tile
from plait.kernels.vector import (
    I64,
    CodeGen,
    fetch_add,
    load_index,
    load_scalar,
    next_piece,
    tile_intrinsic,
    tiles,
)

__all__ = ["MOST_PRODUCTS", "MOST_SUMS", "PRODUCT_WORDS", "SUM_WORDS", "WORDS", "kernel"]

MOST_PRODUCTS = 2
MOST_SUMS = 3

# rows @ w, added to the rows of `out`; rows = 0 means the block in hand
PRODUCT_WORDS = ["rows", "stride", "inner", "w", "w_stride"]
# left.T @ right, added to the chunk's part of `out`; left or right = 0 means the block in hand;
# total: where the parts are added up when all chunks are done, 0 where that is done elsewhere
SUM_WORDS = ["left", "left_stride", "height", "right", "right_stride", "width", "out", "total"]
WORDS = [
    "counter",
    "slots",  # address of a second counter: which scratch rows a thread takes
    "done",  # address of a third one: chunks that are finished
    "chunks",
    "bounds",
    "block_rows",
    # the block: gathered where indptr is given
    "indptr",
    "indices",
    "x",
    "x_stride",
    "factor",
    "target",
    "addend",
    "addend_stride",
    "addend_scale",
    "last_edge",
    "block_width",
    "scratch",
    "block",  # where block rows are kept; 0: in scratch
    "block_stride",
    # the product's rows
    "out",
    "out_stride",
    "width",
    "plus",
    "plus_stride",
    "bias",
    "products",
    "sums",
    "asks",  # 1: ask for the next block's rows while this one is multiplied
    *(f"{name}{k}" for k in range(MOST_PRODUCTS) for name in PRODUCT_WORDS),
    *(f"{name}{k}" for k in range(MOST_SUMS) for name in SUM_WORDS),
]
# rows multiplied between two requests for rows of the next block; neighbours of one row asked for at most
_ASK_ROWS = 8
_MOST_ASKED = 4
_HEIGHT = 4  # rows of a product held in registers
_FIRST_PRODUCT = WORDS.index("rows0")
_FIRST_SUM = WORDS.index("left0")


@functools.cache
def kernel(float_bits: int, index_bits: int, mode: str) -> Any:
    """The compiled kernel; mode is plain, edge or source (see kernels/spmm), or rows: nothing is gathered."""
    gathers = mode != "rows"
    gather = _gather(float_bits, index_bits, mode if gathers else "plain")
    ask = _ask(float_bits, index_bits)
    multiply, accumulate = multiply_rows(float_bits, _HEIGHT), accumulate_rows(float_bits, _HEIGHT)
    bound, total = load_index(64), _total(float_bits)
    size = float_bits // 8
    most = len(PRODUCT_WORDS), len(SUM_WORDS)

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, slots, done, chunks, bounds, block_rows = a[0], a[1], a[2], a[3], a[4], a[5]
        block_width, scratch, kept, kept_stride = a[16], a[17], a[18], a[19]
        out, out_stride, width, plus, plus_stride, bias = a[20], a[21], a[22], a[23], a[24], a[25]
        products, sums, asks = a[26], a[27], a[28]
        mine = scratch + fetch_add(slots) * block_rows * block_width * size
        while True:
            chunk = next_piece(counter, chunks)
            if chunk >= chunks:
                break
            first, last = bound(bounds, chunk), bound(bounds, chunk + 1)
            is_first = 1
            while first < last or is_first == 1:
                rows = min(block_rows, last - first)
                block, stride = mine, block_width * size
                if kept != 0:
                    block, stride = kept + first * kept_stride, kept_stride
                if gathers:
                    gather(a, first, rows, block, stride)
                for r in range(0, rows, _ASK_ROWS):
                    few, i = min(_ASK_ROWS, rows - r), first + r
                    if gathers and asks == 1:
                        ask(a, i + rows, min(last, i + rows + few))
                    to = out + i * out_stride
                    for k in range(products):
                        p = _FIRST_PRODUCT + k * most[0]
                        left, left_stride = block + r * stride, stride
                        if a[p] != 0:
                            left, left_stride = a[p] + i * a[p + 1], a[p + 1]
                        above, above_stride, q = to, out_stride, 0
                        if k == 0:
                            above, above_stride, q = (
                                plus + i * plus_stride if plus != 0 else 0,
                                plus_stride,
                                bias,
                            )
                        multiply(
                            left,
                            left_stride,
                            few,
                            a[p + 2],
                            a[p + 3],
                            a[p + 4],
                            width,
                            to,
                            out_stride,
                            above,
                            above_stride,
                            q,
                        )
                for k in range(sums):
                    s = _FIRST_SUM + k * most[1]
                    left, left_stride, right, right_stride = block, stride, block, stride
                    if a[s] != 0:
                        left, left_stride = a[s] + first * a[s + 1], a[s + 1]
                    if a[s + 3] != 0:
                        right, right_stride = a[s + 3] + first * a[s + 4], a[s + 4]
                    to = a[s + 6] + chunk * a[s + 2] * a[s + 5] * size
                    accumulate(left, left_stride, a[s + 2], right, right_stride, a[s + 5], rows, to, is_first)
                is_first = 0
                first += rows
            if sums > 0 and finished(done) == chunks - 1:  # the last one: all parts are there
                for k in range(sums):
                    s = _FIRST_SUM + k * most[1]
                    if a[s + 7] != 0:
                        total(a[s + 6], chunks, a[s + 2] * a[s + 5], a[s + 7])

    return run


@intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
def finished(typing_context: Any, counter: Any) -> Any:
    """Count a finished chunk: what was written before is seen by the one that counts the last."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.int64), generate


def _total(float_bits: int) -> Any:
    """A numba function: out[count] = the sum of so many parts of `count` numbers, one after the other."""
    lanes = 64 if float_bits == 32 else 32
    size = float_bits // 8

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        parts, stride, chunks, out, left = args
        mask = code.mask(left)

        def add(k: Any, carried: list[Any]) -> list[Any]:
            return [b.fadd(carried[0], code.load(b.add(parts, b.mul(k, stride)), mask))]

        (result,) = code.loop(code.word(0), chunks, [code.constant(0.0)], add)
        code.store(result, out, mask)

    tile = tile_intrinsic(float_bits, 5, 0, body)

    @njit(inline="never")
    def total(parts, chunks, count, out):  # type: ignore[no-untyped-def]
        for c in range(0, count, lanes):
            tile(parts + c * size, count * size, chunks, out + c * size, count - c)

    return total


def _gather(float_bits: int, index_bits: int, mode: str) -> Any:
    """A numba function: rows [first, first + rows) of the sparse product, written to `block`."""
    wide, half, quarter, narrow, _ = tiles(float_bits)
    tile_wide = sum_tile(float_bits, index_bits, wide, mode, False)
    tile_half = sum_tile(float_bits, index_bits, half, mode, False)
    tile_quarter = sum_tile(float_bits, index_bits, quarter, mode, False)
    tile_narrow = sum_tile(float_bits, index_bits, narrow, mode, False)
    tile_rest = sum_tile(float_bits, index_bits, narrow, mode, True)
    index, scalar = load_index(index_bits), load_scalar(float_bits)
    size = float_bits // 8

    @njit(inline="never")
    def gather(a, first, rows, block, stride):  # type: ignore[no-untyped-def]
        indptr, indices, x, xs, factor = a[6], a[7], a[8], a[9], a[10]
        target, addend, addend_stride, addend_scale, last, width = a[11], a[12], a[13], a[14], a[15], a[16]
        for i in range(first, first + rows):
            start, end = index(indptr, i), index(indptr, i + 1)
            t, s = scalar(target, i), scalar(addend_scale, i)
            row, plus = block + (i - first) * stride, addend + i * addend_stride
            c = 0
            while c < width:
                o = c * size
                p = plus + o if addend != 0 else 0
                rest = width - c
                if rest >= wide:
                    tile_wide(x + o, xs, indices, factor, start, end, row + o, p, 0, last, 0, t, s)
                    c += wide
                elif rest >= half:
                    tile_half(x + o, xs, indices, factor, start, end, row + o, p, 0, last, 0, t, s)
                    c += half
                elif rest >= quarter:
                    tile_quarter(x + o, xs, indices, factor, start, end, row + o, p, 0, last, 0, t, s)
                    c += quarter
                elif rest >= narrow:
                    tile_narrow(x + o, xs, indices, factor, start, end, row + o, p, 0, last, 0, t, s)
                    c += narrow
                else:
                    tile_rest(x + o, xs, indices, factor, start, end, row + o, p, 0, last, rest, t, s)
                    c += narrow

    return gather


def _ask(float_bits: int, index_bits: int) -> Any:
    """A numba function: asks for the rows that rows [first, last) will gather, while products are computed.

    The products keep the arithmetic units busy and the gather waits for memory: asked for in time, the next
    block's rows arrive meanwhile.
    """
    index = load_index(index_bits)
    touch = tile_intrinsic(float_bits, 1, 0, lambda code, args: code.prefetch(args[0], 64, level=2))
    size = float_bits // 8

    @njit(inline="never")
    def ask(a, first, last):  # type: ignore[no-untyped-def]
        indptr, indices, x, xs, width = a[6], a[7], a[8], a[9], a[16]
        for i in range(first, last):
            start = index(indptr, i)
            end = min(index(indptr, i + 1), start + _MOST_ASKED)
            for e in range(start, end):
                row = x + index(indices, e) * xs
                for o in range(0, width * size, 64):
                    touch(row + o)

    return ask
