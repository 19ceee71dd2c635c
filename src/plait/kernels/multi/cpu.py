"""Several aggregators in one pass over the edges on the CPU: mean, sum, variance, deviation, max and min.

A tile of columns keeps the sum, the sum of squares, both extrema and, in training, how many edges attain them
while a row's neighbours go by. Backward turns each target's gradients into at most six rows side by side (a,
b, max, its share, min, its share), and one pass over sources adds a + b x[j] + what the extrema give back. A
row is summed by one thread in edge order, so the bits do not depend on the number of threads.

Columns of a node are `towers` groups of `width`; aggregators of one tower lie side by side.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.vector import CodeGen, load_index, load_index_ir, next_rows, row_intrinsic, tile_intrinsic

__all__ = ["AGGREGATORS", "FORWARD", "SHARES", "SOURCES", "forward", "sections", "shares", "sources"]

AGGREGATORS = ("mean", "sum", "var", "std", "max", "min")
# An aggregator's argument is its byte offset inside a tower's columns, -1 where it is not wanted.
_OFFSETS = " ".join(AGGREGATORS)
_EDGES = f"{PATTERN} last_edge width towers"
FORWARD = Arguments(f"{_EDGES} x[] out[] tower {_OFFSETS} ties[]")
SHARES = Arguments(f"rows piece_rows indptr width towers grad[] out[] tower {_OFFSETS} ties[] shares[]")
SOURCES = Arguments(f"{_EDGES} x[] shares[] out[]")

_LEAST_VARIANCE = 1e-5  # PyG: a standard deviation is 0 up to here, and has no gradient
_AHEAD = 8  # edges


def sections(has_spread: bool, has_ends: bool) -> int:
    """Rows side by side that backward keeps for a target: a, b where a variance is, four for the extrema."""
    return 1 + has_spread + 4 * has_ends


def _is_wanted(code: CodeGen, offset: Any) -> Any:
    return code.builder.icmp_signed(">=", offset, code.word(0))


def _square_root(code: CodeGen, value: Any) -> Any:
    kind = ir.FunctionType(code.vector, [code.vector])
    name = f"llvm.sqrt.v{code.lanes}f{code.float_bits}"
    return code.builder.call(code.builder.module.declare_intrinsic(name, fnty=kind), [value])


def _inverse_count(code: CodeGen, count: Any) -> Any:
    """1 / max(count, 1) in every lane."""
    b = code.builder
    count = b.select(b.icmp_signed(">", count, code.word(1)), count, code.word(1))
    return code.splat(b.fdiv(ir.Constant(code.scalar, 1.0), b.sitofp(count, code.scalar)))


def _counted(code: CodeGen, name: str, row: Any, best: Any, ties: Any) -> Any:
    """How many rows so far attain the extremum, this one included."""
    b, one = code.builder, code.constant(1.0)
    is_better = b.fcmp_ordered(">" if name == "max" else "<", row, best)
    more = b.select(b.fcmp_ordered("==", row, best), b.fadd(ties, one), ties)
    return b.select(is_better, one, more)


def _forward_row(float_bits: int, index_bits: int, has_ties: bool) -> Any:
    """One tower of one target; words: x x_row indices start end last out ties ties_step offsets... width."""

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, mask = code.builder, code.mask(count)
        x, x_row, indices, start, end, last, out, ties, ties_step = args[:9]
        offsets = dict(zip(AGGREGATORS, args[9:], strict=True))
        index = load_index_ir(code, indices, index_bits)
        zero = code.constant(0.0)
        is_empty = b.icmp_signed(">=", start, end)
        # deviations are taken from the row's first neighbour: squares of the rows themselves would cancel to
        # eps x^2, and at the least variance PyG keeps (1e-5) float32 would decide by noise
        base_row = code.either(
            b.not_(is_empty), lambda: code.load(b.add(x, b.mul(index(start), x_row)), mask), zero
        )

        def step(i: Any, carried: list[Any]) -> list[Any]:
            total, off, squares, most, least = carried[:5]
            code.ask_ahead([(x, x_row)], index, i, last, _AHEAD)
            row = code.load(b.add(x, b.mul(index(i), x_row)), mask)
            apart = b.fsub(row, base_row)
            result = [
                b.fadd(total, row),
                b.fadd(off, apart),
                code.multiply_add(apart, apart, squares),
                code.extremum("max", most, row),
                code.extremum("min", least, row),
            ]
            if has_ties:
                result.append(_counted(code, "max", row, most, carried[5]))
                result.append(_counted(code, "min", row, least, carried[6]))
            return result

        ends = [code.constant(float("-inf")), code.constant(float("inf"))]
        sums = code.loop(start, end, [zero, zero, zero, *ends, *([zero, zero] if has_ties else [])], step)
        inverse = _inverse_count(code, b.sub(end, start))
        mean, off = b.fmul(sums[0], inverse), b.fmul(sums[1], inverse)
        var = b.fsub(b.fmul(sums[2], inverse), b.fmul(off, off))
        is_flat = b.fcmp_ordered("<=", var, code.constant(_LEAST_VARIANCE))
        found = {
            "mean": mean,
            "sum": sums[0],
            "var": var,
            "std": b.select(is_flat, zero, _square_root(code, var)),
            "max": b.select(is_empty, zero, sums[3]),
            "min": b.select(is_empty, zero, sums[4]),
        }
        for name, value in found.items():
            with b.if_then(_is_wanted(code, offsets[name])):
                code.store(value, b.add(out, offsets[name]), mask)
        if has_ties:
            code.store(sums[5], ties, mask)
            code.store(sums[6], b.add(ties, ties_step), mask)

    moving = dict.fromkeys((0, 6, 7), float_bits)
    return row_intrinsic(float_bits, 16, 0, moving, body, _lanes(float_bits))


def _lanes(float_bits: int) -> tuple[int, int]:
    """Columns of a tile: two vector registers of 512 bits, for up to six accumulators, or one."""
    return 1024 // float_bits, 512 // float_bits


def forward(float_bits: int, index_bits: int, has_ties: bool) -> Any:
    """Every wanted aggregator of every row, and how many edges attain its extrema."""
    row = _forward_row(float_bits, index_bits, has_ties)
    size = float_bits // 8

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        step = a.width * size
        for t in range(a.towers):
            to, ties = a.out + i * a.out_row + t * a.tower, a.ties + i * a.ties_row + 2 * t * step
            row(a.x + t * step, a.x_row, a.indices, start, end, a.last_edge, to, ties, step,
                a.mean, a.sum, a.var, a.std, a.max, a.min, a.width)  # fmt: skip

    return FORWARD.row_kernel(index_bits, each)


def _shares_tile(float_bits: int, lanes: int, has_spread: bool, has_ends: bool) -> Any:
    """One masked tile of one target: its gradients as the rows that the pass over sources gathers."""

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        grad, out, ties, step, to, degree, count = args[:7]
        offsets = dict(zip(AGGREGATORS, args[7:], strict=True))
        mask, zero = code.mask(count), code.constant(0.0)
        inverse = _inverse_count(code, degree)

        def given(name: str) -> Any:
            where = b.add(grad, offsets[name])
            return code.either(_is_wanted(code, offsets[name]), lambda: code.load(where, mask), zero)

        def section(k: int) -> Any:
            return b.add(to, b.mul(step, code.word(k)))

        a = b.fadd(b.fmul(given("mean"), inverse), given("sum"))
        if has_spread:
            deviation = code.either(
                _is_wanted(code, offsets["std"]), lambda: code.load(b.add(out, offsets["std"]), mask), zero
            )
            is_flat = b.fcmp_ordered("==", deviation, zero)
            from_std = b.select(
                is_flat, zero, b.fdiv(given("std"), b.select(is_flat, code.constant(1.0), deviation))
            )
            slope = b.fmul(inverse, code.multiply_add(code.constant(2.0), given("var"), from_std))
            mean = code.load(b.add(out, offsets["mean"]), mask)
            a = b.fsub(a, b.fmul(slope, mean))
            code.store(slope, section(1), mask)
        code.store(a, section(0), mask)
        if has_ends:
            for k, name in enumerate(("max", "min")):
                attained = code.load(b.add(ties, b.mul(step, code.word(k))), mask)
                attained = code.extremum("max", attained, code.constant(1.0))
                where = b.add(out, offsets[name])
                best = code.either(
                    _is_wanted(code, offsets[name]), functools.partial(code.load, where, mask), zero
                )
                at = 1 + has_spread + 2 * k
                code.store(best, section(at), mask)
                code.store(b.fdiv(given(name), attained), section(at + 1), mask)

    return tile_intrinsic(float_bits, 13, 0, body)


def shares(float_bits: int, index_bits: int, has_spread: bool, has_ends: bool) -> Any:
    """Every target's gradients as rows side by side: a, b, max, its share, min, its share."""
    lanes = _lanes(float_bits)[0]
    tile = _shares_tile(float_bits, lanes, has_spread, has_ends)
    index = load_index(index_bits)
    size = float_bits // 8
    parts = sections(has_spread, has_ends)
    read = SHARES.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        step = a.width * size
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            for i in range(first, min(a.rows, first + a.piece_rows)):
                degree = index(a.indptr, i + 1) - index(a.indptr, i)
                for t in range(a.towers):
                    g, o = a.grad + i * a.grad_row + t * a.tower, a.out + i * a.out_row + t * a.tower
                    n, s = (
                        a.ties + i * a.ties_row + 2 * t * step,
                        a.shares + i * a.shares_row + parts * t * step,
                    )
                    for c in range(0, a.width, lanes):
                        k = c * size
                        tile(g + k, o + k, n + k, step, s + k, degree, a.width - c,
                             a.mean, a.sum, a.var, a.std, a.max, a.min)  # fmt: skip

    return run


def _source_row(float_bits: int, index_bits: int, has_spread: bool, has_ends: bool) -> Any:
    """One tower of one source; words: own rows rows_row step indices start end last out width."""

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, mask = code.builder, code.mask(count)
        own, rows, rows_row, step, indices, start, end, last, out = args
        index = load_index_ir(code, indices, index_bits)
        mine, zero = code.load(own, mask), code.constant(0.0)
        parts = sections(has_spread, has_ends)

        def edge(i: Any, sums: list[Any]) -> list[Any]:
            ahead = b.add(i, code.word(_AHEAD))
            ahead = b.select(b.icmp_signed("<", ahead, last), ahead, last)
            next_row = b.add(rows, b.mul(index(ahead), rows_row))
            row = b.add(rows, b.mul(index(i), rows_row))
            at = [b.mul(step, code.word(k)) for k in range(parts)]
            for offset in at:
                code.prefetch(b.add(next_row, offset), code.lanes * float_bits // 8)
            total = b.fadd(sums[0], code.load(row, mask))
            if has_spread:
                total = code.multiply_add(code.load(b.add(row, at[1]), mask), mine, total)
            if has_ends:
                for k in (1 + has_spread, 3 + has_spread):
                    is_it = b.fcmp_ordered("==", code.load(b.add(row, at[k]), mask), mine)
                    total = b.fadd(total, b.select(is_it, code.load(b.add(row, at[k + 1]), mask), zero))
            return [total]

        (total,) = code.loop(start, end, [zero], edge)
        code.store(total, out, mask)

    moving = dict.fromkeys((0, 1, 8), float_bits)
    return row_intrinsic(float_bits, 10, 0, moving, body, _lanes(float_bits))


def sources(float_bits: int, index_bits: int, has_spread: bool, has_ends: bool) -> Any:
    """out[j] = sum over targets of a + b x[j] + the extrema's shares where x[j] attains them."""
    row = _source_row(float_bits, index_bits, has_spread, has_ends)
    size, parts = float_bits // 8, sections(has_spread, has_ends)

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        step = a.width * size
        for t in range(a.towers):
            own, to = a.x + j * a.x_row + t * step, a.out + j * a.out_row + t * step
            row(own, a.shares + parts * t * step, a.shares_row, step, a.indices, start, end, a.last_edge, to,
                a.width)  # fmt: skip

    return SOURCES.row_kernel(index_bits, each)
