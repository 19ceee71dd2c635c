"""From the scores of a block of edges to the weights of a softmax and back, as LLVM vectors.

A row's edges are taken in blocks of at most BLOCK: the numbers of a block lie in a small array on the stack,
[edge][head], heads padded to a power of two (`lanes`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from plait.kernels.attention.rows import (
    FLAT,
    ask_row,
    each,
    greater,
    later_edge,
    nth,
    over_heads,
    place_of,
    shuffle,
    tile,
)  # fmt: skip
from plait.kernels.vector import I32, CodeGen, load_index_ir, tile_intrinsic

__all__ = [
    "combine", "copy", "drop", "exponential", "fill", "gather_heads", "keep", "largest", "recall", "rescale",
    "settle", "softmax", "softmax_gradient", "store_heads", "store_statistics", "subtract_largest",
]  # fmt: skip


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


def _exp(code: CodeGen, z: Any) -> Any:
    """e^z for z <= 0, good to the last place; 0 far below."""
    degree, lowest = {32: (7, -87.3), 64: (13, -708.3)}[code.float_bits]
    power = code.exp(z, degree)
    is_tiny = code.builder.fcmp_ordered("<", z, code.constant(lowest))
    return code.builder.select(is_tiny, code.constant(0.0), power)


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


def _dropout_factor(code: CodeGen, position: Any, seed: Any, threshold: Any, scale: Any) -> Any:
    """0 or `scale` for every head of an edge; 1 without dropout."""

    def factor() -> Any:
        kept = _kept(code, position, seed, threshold)
        return code.builder.select(kept, code.splat(scale), code.constant(0.0))

    return code.either(code.is_given(threshold), factor, code.constant(1.0))


@over_heads(1)
def fill(code: CodeGen, address: Any, value: Any) -> None:
    """(address, value): the value in every head."""
    code.store(code.splat(value), address)


@over_heads()
def copy(code: CodeGen, to: Any, source: Any) -> None:
    """(to, from): a copy of every head."""
    code.store(code.load(source), to)


@over_heads()
def largest(code: CodeGen, block: Any, count: Any, most: Any) -> None:
    """(block, count, most): most = max(most, every edge of the block), by head."""
    slot = code.lanes * code.float_bits // 8

    def step(k: Any, carried: list[Any]) -> list[Any]:
        return [greater(code, code.load(nth(code, block, k, slot)), carried[0])]

    (top,) = code.loop(code.word(0), count, [code.load(most)], step)
    code.store(top, most)


def subtract_largest(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(block, statistics, indices, start, count): block[k] -= largest score of the target i of edge k."""

    @tile(float_bits, lanes, 5)
    def made(code: CodeGen, block: Any, statistics: Any, indices: Any, start: Any, count: Any) -> None:
        b, slot = code.builder, lanes * float_bits // 8
        index = load_index_ir(code, indices, index_bits)

        def step(k: Any) -> None:
            row = nth(code, statistics, index(b.add(start, k)), 4 * slot)
            to = nth(code, block, k, slot)
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
        flat.store(flat.constant(float("-inf")), nth(flat, block, count, lanes * size))
        passes = b.sdiv(b.add(b.mul(count, base.word(lanes)), base.word(FLAT - 1)), base.word(FLAT))
        top = _tiled(flat, heads.load(most), lanes) if is_relative else None

        def step(k: Any, carried: list[Any]) -> list[Any]:
            at = nth(flat, block, k, FLAT * size)
            z = flat.load(at)
            e = _exp(flat, b.fsub(z, top) if is_relative else z)
            flat.store(e, at)
            return [b.fadd(carried[0], e)]

        (summed,) = flat.loop(base.word(0), passes, [flat.constant(0.0)], step)
        if is_relative:
            heads.store(b.fadd(heads.load(total), _folded(flat, summed, lanes)), total)

    return tile_intrinsic(float_bits, 4, 0, body)


@over_heads()
def rescale(code: CodeGen, before: Any, most: Any, total: Any) -> None:
    """(before, most, total): before = exp(before - most), the factor of all summed so far; total *= it."""
    factor = _exp(code, code.builder.fsub(code.load(before), code.load(most)))
    code.store(factor, before)
    code.store(code.builder.fmul(code.load(total), factor), total)


@over_heads()
def store_statistics(code: CodeGen, row: Any, most: Any, total: Any) -> None:
    """(row of statistics, most, total): slot 1 = most, slot 2 = 1 / total, which is left in `total` too."""
    b, slot = code.builder, code.lanes * code.float_bits // 8
    inverse = b.fdiv(code.constant(1.0), code.load(total))
    code.store(code.load(most), b.add(row, code.word(slot)))
    code.store(inverse, b.add(row, code.word(2 * slot)))
    code.store(inverse, total)


@over_heads(1)
def drop(code: CodeGen, block: Any, start: Any, count: Any, seed: Any, threshold: Any, scale: Any) -> None:
    """(block, start, count, seed, threshold, scale): dropout of the weights of the edges from `start`."""
    b = code.builder

    def step(k: Any) -> None:
        to = nth(code, block, k, code.lanes * code.float_bits // 8)
        kept = _kept(code, b.add(start, k), seed, threshold)
        scaled = b.fmul(code.load(to), code.splat(scale))
        code.store(b.select(kept, scaled, code.constant(0.0)), to)

    each(code, count, step)


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
            row = statistics if is_own else nth(code, statistics, index(at), 4 * slot)
            a = b.fmul(code.load(b.add(weights, to)), code.load(b.add(row, code.word(2 * slot))))
            m = _dropout_factor(code, place_of(code, order, at, index_bits), seed, threshold, scale)
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
                code.store(d, nth(code, out, at, slot))
            return [b.fadd(carried[0], d)]

        (summed,) = code.loop(code.word(0), count, [code.load(total)], step)
        code.store(summed, total)

    return tile_intrinsic(float_bits, 12, 2, body)


@over_heads(1)
def keep(
    code: CodeGen, kept: Any, weights: Any, products: Any, own: Any, start: Any, count: Any, inner: Any,
    seed: Any, threshold: Any, scale: Any,
) -> None:  # fmt: skip
    """kept[e] = (a, a m products): a = weights / total of the target, m the dropout factor.

    The second, summed into `inner`, is not a gradient yet: `settle` makes it one when the sum over all edges
    of the row is known.
    """
    b, slot = code.builder, code.lanes * code.float_bits // 8
    inverse = code.load(b.add(own, code.word(2 * slot)))

    def step(k: Any, carried: list[Any]) -> list[Any]:
        at, from_block = b.add(start, k), b.mul(k, code.word(slot))
        a = b.fmul(code.load(b.add(weights, from_block)), inverse)
        m = _dropout_factor(code, at, seed, threshold, scale)
        part = b.fmul(b.fmul(a, m), code.load(b.add(products, from_block)))
        to = nth(code, kept, at, 2 * slot)
        code.store(a, to)
        code.store(part, b.add(to, code.word(slot)))
        return [b.fadd(carried[0], part)]

    (summed,) = code.loop(code.word(0), count, [code.load(inner)], step)
    code.store(summed, inner)


@over_heads(1)
def settle(
    code: CodeGen, kept: Any, products: Any, raw: Any, start: Any, count: Any, inner: Any, total: Any,
    slope: Any,
) -> None:  # fmt: skip
    """products[k] = kept's second number - a inner, bent by leaky where `raw` is given; total += these."""
    b, slot = code.builder, code.lanes * code.float_bits // 8
    whole = code.load(inner)

    def step(k: Any, carried: list[Any]) -> list[Any]:
        in_block = b.mul(k, code.word(slot))
        edge = nth(code, kept, b.add(start, k), 2 * slot)
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


def recall(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(weights, products) of a block from what was kept; total += products; gathered rows are prefetched."""

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
            later = later_edge(code, at, last)
            j = index(later)
            ask_row(code, grad, grad_row, grad_bytes, j)
            ask_row(code, far, far_row, far_bytes, j)
            code.prefetch(nth(code, kept, place_of(code, order, later, index_bits), 2 * slot), 1)
            place = place_of(code, order, at, index_bits)
            edge = nth(code, kept, place, 2 * slot)
            m = _dropout_factor(code, place, seed, threshold, scale)
            d = code.load(b.add(edge, code.word(slot)))
            code.store(b.fmul(code.load(edge), m), b.add(weights, to))
            code.store(d, b.add(products, to))
            return [b.fadd(carried[0], d)]

        (summed,) = code.loop(code.word(0), count, [code.load(total)], step)
        code.store(summed, total)

    return made


def gather_heads(float_bits: int, index_bits: int, lanes: int) -> Any:
    """(block, values, order, start, count): block[k] = values[order[start + k]], or values[start + k]."""

    @tile(float_bits, lanes, 5)
    def made(code: CodeGen, block: Any, values: Any, order: Any, start: Any, count: Any) -> None:
        slot = lanes * float_bits // 8

        def step(k: Any) -> None:
            from_edge = place_of(code, order, code.builder.add(start, k), index_bits)
            code.store(code.load(nth(code, values, from_edge, slot)), nth(code, block, k, slot))

        each(code, count, step)

    return made


@over_heads()
def store_heads(code: CodeGen, to: Any, block: Any, count: Any) -> None:
    """(to, block, count): a copy of the block's edges."""
    slot = code.lanes * code.float_bits // 8
    each(code, count, lambda k: code.store(code.load(nth(code, block, k, slot)), nth(code, to, k, slot)))


@over_heads()
def softmax(code: CodeGen, out: Any, values: Any, count: Any) -> None:
    """(out, scores, count): out = exp(scores - largest) / sum, by head, over `count` edges."""
    b, slot = code.builder, code.lanes * code.float_bits // 8

    def higher(k: Any, most: list[Any]) -> list[Any]:
        return [greater(code, code.load(nth(code, values, k, slot)), most[0])]

    (top,) = code.loop(code.word(0), count, [code.constant(float("-inf"))], higher)

    def power(k: Any, total: list[Any]) -> list[Any]:
        e = _exp(code, b.fsub(code.load(nth(code, values, k, slot)), top))
        code.store(e, nth(code, out, k, slot))
        return [b.fadd(total[0], e)]

    (total,) = code.loop(code.word(0), count, [code.constant(0.0)], power)
    inverse = b.fdiv(code.constant(1.0), total)

    def divide(k: Any) -> None:
        at = nth(code, out, k, slot)
        code.store(b.fmul(code.load(at), inverse), at)

    each(code, count, divide)


@over_heads()
def softmax_gradient(code: CodeGen, out: Any, weights: Any, gradient: Any, count: Any) -> None:
    """(out, weights, gradient, count): out = weights * (gradient - sum of weights * gradient), by head."""
    b, slot = code.builder, code.lanes * code.float_bits // 8

    def both(k: Any) -> tuple[Any, Any]:
        return code.load(nth(code, weights, k, slot)), code.load(nth(code, gradient, k, slot))

    (total,) = code.loop(
        code.word(0), count, [code.constant(0.0)], lambda k, t: [code.multiply_add(*both(k), t[0])]
    )

    def step(k: Any) -> None:
        own, other = both(k)
        code.store(b.fmul(own, b.fsub(other, total)), nth(code, out, k, slot))

    each(code, count, step)
