"""Attention over a graph's edges on the CPU: score, softmax and weighted sum in one pass over each row.

The softmax is the online one: scores of a block of edges, their largest so far, exponentials, and the rows
gathered while they are still in the first cache. Only the largest score and the inverse sum of each node and
head are kept. The backward pass goes over sources and computes everything again from these: one gather of
the gradient rows gives the gradients of values and scores together, because the sum term of the softmax's
gradient is grad . output, known per node. A row is always summed by one thread in edge order, so the bits do
not depend on the number of threads.

Where nodes have few edges the backward pass begins at the other end (targets.py) and keeps two numbers an
edge and head; the pass over sources then only sums rows by them.

kind: gat (score = leaky(source + target + edge)), leaky (GATv2: att . leaky(near + far)), dot (near . far).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.attention import products, rows, softmax
from plait.kernels.attention.rows import BLOCK, FLAT, ROWS_AHEAD
from plait.kernels.vector import load_index, load_scalar, next_piece, next_rows

__all__ = ["EDGES", "ENDS", "FORWARD", "ROW_DOTS", "SOURCES", "forward", "row_dots", "sources"]

# Orders of the words in argument blocks; kernels/attention/__init__.py fills them.
EDGES = "counter pieces bounds indptr indices"
ENDS = "far far_row far_head near near_row near_head score_width edge att numbers"
FORWARD = (
    f"{EDGES} last_edge heads width value value_row value_head out out_row out_head statistics {ENDS} "
    "addend addend_row bias seed threshold"
).split()
SOURCES = (
    f"{EDGES} last_edge order heads width value value_row value_head grad grad_row grad_head "
    f"out out_row out_head statistics {ENDS} seed threshold slopes score_out score_out_row scratch partial "
    "kept"
).split()
ROW_DOTS = (
    *("counter", "rows", "heads", "width", "grad", "grad_row", "row", "row_row"),
    *("addend", "addend_row", "bias", "out", "lanes", "piece_rows"),
)


@functools.cache
def forward(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """out[i] = sum over edges of softmax(score) * value[j] + addend[i] + bias, by head; row statistics."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of, heads_of = rows.block(float_bits, lanes), rows.stack_floats(float_bits, 3 * FLAT)
    fill, store_statistics = softmax.fill(float_bits, lanes), softmax.store_statistics(float_bits, lanes)
    exponential, rescale = softmax.exponential(float_bits, lanes, True), softmax.rescale(float_bits, lanes)
    drop, finish = softmax.drop(float_bits, lanes), rows.finish(float_bits)
    scale_row = rows.scale_row(float_bits)
    sums = products.grouped_sums(float_bits, index_bits, lanes, False, fixed)
    is_gat = kind == "gat"
    scores = products.scores(float_bits, index_bits, lanes, "forward")
    dots = products.grouped_dots(float_bits, index_bits, lanes, kind == "leaky", fixed)
    largest = softmax.largest(float_bits, lanes)
    copy, clear, ask = softmax.copy(float_bits, lanes), rows.clear(float_bits), rows.ask(float_bits)
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
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            out_head, near_head, far_head = head, head, head
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
def sources(
    float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0, is_kept: bool = False
) -> Any:
    """Gradients seen from the sources: of the values, of each edge's scores, of the source's part of them.

    is_kept: the weights and gradients of the scores are there (targets.again), and rows are only summed by
    them; `slopes` is not written then.
    """
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of, heads_of = rows.block(float_bits, lanes), rows.stack_floats(float_bits, 2 * FLAT)
    fill, copy = softmax.fill(float_bits, lanes), softmax.copy(float_bits, lanes)
    exponential = softmax.exponential(float_bits, lanes, False)
    combine = softmax.combine(float_bits, index_bits, lanes, False)
    recall = softmax.recall(float_bits, index_bits, lanes)
    sums = products.grouped_sums(float_bits, index_bits, lanes, False, fixed)
    dots = products.grouped_dots(float_bits, index_bits, lanes, False, fixed)
    is_gat, is_leaky = kind == "gat", kind == "leaky"
    scores = products.scores(float_bits, index_bits, lanes, "sources")
    score_dots = products.grouped_dots(float_bits, index_bits, lanes, True, fixed) if is_leaky else dots
    steps = products.grouped_sums(float_bits, index_bits, lanes, True, fixed) if is_leaky else sums
    subtract = softmax.subtract_largest(float_bits, index_bits, lanes)
    clear, bend, ask = rows.clear(float_bits), rows.bend(float_bits), rows.ask(float_bits)
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
        slopes, score_out, score_out_row, scratch, partial, kept = a[31], a[32], a[33], a[34], a[35], a[36]
        if fixed:
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            grad_head, out_head, near_head, far_head = head, head, head, head
        slope, scale, zero = scalar(numbers, 0), scalar(numbers, 1), scalar(numbers, 3)
        block, products, raw = block_of(), block_of(), block_of()
        most = heads_of()
        total = most + FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
            fill(products + k * slot, zero)
        given_raw = raw if is_gat else 0
        grad_bytes = grad_head * (heads - 1) + width * size
        far_bytes = 0 if is_gat else far_head * (heads - 1) + score_width * size
        out_bytes = out_head * (heads - 1) + width * size
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
                to = row_scratch if is_leaky else score_out + j * score_out_row
                if not is_gat:
                    ask(row + ROWS_AHEAD * out_row, out_bytes)
                    if not is_kept:
                        ask(mine + ROWS_AHEAD * value_row, out_bytes)
                    if is_leaky == is_kept:  # leaky's own rows are its values
                        ask(own + ROWS_AHEAD * near_row, whole)
                    if not is_leaky:
                        ask(to + ROWS_AHEAD * score_out_row, whole)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_kept:
                        recall(block, products, kept, order, indices, k, count, total, grad, grad_row,
                               grad_bytes, far, far_row, far_bytes, last, seed, threshold, scale)  # fmt: skip
                    else:
                        if is_gat:
                            fill(most, zero)
                            scores(statistics, 4 * slot, own, edge, order, indices, k, count, block, raw,
                                   most, grad, grad_row, grad_bytes, last, slope)  # fmt: skip
                        else:
                            score_dots(own, near_head, far, far_row, far_head, indices, k, count, block,
                                       heads, score_width, att, last, slope)  # fmt: skip
                            subtract(block, statistics, indices, k, count)
                        exponential(block, count, 0, 0)
                        dots(mine, value_head, grad, grad_row, grad_head, indices, k, count, products,
                             heads, width, 0, last, slope)  # fmt: skip
                        combine(block, products, given_raw, statistics, indices, order, k, count, slopes,
                                total, seed, threshold, slope, scale)  # fmt: skip
                    sums(grad, grad_row, grad_head, indices, k, count, block, row, out_head, first, heads,
                         width, 0, 0, slope)  # fmt: skip
                    if not is_gat:
                        # the gradient of a row that is both value and key is the sum of both
                        fresh = first if is_leaky or score_out != out else 0
                        steps(far, far_row, far_head, indices, k, count, products, to, near_head, fresh,
                              heads, score_width, own, near_head, slope)  # fmt: skip
                    k += count
                if start >= end:
                    for h in range(heads):
                        clear(row + h * out_head, width)
                    if not is_gat and not is_leaky and score_out != out:
                        clear(to, heads * score_width)
                elif is_leaky:
                    bend(row, row_scratch, own, att, row_partial, heads * score_width, 1)
                if is_gat:
                    copy(score_out + j * score_out_row, total)

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
