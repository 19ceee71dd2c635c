"""The sparse product on the CPU: a tile of columns stays in vector registers while a row's neighbours go by.

One kernel serves every width: 128, 64, 32 and 16 lanes, then a masked rest. Up to 32 columns (16 of float64)
a row is one tile, and a kernel that has no other is compiled for them: to ask every row for wider tiles is a
good part of the time of rows with few edges. The sums are those of the ladder, bit by bit, except for 17
to 31 columns (9 to 15), which the ladder takes in two tiles with more accumulators each. What varies in
the inner loop (edge weights, source scaling, max, min) is compiled apart; what happens once a row (target
scaling, an added term, a bias) is a predictable branch. Pieces of rows are claimed from an atomic counter, a
row is always summed by one thread in edge order, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.vector import (
    I32,
    CodeGen,
    load_index,
    load_index_ir,
    load_scalar,
    one_tile,
    row_intrinsic,
    tile_intrinsic,
)

__all__ = [
    "ATTAINED", "EXTREMUM", "NARROW_BYTES", "PREFETCH_LANES", "SPMM", "WEIGHT_GRADIENT", "ask_ahead",
    "attained_kernel", "extremum_kernel", "kernel", "sum_row", "weight_gradient_kernel",
]  # fmt: skip

SPMM = Arguments(f"{PATTERN} x[] out[] width edge source target addend[] addend_scale bias last_edge")
EXTREMUM = Arguments(f"{PATTERN} x[] out[] ties[] width last_edge")
ATTAINED = Arguments(f"{PATTERN} best[] x[] share[] out[] addend[] width last_edge")
WEIGHT_GRADIENT = Arguments(f"{PATTERN} x[] grad[] out width")

# Tiles this wide prefetch the rows of later edges, those of the next nodes among them: 10% of a product whose
# rows are near, 20 to 40% of one whose rows another step has pushed out (one core). A narrower tile has
# too little to add up meanwhile: 16 columns lost as often as they gained.
PREFETCH_LANES = {32: 32, 64: 16}

# rows up to this long are one tile; a longer one has enough to do for the ladder not to show
NARROW_BYTES = 128
_SHORT_BITS = 512  # rows of one tile up to this wide have little to do for an edge
_WIDE_BYTES = 512  # a row of this many bytes is many lines to prefetch: fewer edges ahead


def _unroll(lanes: int, float_bits: int) -> int:
    """Independent accumulators per tile: one narrow accumulator would wait for its own last addition."""
    registers = lanes * float_bits // 512
    return {0: 4, 1: 4, 2: 2}.get(registers, 1)


def sum_row(float_bits: int, index_bits: int, mode: str, lanes: int = 0, is_masked: bool = False) -> Any:
    """Writes one output row; words: x stride indices factor start end out addend bias last width, then the
    scalings of the sum and of the added row. `lanes` > 0: rows of that many columns, or fewer if masked."""

    is_short = 0 < lanes * float_bits <= _SHORT_BITS

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, lanes = code.builder, code.lanes
        x, stride, indices, factor, start, end, out, addend, bias, last, target, addend_scale = args
        mask = code.mask(count)
        index = load_index_ir(code, indices, index_bits)

        def step(i: Any, total: Any) -> Any:
            j = index(i)
            if lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(code, index, i, last, [(x, stride)])
            row = code.load(b.add(x, b.mul(j, stride)), mask)
            if mode in ("max", "min"):
                return code.extremum(mode, total, row)
            if mode == "plain":
                return b.fadd(total, row)
            scalars = b.inttoptr(factor, code.scalar.as_pointer())
            weight = b.load(b.gep(scalars, [i if mode == "edge" else j]))
            return code.multiply_add(code.splat(weight), row, total)

        start_value = {"max": float("-inf"), "min": float("inf")}.get(mode, 0.0)
        total = _reduce_row(code, mode, _unroll(lanes, float_bits), start, end, start_value, step, is_short)
        if mode in ("max", "min"):
            is_empty = b.icmp_signed(">=", start, end)
            total = b.select(is_empty, code.constant(0.0), total)
        total = b.fmul(total, code.splat(target))
        total = code.either(
            code.is_given(addend),
            lambda: code.multiply_add(code.splat(addend_scale), code.load(addend, mask), total),
            total,
        )
        total = code.either(code.is_given(bias), lambda: b.fadd(total, code.load(bias, mask)), total)
        code.store(total, out, mask)

    if lanes:
        return one_tile(float_bits, 11, 2, body, lanes, is_masked)
    moving = dict.fromkeys((0, 6, 7, 8), float_bits)
    return row_intrinsic(float_bits, 11, 2, moving, body)


def ask_ahead(code: CodeGen, index: Any, i: Any, last: Any, rows: list[tuple[Any, Any]]) -> None:
    """Ask for the rows of an edge some places on."""
    code.ask_ahead(rows, index, i, last, 8 if code.lanes * code.float_bits // 8 >= _WIDE_BYTES else 16)


def _reduce_row(
    code: CodeGen, mode: str, unroll: int, start: Any, end: Any, first: float, step: Any, is_short: bool
) -> Any:
    """Fold `step` over the edges [start, end) with `unroll` accumulators joined in a fixed order."""
    b = code.builder
    groups = b.sdiv(b.sub(end, start), code.word(unroll))

    def group(g: Any, totals: list[Any]) -> list[Any]:
        base = b.add(start, b.mul(g, code.word(unroll)))
        return [step(b.add(base, code.word(k)), total) for k, total in enumerate(totals)]

    totals = code.loop(code.word(0), groups, [code.constant(first)] * unroll, group, is_short)
    if unroll > 1:
        done = b.add(start, b.mul(groups, code.word(unroll)))
        totals[0] = code.either(
            b.icmp_signed("<", start, end),
            lambda: _rest(code, unroll - 1, start, done, end, totals[0], step),
            totals[0],
        )
    while len(totals) > 1:
        join = (lambda p, q: code.extremum(mode, p, q)) if mode in ("max", "min") else b.fadd
        totals = [join(totals[k], totals[k + 1]) for k in range(0, len(totals), 2)]
    return totals[0]


def _rest(code: CodeGen, most: int, start: Any, first: Any, end: Any, total: Any, step: Any) -> Any:
    """`step` over the edges [first, end), of which there are at most `most`, without asking how many.

    Where an edge is missing, the row's first one is added and the sum dropped: the processor cannot predict
    how many are left over, and to guess wrong takes longer than all of them.
    """
    b = code.builder
    numbers = ir.VectorType(I32, code.lanes)
    # lane by lane: LLVM makes a branch of a choice between whole vectors
    left = code.splat_of(b.trunc(b.sub(end, first), I32), numbers)
    for k in range(most):
        i = b.add(first, code.word(k))
        more = step(b.select(b.icmp_signed("<", i, end), i, start), total)
        total = b.select(b.icmp_signed(">", left, ir.Constant(numbers, [k] * code.lanes)), more, total)
    return total


def kernel(float_bits: int, index_bits: int, mode: str, lanes: int = 0, is_masked: bool = False) -> Any:
    """The compiled kernel; mode is plain, edge, source, max or min. For `lanes` see `sum_row`."""
    row = sum_row(float_bits, index_bits, mode, lanes, is_masked)
    scalar, uses_edges = load_scalar(float_bits), mode == "edge"

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        factor = a.edge if uses_edges else a.source
        t, s = scalar(a.target, i), scalar(a.addend_scale, i)
        plus = a.addend + i * a.addend_row if a.addend != 0 else 0
        row(a.x, a.x_row, a.indices, factor, start, end, a.out + i * a.out_row, plus, a.bias, a.last_edge,
            a.width, t, s)  # fmt: skip

    return SPMM.row_kernel(index_bits, each)


def _extremum_row(float_bits: int, index_bits: int, mode: str) -> Any:
    """best[i] and how many edges attain it; words: x stride indices start end out ties last width."""

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, lanes = code.builder, code.lanes
        x, stride, indices, start, end, out, ties, last = args
        mask = code.mask(count)
        index = load_index_ir(code, indices, index_bits)
        zero, one = code.constant(0.0), code.constant(1.0)

        def step(i: Any, carried: list[Any]) -> list[Any]:
            best, attained = carried
            if lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(code, index, i, last, [(x, stride)])
            row = code.load(b.add(x, b.mul(index(i), stride)), mask)
            # one that is better starts to count again; NaN is never attained
            is_better = b.fcmp_ordered(">" if mode == "max" else "<", row, best)
            counted = b.select(is_better, zero, attained)
            is_attained = b.or_(is_better, b.fcmp_ordered("==", row, best))
            counted = b.select(is_attained, b.fadd(counted, one), counted)
            return [b.select(b.or_(is_better, code.is_nan(row)), row, best), counted]

        worst = code.constant(float("-inf") if mode == "max" else float("inf"))
        best, attained = code.loop(start, end, [worst, zero], step)
        best = b.select(b.icmp_signed(">=", start, end), zero, best)
        # torch counts the zero-filled output as one more tie where the extremum is zero
        attained = b.fadd(attained, b.select(b.fcmp_ordered("==", best, zero), one, zero))
        attained = b.select(b.fcmp_ordered("==", attained, zero), one, attained)
        code.store(best, out, mask)
        code.store(attained, ties, mask)

    return row_intrinsic(float_bits, 9, 0, dict.fromkeys((0, 5, 6), float_bits), body)


def _attained_row(float_bits: int, index_bits: int) -> Any:
    """out[j] = sum over targets i of share[i] where best[i] == x[j], plus an added row.

    words: best best_stride near indices share share_stride start end out addend last width.
    """

    def body(code: CodeGen, args: list[Any], count: Any) -> None:
        b, lanes = code.builder, code.lanes
        best, best_stride, near, indices, share, share_stride, start, end, out, addend, last = args
        mask = code.mask(count)
        mine = code.load(near, mask)
        index = load_index_ir(code, indices, index_bits)
        zero = code.constant(0.0)

        def step(e: Any, total: list[Any]) -> list[Any]:
            i = index(e)
            if lanes >= PREFETCH_LANES[float_bits]:
                ask_ahead(code, index, e, last, [(best, best_stride), (share, share_stride)])
            is_equal = b.fcmp_ordered("==", code.load(b.add(best, b.mul(i, best_stride)), mask), mine)
            worth = code.load(b.add(share, b.mul(i, share_stride)), mask)
            return [b.fadd(total[0], b.select(is_equal, worth, zero))]

        (total,) = code.loop(start, end, [zero], step)
        total = code.either(code.is_given(addend), lambda: b.fadd(total, code.load(addend, mask)), total)
        code.store(total, out, mask)

    return row_intrinsic(float_bits, 12, 0, dict.fromkeys((0, 2, 4, 8, 9), float_bits), body)


def extremum_kernel(float_bits: int, index_bits: int, mode: str) -> Any:
    """max or min and the number of edges that attain it."""
    row = _extremum_row(float_bits, index_bits, mode)

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        to, ties = a.out + i * a.out_row, a.ties + i * a.ties_row
        row(a.x, a.x_row, a.indices, start, end, to, ties, a.last_edge, a.width)

    return EXTREMUM.row_kernel(index_bits, each)


def attained_kernel(float_bits: int, index_bits: int) -> Any:
    """The gradient of max and min on the transpose."""
    row = _attained_row(float_bits, index_bits)

    def each(a: Any, j: Any, start: Any, end: Any) -> None:
        plus = a.addend + j * a.addend_row if a.addend != 0 else 0
        row(a.best, a.best_row, a.x + j * a.x_row, a.indices, a.share, a.share_row, start, end,
            a.out + j * a.out_row, plus, a.last_edge, a.width)  # fmt: skip

    return ATTAINED.row_kernel(index_bits, each)


def _dot_tile(float_bits: int, lanes: int) -> Any:
    """out[e] (+)= near . far[e] over one masked tile; words: near far out count is_first."""

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        near, far, out, count, is_first = args
        mask = code.mask(count)
        product = b.fmul(code.load(near, mask), code.load(far, mask))
        name = f"llvm.vector.reduce.fadd.v{lanes}f{float_bits}"
        function = b.module.declare_intrinsic(
            name, fnty=ir.FunctionType(code.scalar, [code.scalar, code.vector])
        )
        total = b.call(function, [ir.Constant(code.scalar, 0.0), product], fastmath=("reassoc",))
        where = b.inttoptr(out, code.scalar.as_pointer())
        total = code.either(
            b.icmp_signed("==", is_first, code.word(0)), lambda: b.fadd(total, b.load(where)), total
        )
        b.store(total, where)

    return tile_intrinsic(float_bits, 5, 0, body)


def weight_gradient_kernel(float_bits: int, index_bits: int) -> Any:
    """out[e] = grad[i] . x[j]."""
    lanes = 32 if float_bits == 32 else 16
    tile = _dot_tile(float_bits, lanes)
    index = load_index(index_bits)
    size = float_bits // 8

    def each(a: Any, i: Any, start: Any, end: Any) -> None:
        for e in range(start, end):
            far = a.x + index(a.indices, e) * a.x_row
            for c in range(0, a.width, lanes):
                o = c * size
                is_first = 1 if c == 0 else 0
                tile(a.grad + i * a.grad_row + o, far + o, a.out + e * size, a.width - c, is_first)

    return WEIGHT_GRADIENT.row_kernel(index_bits, each)
