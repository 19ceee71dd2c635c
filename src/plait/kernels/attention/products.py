"""Scores of edges and weighted sums of gathered rows: products of rows with rows, as LLVM vectors.

"far" rows are gathered by the indices of a block of edges, the "near" row is the row's own. Heads of a row
lie `head` bytes apart; 0 lets all heads share one row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit

from plait.kernels.attention.rows import (
    ask_row,
    by_chunks,
    chunk_lanes,
    greater,
    later_edge,
    nth,
    place_of,
    shuffle,
)  # fmt: skip
from plait.kernels.vector import I32, CodeGen, load_index_ir, tile_intrinsic

__all__ = ["grouped_dots", "grouped_sums", "scores"]

_SUM_BITS = 8 * 512  # of sums of heads that are held in registers at once


def _leaky(code: CodeGen, v: Any, slope: Any) -> Any:
    b = code.builder
    return b.select(b.fcmp_ordered(">", v, code.constant(0.0)), v, b.fmul(v, slope))


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


def scores(float_bits: int, index_bits: int, lanes: int, role: str) -> Any:
    """GAT: block[k] = leaky(far[j] + near + edge), most = max(most, block); backward, raw keeps the sum.

    role: forward, or whose gradients the pass computes. Of sources: the far row is the target's statistics,
    its first slot is added and its second, the largest score, subtracted. Value rows needed next are
    prefetched.
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
            ask_row(code, value, value_stride, value_bytes, index(later_edge(code, at, last)))
            row = b.add(far, b.mul(j, stride))
            v = b.fadd(code.load(row), own)

            def plus() -> Any:
                place = place_of(code, order, at, index_bits)
                return b.fadd(v, code.load(nth(code, edge, place, lanes * size)))

            v = code.either(code.is_given(edge), plus, v)
            to = b.mul(k, code.word(lanes * size))
            z = _leaky(code, v, steep)
            if role != "forward":
                code.store(v, b.add(raw, to))
            if role == "sources":
                z = b.fsub(z, code.load(b.add(row, code.word(lanes * size))))
            code.store(z, b.add(block, to))
            return [greater(code, z, carried[0])]

        (top,) = code.loop(code.word(0), count, [code.load(most)], step)
        code.store(top, most)

    return tile_intrinsic(float_bits, 15, 1, body)


def _dot_tile(
    float_bits: int, index_bits: int, lanes: int, is_leaky: bool, heads: int, chunk: int = 0
) -> Any:
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
                # past the block's end the last edge is taken again; those sums are not read
                at = b.select(b.icmp_signed("<", at, final), at, final)
                ask_row(code, far, far_row, row_bytes, index(later_edge(code, at, last)))
                rows.append(b.add(far, b.mul(index(at), far_row)))

            def chunk(offset: Any, mask: Any, totals: list[Any]) -> list[Any]:
                result = []
                for h in range(heads):
                    own = code.load(b.add(b.add(near, b.mul(near_head, code.word(h))), offset), mask)
                    weight = own
                    if is_leaky:
                        weight = code.load(b.add(b.add(att, b.mul(att_head, code.word(h))), offset), mask)
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
    to = nth(code, block, k, lanes * size)
    if heads == lanes or heads == 4:
        code.of(4).store(four, to)
        return
    for n in range(4):
        value = b.extract_element(four, ir.Constant(I32, n))
        place = (n // heads) * lanes * size + (n % heads) * size
        b.store(value, b.inttoptr(b.add(to, code.word(place)), code.scalar.as_pointer()))


def _aggregate(
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
        own = [code.load(b.add(near, b.mul(near_head, code.word(h))), mask) for h in range(heads * is_step)]
        steep = code.splat(slope)

        def step(k: Any, sums: list[Any]) -> list[Any]:
            row = b.add(far, b.mul(index(b.add(start, k)), far_row))
            at = b.inttoptr(nth(code, weights, k, lanes * size), code.scalar.as_pointer())
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


def _fixed_dots(float_bits: int, index_bits: int, lanes: int, is_leaky: bool, fixed: int) -> Any:
    """grouped_dots of `lanes` heads side by side, each of `fixed` columns."""
    group = min(4, lanes)
    tile = _dot_tile(float_bits, index_bits, lanes, is_leaky, group, min(fixed, 512 // float_bits))
    size = float_bits // 8
    head = fixed * size

    @njit
    def run(  # type: ignore[no-untyped-def]
        near, near_head, far, far_row, far_head, indices, start, count, block, heads, width, att, last, slope
    ):
        for h in range(0, lanes, group):
            o = h * head
            tile(near + o, head, far + o, far_row, head, indices, start, count, block + h * size, fixed,
                 att + o, head, last, slope)  # fmt: skip

    return run


def grouped_dots(float_bits: int, index_bits: int, lanes: int, is_leaky: bool, fixed: int = 0) -> Any:
    """A numba function: the dots of every head of a block, four, two or one head at a time."""
    if fixed:
        return _fixed_dots(float_bits, index_bits, lanes, is_leaky, fixed)
    make = partial(_dot_tile, float_bits, index_bits, lanes, is_leaky)
    one = make(1)
    two = make(2) if lanes >= 2 else one
    four = make(4) if lanes >= 4 else one
    size = float_bits // 8

    @njit
    def run(  # type: ignore[no-untyped-def]
        near, near_head, far, far_row, far_head, indices, start, count, block, heads, width, att, last, slope
    ):
        h = 0
        ah = width * size
        while h < heads:
            n, f, b, a = near + h * near_head, far + h * far_head, block + h * size, att + h * ah
            if heads - h >= 4:
                four(n, near_head, f, far_row, far_head, indices, start, count, b, width, a, ah, last, slope)
                h += 4
            elif heads - h >= 2:
                two(n, near_head, f, far_row, far_head, indices, start, count, b, width, a, ah, last, slope)
                h += 2
            else:
                one(n, near_head, f, far_row, far_head, indices, start, count, b, width, a, ah, last, slope)
                h += 1

    return run


def _fixed_sums(float_bits: int, index_bits: int, lanes: int, is_step: bool, fixed: int) -> Any:
    """grouped_sums of `lanes` heads side by side, each of `fixed` columns."""
    group = min(4, lanes, max(1, _SUM_BITS // (fixed * float_bits)))
    tile = _aggregate(float_bits, index_bits, lanes, group, fixed, False, is_step)
    size = float_bits // 8
    head = fixed * size

    @njit
    def run(  # type: ignore[no-untyped-def]
        far, far_row, far_head, indices, start, count, weights, out, out_head, first, heads, width,
        near, near_head, slope,
    ):  # fmt: skip
        for h in range(0, lanes, group):
            o = h * head
            tile(far + o, far_row, head, indices, start, count, weights + h * size, out + o, head, first, 0,
                 near + o, head, slope)  # fmt: skip

    return run


def grouped_sums(float_bits: int, index_bits: int, lanes: int, is_step: bool, fixed: int = 0) -> Any:
    """A numba function: the weighted sums of a block for every head and column."""
    if fixed:
        return _fixed_sums(float_bits, index_bits, lanes, is_step, fixed)
    narrow = 16 if float_bits == 32 else 8
    make = partial(_aggregate, float_bits, index_bits, lanes, is_step=is_step)
    one_wide, one_half = make(1, 4 * narrow, False), make(1, 2 * narrow, False)
    one_narrow, one_rest = make(1, narrow, False), make(1, narrow, True)
    has_four = lanes >= 4
    four_half = make(4, 2 * narrow, False) if has_four else one_half
    four_narrow = make(4, narrow, False) if has_four else one_narrow
    four_rest = make(4, narrow, True) if has_four else one_rest
    size = float_bits // 8

    @njit
    def run(  # type: ignore[no-untyped-def]
        far, far_row, far_head, indices, start, count, weights, out, out_head, first, heads, width,
        near, near_head, slope,
    ):  # fmt: skip
        h = 0
        while h < heads:
            is_four = heads - h >= 4 and out_head != 0
            f, o, w, n = far + h * far_head, out + h * out_head, weights + h * size, near + h * near_head
            # heads that share one output row are added to it one after the other
            is_first = first if out_head != 0 or h == 0 else 0
            c = 0
            while c < width:
                rest, s = width - c, c * size
                if is_four:
                    if rest >= 2 * narrow:
                        four_half(f + s, far_row, far_head, indices, start, count, w, o + s, out_head,
                                  is_first, 0, n + s, near_head, slope)  # fmt: skip
                        c += 2 * narrow
                    elif rest >= narrow:
                        four_narrow(f + s, far_row, far_head, indices, start, count, w, o + s, out_head,
                                    is_first, 0, n + s, near_head, slope)  # fmt: skip
                        c += narrow
                    else:
                        four_rest(f + s, far_row, far_head, indices, start, count, w, o + s, out_head,
                                  is_first, rest, n + s, near_head, slope)  # fmt: skip
                        c += narrow
                elif rest >= 4 * narrow:
                    one_wide(f + s, far_row, far_head, indices, start, count, w, o + s, out_head, is_first,
                             0, n + s, near_head, slope)  # fmt: skip
                    c += 4 * narrow
                elif rest >= 2 * narrow:
                    one_half(f + s, far_row, far_head, indices, start, count, w, o + s, out_head, is_first,
                             0, n + s, near_head, slope)  # fmt: skip
                    c += 2 * narrow
                elif rest >= narrow:
                    one_narrow(f + s, far_row, far_head, indices, start, count, w, o + s, out_head,
                               is_first, 0, n + s, near_head, slope)  # fmt: skip
                    c += narrow
                else:
                    one_rest(f + s, far_row, far_head, indices, start, count, w, o + s, out_head, is_first,
                             rest, n + s, near_head, slope)  # fmt: skip
                    c += narrow
            h += 4 if is_four else 1

    return run
