"""Tall and skinny dense products on the CPU: many rows (nodes), few columns (features).

A general BLAS is tuned for square matrices; with 10^5 rows and 64 columns it spends its time packing and
splitting. Here a block of a few rows times a tile of columns stays in registers and the small operand
streams from the first cache levels: 160-210 GFLOP/s on two Zen 4 cores where MKL gives 90-170, and
two to one for the weight gradient at 32 x 256 (ad-hoc timings, not recorded).
The machine's own prefetching stops at every page and does not guess the next block of rows, so the rows to
come and those to be written are prefetched while the present ones are multiplied: a quarter of the time of a
product that reads 256 columns from memory (one core).
Results do not depend on the number of threads: rows are independent, and the weight gradient adds
its partial sums, whose number depends on the rows alone, in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from plait.kernels.arguments import Arguments
from plait.kernels.vector import I64, CodeGen, next_piece, next_rows, tile_intrinsic

__all__ = [
    "GEMM", "TRANSPOSED", "accumulate_rows", "finished", "kernel", "multiply_rows", "total_of",
    "transposed_kernel",
]  # fmt: skip

GEMM = Arguments("rows x[] w[] inner width out[] addend[] bias piece_rows")
# total: where the parts are added up when all chunks are done, 0 where that is done elsewhere
TRANSPOSED = Arguments("rows left[] right[] height width out chunks step total done done_counter")
# bits of a tile's row from which on it prefetches rows; a narrower one has too little else to do
_LEAST_ASKING = 1024


@dataclass(frozen=True)
class _Asks:
    """What a block prefetches on its way along the inner dimension."""

    level: int  # of the caches, see CodeGen.prefetch
    writes: bool  # also for the rows of `out` that the next block writes


_NEXT_BLOCK, _NEXT_ROWS = _Asks(3, writes=True), _Asks(2, writes=False)


def _block(float_bits: int, rows: int, lanes: int, is_masked: bool, asks: _Asks) -> Any:
    """out[rows, lanes] = x-block @ w-tile + addend + bias, held in registers over the inner dimension.

    words: x, x_row (stride between the block's rows), x_inner (stride along the inner dimension),
    w, w_stride, inner, out, out_stride, addend, addend_stride, bias, count (lanes when masked),
    then two addresses to prefetch, of bytes read and of bytes written, each before how far it moves a step.
    """

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        x, x_row, x_inner, w, w_stride, inner, out, out_stride, addend, addend_stride, bias, count = args[:12]
        far, far_step, to, to_step = args[12:]
        is_wide = lanes * float_bits >= _LEAST_ASKING
        mask = code.mask(count) if is_masked else None
        offsets = [b.mul(x_row, code.word(r)) for r in range(rows)]
        start = code.either(code.is_given(bias), lambda: code.load(bias, mask), code.constant(0.0))

        def step(k: Any, totals: list[Any]) -> list[Any]:
            tile = code.load(b.add(w, b.mul(k, w_stride)), mask)
            at = b.add(x, b.mul(k, x_inner))
            if is_wide:
                code.prefetch(b.add(far, b.mul(k, far_step)), 1, asks.level)
            if is_wide and asks.writes:
                code.prefetch(b.add(to, b.mul(k, to_step)), 1, is_written=True)
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

    return tile_intrinsic(float_bits, 16, 0, body)


def _plus(code: CodeGen, total: Any, address: Any, mask: Any) -> Any:
    return code.builder.fadd(total, code.load(address, mask))


def _blocks(float_bits: int, rows: int, asks: _Asks) -> tuple[Any, ...]:
    """(wide, half, narrow, masked) tiles for a block of `rows` rows, and their lanes."""
    wide = 64 if float_bits == 32 else 32
    return (
        _block(float_bits, rows, wide, False, asks),
        _block(float_bits, rows, wide // 2, False, asks),
        _block(float_bits, rows, wide // 4, False, asks),
        _block(float_bits, rows, wide // 4, True, asks),
    )


@functools.cache
def multiply_rows(float_bits: int, height: int) -> Any:
    """A numba function: out[rows, width] = x[rows, inner] @ w + addend + bias, `height` rows at a time.

    The next block's rows of x and of out are prefetched on the way.
    """
    wide, half, narrow, rest = _blocks(float_bits, height, _NEXT_BLOCK)
    wide1, half1, narrow1, rest1 = _blocks(float_bits, 1, _NEXT_BLOCK)
    lanes = 64 if float_bits == 32 else 32
    size = float_bits // 8

    @njit(inline="never")
    def multiply(x, xs, rows, inner, w, ws, width, out, os, addend, ps, bias):  # type: ignore[no-untyped-def]
        steps = max(1, inner * ((width + lanes - 1) // lanes))
        fs, ts = -(-height * xs // steps), -(-height * os // steps)
        i = 0
        while i < rows:
            block = height if i + height <= rows else 1
            xi, oi, c = x + i * xs, out + i * os, 0
            f, t = xi + height * xs, oi + height * os  # prefetched, step by step
            while c < width:
                o = c * size
                p = addend + i * ps + o if addend != 0 else 0
                q = bias + o if bias != 0 else 0
                left = width - c
                if block == 1:
                    if left >= lanes:
                        wide1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                        c += lanes
                    elif left >= lanes // 2:
                        half1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                        c += lanes // 2
                    elif left >= lanes // 4:
                        narrow1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                        c += lanes // 4
                    else:
                        rest1(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, left, f, fs, t, ts)
                        c += lanes // 4
                elif left >= lanes:
                    wide(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                    c += lanes
                elif left >= lanes // 2:
                    half(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                    c += lanes // 2
                elif left >= lanes // 4:
                    narrow(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, 0, f, fs, t, ts)
                    c += lanes // 4
                else:
                    rest(xi, xs, size, w + o, ws, inner, oi + o, os, p, ps, q, left, f, fs, t, ts)
                    c += lanes // 4
                f += inner * fs
                t += inner * ts
            i += block

    return multiply


@functools.cache
def accumulate_rows(float_bits: int, tall: int) -> Any:
    """A numba function: out[height, width] (+)= left[rows, height].T @ right[rows, width].

    As many rows of `right` as it reads, those that follow, are prefetched on the way.
    """
    wide, half, narrow, rest = _blocks(float_bits, tall, _NEXT_ROWS)
    wide1, half1, narrow1, rest1 = _blocks(float_bits, 1, _NEXT_ROWS)
    lanes = 64 if float_bits == 32 else 32
    size = float_bits // 8

    @njit(inline="never")
    def accumulate(left, ls, height, right, rs, width, rows, out, is_first):  # type: ignore[no-untyped-def]
        step = -(-rs // max(1, ((height + tall - 1) // tall) * ((width + lanes - 1) // lanes)))
        os, h, far = width * size, 0, right + rows * rs
        while h < height:
            block = tall if h + tall <= height else 1
            lh, c = left + h * size, 0
            while c < width:
                o = c * size
                to = out + h * os + o
                p = 0 if is_first == 1 else to
                more = width - c
                if block == 1:
                    if more >= lanes:
                        wide1(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                        c += lanes
                    elif more >= lanes // 2:
                        half1(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                        c += lanes // 2
                    elif more >= lanes // 4:
                        narrow1(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                        c += lanes // 4
                    else:
                        rest1(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, more, far, step, 0, 0)
                        c += lanes // 4
                elif more >= lanes:
                    wide(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                    c += lanes
                elif more >= lanes // 2:
                    half(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                    c += lanes // 2
                elif more >= lanes // 4:
                    narrow(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, 0, far, step, 0, 0)
                    c += lanes // 4
                else:
                    rest(lh, size, ls, right + o, rs, rows, to, os, p, os, 0, more, far, step, 0, 0)
                    c += lanes // 4
                far += rows * step
            h += block

    return accumulate


@functools.cache
def kernel(float_bits: int, rows: int) -> Any:
    """out = x @ w + addend + bias, `rows` rows at a time; see GEMM."""
    multiply = multiply_rows(float_bits, rows)
    read = GEMM.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            count = min(a.piece_rows, a.rows - first)
            plus = a.addend + first * a.addend_row if a.addend != 0 else 0
            multiply(
                a.x + first * a.x_row, a.x_row, count, a.inner, a.w, a.w_row, a.width,
                a.out + first * a.out_row, a.out_row, plus, a.addend_row, a.bias,
            )  # fmt: skip

    return run


@functools.cache
def transposed_kernel(float_bits: int, rows: int) -> Any:
    """out[chunk] = left[chunk rows].T @ right[chunk rows], `rows` columns of left at a time."""
    accumulate, add_up = accumulate_rows(float_bits, rows), total_of(float_bits)
    size = float_bits // 8
    read = TRANSPOSED.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        per = (a.rows + a.chunks - 1) // a.chunks
        while True:
            chunk = next_piece(a.team, a.chunks)
            if chunk >= a.chunks:
                break
            first = min(a.rows, chunk * per)
            last = min(a.rows, first + per)
            is_first = 1
            while first < last or is_first == 1:
                count = min(a.step, last - first)
                to = a.out + chunk * a.height * a.width * size
                accumulate(
                    a.left + first * a.left_row, a.left_row, a.height, a.right + first * a.right_row,
                    a.right_row, a.width, count, to, is_first,
                )  # fmt: skip
                is_first = 0
                first += count
            if a.total != 0 and finished(a.done) == a.chunks - 1:  # the last one: all parts are there
                add_up(a.out, a.chunks, a.height * a.width, a.total)

    return run


@intrinsic  # type: ignore[untyped-decorator]  # numba carries no types
def finished(typing_context: Any, counter: Any) -> Any:
    """Count a finished chunk: what was written before is seen by the one that counts the last."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.int64), generate


@functools.cache
def total_of(float_bits: int) -> Any:
    """A numba function: out[count] = the sum of this many parts of `count` numbers, one after the other."""
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
