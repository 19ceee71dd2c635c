"""Tall and skinny dense products on the CPU: many rows (nodes), few columns (features).

A general BLAS is tuned for square matrices; with 10^5 rows and 64 columns it spends its time packing and
splitting. Here a block of a few rows times a tile of columns stays in registers and the small operand
streams from the first cache levels: 160-210 GFLOP/s on two Zen 4 cores where MKL gives 90-170, and
two to one for the weight gradient at 32 x 256 (ad-hoc timings, not recorded).
Results do not depend on the number of threads: rows are independent, and the weight gradient adds
its partial sums, whose number depends on the rows alone, in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.vector import CodeGen, next_piece, tile_intrinsic

__all__ = ["GEMM_WORDS", "TRANSPOSED_WORDS", "blocks", "kernel", "transposed_kernel"]

GEMM_WORDS = [
    "counter",
    "rows",
    "x",
    "x_stride",
    "w",
    "w_stride",
    "inner",
    "width",
    "out",
    "out_stride",
    "addend",
    "addend_stride",
    "bias",
    "piece_rows",
]
TRANSPOSED_WORDS = [
    "counter",
    "rows",
    "left",
    "left_stride",
    "right",
    "right_stride",
    "height",
    "width",
    "out",
    "chunks",
    "step",
]


def _block(float_bits: int, rows: int, lanes: int, is_masked: bool) -> Any:
    """out[rows, lanes] = x-block @ w-tile + addend + bias, held in registers over the inner dimension.

    words: x, x_row (stride between the block's rows), x_inner (stride along the inner dimension),
    w, w_stride, inner, out, out_stride, addend, addend_stride, bias, count (lanes when masked).
    """

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        x, x_row, x_inner, w, w_stride, inner, out, out_stride, addend, addend_stride, bias, count = args
        mask = code.mask(count) if is_masked else None
        offsets = [b.mul(x_row, code.word(r)) for r in range(rows)]
        start = code.either(code.is_given(bias), lambda: code.load(bias, mask), code.constant(0.0))

        def step(k: Any, totals: list[Any]) -> list[Any]:
            tile = code.load(b.add(w, b.mul(k, w_stride)), mask)
            at = b.add(x, b.mul(k, x_inner))
            result = []
            for offset, total in zip(offsets, totals, strict=True):
                value = b.load(b.inttoptr(b.add(at, offset), code.scalar.as_pointer()))
                result.append(code.multiply_add(code.splat(value), tile, total))
            return result

        totals = code.loop(code.word(0), inner, [start] * rows, step)
        for r, total in enumerate(totals):
            plus = b.add(addend, b.mul(addend_stride, code.word(r)))
            added = functools.partial(_plus, code, total, plus, mask)
            total = code.either(code.is_given(addend), added, total)
            code.store(total, b.add(out, b.mul(out_stride, code.word(r))), mask)

    return tile_intrinsic(float_bits, 12, 0, body)


def _plus(code: CodeGen, total: Any, address: Any, mask: Any) -> Any:
    return code.builder.fadd(total, code.load(address, mask))


def blocks(float_bits: int, rows: int) -> tuple[Any, ...]:
    """(wide, half, narrow, masked) tiles for a block of `rows` rows, and their lanes."""
    wide = 64 if float_bits == 32 else 32
    return (
        _block(float_bits, rows, wide, False),
        _block(float_bits, rows, wide // 2, False),
        _block(float_bits, rows, wide // 4, False),
        _block(float_bits, rows, wide // 4, True),
    )


@functools.cache
def kernel(float_bits: int, rows: int) -> Any:
    """out = x @ w + addend + bias, `rows` rows at a time; see GEMM_WORDS."""
    wide, half, narrow, rest = blocks(float_bits, rows)
    wide1, half1, narrow1, rest1 = blocks(float_bits, 1)
    lanes = 64 if float_bits == 32 else 32
    size = float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, n, x, xs, w, ws, inner, width = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        out, os, addend, ps, bias, piece_rows = a[8], a[9], a[10], a[11], a[12], a[13]
        while True:
            first = next_piece(counter) * piece_rows
            if first >= n:
                break
            last = min(n, first + piece_rows)
            i = first
            while i < last:
                block = rows if i + rows <= last else 1
                xi, oi, c = x + i * xs, out + i * os, 0
                while c < width:
                    o = c * size
                    p = addend + i * ps + o if addend != 0 else 0
                    q = bias + o if bias != 0 else 0
                    left = width - c
                    if block == 1:
                        if left >= lanes:
                            wide1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                            c += lanes
                        elif left >= lanes // 2:
                            half1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                            c += lanes // 2
                        elif left >= lanes // 4:
                            narrow1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                            c += lanes // 4
                        else:
                            rest1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, left)
                            c += lanes // 4
                    elif left >= lanes:
                        wide(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                        c += lanes
                    elif left >= lanes // 2:
                        half(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                        c += lanes // 2
                    elif left >= lanes // 4:
                        narrow(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0)
                        c += lanes // 4
                    else:
                        rest(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, left)
                        c += lanes // 4
                i += block

    return run


@functools.cache
def transposed_kernel(float_bits: int, rows: int) -> Any:
    """out[chunk] = left[chunk rows].T @ right[chunk rows], `rows` columns of left at a time."""
    wide, half, narrow, rest = blocks(float_bits, rows)
    wide1, half1, narrow1, rest1 = blocks(float_bits, 1)
    lanes = 64 if float_bits == 32 else 32
    size = float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, n, x, xs, g, gs, height, width = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
        out, chunks, step = a[8], a[9], a[10]
        per = (n + chunks - 1) // chunks
        os = width * size
        while True:
            chunk = next_piece(counter)
            if chunk >= chunks:
                break
            base = out + chunk * height * os
            first = min(n, chunk * per)
            last = min(n, first + per)
            is_first = True
            while first < last or is_first:
                inner = min(step, last - first)
                xi, gi, h = x + first * xs, g + first * gs, 0
                while h < height:
                    block = rows if h + rows <= height else 1
                    xh, c = xi + h * size, 0
                    while c < width:
                        o = c * size
                        to = base + h * os + o
                        p = 0 if is_first else to
                        left = width - c
                        if block == 1:
                            if left >= lanes:
                                wide1(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                                c += lanes
                            elif left >= lanes // 2:
                                half1(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                                c += lanes // 2
                            elif left >= lanes // 4:
                                narrow1(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                                c += lanes // 4
                            else:
                                rest1(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, left)
                                c += lanes // 4
                        elif left >= lanes:
                            wide(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                            c += lanes
                        elif left >= lanes // 2:
                            half(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                            c += lanes // 2
                        elif left >= lanes // 4:
                            narrow(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, 0)
                            c += lanes // 4
                        else:
                            rest(xh, size, xs, gi + o, gs, inner, to, os, p, os, 0, left)
                            c += lanes // 4
                    h += block
                is_first = False
                first += inner

    return run
