"""Rows of a block of edges on the CPU: sums of both ends, which edges attain an extremum, gradients."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from plait.kernels.arguments import Arguments
from plait.kernels.vector import CodeGen, load_index, load_index_ir, next_rows, tile_intrinsic

__all__ = ["LANES_MARKED", "MARKS", "PAIR", "SCATTER", "marks", "pair", "scatter"]

PAIR = Arguments("first last piece_rows indptr indices near[] far[] out[] width")
SCATTER = Arguments("rows piece_rows indptr order targets values[] out[] width")
MARKS = Arguments("rows piece_rows indptr near[] values[] marks[] width")
LANES_MARKED = 16  # columns whose marks are one word of as many bits


def _lanes(float_bits: int) -> int:
    return 1024 // float_bits


def _pair_tile(float_bits: int, index_bits: int, lanes: int) -> Any:
    """out[e] = near + far[j] on a masked tile of the edges [start, end)."""

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        near, far, far_row, indices, start, end, out, out_row, count = args
        mask = code.mask(count)
        own, index = code.load(near, mask), load_index_ir(code, indices, index_bits)

        def step(e: Any, none: list[Any]) -> list[Any]:
            row = code.load(b.add(far, b.mul(index(e), far_row)), mask)
            code.store(b.fadd(own, row), b.add(out, b.mul(b.sub(e, start), out_row)), mask)
            return []

        code.loop(start, end, [], step)

    return tile_intrinsic(float_bits, 9, 0, body)


@functools.cache
def pair(float_bits: int, index_bits: int) -> Any:
    """out[e] = near[i] + far[j] for the edges of the rows from first to last; out begins with the first."""
    lanes = _lanes(float_bits)
    tile = _pair_tile(float_bits, index_bits, lanes)
    index = load_index(index_bits)
    size = float_bits // 8
    read = PAIR.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        base = index(a.indptr, a.first)
        while True:
            row = a.first + next_rows(a.team, a.last - a.first, a.piece_rows)
            if row >= a.last:
                break
            for i in range(row, min(a.last, row + a.piece_rows)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                to = a.out + (start - base) * a.out_row
                for c in range(0, a.width, lanes):
                    o = c * size
                    tile(
                        a.near + i * a.near_row + o, a.far + o, a.far_row, a.indices, start, end, to + o,
                        a.out_row, a.width - c,
                    )  # fmt: skip

    return run


def _scatter_tile(float_bits: int, index_bits: int, lanes: int) -> Any:
    """out += sum over k of values[order[k]] on a masked tile."""

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        values, values_row, order, start, end, out, count = args
        mask = code.mask(count)
        index = load_index_ir(code, order, index_bits)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            return [b.fadd(sums[0], code.load(b.add(values, b.mul(index(k), values_row)), mask))]

        (total,) = code.loop(start, end, [code.load(out, mask)], step)
        code.store(total, out, mask)

    return tile_intrinsic(float_bits, 7, 0, body)


@functools.cache
def scatter(float_bits: int, index_bits: int) -> Any:
    """out[targets[r]] += sum of values[order[k]] over the k of group r; no target is named twice."""
    lanes = _lanes(float_bits)
    tile = _scatter_tile(float_bits, index_bits, lanes)
    index = load_index(index_bits)
    size = float_bits // 8
    read = SCATTER.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            for r in range(first, min(a.rows, first + a.piece_rows)):
                start, end = index(a.indptr, r), index(a.indptr, r + 1)
                to = a.out + index(a.targets, r) * a.out_row
                for c in range(0, a.width, lanes):
                    o = c * size
                    tile(a.values + o, a.values_row, a.order, start, end, to + o, a.width - c)

    return run


def _marks_tile(float_bits: int, is_back: bool) -> Any:
    """A masked tile of the edges [start, end) of a row: marks where values == near, or near where marked."""
    lanes = LANES_MARKED

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        near, values, values_row, marks, marks_row, start, end, count = args
        mask, zero = code.mask(count), code.constant(0.0)
        own, word = code.load(near, mask), ir.IntType(lanes)

        def step(e: Any, none: list[Any]) -> list[Any]:
            row = b.add(values, b.mul(e, values_row))
            where = b.inttoptr(b.add(marks, b.mul(e, marks_row)), word.as_pointer())
            if is_back:
                is_it = b.bitcast(b.load(where), ir.VectorType(ir.IntType(1), lanes))
                code.store(b.select(is_it, own, zero), row, mask)
            else:
                b.store(b.bitcast(b.fcmp_ordered("==", code.load(row, mask), own), word), where)
            return []

        code.loop(start, end, [], step)

    return tile_intrinsic(float_bits, 8, 0, body)


@functools.cache
def marks(float_bits: int, index_bits: int, is_back: bool) -> Any:
    """A bit for each edge and column: values[e] == near[i]; or (is_back) values[e] = near[i] where marked."""
    tile = _marks_tile(float_bits, is_back)
    index = load_index(index_bits)
    size = float_bits // 8
    read = MARKS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            for i in range(first, min(a.rows, first + a.piece_rows)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                for c in range(0, a.width, LANES_MARKED):
                    o = c * size
                    tile(
                        a.near + i * a.near_row + o, a.values + o, a.values_row, a.marks + c // 8,
                        a.marks_row, start, end, a.width - c,
                    )  # fmt: skip

    return run
