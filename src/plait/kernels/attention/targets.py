"""Gradients of what the targets give to the scores, over the edges of each target.

`targets` sums by the slopes that the pass over sources left; `again` needs none. Where nodes have few edges,
`again` comes first and keeps two numbers per edge and head for the sources (cpu.py: sources): neither the
output nor a pass over it is needed then and nothing of an edge is computed twice, but the rows of values are
gathered once more.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from plait.kernels.arguments import PATTERN, Arguments
from plait.kernels.attention import products, rows, softmax
from plait.kernels.attention.cpu import ENDS
from plait.kernels.attention.rows import BLOCK, FLAT, ROWS_AHEAD
from plait.kernels.vector import load_index, load_scalar, next_piece

__all__ = ["AGAIN", "TARGETS", "again", "targets"]

TARGETS = Arguments(
    f"{PATTERN} order heads width far[] far_head near[] near_head out[] out_head slopes att numbers scratch "
    "partial"
)
AGAIN = Arguments(
    f"{PATTERN} last_edge heads width value[] value_head grad[] grad_head out[] statistics {ENDS} "
    "seed threshold scratch partial kept"
)


@functools.cache
def targets(float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0) -> Any:
    """Gradients of the target's part of the scores: sums of slope * far, or of slope * leaky's steps."""
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of = rows.block(float_bits, lanes)
    is_leaky = kind == "leaky"
    sums = products.grouped_sums(float_bits, index_bits, lanes, is_leaky, fixed)
    gather = softmax.gather_heads(float_bits, index_bits, lanes)
    clear, bend, ask = rows.clear(float_bits), rows.bend(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    head = fixed * size
    read = TARGETS.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        heads, width, far_head, near_head = a.heads, a.width, a.far_head, a.near_head
        out_head = a.out_head
        if fixed:
            heads, width, out_head, near_head, far_head = lanes, fixed, head, head, head
        slope = scalar(a.numbers, 0)
        block = block_of()
        whole = heads * width * size
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            row_scratch, row_partial = a.scratch + piece * whole, a.partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * width)
            for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                row, own = a.out + i * a.out_row, a.near + i * a.near_row
                ask(row + ROWS_AHEAD * a.out_row, whole)
                if is_leaky:
                    ask(own + ROWS_AHEAD * a.near_row, whole)
                to = row_scratch if is_leaky else row
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    gather(block, a.slopes, a.order, k, count)
                    sums(a.far, a.far_row, far_head, a.indices, k, count, block, to, out_head, first, heads,
                         width, own, near_head, slope)  # fmt: skip
                    k += count
                if start >= end:
                    clear(row, heads * width)
                elif is_leaky:
                    bend(row, row_scratch, own, a.att, row_partial, heads * width, 0)

    return run


@functools.cache
def again(
    float_bits: int, index_bits: int, lanes: int, kind: str, fixed: int = 0, is_kept: bool = False
) -> Any:
    """The same gradients as `targets` (gat: of the target's score) from nothing but the nodes' statistics.

    Scores, weights and their gradients are computed again, so that none has to be kept for an edge; a value
    row is gathered once more for that. is_kept: all edges of a softmax are here together, so that the sum
    term of its gradient is found here too, and weights and gradients of the scores are kept for the sources.
    """
    index, bound, scalar = load_index(index_bits), load_index(64), load_scalar(float_bits)
    block_of, heads_of = rows.block(float_bits, lanes), rows.stack_floats(float_bits, 4 * FLAT)
    fill, copy = softmax.fill(float_bits, lanes), softmax.copy(float_bits, lanes)
    exponential = softmax.exponential(float_bits, lanes, True)
    combine = softmax.combine(float_bits, index_bits, lanes, True)
    keep, settle = softmax.keep(float_bits, lanes), softmax.settle(float_bits, lanes)
    dots = products.grouped_dots(float_bits, index_bits, lanes, False, fixed)
    is_gat, is_leaky = kind == "gat", kind == "leaky"
    scores = products.scores(float_bits, index_bits, lanes, "targets")
    score_dots = products.grouped_dots(float_bits, index_bits, lanes, is_leaky, fixed)
    sums = products.grouped_sums(float_bits, index_bits, lanes, is_leaky, fixed)
    clear, bend, ask = rows.clear(float_bits), rows.bend(float_bits), rows.ask(float_bits)
    size = float_bits // 8
    slot, head = lanes * size, fixed * size
    read = AGAIN.reader()

    @cfunc(types.void(types.CPointer(types.int64)))
    def run(arguments):  # type: ignore[no-untyped-def]
        a = read(arguments)
        heads, width, value_head, grad_head = a.heads, a.width, a.value_head, a.grad_head
        far_head, near_head, score_width = a.far_head, a.near_head, a.score_width
        if fixed:
            heads, width, score_width, value_head = lanes, fixed, fixed, head
            grad_head, near_head, far_head = head, head, head
        slope, scale, zero = scalar(a.numbers, 0), scalar(a.numbers, 1), scalar(a.numbers, 3)
        block, products, raw = block_of(), block_of(), block_of()
        most = heads_of()
        total, unread, inner = most + FLAT * size, most + 2 * FLAT * size, most + 3 * FLAT * size
        for k in range(BLOCK + 4):
            fill(block + k * slot, zero)
            fill(products + k * slot, zero)
        given_raw = raw if is_gat else 0
        value_bytes = value_head * (heads - 1) + width * size
        whole = heads * score_width * size
        while True:
            piece = next_piece(a.team, a.pieces)
            if piece >= a.pieces:
                break
            row_scratch, row_partial = a.scratch + piece * whole, a.partial + piece * whole
            if is_leaky:
                clear(row_partial, heads * score_width)
            for i in range(bound(a.bounds, piece), bound(a.bounds, piece + 1)):
                start, end = index(a.indptr, i), index(a.indptr, i + 1)
                row, mine, own = a.out + i * a.out_row, a.near + i * a.near_row, a.statistics + i * 4 * slot
                if not is_gat:
                    ask(a.grad + (i + ROWS_AHEAD) * a.grad_row, grad_head * heads)
                    ask(mine + ROWS_AHEAD * a.near_row, whole)
                    ask(row + ROWS_AHEAD * a.out_row, whole)
                to = row_scratch if is_leaky else row
                fill(total, zero)
                fill(unread, zero)
                fill(inner, zero)
                k = start
                while k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_gat:
                        fill(most, zero)
                        scores(a.far, a.far_row, own, a.edge, 0, a.indices, k, count, block, raw, most,
                               a.value, a.value_row, value_bytes, a.last_edge, slope)  # fmt: skip
                    else:
                        score_dots(mine, near_head, a.far, a.far_row, far_head, a.indices, k, count, block,
                                   heads, score_width, a.att, a.last_edge, slope)  # fmt: skip
                    exponential(block, count, own + slot, unread)
                    dots(
                        a.grad + i * a.grad_row, grad_head, a.value, a.value_row, value_head, a.indices, k,
                        count, products, heads, width, 0, a.last_edge, slope,
                    )  # fmt: skip
                    if is_kept:
                        keep(a.kept, block, products, own, k, count, inner, a.seed, a.threshold, scale)
                    else:
                        combine(block, products, given_raw, own, a.indices, 0, k, count, 0, total,
                                a.seed, a.threshold, slope, scale)  # fmt: skip
                        if not is_gat:
                            sums(
                                a.far, a.far_row, far_head, a.indices, k, count, products, to, near_head,
                                first, heads, score_width, mine, near_head, slope,
                            )  # fmt: skip
                    k += count
                k = start
                while is_kept and k < end:
                    count = min(BLOCK, end - k)
                    first = 1 if k == start else 0
                    if is_gat and end - start > BLOCK:  # the sums before leaky are the last block's by now
                        scores(a.far, a.far_row, own, a.edge, 0, a.indices, k, count, block, raw, most,
                               a.value, a.value_row, value_bytes, a.last_edge, slope)  # fmt: skip
                    settle(a.kept, products, given_raw, k, count, inner, total, slope)
                    if not is_gat:
                        sums(a.far, a.far_row, far_head, a.indices, k, count, products, to, near_head, first,
                             heads, score_width, mine, near_head, slope)  # fmt: skip
                    k += count
                if is_gat:
                    copy(row, total)
                elif start >= end:
                    clear(row, heads * score_width)
                elif is_leaky:
                    bend(row, row_scratch, mine, a.att, row_partial, heads * score_width, 0)

    return run
