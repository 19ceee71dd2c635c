"""The backward pass of attention with two numbers an edge and head kept: over targets first, then sources.

The pass over targets has all edges of a softmax together: it finds the sum term of its gradient itself, so
neither the output nor a pass over it is needed, and keeps the weights and the gradients of the scores. The
pass over sources then only sums rows by them. Against sources first (cpu.py): nothing of an edge is computed
twice, but the rows of values are gathered once more.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.attention import rows, tiles
from plait.kernels.attention.cpu import ROWS_AHEAD, grouped_dots, grouped_sums
from plait.kernels.attention.tiles import BLOCK, FLAT
from plait.kernels.vector import load_index, load_scalar, next_piece

__all__ = ["spread", "weigh"]


@functools.cache
def weigh(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """Weights and gradients of the scores of every edge, and of what the target gives to them; cpu.AGAIN."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    products_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 1)
    raw_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 2)
    heads_of = tiles.stack_floats(float_bits, 4 * FLAT)
    fill, copy, clear = tiles.fill(float_bits, lanes), tiles.copy(float_bits, lanes), rows.clear(float_bits)
    exponential = tiles.exponential(float_bits, lanes, True)
    keep, settle = tiles.keep(float_bits, lanes), tiles.settle(float_bits, lanes)
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
        scratch, partial, kept = a[29], a[30], a[31]
        if fixed:
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            grad_head, near_head, far_head = head, head, head
        slope, scale, zero = scalar(numbers, 0), scalar(numbers, 1), scalar(numbers, 3)
        block, products, raw = block_of(), products_of(), raw_of()
        most = heads_of()
        total, unread, inner = most + FLAT * size, most + 2 * FLAT * size, most + 3 * FLAT * size
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
                fill(inner, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
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
                    keep(kept, block, products, own, k, count, inner, seed, threshold, scale)
                    k += count
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_gat and end - start > BLOCK:  # the sums before leaky are the last block's by now
                        scores(far, far_row, own, edge, 0, indices, k, count, block, raw, most,
                               value, value_row, value_bytes, last, slope)  # fmt: skip
                    settle(kept, products, given_raw, k, count, inner, total, slope)
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
def spread(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """Gradients of the values and of the source's part of the scores from what was kept (see cpu.SOURCES)."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT)
    products_of = tiles.stack_floats(float_bits, (BLOCK + 4) * lanes + FLAT + 1)
    heads_of = tiles.stack_floats(float_bits, FLAT)
    fill, copy, clear = tiles.fill(float_bits, lanes), tiles.copy(float_bits, lanes), rows.clear(float_bits)
    recall = tiles.recall(float_bits, index_bits, lanes)
    sums = grouped_sums(float_bits, index_bits, lanes, False, fixed)
    is_gat, is_leaky = kind == "gat", kind == "leaky"
    steps = grouped_sums(float_bits, index_bits, lanes, True, fixed) if is_leaky else sums
    bend, ask = rows.bend(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    head = fixed * size

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(a):  # type: ignore[no-untyped-def]
        counter, pieces, bounds, indptr, indices, last, order = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
        heads, width = a[7], a[8]
        grad, grad_row, grad_head, out, out_row, out_head = a[12], a[13], a[14], a[15], a[16], a[17]
        far, far_row, far_head = a[19], a[20], a[21]
        near, near_row, near_head, score_width = a[22], a[23], a[24], a[25]
        att, numbers, seed, threshold = a[27], a[28], a[29], a[30]
        score_out, score_out_row, scratch, partial, kept = a[32], a[33], a[34], a[35], a[36]
        if fixed:
            heads, width, score_width, grad_head = lanes, fixed, fixed, head
            out_head, near_head, far_head = head, head, head
        slope, scale, zero = scalar(numbers, 0), scalar(numbers, 1), scalar(numbers, 3)
        block, products, total = block_of(), products_of(), heads_of()
        whole, grad_bytes = heads * score_width * size, grad_head * (heads - 1) + width * size
        far_bytes = 0 if is_gat else far_head * (heads - 1) + score_width * size
        while True:
            piece = next_piece(counter, pieces)
            if piece >= pieces:
                break
            row_scratch, row_partial = scratch + piece * whole, partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * score_width)
            for j in range(bound(bounds, piece), bound(bounds, piece + 1)):
                start, end = index(indptr, j), index(indptr, j + 1)
                row, own = out + j * out_row, near + j * near_row
                to = row_scratch if is_leaky else score_out + j * score_out_row
                if not is_gat:
                    ask(row + ROWS_AHEAD * out_row, out_head * (heads - 1) + width * size)
                    if is_leaky:
                        ask(own + ROWS_AHEAD * near_row, whole)
                    else:
                        ask(to + ROWS_AHEAD * score_out_row, whole)
                fill(total, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    recall(block, products, kept, order, indices, k, count, total, grad, grad_row, grad_bytes,
                           far, far_row, far_bytes, last, seed, threshold, scale)  # fmt: skip
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
