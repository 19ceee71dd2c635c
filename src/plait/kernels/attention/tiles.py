"""The pieces of attention kernels as LLVM vectors: scores, exponentials, and weighted sums of gathered rows.

A row's edges are taken in blocks of at most BLOCK: the scores of a block lie in a small array on the stack,
[edge][head], heads padded to a power of two (`lanes`). "far" rows are gathered by the indices of the block,
the "near" row is the row's own. Heads of a row lie `head` bytes apart; 0 lets all heads share one row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plait.kernels.attention.rows import ask_lines, by_chunks, chunk_lanes, each, shuffle, tile
from plait.kernels.vector import I32, I64, CodeGen, load_index_ir, tile_intrinsic

__all__ = [
    "BLOCK",
    "FLAT",
    "aggregate",
    "combine",
    "copy",
    "dots",
    "drop",
    "exponential",
    "fill",
    "gather_heads",
    "keep",
    "largest",
    "leaky_dots",
    "recall",
    "rescale",
    "scores",
    "settle",
    "softmax",
    "softmax_gradient",
    "stack_floats",
    "store_heads",
    "store_statistics",
    "subtract_largest",
]

BLOCK = 64  # edges: their rows of 64 float32 fill half of a first-level cache
FLAT = 16  # lanes of a pass over a block's scores
_AHEAD = 16  # edges; past the row's end lie the edges of the rows that come next


def stack_floats(float_bits: int, count: int) -> Any:
    """A numba function: the address of `count` floats on the stack; call it once, outside loops."""
    kind: Any = {32: ir.FloatType(), 64: ir.DoubleType()}[float_bits]

    @intrinsic  # type: ignore[untyped-decorator]
    def reserve(typing_context: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            array = cgutils.alloca_once(builder, ir.ArrayType(kind, count))
            array.align = 64
            return builder.ptrtoint(array, I64)

        return types.int64(), generate

    return reserve


# Small vector moves ---------------------------------------------------------------------------------------


def _tiled(code: CodeGen, heads: Any, lanes: int) -> Any:
    """A vector of `lanes` heads repeated to FLAT lanes."""
    return heads if lanes == FLAT else shuffle(code, heads, heads, [k % lanes for k in range(FLAT)])


def _folded(code: CodeGen, flat: Any, lanes: int) -> Any:
    """FLAT lanes summed by head."""
    size = FLAT
    while size > lanes:
        size //= 2
        low = shuffle(code, flat, flat, list(range(size)))
        high = shuffle(code, flat, flat, list(range(size, 2 * size)))
        flat = code.builder.fadd(low, high)
    return flat


def _four_sums(code: CodeGen, four: list[Any]) -> Any:
    """The sums of four vectors as one vector of four, by a tree of shuffles."""
    b, n = code.builder, code.lanes
    half, quarter = n // 2, n // 4

    def paired(p: Any, q: Any) -> Any:
        low = [*range(half), *range(n, n + half)]
        return b.fadd(shuffle(code, p, q, low), shuffle(code, p, q, [k + half for k in low]))

    a, c = paired(four[0], four[1]), paired(four[2], four[3])
    low = [start + k for start in (0, half, n, n + half) for k in range(quarter)]
    total = b.fadd(shuffle(code, a, c, low), shuffle(code, a, c, [k + quarter for k in low]))
    while quarter > 1:
        size, quarter = quarter, quarter // 2
        low = [start * size + k for start in range(4) for k in range(quarter)]
        total = b.fadd(
            shuffle(code, total, total, low), shuffle(code, total, total, [k + quarter for k in low])
        )
    return total


def _exp(code: CodeGen, z: Any) -> Any:
    """e^z for z <= 0: 2^n times a Taylor polynomial of the rest, good to the last place; 0 far below."""
    b, bits = code.builder, code.float_bits
    degree, magic, bias, shift, lowest = {
        32: (7, 12582912.0, 127, 23, -87.3),
        64: (13, 6755399441055744.0, 1023, 52, -708.3),
    }[bits]
    # ln 2 in two parts, the first with trailing zeros, so that n times it is exact
    high = {32: 0.693359375, 64: 0.6931471803691238}[bits]
    low = math.log(2) - high if bits == 32 else 1.9082149292705877e-10
    whole = ir.VectorType(ir.IntType(bits), code.lanes)
    shifted = code.multiply_add(z, code.constant(math.log2(math.e)), code.constant(magic))
    n = b.fsub(shifted, code.constant(magic))
    r = code.multiply_add(n, code.constant(-high), z)
    r = code.multiply_add(n, code.constant(-low), r)
    result = code.constant(1.0 / math.factorial(degree))
    for k in range(degree - 1, -1, -1):
        result = code.multiply_add(result, r, code.constant(1.0 / math.factorial(k)))
    exponent = b.add(b.bitcast(shifted, whole), ir.Constant(whole, [bias] * code.lanes))
    power = b.bitcast(b.shl(exponent, ir.Constant(whole, [shift] * code.lanes)), code.vector)
    is_tiny = b.fcmp_ordered("<", z, code.constant(lowest))
    return b.select(is_tiny, code.constant(0.0), b.fmul(result, power))


def _leaky(code: CodeGen, v: Any, slope: Any) -> Any:
    b = code.builder
    return b.select(b.fcmp_ordered(">", v, code.constant(0.0)), v, b.fmul(v, slope))


def _greater(code: CodeGen, a: Any, c: Any) -> Any:
    return code.builder.select(code.builder.fcmp_ordered(">", a, c), a, c)


def _at(code: CodeGen, base: Any, number: Any, step: int) -> Any:
    return code.builder.add(base, code.builder.mul(number, code.word(step)))


def _position(code: CodeGen, order: Any, k: Any, index_bits: int) -> Any:
    """Where the values of edge k lie: k itself, or order[k] where an order is given."""
    return code.either(code.is_given(order), lambda: load_index_ir(code, order, index_bits)(k), k)


def _prefetch_row(code: CodeGen, base: Any, stride: Any, row_bytes: Any, j: Any) -> None:
    """Ask for the first cache lines of row j; a row of `row_bytes` may be shorter."""
    ask_lines(code, code.builder.add(base, code.builder.mul(j, stride)), row_bytes)


def _ahead(code: CodeGen, k: Any, last: Any) -> Any:
    b = code.builder
    ahead = b.add(k, code.word(_AHEAD))
    return b.select(b.icmp_signed("<", ahead, last), ahead, last)


def _kept(code: CodeGen, position: Any, seed: Any, threshold: Any) -> Any:
    """Lanes whose draw is below the threshold: a hash of (seed, edge, head), murmur's finaliser twice."""
    b, lanes = code.builder, code.lanes
    kind = ir.VectorType(I32, lanes)

    def spread(word: Any) -> Any:
        first = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(word, I32), ir.Constant(I32, 0))
        return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def mixed(h: Any) -> Any:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = b.xor(h, b.lshr(h, ir.Constant(kind, [shift] * lanes)))
            h = b.mul(h, ir.Constant(kind, [factor] * lanes))
        return b.xor(h, b.lshr(h, ir.Constant(kind, [16] * lanes)))

    flat = b.mul(position, code.word(lanes))
    counter = b.add(spread(flat), ir.Constant(kind, list(range(lanes))))
    counter = b.xor(counter, spread(seed))
    high = b.add(b.lshr(seed, code.word(32)), b.mul(b.lshr(flat, code.word(32)), code.word(0x9E3779B9)))
    draw = mixed(b.add(mixed(counter), spread(high)))
    return b.icmp_unsigned("<", draw, spread(threshold))


# Passes over a block's scores -----------------------------------------------------------------------------


def fill(float_bits: int, lanes: int) -> Any:
    """(address, value): the value in every head."""

    @tile(float_bits, lanes, 1, 1)
    def made(code: CodeGen, address: Any, value: Any) -> None:
        code.store(code.splat(value), address)

    return made


def copy(float_bits: int, lanes: int) -> Any:
    """(to, from): a copy of every head."""

    @tile(float_bits, lanes, 2)
    def made(code: CodeGen, to: Any, source: Any) -> None:
        code.store(code.load(source), to)

    return made


def scores(float_bits: int, index_bits: int, lanes: int, role: str) -> Any:
    """GAT: block[k] = leaky(far[j] + near + edge), most = max(most, block); backward, raw keeps the sum.

    role: forward, or whose gradients the pass computes. Of sources: the far row is the target's statistics,
    its first slot is added and its second, the largest score, subtracted. Value rows needed next are asked
    for.
    """

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        far, stride, near, edge, order, indices, start, count, block, raw, most = args[:11]
        value, value_stride, value_bytes, last, slope = args[11:]
        size = float_bits // 8
        index = load_index_ir(code, indices, index_bits)
        own, steep = code.load(near), code.splat(slope)

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at = b.add(start, k)
            j = index(at)
            _prefetch_row(code, value, value_stride, value_bytes, index(_ahead(code, at, last)))
            row = b.add(far, b.mul(j, stride))
            v = b.fadd(code.load(row), own)

            def plus() -> Any:
                place = _position(code, order, at, index_bits)
                return b.fadd(v, code.load(_at(code, edge, place, lanes * size)))

            v = code.either(code.is_given(edge), plus, v)
            to = b.mul(k, code.word(lanes * size))
            z = _leaky(code, v, steep)
            if role != "forward":
                code.store(v, b.add(raw, to))
            if role == "sources":
                z = b.fsub(z, code.load(b.add(row, code.word(lanes * size))))
            code.store(z, b.add(block, to))
            return [_greater(code, z, carried[0])]

        (top,) = code.loop(code.word(0), count, [code.load(most)], step)
        code.store(top, most)

    return tile_intrinsic(float_bits, 15, 1, body)


def largest(float_bits: int, lanes: int) -> Any:
    """(block, count, most): most = max(most, every edge of the block), by head."""

    @tile(float_bits, lanes, 3)
    def made(code: CodeGen, block: Any, count: Any, most: Any) -> None:
        slot = lanes * float_bits // 8

        def step(k: Any, carried: list[Any]) -> list[Any]:
            return [_greater(code, code.load(_at(code, block, k, slot)), carried[0])]

        (top,) = code.loop(code.word(0), count, [code.load(most)], step)
        code.store(top, most)

    return made


def subtract_largest(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(block, statistics, indices, start, count): block[k] -= largest score of the target i of edge k."""

    @tile(float_bits, lanes, 5)
    def made(code: CodeGen, block: Any, statistics: Any, indices: Any, start: Any, count: Any) -> None:
        b, slot = code.builder, lanes * float_bits // 8
        index = load_index_ir(code, indices, index_bits)

        def step(k: Any) -> None:
            row = _at(code, statistics, index(b.add(start, k)), 4 * slot)
            to = _at(code, block, k, slot)
            code.store(b.fsub(code.load(to), code.load(b.add(row, code.word(slot)))), to)

        each(code, count, step)

    return made


def exponential(float_bits: int, lanes: int, is_relative: bool) -> Any:
    """(block, count, most, total): block = exp(block - most), total += its sum; or exp(block) alone."""

    def body(base: CodeGen, args: list[Any]) -> None:
        flat, heads = base.of(FLAT), base.of(lanes)
        b = base.builder
        block, count, most, total = args
        size = float_bits // 8
        # what lies behind the last edge must add nothing
        flat.store(flat.constant(float("-inf")), _at(flat, block, count, lanes * size))
        passes = b.sdiv(b.add(b.mul(count, base.word(lanes)), base.word(FLAT - 1)), base.word(FLAT))
        top = _tiled(flat, heads.load(most), lanes) if is_relative else None

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at = _at(flat, block, k, FLAT * size)
            z = flat.load(at)
            e = _exp(flat, b.fsub(z, top) if is_relative else z)
            flat.store(e, at)
            return [b.fadd(carried[0], e)]

        (summed,) = flat.loop(base.word(0), passes, [flat.constant(0.0)], step)
        if is_relative:
            heads.store(b.fadd(heads.load(total), _folded(flat, summed, lanes)), total)

    return tile_intrinsic(float_bits, 4, 0, body)


def rescale(float_bits: int, lanes: int) -> Any:
    """(before, most, total): before = exp(before - most), the factor of all summed so far; total *= it."""

    @tile(float_bits, lanes, 3)
    def made(code: CodeGen, before: Any, most: Any, total: Any) -> None:
        factor = _exp(code, code.builder.fsub(code.load(before), code.load(most)))
        code.store(factor, before)
        code.store(code.builder.fmul(code.load(total), factor), total)

    return made


def store_statistics(float_bits: int, lanes: int) -> Any:
    """(row of statistics, most, total): slot 1 = most, slot 2 = 1 / total, which is left in `total` too."""

    @tile(float_bits, lanes, 3)
    def made(code: CodeGen, row: Any, most: Any, total: Any) -> None:
        b, slot = code.builder, lanes * float_bits // 8
        inverse = b.fdiv(code.constant(1.0), code.load(total))
        code.store(code.load(most), b.add(row, code.word(slot)))
        code.store(inverse, b.add(row, code.word(2 * slot)))
        code.store(inverse, total)

    return made


def drop(float_bits: int, lanes: int) -> Any:
    """(block, start, count, seed, threshold, scale): dropout of the weights of the edges from `start`."""

    @tile(float_bits, lanes, 5, 1)
    def made(
        code: CodeGen, block: Any, start: Any, count: Any, seed: Any, threshold: Any, scale: Any
    ) -> None:
        b = code.builder

        def step(k: Any) -> None:
            to = _at(code, block, k, lanes * float_bits // 8)
            kept = _kept(code, b.add(start, k), seed, threshold)
            scaled = b.fmul(code.load(to), code.splat(scale))
            code.store(b.select(kept, scaled, code.constant(0.0)), to)

        each(code, count, step)

    return made


def combine(float_bits: int, index_bits: int, lanes: int, is_own: bool) -> Any:
    """The gradient of the scores of a block, seen from the source, or from the target (is_own).

    With a = weights / total of the target and m the dropout factor: weights = a m (for the sum of gradients)
    and products = a (m products - D), times the slope of leaky where `raw` is given; these are added to
    `total` and written to `out` if that is given. `statistics` are all targets', or the target's own.
    """

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(lanes)
        b = code.builder
        weights, products, raw, statistics, indices, order, start, count, out, total = args[:10]
        seed, threshold, slope, scale = args[10:]
        size = float_bits // 8
        slot = lanes * size
        index = load_index_ir(code, indices, index_bits)

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at, to = b.add(start, k), b.mul(k, code.word(slot))
            row = statistics if is_own else _at(code, statistics, index(at), 4 * slot)
            a = b.fmul(code.load(b.add(weights, to)), code.load(b.add(row, code.word(2 * slot))))
            m = _dropout_factor(code, _position(code, order, at, index_bits), seed, threshold, scale)
            code.store(b.fmul(a, m), b.add(weights, to))
            inner = b.fsub(
                b.fmul(m, code.load(b.add(products, to))), code.load(b.add(row, code.word(3 * slot)))
            )
            d = b.fmul(a, inner)

            def bent() -> Any:
                is_up = b.fcmp_ordered(">", code.load(b.add(raw, to)), code.constant(0.0))
                return b.fmul(d, b.select(is_up, code.constant(1.0), code.splat(slope)))

            d = code.either(code.is_given(raw), bent, d)
            code.store(d, b.add(products, to))
            with b.if_then(code.is_given(out)):
                code.store(d, _at(code, out, at, slot))
            return [b.fadd(carried[0], d)]

        (summed,) = code.loop(code.word(0), count, [code.load(total)], step)
        code.store(summed, total)

    return tile_intrinsic(float_bits, 12, 2, body)


def keep(float_bits: int, lanes: int) -> Any:
    """kept[e] = (a, a m products): a = weights / total of the target, m the dropout factor.

    The second, whose sum `inner` gets, is no gradient yet: `settle` makes it one when the sum over all edges
    of the row is known.
    """

    @tile(float_bits, lanes, 9, 1)
    def made(
        code: CodeGen, kept: Any, weights: Any, products: Any, own: Any, start: Any, count: Any, inner: Any,
        seed: Any, threshold: Any, scale: Any,
    ) -> None:  # fmt: skip
        b, slot = code.builder, lanes * float_bits // 8
        inverse = code.load(b.add(own, code.word(2 * slot)))

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at, from_block = b.add(start, k), b.mul(k, code.word(slot))
            a = b.fmul(code.load(b.add(weights, from_block)), inverse)
            m = _dropout_factor(code, at, seed, threshold, scale)
            part = b.fmul(b.fmul(a, m), code.load(b.add(products, from_block)))
            to = _at(code, kept, at, 2 * slot)
            code.store(a, to)
            code.store(part, b.add(to, code.word(slot)))
            return [b.fadd(carried[0], part)]

        (summed,) = code.loop(code.word(0), count, [code.load(inner)], step)
        code.store(summed, inner)

    return made


def settle(float_bits: int, lanes: int) -> Any:
    """products[k] = kept's second number - a inner, bent by leaky where `raw` is given; total += these."""

    @tile(float_bits, lanes, 7, 1)
    def made(
        code: CodeGen, kept: Any, products: Any, raw: Any, start: Any, count: Any, inner: Any, total: Any,
        slope: Any,
    ) -> None:  # fmt: skip
        b, slot = code.builder, lanes * float_bits // 8
        whole = code.load(inner)

        def step(k: Any, carried: list[Any]) -> list[Any]:
            in_block = b.mul(k, code.word(slot))
            edge = _at(code, kept, b.add(start, k), 2 * slot)
            second = b.add(edge, code.word(slot))
            d = b.fsub(code.load(second), b.fmul(code.load(edge), whole))

            def bent() -> Any:
                is_up = b.fcmp_ordered(">", code.load(b.add(raw, in_block)), code.constant(0.0))
                return b.fmul(d, b.select(is_up, code.constant(1.0), code.splat(slope)))

            d = code.either(code.is_given(raw), bent, d)
            code.store(d, second)
            code.store(d, b.add(products, in_block))
            return [b.fadd(carried[0], d)]

        (summed,) = code.loop(code.word(0), count, [code.load(total)], step)
        code.store(summed, total)

    return made


def recall(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(weights, products) of a block from what was kept; total += products; gathered rows are asked for."""

    @tile(float_bits, lanes, 17, 1)
    def made(
        code: CodeGen, weights: Any, products: Any, kept: Any, order: Any, indices: Any, start: Any,
        count: Any, total: Any, grad: Any, grad_row: Any, grad_bytes: Any, far: Any, far_row: Any,
        far_bytes: Any, last: Any, seed: Any, threshold: Any, scale: Any,
    ) -> None:  # fmt: skip
        b, slot = code.builder, lanes * float_bits // 8
        index = load_index_ir(code, indices, index_bits)

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at, to = b.add(start, k), b.mul(k, code.word(slot))
            later = _ahead(code, at, last)
            j = index(later)
            _prefetch_row(code, grad, grad_row, grad_bytes, j)
            _prefetch_row(code, far, far_row, far_bytes, j)
            code.prefetch(_at(code, kept, _position(code, order, later, index_bits), 2 * slot), 1)
            place = _position(code, order, at, index_bits)
            edge = _at(code, kept, place, 2 * slot)
            m = _dropout_factor(code, place, seed, threshold, scale)
            d = code.load(b.add(edge, code.word(slot)))
            code.store(b.fmul(code.load(edge), m), b.add(weights, to))
            code.store(d, b.add(products, to))
            return [b.fadd(carried[0], d)]

        (summed,) = code.loop(code.word(0), count, [code.load(total)], step)
        code.store(summed, total)

    return made


def _dropout_factor(code: CodeGen, position: Any, seed: Any, threshold: Any, scale: Any) -> Any:
    """0 or `scale` for every head of an edge; 1 without dropout."""

    def factor() -> Any:
        kept = _kept(code, position, seed, threshold)
        return code.builder.select(kept, code.splat(scale), code.constant(0.0))

    return code.either(code.is_given(threshold), factor, code.constant(1.0))


def gather_heads(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(block, values, order, start, count): block[k] = values[order[start + k]], or values[start + k]."""

    @tile(float_bits, lanes, 5)
    def made(code: CodeGen, block: Any, values: Any, order: Any, start: Any, count: Any) -> None:
        slot = lanes * float_bits // 8

        def step(k: Any) -> None:
            from_edge = _position(code, order, code.builder.add(start, k), index_bits)
            code.store(code.load(_at(code, values, from_edge, slot)), _at(code, block, k, slot))

        each(code, count, step)

    return made


def store_heads(float_bits: int, lanes: int) -> Any:
    """(to, block, count): a copy of the block's edges."""

    @tile(float_bits, lanes, 3)
    def made(code: CodeGen, to: Any, block: Any, count: Any) -> None:
        slot = lanes * float_bits // 8
        each(code, count, lambda k: code.store(code.load(_at(code, block, k, slot)), _at(code, to, k, slot)))

    return made


def softmax(float_bits: int, lanes: int) -> Any:
    """(out, scores, count): out = exp(scores - largest) / sum, by head, over `count` edges."""

    @tile(float_bits, lanes, 3)
    def made(code: CodeGen, out: Any, values: Any, count: Any) -> None:
        b, slot = code.builder, lanes * float_bits // 8

        def higher(k: Any, most: list[Any]) -> list[Any]:
            return [_greater(code, code.load(_at(code, values, k, slot)), most[0])]

        (top,) = code.loop(code.word(0), count, [code.constant(float("-inf"))], higher)

        def power(k: Any, total: list[Any]) -> list[Any]:
            e = _exp(code, b.fsub(code.load(_at(code, values, k, slot)), top))
            code.store(e, _at(code, out, k, slot))
            return [b.fadd(total[0], e)]

        (total,) = code.loop(code.word(0), count, [code.constant(0.0)], power)
        inverse = b.fdiv(code.constant(1.0), total)

        def divide(k: Any) -> None:
            at = _at(code, out, k, slot)
            code.store(b.fmul(code.load(at), inverse), at)

        each(code, count, divide)

    return made


def softmax_gradient(float_bits: int, lanes: int) -> Any:
    """(out, weights, gradient, count): out = weights * (gradient - sum of weights * gradient), by head."""

    @tile(float_bits, lanes, 4)
    def made(code: CodeGen, out: Any, weights: Any, gradient: Any, count: Any) -> None:
        b, slot = code.builder, lanes * float_bits // 8

        def both(k: Any) -> tuple[Any, Any]:
            return code.load(_at(code, weights, k, slot)), code.load(_at(code, gradient, k, slot))

        (total,) = code.loop(
            code.word(0), count, [code.constant(0.0)], lambda k, t: [code.multiply_add(*both(k), t[0])]
        )

        def step(k: Any) -> None:
            own, other = both(k)
            code.store(b.fmul(own, b.fsub(other, total)), _at(code, out, k, slot))

        each(code, count, step)

    return made


# Passes over gathered rows --------------------------------------------------------------------------------


def _dot_tile(float_bits: int, index_bits: int, lanes: int, heads: int, is_leaky: bool, chunk: int) -> Any:
    """block[k][0..heads) = near . far[j], or att . leaky(near + far[j]), by head; four sums at a time.

    A head's row is taken `chunk` numbers at once, 0: as many as a vector holds.
    """
    edges = 4 // heads

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(chunk or chunk_lanes(float_bits))
        b = code.builder
        near, near_head, far, far_row, far_head, indices, start, count = args[:8]
        block, width, att, att_head, last, slope = args[8:]
        size = float_bits // 8
        index = load_index_ir(code, indices, index_bits)
        final = b.sub(b.add(start, count), code.word(1))
        steep = code.splat(slope)
        row_bytes = b.add(b.mul(far_head, code.word(heads - 1)), b.mul(width, code.word(size)))

        def step(group: Any, none: list[Any]) -> list[Any]:
            k = b.mul(group, code.word(edges))
            rows = []
            for e in range(edges):
                at = b.add(start, b.add(k, code.word(e)))
                # past the block's end the last edge is taken again; nobody reads those sums
                at = b.select(b.icmp_signed("<", at, final), at, final)
                _prefetch_row(code, far, far_row, row_bytes, index(_ahead(code, at, last)))
                rows.append(b.add(far, b.mul(index(at), far_row)))

            def chunk(offset: Any, mask: Any, totals: list[Any]) -> list[Any]:
                result = []
                for h in range(heads):
                    own = code.load(b.add(b.add(near, b.mul(near_head, code.word(h))), offset), mask)
                    weight = (
                        code.load(b.add(b.add(att, b.mul(att_head, code.word(h))), offset), mask)
                        if is_leaky
                        else own
                    )
                    for e in range(edges):
                        other = code.load(b.add(b.add(rows[e], b.mul(far_head, code.word(h))), offset), mask)
                        term = _leaky(code, b.fadd(own, other), steep) if is_leaky else other
                        result.append(code.multiply_add(weight, term, totals[h * edges + e]))
                return result

            totals = by_chunks(code, width, [code.constant(0.0)] * 4, chunk)
            in_order = [totals[h * edges + e] for e in range(edges) for h in range(heads)]
            _store_sums(code, _four_sums(code, in_order), block, k, heads, lanes)
            return []

        groups = b.sdiv(b.add(count, code.word(edges - 1)), code.word(edges))
        code.loop(code.word(0), groups, [], step)

    return tile_intrinsic(float_bits, 13, 1, body)


def _store_sums(code: CodeGen, four: Any, block: Any, k: Any, heads: int, lanes: int) -> None:
    """Four sums, edge by edge and head by head, to their places in a block of `lanes` heads."""
    b, size = code.builder, code.float_bits // 8
    to = _at(code, block, k, lanes * size)
    if heads == lanes or heads == 4:
        code.of(4).store(four, to)
        return
    for n in range(4):
        value = b.extract_element(four, ir.Constant(I32, n))
        place = (n // heads) * lanes * size + (n % heads) * size
        b.store(value, b.inttoptr(b.add(to, code.word(place)), code.scalar.as_pointer()))


def dots(float_bits: int, index_bits: int, lanes: int, heads: int, chunk: int = 0) -> Any:
    """block[k][h] = near[h] . far[j][h] for `heads` (1, 2 or 4) heads from the given addresses."""
    return _dot_tile(float_bits, index_bits, lanes, heads, False, chunk)


def leaky_dots(float_bits: int, index_bits: int, lanes: int, heads: int, chunk: int = 0) -> Any:
    """block[k][h] = att[h] . leaky(near[h] + far[j][h])."""
    return _dot_tile(float_bits, index_bits, lanes, heads, True, chunk)


def aggregate(
    float_bits: int, index_bits: int, lanes: int, heads: int, width: int, is_masked: bool, is_step: bool
) -> Any:
    """total[h] += sum over the block of weight[k][h] * far[j][h] on a tile of `width` columns.

    It starts at 0 if is_first. With `is_step` the summed row is 1 where near[h] + far[j][h] > 0 and slope
    elsewhere.
    """
    registers = max(1, heads * width * float_bits // 512)
    unroll = {1: 4, 2: 2, 4: 2}.get(registers, 1)

    def body(base: CodeGen, args: list[Any]) -> None:
        code = base.of(width)
        b = code.builder
        far, far_row, far_head, indices, start, count = args[:6]
        weights, total, total_head, is_first, rest, near, near_head, slope = args[6:]
        size = float_bits // 8
        mask = code.mask(rest) if is_masked else None
        index = load_index_ir(code, indices, index_bits)
        own = (
            [code.load(b.add(near, b.mul(near_head, code.word(h))), mask) for h in range(heads)]
            if is_step
            else []
        )
        steep = code.splat(slope)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            row = b.add(far, b.mul(index(b.add(start, k)), far_row))
            at = b.inttoptr(_at(code, weights, k, lanes * size), code.scalar.as_pointer())
            result = []
            for h in range(heads):
                weight = code.splat(b.load(b.gep(at, [code.word(h)])))
                other = code.load(b.add(row, b.mul(far_head, code.word(h))), mask)
                if is_step:
                    is_up = b.fcmp_ordered(">", b.fadd(own[h], other), code.constant(0.0))
                    other = b.select(is_up, code.constant(1.0), steep)
                result.append(code.multiply_add(weight, other, sums[h]))
            return result

        def group(g: Any, sums: list[Any]) -> list[Any]:
            k = b.mul(g, code.word(unroll))
            result: list[Any] = []
            for u in range(unroll):
                result += step(b.add(k, code.word(u)), sums[u * heads : (u + 1) * heads])
            return result

        groups = b.sdiv(count, code.word(unroll))
        sums = code.loop(code.word(0), groups, [code.constant(0.0)] * (heads * unroll), group)
        sums[:heads] = code.loop(b.mul(groups, code.word(unroll)), count, sums[:heads], step)
        while len(sums) > heads:
            half = len(sums) // 2
            sums = [b.fadd(sums[n], sums[n + half]) for n in range(half)]
        for h in range(heads):
            to = b.add(total, b.mul(total_head, code.word(h)))
            is_later = b.icmp_signed("==", is_first, code.word(0))
            before = code.either(is_later, partial(code.load, to, mask), code.constant(0.0))
            code.store(b.fadd(before, sums[h]), to, mask)

    return tile_intrinsic(float_bits, 13, 1, body)
