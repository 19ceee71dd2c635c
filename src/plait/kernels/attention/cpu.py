"""Attention over a graph's edges on the CPU: score, softmax and weighted sum in one pass over each row.

The softmax is the online one: scores of a block of edges, their largest so far, exponentials, and the rows
gathered while they are still in the first cache. Only the largest score and the inverse sum of each node and
head are kept. The backward pass goes over sources and computes everything again from these: one gather of
the gradient rows gives the gradients of values and scores together, because the sum term of the softmax's
gradient is grad . output, known per node. A row is always summed by one thread in edge order, so the bits do
not depend on the number of threads.

kind: gat (score = leaky(source + target + edge)), leaky (GATv2: att . leaky(near + far)), dot (near . far).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, njit, types

from plait.kernels.attention import rows, tiles
from plait.kernels.attention.tiles import BLOCK, FLAT
from plait.kernels.vector import load_index, load_scalar, next_piece, next_rows

__all__ = [
    "AGAIN", "FORWARD", "ROWS_AHEAD", "ROW_DOTS", "SOURCES", "TARGETS",
    "again", "forward", "grouped_dots", "grouped_sums", "row_dots", "sources", "targets",
]  # fmt: skip

# Rows ahead of the one in hand whose own operands are asked for: parts of a projected row lie apart, which
# the machine's own guesses do not follow (the pass over the sources of a road network took twice as long)
ROWS_AHEAD = 8
_SUM_BITS = 8 * 512  # of sums of heads that are held in registers at once

# Orders of the words in argument blocks; kernels/attention/__init__.py fills them.
_EDGES = "counter pieces bounds indptr indices"
_ENDS = "far far_row far_head near near_row near_head score_width edge att numbers"
FORWARD = (
    f"{_EDGES} last_edge heads width value value_row value_head out out_row out_head statistics {_ENDS} "
    "addend addend_row bias seed threshold"
).split()
SOURCES = (
    f"{_EDGES} last_edge order heads width value value_row value_head grad grad_row grad_head "
    f"out out_row out_head statistics {_ENDS} seed threshold slopes score_out score_out_row scratch partial "
    "kept"
).split()
TARGETS = (
    f"{_EDGES} order heads width far far_row far_head near near_row near_head out out_row out_head "
    "slopes att numbers scratch partial"
).split()
AGAIN = (
    f"{_EDGES} last_edge heads width value value_row value_head grad grad_row grad_head "
    f"out out_row statistics {_ENDS} seed threshold scratch partial kept"
).split()
ROW_DOTS = (
    *("counter", "rows", "heads", "width", "grad", "grad_row", "row", "row_row"),
    *("addend", "addend_row", "bias", "out", "lanes", "piece_rows"),
)


def _fixed_dots(float_bits: int, index_bits: int, lanes: int, is_leaky: bool, fixed: int) -> Any:
    """grouped_dots of `lanes` heads side by side, each of `fixed` columns."""
    make, group = tiles.leaky_dots if is_leaky else tiles.dots, min(4, lanes)
    tile = make(float_bits, index_bits, lanes, group, min(fixed, 512 // float_bits))
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
    make = tiles.leaky_dots if is_leaky else tiles.dots
    one = make(float_bits, index_bits, lanes, 1)
    two = make(float_bits, index_bits, lanes, 2) if lanes >= 2 else one
    four = make(float_bits, index_bits, lanes, 4) if lanes >= 4 else one
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
    tile = tiles.aggregate(float_bits, index_bits, lanes, group, fixed, False, is_step)
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
    make = functools.partial(tiles.aggregate, float_bits, index_bits, lanes, is_step=is_step)
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


@functools.cache
def forward(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """out[i] = sum over edges of softmax(score) * value[j] + addend[i] + bias, by head; row statistics."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    heads_of = tiles.stack_floats(float_bits, 3 * FLAT)
    fill, store_statistics = tiles.fill(float_bits, lanes), tiles.store_statistics(float_bits, lanes)
    exponential, rescale = tiles.exponential(float_bits, lanes, True), tiles.rescale(float_bits, lanes)
    drop, finish = tiles.drop(float_bits, lanes), rows.finish(float_bits)
    scale_row = rows.scale_row(float_bits)
    sums = grouped_sums(float_bits, index_bits, lanes, False, fixed)
    is_gat = kind == "gat"
    scores = tiles.scores(float_bits, index_bits, lanes, "forward")
    dots = grouped_dots(float_bits, index_bits, lanes, kind == "leaky", fixed)
    largest = tiles.largest(float_bits, lanes)
    copy, clear, ask = tiles.copy(float_bits, lanes), rows.clear(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    slot, head = lanes * size, fixed * size
    low = float("-inf")

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices = a[0], a[1], a[2], a[3], a[4]
        last, heads, width = a[5], a[6], a[7]
        value, value_row, value_head, out, out_row, out_head = a[8], a[9], a[10], a[11], a[12], a[13]
        statistics, far, far_row, far_head = a[14], a[15], a[16], a[17]
        near, near_row, near_head, score_width = a[18], a[19], a[20], a[21]
        edge, att, numbers, addend, addend_row, bias = a[22], a[23], a[24], a[25], a[26], a[27]
        seed, threshold = a[28], a[29]
        if fixed:
            heads, width, score_width, value_head, out_head, near_head, far_head = (
                lanes,
                fixed,
                fixed,
                head,
                head,
                head,
                head,
            )
        slope, scale = scalar(numbers, 0), scalar(numbers, 1)
        one, zero = scalar(numbers, 2), scalar(numbers, 3)
        block = block_of()
        most = heads_of()
        before, total = most + FLAT * size, most + 2 * FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
        value_bytes = value_head * (heads - 1) + width * size
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, i), index(indptr, i + 1)
                row, own = out + i * out_row, statistics + i * 4 * slot
                later = i + ROWS_AHEAD
                if not is_gat:
                    ask(near + later * near_row, heads * score_width * size)
                if addend != 0:
                    ask(addend + later * addend_row, heads * width * size)
                fill(most, one * low)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    copy(before, most)
                    if is_gat:
                        scores(far, far_row, own, edge, 0, indices, k, count, block, 0, most,
                               value, value_row, value_bytes, last, slope)  # fmt: skip
                    else:
                        dots(near + i * near_row, near_head, far, far_row, far_head, indices, k, count, block,
                             heads, score_width, att, last, slope)  # fmt: skip
                        largest(block, count, most)
                    if k > start:
                        rescale(before, most, total)
                        for h in range(heads):
                            scale_row(row + h * out_head, width, scalar(before, h))
                    exponential(block, count, most, total)
                    if threshold != 0:
                        drop(block, k, count, seed, threshold, scale)
                    first = 1 if k == start else 0
                    sums(value, value_row, value_head, indices, k, count, block, row, out_head, first,
                         heads, width, 0, 0, slope)  # fmt: skip
                    k += count
                if start < end:
                    store_statistics(own, most, total)
                else:
                    fill(own + slot, zero)
                    fill(own + 2 * slot, zero)
                    fill(total, zero)
                    for h in range(heads):
                        clear(row + h * out_head, width)
                for h in range(heads):
                    o = h * out_head
                    p = addend + i * addend_row + o if addend != 0 else 0
                    q = bias + o if bias != 0 else 0
                    finish(row + o, width, p, q, scalar(total, h))

    return run


@functools.cache
def sources(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """Gradients seen from the sources: of the values, of each edge's scores, of the source's part of them."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    products_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 1)
    raw_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 2)
    heads_of = tiles.stack_floats(float_bits, 2 * FLAT)
    fill, copy, clear = tiles.fill(float_bits, lanes), tiles.copy(float_bits, lanes), rows.clear(float_bits)
    exponential = tiles.exponential(float_bits, lanes, False)
    combine = tiles.combine(float_bits, index_bits, lanes, False)
    sums = grouped_sums(float_bits, index_bits, lanes, False, fixed)
    dots = grouped_dots(float_bits, index_bits, lanes, False, fixed)
    is_gat, is_leaky = kind == "gat", kind == "leaky"
    scores = tiles.scores(float_bits, index_bits, lanes, "sources")
    score_dots = grouped_dots(float_bits, index_bits, lanes, True, fixed) if is_leaky else dots
    steps = grouped_sums(float_bits, index_bits, lanes, True, fixed) if is_leaky else sums
    subtract = tiles.subtract_largest(float_bits, index_bits, lanes)
    bend, ask = rows.bend(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    slot, head = lanes * size, fixed * size

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices, last, order = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
        heads, width, value, value_row, value_head = a[7], a[8], a[9], a[10], a[11]
        grad, grad_row, grad_head, out, out_row, out_head = a[12], a[13], a[14], a[15], a[16], a[17]
        statistics, far, far_row, far_head = a[18], a[19], a[20], a[21]
        near, near_row, near_head, score_width = a[22], a[23], a[24], a[25]
        edge, att, numbers, seed, threshold = a[26], a[27], a[28], a[29], a[30]
        slopes, score_out, score_out_row, scratch, partial = a[31], a[32], a[33], a[34], a[35]
        if fixed:
            heads, width, score_width, value_head, grad_head, out_head, near_head, far_head = (
                lanes,
                fixed,
                fixed,
                head,
                head,
                head,
                head,
                head,
            )
        slope, scale, zero = scalar(numbers, 0), scalar(numbers, 1), scalar(numbers, 3)
        block, products, raw = block_of(), products_of(), raw_of()
        most = heads_of()
        total = most + FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
            fill(products + k * slot, zero)
        given_raw = raw if is_gat else 0
        grad_bytes = grad_head * (heads - 1) + width * size
        mine_bytes = value_head * (heads - 1) + width * size
        whole = heads * score_width * size
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            row_scratch, row_partial = scratch + piece * whole, partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * score_width)
            for j in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, j), index(indptr, j + 1)
                row, own, mine = out + j * out_row, near + j * near_row, value + j * value_row
                later = j + ROWS_AHEAD
                if not is_gat:
                    ask(value + later * value_row, mine_bytes)
                    ask(out + later * out_row, mine_bytes)
                    if not is_leaky:
                        ask(near + later * near_row, whole)
                        ask(score_out + later * score_out_row, whole)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_gat:
                        fill(most, zero)
                        scores(statistics, 4 * slot, own, edge, order, indices, k, count, block, raw, most,
                               grad, grad_row, grad_bytes, last, slope)  # fmt: skip
                    else:
                        score_dots(own, near_head, far, far_row, far_head, indices, k, count, block,
                                   heads, score_width, att, last, slope)  # fmt: skip
                        subtract(block, statistics, indices, k, count)
                    exponential(block, count, 0, 0)
                    dots(mine, value_head, grad, grad_row, grad_head, indices, k, count, products,
                         heads, width, 0, last, slope)  # fmt: skip
                    combine(block, products, given_raw, statistics, indices, order, k, count, slopes, total,
                            seed, threshold, slope, scale)  # fmt: skip
                    sums(grad, grad_row, grad_head, indices, k, count, block, row, out_head, first, heads,
                         width, 0, 0, slope)  # fmt: skip
                    if is_leaky:
                        steps(far, far_row, far_head, indices, k, count, products, row_scratch, near_head,
                              first, heads, score_width, own, near_head, slope)  # fmt: skip
                    elif not is_gat:
                        to = score_out + j * score_out_row
                        # the gradient of a row that is both value and key is the sum of both
                        fresh = first if score_out != out else 0
                        steps(far, far_row, far_head, indices, k, count, products, to, near_head,
                              fresh, heads, score_width, 0, 0, slope)  # fmt: skip
                    k += count
                if start >= end:
                    for h in range(heads):
                        clear(row + h * out_head, width)
                    if not is_gat and not is_leaky and score_out != out:
                        clear(score_out + j * score_out_row, heads * score_width)
                elif is_leaky:
                    bend(row, row_scratch, own, att, row_partial, heads * score_width, 1)
                if is_gat:
                    copy(score_out + j * score_out_row, total)

    return run


@functools.cache
def targets(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """Gradients of the target's part of the scores: sums of slope * far, or of slope * leaky's steps."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    is_leaky = kind == "leaky"
    sums = grouped_sums(float_bits, index_bits, lanes, is_leaky, fixed)
    gather = tiles.gather_heads(float_bits, index_bits, lanes)
    clear, bend, ask = rows.clear(float_bits), rows.bend(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    head = fixed * size

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices, order = a[0], a[1], a[2], a[3], a[4], a[5]
        heads, width, far, far_row, far_head = a[6], a[7], a[8], a[9], a[10]
        near, near_row, near_head, out, out_row, out_head = a[11], a[12], a[13], a[14], a[15], a[16]
        slopes, att, numbers, scratch, partial = a[17], a[18], a[19], a[20], a[21]
        if fixed:
            heads, width, out_head, near_head, far_head = lanes, fixed, head, head, head
        slope = scalar(numbers, 0)
        block = block_of()
        whole = heads * width * size
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            row_scratch, row_partial = scratch + piece * whole, partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * width)
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, i), index(indptr, i + 1)
                row, own = out + i * out_row, near + i * near_row
                ask(row + ROWS_AHEAD * out_row, whole)
                if is_leaky:
                    ask(own + ROWS_AHEAD * near_row, whole)
                to = row_scratch if is_leaky else row
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    gather(block, slopes, order, k, count)
                    sums(far, far_row, far_head, indices, k, count, block, to, out_head, first, heads,
                         width, own, near_head, slope)  # fmt: skip
                    k += count
                if start >= end:
                    clear(row, heads * width)
                elif is_leaky:
                    bend(row, row_scratch, own, att, row_partial, heads * width, 0)

    return run


@functools.cache
def again(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """The same gradients as `targets` (gat: of the target's score) from nothing but the nodes' statistics.

    Scores, weights and their gradients are computed again, so that none has to be kept for an edge; a value
    row is gathered once more for that.
    """
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    products_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 1)
    raw_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 2)
    heads_of = tiles.stack_floats(float_bits, 3 * FLAT)
    fill, copy, clear = tiles.fill(float_bits, lanes), tiles.copy(float_bits, lanes), rows.clear(float_bits)
    exponential = tiles.exponential(float_bits, lanes, True)
    combine = tiles.combine(float_bits, index_bits, lanes, True)
    dots = grouped_dots(float_bits, index_bits, lanes, False, fixed)
    is_gat, is_leaky = kind == "gat", kind == "leaky"
    scores = tiles.scores(float_bits, index_bits, lanes, "targets")
    score_dots = grouped_dots(float_bits, index_bits, lanes, is_leaky, fixed)
    sums, bend = grouped_sums(float_bits, index_bits, lanes, is_leaky, fixed), rows.bend(float_bits)
    ask = rows.ask(float_bits)
    size = float_bits // 8
    slot, head = lanes * size, fixed * size

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices = a[0], a[1], a[2], a[3], a[4]
        last, heads, width, value, value_row, value_head = a[5], a[6], a[7], a[8], a[9], a[10]
        grad, grad_row, grad_head, out, out_row, statistics = a[11], a[12], a[13], a[14], a[15], a[16]
        far, far_row, far_head, near, near_row, near_head = a[17], a[18], a[19], a[20], a[21], a[22]
        score_width, edge, att, numbers, seed, threshold = a[23], a[24], a[25], a[26], a[27], a[28]
        scratch, partial = a[29], a[30]
        if fixed:
            heads, width, score_width, value_head, grad_head, near_head, far_head = (
                lanes,
                fixed,
                fixed,
                head,
                head,
                head,
                head,
            )
        slope, scale, zero = scalar(numbers, 0), scalar(numbers, 1), scalar(numbers, 3)
        block, products, raw = block_of(), products_of(), raw_of()
        most = heads_of()
        total, unread = most + FLAT * size, most + 2 * FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
            fill(products + k * slot, zero)
        given_raw = raw if is_gat else 0
        value_bytes = value_head * (heads - 1) + width * size
        whole = heads * score_width * size
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            row_scratch, row_partial = scratch + piece * whole, partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * score_width)
            for i in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, i), index(indptr, i + 1)
                row, mine, own = out + i * out_row, near + i * near_row, statistics + i * 4 * slot
                if not is_gat:
                    ask(grad + (i + ROWS_AHEAD) * grad_row, grad_head * heads)
                    ask(mine + ROWS_AHEAD * near_row, whole)
                    ask(row + ROWS_AHEAD * out_row, whole)
                to = row_scratch if is_leaky else row
                fill(total, zero)
                fill(unread, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_gat:
                        fill(most, zero)
                        scores(far, far_row, own, edge, 0, indices, k, count, block, raw, most,
                               value, value_row, value_bytes, last, slope)  # fmt: skip
                    else:
                        score_dots(mine, near_head, far, far_row, far_head, indices, k, count, block,
                                   heads, score_width, att, last, slope)  # fmt: skip
                    exponential(block, count, own + slot, unread)
                    dots(grad + i * grad_row, grad_head, value, value_row, value_head, indices, k, count,
                         products, heads, width, 0, last, slope)  # fmt: skip
                    combine(block, products, given_raw, own, indices, 0, k, count, 0, total,
                            seed, threshold, slope, scale)  # fmt: skip
                    if not is_gat:
                        sums(far, far_row, far_head, indices, k, count, products, to, near_head, first,
                             heads, score_width, mine, near_head, slope)  # fmt: skip
                    k += count
                if is_gat:
                    copy(row, total)
                elif start >= end:
                    clear(row, heads * score_width)
                elif is_leaky:
                    bend(row, row_scratch, mine, att, row_partial, heads * score_width, 0)

    return run


@functools.cache
def row_dots(float_bits: int) -> Any:
    """out[i, 3, h] = grad[i, h] . (row[i, h] - addend[i, h] - bias[h]), the softmax gradient's sum term."""
    dot, ask = rows.row_dots(float_bits), rows.ask(float_bits)
    size = float_bits // 8

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, rows, heads, width = a[0], a[1], a[2], a[3]
        grad, grad_row, row, row_row = a[4], a[5], a[6], a[7]
        addend, addend_row, bias, out, lanes, piece_rows = a[8], a[9], a[10], a[11], a[12], a[13]
        while True:
            first = next_rows(counter, rows, piece_rows)
            if first >= rows:
                break
            for i in range(first, min(rows, first + piece_rows)):
                to = out + (i * 4 + 3) * lanes * size
                if addend != 0:
                    ask(addend + (i + ROWS_AHEAD) * addend_row, heads * width * size)
                for h in range(heads):
                    o = h * width * size
                    p = addend + i * addend_row + o if addend != 0 else 0
                    q = bias + o if bias != 0 else 0
                    dot(to + h * size, grad + i * grad_row + o, row + i * row_row + o, p, q, width)

    return run
