"""Maxima and minima over neighbours that mark, one bit per edge and column, which edges attain them.

The gradient then reads a row and some bits of it for every edge, where comparing reads two rows.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.spmm.cpu import PREFETCH_LANES, ask_ahead
from plait.kernels.vector import CodeGen, load_index_ir, row_intrinsic

__all__ = ["GATHER", "MARK", "Parts", "gather_kernel", "mark_kernel", "mark_lanes"]

MARK = Arguments(f"{PATTERN} marks[] x[] out[] ties[] width last_edge")
GATHER = Arguments(f"{PATTERN} order marks[] share[] out[] addend[] width last_edge")

_REGISTER_BITS = 512  # marks are written and read this many columns' worth of bits at a time


def mark_lanes(float_bits: int) -> int:
    """Columns whose marks share a word; a row of marks is a whole number of them."""
    return _REGISTER_BITS // float_bits


class Parts:
    """A tile as registers of `mark_lanes` columns each, and the marks of each."""

    def __init__(self, tile: CodeGen, count: Any):
        self.code = tile.of(mark_lanes(tile.float_bits))
        self.tile = tile
        self.number = tile.lanes // self.code.lanes
        self.mask = self.code.mask(count)
        self.word = ir.IntType(self.code.lanes)
        self.flags = ir.VectorType(ir.IntType(1), self.code.lanes)

    def row(self, address: Any) -> list[Any]:
        return [self.code.load(self.at(address, k), self.mask) for k in range(self.number)]

    def at(self, address: Any, k: int) -> Any:
        size = self.code.lanes * self.code.float_bits // 8
        return self.code.builder.add(address, self.code.word(k * size))

    def store(self, values: list[Any], address: Any) -> None:
        for k, value in enumerate(values):
            self.code.store(value, self.at(address, k), self.mask)

    def marks(self, address: Any) -> Any:
        """The words of a row of marks."""
        return self.code.builder.inttoptr(address, self.word.as_pointer())

    def splat(self, value: float) -> list[Any]:
        return [self.code.constant(value)] * self.number


def _mark_row(float_bits: int, index_bits: int, mode: str) -> Any:
    """The extremum, then which edges attain it; words: x stride indices start end out ties marks marks_stride
    last width."""

    def body(tile: CodeGen, args: list[Any], count: Any) -> None:
        x, stride, indices, start, end, out, ties, marks, marks_stride, last = args
        parts = Parts(tile, count)
        code, b = parts.code, tile.builder
        index = load_index_ir(code, indices, index_bits)
        zero, one = code.constant(0.0), code.constant(1.0)

        def better(i: Any, best: list[Any]) -> list[Any]:
            if tile.lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(tile, index, i, last, [(x, stride)])
            row = parts.row(b.add(x, b.mul(index(i), stride)))
            return [code.extremum(mode, p, q) for p, q in zip(best, row, strict=True)]

        best = code.loop(start, end, parts.splat(float("-inf") if mode == "max" else float("inf")), better)
        best = [b.select(b.icmp_signed(">=", start, end), zero, value) for value in best]

        def mark(i: Any, attained: list[Any]) -> list[Any]:
            row = parts.row(b.add(x, b.mul(index(i), stride)))
            to, made = parts.marks(b.add(marks, b.mul(i, marks_stride))), []
            for k, (value, extreme, many) in enumerate(zip(row, best, attained, strict=True)):
                is_equal = b.fcmp_ordered("==", value, extreme)
                b.store(b.bitcast(is_equal, parts.word), b.gep(to, [code.word(k)]), align=1)
                made.append(b.fadd(many, b.select(is_equal, one, zero)))
            return made

        attained = code.loop(start, end, parts.splat(0.0), mark)
        # torch counts the zero-filled output as one more tie where the extremum is zero
        for k, extreme in enumerate(best):
            many = b.fadd(attained[k], b.select(b.fcmp_ordered("==", extreme, zero), one, zero))
            attained[k] = b.select(b.fcmp_ordered("==", many, zero), one, many)
        parts.store(best, out)
        parts.store(attained, ties)

    return row_intrinsic(float_bits, 11, 0, dict.fromkeys((0, 5, 6), float_bits) | {7: 1}, body)


def _gather_row(float_bits: int, index_bits: int) -> Any:
    """out[j] = sum over targets i of share[i] where the edge is marked, plus an added row.

    words: share share_stride indices order marks marks_stride start end out addend last width.
    """

    def body(tile: CodeGen, args: list[Any], count: Any) -> None:
        share, stride, indices, order, marks, marks_stride, start, end, out, addend, last = args
        parts = Parts(tile, count)
        code, b = parts.code, tile.builder
        index = load_index_ir(code, indices, index_bits)
        place = load_index_ir(code, order, index_bits)
        zero = code.constant(0.0)

        def step(e: Any, totals: list[Any]) -> list[Any]:
            if tile.lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(tile, index, e, last, [(share, stride)])
                ask_ahead(tile.of(1), place, e, last, [(marks, marks_stride)])
            row = parts.row(b.add(share, b.mul(index(e), stride)))
            at, made = parts.marks(b.add(marks, b.mul(place(e), marks_stride))), []
            for k, (value, total) in enumerate(zip(row, totals, strict=True)):
                flags = b.bitcast(b.load(b.gep(at, [code.word(k)]), align=1), parts.flags)
                made.append(b.fadd(total, b.select(flags, value, zero)))
            return made

        totals = code.loop(start, end, parts.splat(0.0), step)
        for k in range(parts.number):
            plus = functools.partial(_plus, parts, addend, k, totals[k])
            totals[k] = code.either(code.is_given(addend), plus, totals[k])
        parts.store(totals, out)

    return row_intrinsic(float_bits, 12, 0, dict.fromkeys((0, 8, 9), float_bits) | {4: 1}, body)


def _plus(parts: Parts, addend: Any, k: int, total: Any) -> Any:
    return parts.code.builder.fadd(total, parts.code.load(parts.at(addend, k), parts.mask))


def mark_kernel(float_bits: int, index_bits: int, mode: str) -> Any:
    """max or min, how many edges attain it, and which."""
    row = _mark_row(float_bits, index_bits, mode)

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        to, ties = a.out + i * a.out_row, a.ties + i * a.ties_row
        row(a.x, a.x_row, a.indices, start, end, to, ties, a.marks, a.marks_row, a.last_edge, a.width)

    return MARK.row_kernel(index_bits, each)


def gather_kernel(float_bits: int, index_bits: int) -> Any:
    """The gradient of max and min on the transpose, by the marks."""
    row = _gather_row(float_bits, index_bits)

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        plus = a.addend + j * a.addend_row if a.addend != 0 else 0
        row(a.share, a.share_row, a.indices, a.order, a.marks, a.marks_row, start, end,
            a.out + j * a.out_row, plus, a.last_edge, a.width)  # fmt: skip

    return GATHER.row_kernel(index_bits, each)
