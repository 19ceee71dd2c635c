"""relu(near[i] + far[j]) @ w + bias of every edge under a maximum or minimum, and its gradients, on the CPU.

Forwards a tile of edges is gathered, multiplied and reduced while it is in the first caches; one bit per edge
and column remembers who attained the extremum. Few do: a target hands its gradient to one edge per column, so
backwards the products with `w` go over the set bits alone, and an edge without any is not even gathered.
The gradients of the sources are made on the transpose from the same bits: nothing of edges x width is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.gemm.cpu import multiply_rows
from plait.kernels.spmm.cpu import PREFETCH_LANES, ask_ahead
from plait.kernels.spmm.marked import Parts
from plait.kernels.vector import (
    I64,
    CodeGen,
    fetch_add,
    load_index,
    load_index_ir,
    next_piece,
    row_intrinsic,
    tile_intrinsic,
)

__all__ = ["ATTAIN", "JOIN", "SOURCES", "TARGETS", "attain", "join", "sources", "targets"]

# table[tile]: first row, last row, first edge, which part of a row that is cut (-1: its rows are whole)
ATTAIN = Arguments(
    "slots tiles table indptr indices near[] far[] inner w[] bias width out[] ties[] marks[] parts part_ties "
    "last_edge scratch scratch_bytes slot_counter"
)
# cuts[k]: a row, its first tile, the tile after its last
JOIN = Arguments("rows cuts table out[] ties[] marks[] parts part_ties width")
_BACK = "near[] far[] inner turned[] share[] marks[] mark_words"
TARGETS = Arguments(f"chunks bounds indptr indices {_BACK} width out[] part part_bias last_edge")
SOURCES = Arguments(f"{PATTERN} order {_BACK} out[] last_edge")

_HEIGHT = 4  # rows of a product held in registers
_WORD = 64  # marks that are read at once


def _lanes(float_bits: int) -> tuple[int, ...]:
    """Tiles of columns of which four rows stay in registers."""
    return (64, 32, 16) if float_bits == 32 else (32, 16, 8)


def _relu(code: CodeGen, x: Any) -> Any:
    """max(x, 0) that keeps NaN."""
    b, zero = code.builder, code.constant(0.0)
    return b.select(b.fcmp_ordered("<=", x, zero), zero, x)


# Forwards -------------------------------------------------------------------------------------------------


def _rectify(float_bits: int, index_bits: int) -> Any:
    """out[e] = relu(near + far[j]).

    words: near far far_stride indices start end out out_stride last width.
    """

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        near, far, stride, indices, start, end, out, out_stride, last = args
        b, mask = code.builder, code.mask(count)
        own, index = code.load(near, mask), load_index_ir(code, indices, index_bits)

        def step(e: Any, none: list[Any]) -> list[Any]:
            if code.lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(code, index, e, last, [(far, stride)])
            row = code.load(b.add(far, b.mul(index(e), stride)), mask)
            code.store(_relu(code, b.fadd(own, row)), b.add(out, b.mul(b.sub(e, start), out_stride)), mask)
            return []

        code.loop(start, end, [], step)

    return row_intrinsic(float_bits, 10, 0, dict.fromkeys((0, 1, 6), float_bits), body, _lanes(float_bits))


def _extreme(float_bits: int, mode: str, has_marks: bool) -> Any:
    """The extremum of rows that follow each other, how many attain it and which.

    words: rows stride count out ties marks marks_stride is_part width. Of a part of a row the ties are
    counted as they are: what torch adds to them is added when the parts are joined.
    """

    def body(tile: CodeGen, args: list[Any], columns: Any) -> None:
        rows, stride, count, out, ties, marks, marks_stride, is_part = args
        parts = Parts(tile, columns)
        code, b = parts.code, tile.builder
        zero, one, start = code.constant(0.0), code.constant(1.0), code.word(0)

        def better(e: Any, best: list[Any]) -> list[Any]:
            row = parts.row(b.add(rows, b.mul(e, stride)))
            return [code.extremum(mode, p, q) for p, q in zip(best, row, strict=True)]

        best = code.loop(start, count, parts.splat(float("-inf") if mode == "max" else float("inf")), better)
        best = [b.select(b.icmp_signed(">=", start, count), zero, value) for value in best]
        parts.store(best, out)
        if not has_marks:
            return

        def mark(e: Any, attained: list[Any]) -> list[Any]:
            row = parts.row(b.add(rows, b.mul(e, stride)))
            to, made = parts.marks(b.add(marks, b.mul(e, marks_stride))), []
            for k, (value, extreme, many) in enumerate(zip(row, best, attained, strict=True)):
                is_equal = b.fcmp_ordered("==", value, extreme)
                if parts.mask is not None:
                    is_equal = b.and_(is_equal, parts.mask)
                b.store(b.bitcast(is_equal, parts.word), b.gep(to, [code.word(k)]), align=1)
                made.append(b.fadd(many, b.select(is_equal, one, zero)))
            return made

        attained = code.loop(start, count, parts.splat(0.0), mark)
        parts.store([_shared(code, *pair, is_part) for pair in zip(best, attained, strict=True)], ties)

    moving = dict.fromkeys((0, 3, 4), float_bits) | {5: 1}
    return row_intrinsic(float_bits, 9, 0, moving, body, _lanes(float_bits))


def _shared(code: CodeGen, extreme: Any, attained: Any, is_part: Any) -> Any:
    """Among how many the gradient is shared: torch counts its zero-filled output where that is attained."""
    b, zero, one = code.builder, code.constant(0.0), code.constant(1.0)
    many = b.fadd(attained, b.select(b.fcmp_ordered("==", extreme, zero), one, zero))
    many = b.select(b.fcmp_ordered("==", many, zero), one, many)
    return b.select(code.is_given(is_part), attained, many)


def _clear() -> Any:
    """A numba function: the 64-bit words of zeros at an address."""

    def body(code: CodeGen, args: list[Any]) -> None:
        start, count = args
        b = code.builder

        def step(k: Any, none: list[Any]) -> list[Any]:
            where = b.inttoptr(b.add(start, b.mul(k, code.word(8))), I64.as_pointer())
            b.store(code.word(0), where, align=1)
            return []

        code.loop(code.word(0), count, [], step)

    return tile_intrinsic(32, 2, 0, body)


@functools.cache
def attain(float_bits: int, index_bits: int, mode: str, has_marks: bool) -> Any:
    """out[i] = the extremum of relu(near[i] + far[j]) @ w + bias; with marks also who attains it."""
    rectify = _rectify(float_bits, index_bits)
    multiply, extreme = multiply_rows(float_bits, _HEIGHT), _extreme(float_bits, mode, has_marks)
    index, word, clear = load_index(index_bits), load_index(64), _clear()
    size = float_bits // 8
    read = ATTAIN.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        hidden = a.scratch + fetch_add(a.slots) * a.scratch_bytes
        across, along = a.inner * size, a.width * size
        while True:
            tile = next_piece(a.team, a.tiles)
            if tile >= a.tiles:
                break
            first, last = word(a.table, 4 * tile), word(a.table, 4 * tile + 1)
            begin, part, end = (
                word(a.table, 4 * tile + 2), word(a.table, 4 * tile + 3), word(a.table, 4 * tile + 6),
            )  # fmt: skip
            made = hidden + (end - begin) * across
            for i in range(first, last):
                start, stop = max(begin, index(a.indptr, i)), min(end, index(a.indptr, i + 1))
                rectify(
                    a.near + i * a.near_row, a.far, a.far_row, a.indices, start, stop,
                    hidden + (start - begin) * across, across, a.last_edge, a.inner,
                )  # fmt: skip
            multiply(hidden, across, end - begin, a.inner, a.w, a.w_row, a.width, made, along, 0, 0, a.bias)
            if has_marks and a.width % 64 != 0:
                for e in range(begin, end):
                    clear(a.marks + e * a.marks_row, a.marks_row // 8)
            for i in range(first, last):
                start, stop = max(begin, index(a.indptr, i)), min(end, index(a.indptr, i + 1))
                to, ties, is_part = a.out + i * a.out_row, a.ties + i * a.ties_row, 0
                if part >= 0:
                    to, ties, is_part = a.parts + part * along, a.part_ties + part * along, 1
                extreme(
                    made + (start - begin) * along, along, stop - start, to, ties,
                    a.marks + start * a.marks_row, a.marks_row, is_part, a.width,
                )  # fmt: skip

    return run


def _join(float_bits: int, mode: str, has_marks: bool) -> Any:
    """A row that was cut: the extremum of its parts; marks and ties of parts below it are dropped.

    words: parts part_ties stride first last table out ties marks marks_stride width; the row's tiles are
    those from first to last.
    """

    def body(tile: CodeGen, args: list[Any], columns: Any) -> None:
        values, counts, stride, first, last, table, out, ties, marks, marks_stride = args
        parts = Parts(tile, columns)
        code, b = parts.code, tile.builder
        zero, entry = code.constant(0.0), load_index_ir(code, table, 64)

        def place(k: Any, column: int) -> Any:
            return entry(b.add(b.mul(k, code.word(4)), code.word(column)))

        def better(k: Any, best: list[Any]) -> list[Any]:
            row = parts.row(b.add(values, b.mul(place(k, 3), stride)))
            return [code.extremum(mode, p, q) for p, q in zip(best, row, strict=True)]

        start = parts.splat(float("-inf") if mode == "max" else float("inf"))
        best = code.loop(first, last, start, better)
        parts.store(best, out)
        if not has_marks:
            return

        def keep(k: Any, attained: list[Any]) -> list[Any]:
            row = parts.row(b.add(values, b.mul(place(k, 3), stride)))
            many = parts.row(b.add(counts, b.mul(place(k, 3), stride)))
            reach = [b.fcmp_ordered("==", p, q) for p, q in zip(row, best, strict=True)]
            words = [b.bitcast(flags, parts.word) for flags in reach]

            def drop(e: Any, none: list[Any]) -> list[Any]:
                at = parts.marks(b.add(marks, b.mul(e, marks_stride)))
                for n, flags in enumerate(words):
                    where = b.gep(at, [code.word(n)])
                    b.store(b.and_(b.load(where, align=1), flags), where, align=1)
                return []

            code.loop(place(k, 2), place(k, 6), [], drop)
            return [
                b.fadd(total, b.select(flags, count, zero))
                for total, flags, count in zip(attained, reach, many, strict=True)
            ]

        attained = code.loop(first, last, parts.splat(0.0), keep)
        shared = [_shared(code, *pair, code.word(0)) for pair in zip(best, attained, strict=True)]
        parts.store(shared, ties)

    moving = dict.fromkeys((0, 1, 6, 7), float_bits) | {8: 1}
    return row_intrinsic(float_bits, 11, 0, moving, body, _lanes(float_bits))


@functools.cache
def join(float_bits: int, mode: str, has_marks: bool) -> Any:
    """The rows that are cut into several tiles, from their parts."""
    row, word = _join(float_bits, mode, has_marks), load_index(64)
    size = float_bits // 8
    read = JOIN.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            k = next_piece(a.team, a.rows)
            if k >= a.rows:
                break
            i = word(a.cuts, 3 * k)
            row(
                a.parts, a.part_ties, a.width * size, word(a.cuts, 3 * k + 1), word(a.cuts, 3 * k + 2),
                a.table, a.out + i * a.out_row, a.ties + i * a.ties_row, a.marks, a.marks_row, a.width,
            )  # fmt: skip

    return run


# Backwards ------------------------------------------------------------------------------------------------


def _set_bits(code: CodeGen, marks: Any, words: Any, carried: Any, each: Callable[[Any, Any], Any]) -> Any:
    """carried = each(column, carried) for every set bit of an edge's marks."""
    b, one = code.builder, code.word(1)
    count = b.module.declare_intrinsic("llvm.ctpop", [I64])
    trailing = b.module.declare_intrinsic("llvm.cttz", [I64], ir.FunctionType(I64, [I64, ir.IntType(1)]))

    def word(k: Any, outer: list[Any]) -> list[Any]:
        bits = b.load(b.inttoptr(b.add(marks, b.mul(k, code.word(8))), I64.as_pointer()), align=1)
        base = b.mul(k, code.word(_WORD))

        def bit(_: Any, inner: list[Any]) -> list[Any]:
            left, value = inner
            column = b.add(base, b.call(trailing, [left, ir.Constant(ir.IntType(1), 1)]))
            return [b.and_(left, b.sub(left, one)), each(column, value)]

        return code.loop(code.word(0), b.call(count, [bits]), [bits, outer[0]], bit)[1:]

    (result,) = code.loop(code.word(0), words, [carried], word)
    return result


def _is_marked(code: CodeGen, marks: Any, words: Any) -> Any:
    """Whether any bit of an edge's marks is set."""
    b = code.builder

    def either(k: Any, seen: list[Any]) -> list[Any]:
        where = b.inttoptr(b.add(marks, b.mul(k, code.word(8))), I64.as_pointer())
        return [b.or_(seen[0], b.load(where, align=1))]

    (seen,) = code.loop(code.word(0), words, [code.word(0)], either)
    return code.is_given(seen)


def _back(float_bits: int, index_bits: int, is_target: bool) -> Any:
    """out = sum over a node's edges of relu'(own + other) * sum over marked columns c of share[c] turned[c].

    words: own other other_stride indices order start end turned turned_stride share share_stride marks
    marks_stride words out part part_bias first last width. At a target (`other` are sources, order 0) the
    marks lie in the edges' order and share is its own row (stride 0); part[c] += share[c] relu(own + other)
    and part_bias[c] += share[c] are the gradients of w and of the bias. `first`: `own` at column 0.
    """

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        own, other, other_stride, indices, order, start, end, turned, turned_stride, share = args[:10]
        share_stride, marks, marks_stride, words, out, part, part_bias, first, last = args[10:]
        b, mask, zero = code.builder, code.mask(count), code.constant(0.0)
        mine, index = code.load(own, mask), load_index_ir(code, indices, index_bits)
        place = (lambda e: e) if is_target else load_index_ir(code, order, index_bits)
        is_first = b.icmp_signed("==", own, first)
        scalar = code.scalar.as_pointer()

        def step(e: Any, totals: list[Any]) -> list[Any]:
            if code.lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(code, index, e, last, [(other, other_stride)])
                if not is_target:
                    ask_ahead(code, index, e, last, [(share, share_stride)])
                    ask_ahead(code.of(1), place, e, last, [(marks, marks_stride)])
            bits = b.add(marks, b.mul(place(e), marks_stride))

            def more() -> Any:
                j = index(e)
                given = b.inttoptr(b.add(share, b.mul(j, share_stride)), scalar)
                x = b.fadd(mine, code.load(b.add(other, b.mul(j, other_stride)), mask))
                rectified = _relu(code, x)

                def each(column: Any, total: Any) -> Any:
                    number = b.load(b.gep(given, [column]))
                    g = code.splat(number)
                    row = code.load(b.add(turned, b.mul(column, turned_stride)), mask)
                    if is_target:
                        to = b.add(part, b.mul(column, turned_stride))
                        code.store(code.multiply_add(g, rectified, code.load(to, mask)), to, mask)
                        with b.if_then(is_first):
                            at = b.gep(b.inttoptr(part_bias, scalar), [column])
                            b.store(b.fadd(b.load(at), number), at)
                    return code.multiply_add(g, row, total)

                through = _set_bits(code, bits, words, zero, each)
                return b.fadd(totals[0], b.select(b.fcmp_ordered("<=", x, zero), zero, through))

            return [code.either(_is_marked(code, bits, words), more, totals[0])]

        (total,) = code.loop(start, end, [zero], step)
        code.store(total, out, mask)

    moving = dict.fromkeys((0, 1, 7, 14, 15), float_bits)
    return row_intrinsic(float_bits, 20, 0, moving, body, _lanes(float_bits))


@functools.cache
def targets(float_bits: int, index_bits: int) -> Any:
    """The gradients of the targets' rows, and chunk by chunk of w (transposed) and of the bias."""
    row, index, bound = _back(float_bits, index_bits, True), load_index(index_bits), load_index(64)
    clear, size = _clear(), float_bits // 8
    read = TARGETS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        turned = a.inner * size
        while True:
            chunk = next_piece(a.team, a.chunks)
            if chunk >= a.chunks:
                break
            # rows of parts are a whole number of cache lines apart
            whole, bias = a.width * turned, (a.width * size + 63) // 64 * 64
            part, part_bias = a.part + chunk * ((whole + 63) // 64 * 64), a.part_bias + chunk * bias
            clear(part, (whole + 63) // 64 * 8)
            clear(part_bias, bias // 8)
            for i in range(bound(a.bounds, chunk), bound(a.bounds, chunk + 1)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                own = a.near + i * a.near_row
                row(
                    own, a.far, a.far_row, a.indices, 0, start, end, a.turned, turned,
                    a.share + i * a.share_row, 0, a.marks, a.marks_row, a.mark_words,
                    a.out + i * a.out_row, part, part_bias, own, a.last_edge, a.inner,
                )  # fmt: skip

    return run


@functools.cache
def sources(float_bits: int, index_bits: int) -> Any:
    """The gradients of the sources' rows, on the transpose."""
    row = _back(float_bits, index_bits, False)

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        own = a.far + j * a.far_row
        row(
            own, a.near, a.near_row, a.indices, a.order, start, end, a.turned, a.turned_row, a.share,
            a.share_row, a.marks, a.marks_row, a.mark_words, a.out + j * a.out_row, 0, 0, own,
            a.last_edge, a.inner,
        )  # fmt: skip

    return SOURCES.row_kernel(index_bits, each)
