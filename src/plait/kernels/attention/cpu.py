"""Attention over a graph's edges on the CPU: score, softmax and weighted sum in one pass over each row.

The softmax is the online one: scores of a block of edges, their largest so far, exponentials, and the rows
gathered while they are still in the first cache. Only the largest score and the inverse sum of each node and
head are kept. The backward pass goes over sources and computes everything again from these: one gather of
the gradient rows gives the gradients of values and scores together, because the sum term of the softmax's
gradient is grad . output, known per node. A row is always summed by one thread in edge order, so the bits do
not depend on the number of threads.

Where nodes have few edges the backward pass begins at the other end (targets.py) and keeps two numbers per
edge and head; the pass over sources then only sums rows by them.

kind: gat (score = leaky(source + target + edge)), leaky (GATv2: att . leaky(near + far)), dot (near . far).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.attention import products, rows, softmax
from plait.kernels.attention.rows import BLOCK, FLAT, ROWS_AHEAD
from plait.kernels.vector import load_index, load_scalar, next_piece, next_rows

__all__ = ["ENDS", "FORWARD", "ROW_DOTS", "SOURCES", "forward", "row_dots", "sources"]

ENDS = "far[] far_head near[] near_head score_width edge att numbers"
FORWARD = Arguments(
    f"{PATTERN} last_edge heads width value[] value_head out[] out_head statistics {ENDS} addend[] bias "
    "seed threshold"
)
SOURCES = Arguments(
    f"{PATTERN} last_edge order heads width value[] value_head grad[] grad_head out[] out_head statistics "
    f"{ENDS} seed threshold slopes score_out[] scratch partial kept"
)
ROW_DOTS = Arguments("rows heads width grad[] row[] addend[] bias out lanes piece_rows")


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
    read = FORWARD.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        heads, width, value_head, out_head = a.heads, a.width, a.value_head, a.out_head
        far_head, near_head, score_width = a.far_head, a.near_head, a.score_width
        if fixed:
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            out_head, near_head, far_head = head, head, head
        slope, scale = scalar(a.numbers, 0), scalar(a.numbers, 1)
        one, zero = scalar(a.numbers, 2), scalar(a.numbers, 3)
        block = block_of()
        most = heads_of()
        before, total = most + FLAT * size, most + 2 * FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
        value_bytes = value_head * (heads - 1) + width * size
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                row, own = a.out + i * a.out_row, a.statistics + i * 4 * slot
                later = i + ROWS_AHEAD
                if not is_gat:
                    ask(a.near + later * a.near_row, heads * score_width * size)
                if a.addend != 0:
                    ask(a.addend + later * a.addend_row, heads * width * size)
                fill(most, one * low)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    copy(before, most)
                    if is_gat:
                        scores(a.far, a.far_row, own, a.edge, 0, a.indices, k, count, block, 0, most,
                               a.value, a.value_row, value_bytes, a.last_edge, slope)  # fmt: skip
                    else:
                        dots(
                            a.near + i * a.near_row, near_head, a.far, a.far_row, far_head, a.indices, k,
                            count, block, heads, score_width, a.att, a.last_edge, slope,
                        )  # fmt: skip
                        largest(block, count, most)
                    if k > start:
                        rescale(before, most, total)
                        for h in range(heads):
                            scale_row(row + h * out_head, width, scalar(before, h))
                    exponential(block, count, most, total)
                    if a.threshold != 0:
                        drop(block, k, count, a.seed, a.threshold, scale)
                    first = 1 if k == start else 0
                    sums(a.value, a.value_row, value_head, a.indices, k, count, block, row, out_head, first,
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
                    p = a.addend + i * a.addend_row + o if a.addend != 0 else 0
                    q = a.bias + o if a.bias != 0 else 0
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
    read = SOURCES.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        heads, width, value_head, grad_head = a.heads, a.width, a.value_head, a.grad_head
        out_head, far_head, near_head, score_width = a.out_head, a.far_head, a.near_head, a.score_width
        if fixed:
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            grad_head, out_head, near_head, far_head = head, head, head, head
        slope, scale, zero = scalar(a.numbers, 0), scalar(a.numbers, 1), scalar(a.numbers, 3)
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
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            row_scratch, row_partial = a.scratch + piece * whole, a.partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * score_width)
            for j in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                start, end = index(a.indptr, j), index(a.indptr, j + 1)
                row, own, mine = a.out + j * a.out_row, a.near + j * a.near_row, a.value + j * a.value_row
                to = row_scratch if is_leaky else a.score_out + j * a.score_out_row
                if not is_gat:
                    ask(row + ROWS_AHEAD * a.out_row, out_bytes)
                    if not is_kept:
                        ask(mine + ROWS_AHEAD * a.value_row, out_bytes)
                    if is_leaky == is_kept:  # leaky's own rows are its values
                        ask(own + ROWS_AHEAD * a.near_row, whole)
                    if not is_leaky:
                        ask(to + ROWS_AHEAD * a.score_out_row, whole)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_kept:
                        recall(
                            block, products, a.kept, a.order, a.indices, k, count, total, a.grad,
                            a.grad_row, grad_bytes, a.far, a.far_row, far_bytes, a.last_edge, a.seed,
                            a.threshold, scale,
                        )  # fmt: skip
                    else:
                        if is_gat:
                            fill(most, zero)
                            scores(
                                a.statistics, 4 * slot, own, a.edge, a.order, a.indices, k, count, block,
                                raw, most, a.grad, a.grad_row, grad_bytes, a.last_edge, slope,
                            )  # fmt: skip
                        else:
                            score_dots(own, near_head, a.far, a.far_row, far_head, a.indices, k, count, block,
                                       heads, score_width, a.att, a.last_edge, slope)  # fmt: skip
                            subtract(block, a.statistics, a.indices, k, count)
                        exponential(block, count, 0, 0)
                        dots(mine, value_head, a.grad, a.grad_row, grad_head, a.indices, k, count, products,
                             heads, width, 0, a.last_edge, slope)  # fmt: skip
                        combine(
                            block, products, given_raw, a.statistics, a.indices, a.order, k, count,
                            a.slopes, total, a.seed, a.threshold, slope, scale,
                        )  # fmt: skip
                    sums(
                        a.grad, a.grad_row, grad_head, a.indices, k, count, block, row, out_head, first,
                        heads, width, 0, 0, slope,
                    )  # fmt: skip
                    if not is_gat:
                        # the gradient of a row that is both value and key is the sum of both
                        fresh = first if is_leaky or a.score_out != a.out else 0
                        steps(a.far, a.far_row, far_head, a.indices, k, count, products, to, near_head, fresh,
                              heads, score_width, own, near_head, slope)  # fmt: skip
                    k += count
                if start >= end:
                    for h in range(heads):
                        clear(row + h * out_head, width)
                    if not is_gat and not is_leaky and a.score_out != a.out:
                        clear(to, heads * score_width)
                elif is_leaky:
                    bend(row, row_scratch, own, a.att, row_partial, heads * score_width, 1)
                if is_gat:
                    copy(a.score_out + j * a.score_out_row, total)

    return run


@functools.cache
def row_dots(float_bits: int) -> Any:
    """out[i, 3, h] = grad[i, h] . (row[i, h] - addend[i, h] - bias[h]), the softmax gradient's sum term."""
    dot, ask = rows.row_dots(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    read = ROW_DOTS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        while True:
            first = next_rows(a.team, a.rows, a.piece_rows)
            if first >= a.rows:
                break
            for i in range(first, min(a.rows, first + a.piece_rows)):
                to = a.out + (i * 4 + 3) * a.lanes * size
                if a.addend != 0:
                    ask(a.addend + (i + ROWS_AHEAD) * a.addend_row, a.heads * a.width * size)
                for h in range(a.heads):
                    o = h * a.width * size
                    p = a.addend + i * a.addend_row + o if a.addend != 0 else 0
                    q = a.bias + o if a.bias != 0 else 0
                    dot(to + h * size, a.grad + i * a.grad_row + o, a.row + i * a.row_row + o, p, q, a.width)

    return run
