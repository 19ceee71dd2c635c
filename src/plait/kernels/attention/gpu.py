"""Attention over a graph's edges on a GPU by Triton: all heads of an edge in one program, and the gradients.

A program has SLOTS softmaxes under way: one for each of SLOTS short rows, or SLOTS shares of one piece of a
long row, merged at the end (kernels/csr: Items). A row of heads x columns lies in a program as
[CHUNKS, SLOTS, HEADS, LANES]: threads divide the last three, so a score is summed over CHUNKS inside a thread
and over two or four threads; with whole rows side by side it would be summed over eight, in three rounds of
shuffles per edge, which took longer than fetching the row.

Kept from forward to backward: log(sum(exp(score))) per node and head, and grad . out, which is the softmax
gradient's sum term. The pass over targets recomputes the weights (or keeps them for the pass over sources).
GATv2's gradient of `att` needs nothing per edge: the sum over edges of ds * leaky(near[i] + far[j]) is the
sum over targets of near[i] times the sum of ds * leaky', plus the same over sources; only rows of edges,
where there are any, add theirs edge by edge.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from plait.errors import InputError
from plait.kernels.attention import Scores
from plait.kernels.csr.gpu import Items, Rows
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import accumulator, add_parts, rows_on, slots_of

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["AttentionTiles", "attend", "attend_sources", "attend_targets", "statistics_of"]

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
_COUNTS = ("num_pieces", "num_items", "threshold")
"""Numbers that differ from one call to the next: kernels are not compiled again for them."""


@dataclass(frozen=True)
class AttentionTiles:
    """How a launch is cut: see kernels/spmm/gpu: Tiles; `lanes` columns of a head lie side by side."""

    short: int
    most: int
    slots: int
    lanes: int
    warps: int


@functools.cache
def _tiles_of(pass_name: str, kind: str, heads: int, columns: int, element_size: int) -> AttentionTiles:
    """The tiles of a pass (forward, targets, sources) for so many heads of so many columns.

    From 52 settings per pass on an H200 (4 heads of 32; two R-MAT graphs, a mesh, cliques): 8 numbers of each
    row in a thread, 16 where rows are of 16 bits or the scores are computed without them.
    """
    is_half = element_size < 4
    is_cheap = kind == "gat" and pass_name != "sources"
    lanes, warps, per_thread = (8, 1, 32) if is_half and pass_name != "targets" else (16, 2, 8)
    per_thread = 16 if warps == 2 and (is_half or is_cheap) else per_thread
    width = triton.next_power_of_2(heads) * triton.next_power_of_2(columns)
    slots = max(1, min(16, 32 * warps * per_thread // width))
    warps = warps if width <= 1024 else 4
    return AttentionTiles(short=64, most=1024, slots=slots, lanes=lanes, warps=warps)


# Triton gives threads to the last dimension first, then to the others from the first (up to 3.6) or from the
# last one (3.9). Chunks are to lie in registers, so they have the dimension it comes to last.
_HEADS_FIRST = tl.constexpr(tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 6))


@triton.jit  # type: ignore[untyped-decorator]
def _cells(  # type: ignore[no-untyped-def]
    heads, columns, CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr
):
    """(offsets, mask) of a row's columns, [HEADS, 1, CHUNKS, LANES] or with heads and chunks exchanged; EVEN:
    nothing is padding, and the mask a constant, which vector loads need."""
    o_head, o_chunk = tl.arange(0, HEADS), tl.arange(0, CHUNKS) * LANES
    o_lane = tl.arange(0, LANES)[None, None, None, :]
    if _HEADS_FIRST:
        o_head, o_column = o_head[:, None, None, None], o_chunk[None, None, :, None] + o_lane
    else:
        o_head, o_column = o_head[None, None, :, None], o_chunk[:, None, None, None] + o_lane
    if EVEN:  # noqa: SIM108 - Triton compiles one branch alone
        m_cell = tl.full((1, 1, 1, 1), 1, tl.int1)
    else:
        m_cell = (o_head < heads) & (o_column < columns)
    return o_head * columns + o_column, m_cell


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(  # type: ignore[no-untyped-def]
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr
):
    """A tile of zeros."""
    if _HEADS_FIRST:
        tile = tl.zeros((HEADS, SLOTS, CHUNKS, LANES), ACC)
    else:
        tile = tl.zeros((CHUNKS, SLOTS, HEADS, LANES), ACC)
    return tile


@triton.jit
def _by_head(tile):  # type: ignore[no-untyped-def]
    """The sums over a head's columns: tile -> [SLOTS, HEADS]."""
    if _HEADS_FIRST:  # noqa: SIM108 - Triton compiles one branch alone
        sums = tl.trans(tl.sum(tl.sum(tile, 2), 2))
    else:
        sums = tl.sum(tl.sum(tile, 0), 2)
    return sums


@triton.jit
def _over(weights):  # type: ignore[no-untyped-def]
    """[SLOTS, HEADS] against a tile."""
    if _HEADS_FIRST:  # noqa: SIM108 - Triton compiles one branch alone
        tile = tl.trans(weights)[:, :, None, None]
    else:
        tile = weights[None, :, :, None]
    return tile


@triton.jit
def _mixed(h):  # type: ignore[no-untyped-def]
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _halves(p_seed):  # type: ignore[no-untyped-def]
    """The low and the high 32 bits of the seed, which lies on the device: a CUDA graph draws it anew."""
    if p_seed is not None:  # noqa: SIM108 - Triton compiles one branch alone
        seed = tl.load(p_seed)
    else:
        seed = tl.full((), 0, tl.int64)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _factor(  # type: ignore[no-untyped-def]
    o_edge,
    o_head,
    seed_low,
    seed_high,
    threshold,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    HEADS: tl.constexpr,
):
    """0 or SCALE for every edge and head: the draws of kernels/attention/softmax.py, bit for bit."""
    flat = o_edge.to(tl.int64)[:, None] * HEADS
    counter = flat.to(tl.uint32) + o_head[None, :].to(tl.uint32)
    counter = counter ^ seed_low
    high = seed_high + (flat >> 32).to(tl.uint32) * 0x9E3779B9
    draw = _mixed(_mixed(counter) + high)
    return (draw < threshold.to(tl.uint32)).to(ACC) * SCALE


@triton.jit  # type: ignore[untyped-decorator]
def _leaky(total, SLOPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(total > 0, total, total * SLOPE)


@triton.jit  # type: ignore[untyped-decorator]
def _slopes(total, SLOPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of _leaky; of the tile's own type, two plain numbers would be float32."""
    return tl.where(
        total > 0, tl.full((1, 1, 1, 1), 1.0, total.dtype), tl.full((1, 1, 1, 1), SLOPE, total.dtype)
    )


@triton.jit
def _merged(largest, powers, total):  # type: ignore[no-untyped-def]
    """The softmaxes of all slots as one: (largest [1, HEADS], sum of powers [1, HEADS], total
    [CHUNKS, 1, HEADS, LANES])."""
    top = tl.max(largest, 0)[None, :]
    weight = tl.exp(largest - top)
    return top, tl.sum(powers * weight, 0)[None, :], tl.sum(total * _over(weight), 1)[:, None, :, :]


@triton.jit
def _write_row(  # type: ignore[no-untyped-def]
    largest, powers, total, row, o_cell, m_cell, o_head, heads, p_out, p_statistics, out_stride
):
    """out and the first statistic of some rows: [rows, HEADS], [CHUNKS, rows, HEADS, LANES]."""
    node = row.to(tl.int64)
    m_row = row >= 0
    inverse = tl.where(powers > 0, 1.0 / tl.where(powers > 0, powers, 1.0), 0.0)
    p_row = p_out + node[None, :, None, None] * out_stride
    tl.store(p_row + o_cell, total * _over(inverse), mask=m_row[None, :, None, None] & m_cell)
    p_own = p_statistics + node[:, None] * (2 * heads) + o_head[None, :]
    log = largest + tl.log(tl.where(powers > 0, powers, 1.0))
    tl.store(p_own, log, mask=m_row[:, None] & (o_head < heads)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _seen(  # type: ignore[no-untyped-def]
    p_far, p_value, p_edge, b_near, b_att, source, o_edge, m_edge, o_cell, m_cell, o_head, m_head,
    far_stride, value_stride, edge_stride, SLOPE: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(values, scores [SLOTS, HEADS]) of one edge of every slot."""
    m_tile = m_edge[None, :, None, None] & m_cell
    b_value = tl.load(
        p_value + source[None, :, None, None] * value_stride + o_cell, mask=m_tile, other=0.0
    ).to(ACC)
    if KIND == "gat":
        m_scores = m_edge[:, None] & m_head
        b_sum = b_near + tl.load(p_far + source[:, None] * far_stride + o_head[None, :],
                                 mask=m_scores, other=0.0).to(ACC)  # fmt: skip
        if p_edge is not None:
            b_sum += tl.load(p_edge + o_edge.to(tl.int64)[:, None] * edge_stride + o_head[None, :],
                             mask=m_scores, other=0.0).to(ACC)  # fmt: skip
        score = _leaky(b_sum, SLOPE)
    else:
        if KIND == "leaky":
            b_far = b_value
        else:
            b_far = tl.load(p_far + source[None, :, None, None] * far_stride + o_cell,
                            mask=m_tile, other=0.0).to(ACC)  # fmt: skip
        if p_edge is not None:
            b_edge = tl.load(p_edge + o_edge.to(tl.int64)[None, :, None, None] * edge_stride + o_cell,
                             mask=m_tile, other=0.0).to(ACC)  # fmt: skip
            b_far += b_edge
            if KIND == "dot":
                b_value += b_edge
        if KIND == "leaky":
            score = _by_head(b_att * _leaky(b_near + b_far, SLOPE))
        else:
            score = _by_head(b_near * b_far)
    return b_value, score


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_out, p_statistics, p_parts, p_part_statistics,
    p_indices, p_items, far_stride, near_stride, value_stride, edge_stride, out_stride,
    num_pieces, num_items, heads, columns, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    LOWEST: tl.constexpr, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = _halves(p_seed)
    o_cell, m_cell = _cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    m_head = (o_head < heads)[None, :]
    m_row = row >= 0
    node = row.to(tl.int64)
    if KIND == "gat":
        b_near = tl.load(p_near + node[:, None] * near_stride + o_head[None, :],
                         mask=m_row[:, None] & m_head, other=0.0).to(ACC)  # fmt: skip
    else:
        b_near = tl.load(p_near + node[None, :, None, None] * near_stride + o_cell,
                         mask=m_row[None, :, None, None] & m_cell, other=0.0).to(ACC)  # fmt: skip
    b_att = b_near
    if KIND == "leaky":
        b_att = tl.load(p_att + o_cell, mask=m_cell, other=0.0).to(ACC)
    largest = tl.full((SLOTS, HEADS), LOWEST, ACC)
    powers = tl.zeros((SLOTS, HEADS), ACC)
    total = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    source = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    other = tl.load(p_indices + first + step, mask=first + step < last, other=0).to(tl.int64)
    # two edges at a time: what was summed so far is scaled once for both
    for k in range(0, rounds, 2):
        o_edge = first + k * step
        o_other = o_edge + step
        m_edge, m_other = o_edge < last, o_other < last
        b_value, score = _seen(
            p_far, p_value, p_edge, b_near, b_att, source, o_edge, m_edge, o_cell, m_cell, o_head, m_head,
            far_stride, value_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        b_next, next_score = _seen(
            p_far, p_value, p_edge, b_near, b_att, other, o_other, m_other, o_cell, m_cell, o_head, m_head,
            far_stride, value_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        # the next ones are asked for while these are worked on
        source = tl.load(p_indices + o_other + step, mask=o_other + step < last, other=0).to(tl.int64)
        other = tl.load(p_indices + o_other + 2 * step, mask=o_other + 2 * step < last, other=0).to(tl.int64)
        score = tl.where(m_edge[:, None], score, LOWEST)
        next_score = tl.where(m_other[:, None], next_score, LOWEST)
        top = tl.maximum(largest, tl.maximum(score, next_score))
        shrink = tl.exp(largest - top)
        power = tl.where(m_edge[:, None], tl.exp(score - top), 0.0)
        next_power = tl.where(m_other[:, None], tl.exp(next_score - top), 0.0)
        powers = powers * shrink + power + next_power
        if DROPS:
            power *= _factor(o_edge, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
            next_power *= _factor(o_other, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
        total = total * _over(shrink) + b_value * _over(power) + b_next * _over(next_power)
        largest = top
    if i_program < num_pieces:
        top_of, powers_of, total_of = _merged(largest, powers, total)
        part_of = tl.max(part, 0).to(tl.int64)
        if part_of >= 0:
            tl.store(p_parts + part_of * (heads * columns) + o_cell, total_of, mask=m_cell)
            p_own = p_part_statistics + part_of * (2 * heads) + o_head[None, :]
            tl.store(p_own, top_of, mask=m_head)
            tl.store(p_own + heads, powers_of, mask=m_head)
        else:
            row_of = tl.max(row, 0) + tl.zeros((1,), row.dtype)
            _write_row(top_of, powers_of, total_of, row_of, o_cell, m_cell, o_head, heads,
                       p_out, p_statistics, out_stride)  # fmt: skip
    else:
        _write_row(
            largest, powers, total, row, o_cell, m_cell, o_head, heads, p_out, p_statistics, out_stride
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    p_parts, p_part_statistics, p_splits, p_out, p_statistics, out_stride, heads, columns,
    ACC: tl.constexpr, LOWEST: tl.constexpr, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A row that was split: the softmaxes of its parts as one, always in the same order."""
    o_cell, m_cell = _cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    p_split = p_splits + tl.program_id(0) * 3
    row = tl.load(p_split) + tl.zeros((1,), p_splits.dtype.element_ty)
    first = tl.load(p_split + 1)
    last = tl.where(tl.max(row, 0) >= 0, tl.load(p_split + 2), first)
    largest = tl.full((SLOTS, HEADS), LOWEST, ACC)
    powers = tl.zeros((SLOTS, HEADS), ACC)
    total = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    for k in range(first, last, SLOTS):
        o_part = (k + tl.arange(0, SLOTS)).to(tl.int64)
        m_part = o_part < last
        m_own = m_part[:, None] & (o_head < heads)[None, :]
        p_own = p_part_statistics + o_part[:, None] * (2 * heads) + o_head[None, :]
        b_largest = tl.load(p_own, mask=m_own, other=LOWEST)
        b_powers = tl.load(p_own + heads, mask=m_own, other=0.0)
        b_part = tl.load(p_parts + o_part[None, :, None, None] * (heads * columns) + o_cell,
                         mask=m_part[None, :, None, None] & m_cell, other=0.0)  # fmt: skip
        top = tl.maximum(largest, b_largest)
        shrink, weight = tl.exp(largest - top), tl.exp(b_largest - top)
        powers = powers * shrink + b_powers * weight
        total = total * _over(shrink) + b_part * _over(weight)
        largest = top
    largest, powers, total = _merged(largest, powers, total)
    _write_row(largest, powers, total, row, o_cell, m_cell, o_head, heads, p_out, p_statistics, out_stride)


@triton.jit
def _write_sums(  # type: ignore[no-untyped-def]
    total, row, part, is_piece, o_cell, m_cell, p_out, p_parts, out_stride, parts_stride
):
    """The sums of a program: rows as they are, of a piece one row or one part; [CHUNKS, SLOTS, ...]."""
    if is_piece:
        one = tl.sum(total, 1)[:, None, :, :]
        part_of = tl.max(part, 0).to(tl.int64)
        row_of = (tl.max(row, 0) + tl.zeros((1,), row.dtype)).to(tl.int64)[None, :, None, None]
        if part_of >= 0:
            tl.store(p_parts + part_of * parts_stride + o_cell, one, mask=m_cell)
        else:
            tl.store(p_out + row_of * out_stride + o_cell, one, mask=m_cell & (row_of >= 0))
    else:
        p_row = p_out + row.to(tl.int64)[None, :, None, None] * out_stride
        tl.store(p_row + o_cell, total, mask=(row >= 0)[None, :, None, None] & m_cell)


@triton.jit
def _write_head_sums(  # type: ignore[no-untyped-def]
    total, row, part, is_piece, o_head, heads, p_out, p_parts, out_stride, parts_stride
):
    """_write_sums for one number per head: [SLOTS, HEADS]."""
    m_head = (o_head < heads)[None, :]
    if is_piece:
        one = tl.sum(total, 0)[None, :]
        part_of = tl.max(part, 0).to(tl.int64)
        row_of = (tl.max(row, 0) + tl.zeros((1,), row.dtype)).to(tl.int64)[:, None]
        if part_of >= 0:
            tl.store(p_parts + part_of * parts_stride + o_head[None, :], one, mask=m_head)
        else:
            tl.store(p_out + row_of * out_stride + o_head[None, :], one, mask=m_head & (row_of >= 0))
    else:
        p_row = p_out + row.to(tl.int64)[:, None] * out_stride
        tl.store(p_row + o_head[None, :], total, mask=(row >= 0)[:, None] & m_head)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _targets(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_out, p_grad, p_statistics, p_near_grad, p_near_parts,
    p_att_parts, p_edge_grad, p_kept, p_indices, p_items,
    far_stride, near_stride, value_stride, edge_stride, out_stride, grad_stride, near_grad_stride,
    near_parts_stride, edge_grad_stride,
    num_pieces, num_items, heads, columns, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = _halves(p_seed)
    o_cell, m_cell = _cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    m_head = (o_head < heads)[None, :]
    m_row, node = row >= 0, row.to(tl.int64)
    m_own, at_row = m_row[None, :, None, None] & m_cell, node[None, :, None, None]
    m_stat = m_row[:, None] & m_head
    b_grad = tl.load(p_grad + at_row * grad_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    b_out = tl.load(p_out + at_row * out_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    p_own = p_statistics + node[:, None] * (2 * heads) + o_head[None, :]
    log = tl.load(p_own, mask=m_stat, other=0.0)
    mean = _by_head(b_grad * b_out)
    tl.store(p_own + heads, mean, mask=m_stat)  # pieces of one row write the same bits
    if KIND == "gat":
        b_near = tl.load(p_near + node[:, None] * near_stride + o_head[None, :], mask=m_stat, other=0.0).to(
            ACC
        )
        total = tl.zeros((SLOTS, HEADS), ACC)
    else:
        b_near = tl.load(p_near + at_row * near_stride + o_cell, mask=m_own, other=0.0).to(ACC)
        total = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    if KIND == "leaky":
        b_att = tl.load(p_att + o_cell, mask=m_cell, other=0.0).to(ACC)
        if p_edge is not None:
            to_att = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)  # the edges' own share, see the file's head
    source = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_tile = m_edge[None, :, None, None] & m_cell
        m_edge_head = m_edge[:, None] & m_head
        at_edge = o_edge.to(tl.int64)
        b_value = tl.load(p_value + source[None, :, None, None] * value_stride + o_cell,
                          mask=m_tile, other=0.0).to(ACC)  # fmt: skip
        if KIND == "gat":
            b_sum = b_near + tl.load(p_far + source[:, None] * far_stride + o_head[None, :],
                                     mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
            if p_edge is not None:
                b_sum += tl.load(p_edge + at_edge[:, None] * edge_stride + o_head[None, :],
                                 mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
            score = _leaky(b_sum, SLOPE)
        else:
            if KIND == "leaky":
                b_sum = b_near + b_value
            else:
                b_sum = tl.load(p_far + source[None, :, None, None] * far_stride + o_cell,
                                mask=m_tile, other=0.0).to(ACC)  # fmt: skip
            if p_edge is not None:
                b_edge = tl.load(p_edge + at_edge[None, :, None, None] * edge_stride + o_cell,
                                 mask=m_tile, other=0.0).to(ACC)  # fmt: skip
                b_sum += b_edge
                if KIND == "dot":
                    b_value += b_edge
            if KIND == "leaky":
                slopes = _slopes(b_sum, SLOPE)
                score = _by_head(b_att * (b_sum * slopes))
            else:
                score = _by_head(b_near * b_sum)
        source = tl.load(p_indices + o_edge + step, mask=o_edge + step < last, other=0).to(tl.int64)
        weight = tl.where(m_edge[:, None], tl.exp(score - log), 0.0)
        to_weight = _by_head(b_grad * b_value)
        dropped = weight
        if DROPS:
            factor = _factor(o_edge, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
            to_weight *= factor
            dropped = weight * factor
        to_score = weight * (to_weight - mean)
        if KIND == "gat":
            to_score = tl.where(b_sum > 0, to_score, to_score * SLOPE)
            total += to_score
            if p_edge_grad is not None:
                tl.store(p_edge_grad + at_edge[:, None] * edge_grad_stride + o_head[None, :],
                         to_score, mask=m_edge_head)  # fmt: skip
        elif KIND == "leaky":
            total += slopes * _over(to_score)
            if p_edge is not None:
                to_att += slopes * _over(to_score) * b_edge
            if p_edge_grad is not None:
                tl.store(p_edge_grad + at_edge[None, :, None, None] * edge_grad_stride + o_cell,
                         slopes * _over(to_score) * b_att, mask=m_tile)  # fmt: skip
        else:
            total += b_sum * _over(to_score)
            if p_edge_grad is not None:
                tl.store(p_edge_grad + at_edge[None, :, None, None] * edge_grad_stride + o_cell,
                         b_near * _over(to_score) + b_grad * _over(dropped), mask=m_tile)  # fmt: skip
        if p_kept is not None:
            p_mine = p_kept + at_edge[:, None] * (2 * heads) + o_head[None, :]
            tl.store(p_mine, dropped, mask=m_edge_head)
            tl.store(p_mine + heads, to_score, mask=m_edge_head)
    is_piece = i_program < num_pieces
    if KIND == "gat":
        _write_head_sums(total, row, part, is_piece, o_head, heads,
                         p_near_grad, p_near_parts, near_grad_stride, near_parts_stride)  # fmt: skip
    else:
        if KIND == "leaky":
            p_mine = p_att_parts + i_program.to(tl.int64) * (heads * columns)
            share = total * b_near
            if p_edge is not None:
                share += to_att
            tl.store(p_mine + o_cell, tl.sum(share, 1)[:, None, :, :], mask=m_cell)
            total *= b_att
        _write_sums(total, row, part, is_piece, o_cell, m_cell,
                    p_near_grad, p_near_parts, near_grad_stride, near_parts_stride)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _sources(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_grad, p_statistics, p_value_grad, p_value_parts,
    p_far_grad, p_far_parts, p_att_parts, p_kept, p_indices, p_order, p_items,
    far_stride, near_stride, value_stride, edge_stride, grad_stride,
    value_grad_stride, value_parts_stride, far_grad_stride, far_parts_stride,
    num_pieces, num_items, heads, columns, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = _halves(p_seed)
    o_cell, m_cell = _cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    m_head = (o_head < heads)[None, :]
    m_row, node = row >= 0, row.to(tl.int64)
    m_own, at_row = m_row[None, :, None, None] & m_cell, node[None, :, None, None]
    b_value = tl.load(p_value + at_row * value_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    to_value = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    if KIND == "gat":
        b_far = tl.load(p_far + node[:, None] * far_stride + o_head[None, :],
                        mask=m_row[:, None] & m_head, other=0.0).to(ACC)  # fmt: skip
        to_far = tl.zeros((SLOTS, HEADS), ACC)
    else:
        to_far = _zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
        if KIND == "leaky":
            b_far = b_value
            b_att = tl.load(p_att + o_cell, mask=m_cell, other=0.0).to(ACC)
        else:
            b_far = tl.load(p_far + at_row * far_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    target = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_tile = m_edge[None, :, None, None] & m_cell
        m_edge_head = m_edge[:, None] & m_head
        b_grad = tl.load(p_grad + target[None, :, None, None] * grad_stride + o_cell,
                         mask=m_tile, other=0.0).to(ACC)  # fmt: skip
        if p_order is not None:
            place = tl.load(p_order + o_edge, mask=m_edge, other=0).to(tl.int64)
        b_other, b_seen = b_far, b_value
        if KIND == "gat":
            b_sum = b_far
            if p_kept is None:
                b_sum = b_far + tl.load(p_near + target[:, None] * near_stride + o_head[None, :],
                                        mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
                if p_edge is not None:
                    b_sum += tl.load(p_edge + place[:, None] * edge_stride + o_head[None, :],
                                     mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
        else:
            b_near = tl.load(p_near + target[None, :, None, None] * near_stride + o_cell,
                             mask=m_tile, other=0.0).to(ACC)  # fmt: skip
            if p_edge is not None:
                b_edge = tl.load(p_edge + place[None, :, None, None] * edge_stride + o_cell,
                                 mask=m_tile, other=0.0).to(ACC)  # fmt: skip
                b_other = b_far + b_edge
                if KIND == "dot":
                    b_seen = b_value + b_edge
            b_sum = b_near + b_other
            slopes = _slopes(b_sum, SLOPE)
        if p_kept is not None:
            p_mine = p_kept + place[:, None] * (2 * heads) + o_head[None, :]
            dropped = tl.load(p_mine, mask=m_edge_head, other=0.0)
            to_score = tl.load(p_mine + heads, mask=m_edge_head, other=0.0)
        else:
            p_own = p_statistics + target[:, None] * (2 * heads) + o_head[None, :]
            log = tl.load(p_own, mask=m_edge_head, other=0.0)
            mean = tl.load(p_own + heads, mask=m_edge_head, other=0.0)
            if KIND == "gat":
                score = _leaky(b_sum, SLOPE)
            elif KIND == "leaky":
                score = _by_head(b_att * (b_sum * slopes))
            else:
                score = _by_head(b_near * b_other)
            weight = tl.where(m_edge[:, None], tl.exp(score - log), 0.0)
            to_weight = _by_head(b_grad * b_seen)
            dropped = weight
            if DROPS:
                factor = _factor(place, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
                to_weight *= factor
                dropped = weight * factor
            to_score = weight * (to_weight - mean)
            if KIND == "gat":
                to_score = tl.where(b_sum > 0, to_score, to_score * SLOPE)
        target = tl.load(p_indices + o_edge + step, mask=o_edge + step < last, other=0).to(tl.int64)
        to_value += b_grad * _over(dropped)
        if KIND == "gat":
            to_far += to_score
        elif KIND == "leaky":
            to_far += slopes * _over(to_score)
        else:
            to_far += b_near * _over(to_score)
    is_piece = i_program < num_pieces
    if KIND == "leaky":
        p_mine = p_att_parts + i_program.to(tl.int64) * (heads * columns)
        tl.store(p_mine + o_cell, tl.sum(to_far * b_value, 1)[:, None, :, :], mask=m_cell)
        to_value += to_far * b_att
    elif KIND == "gat":
        _write_head_sums(to_far, row, part, is_piece, o_head, heads,
                         p_far_grad, p_far_parts, far_grad_stride, far_parts_stride)  # fmt: skip
    else:
        _write_sums(to_far, row, part, is_piece, o_cell, m_cell,
                    p_far_grad, p_far_parts, far_grad_stride, far_parts_stride)  # fmt: skip
    _write_sums(to_value, row, part, is_piece, o_cell, m_cell,
                p_value_grad, p_value_parts, value_grad_stride, value_parts_stride)  # fmt: skip


_run_forward, _run_merge, _run_targets, _run_sources = (
    Launcher(kernel) for kernel in (_forward, _merge, _targets, _sources)
)


def statistics_of(rows: Rows, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Room for what forward keeps per row and head: log(sum(exp(score))), then grad . out."""
    return value.new_empty((rows.num_rows, 2, heads), dtype=accumulator(value.dtype)[0])


def _shape(tiles: AttentionTiles, heads: int, columns: int) -> dict[str, Any]:
    lanes = min(tiles.lanes, triton.next_power_of_2(columns))
    padded_heads, chunks = triton.next_power_of_2(heads), triton.next_power_of_2(-(-columns // lanes))
    return {
        "SLOTS": tiles.slots, "CHUNKS": chunks, "HEADS": padded_heads, "LANES": lanes,
        "EVEN": padded_heads == heads and chunks * lanes == columns,
    }  # fmt: skip


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _word(number: int) -> int:
    """The low 32 bits as a signed number: Triton would compile again for a wider type."""
    return ((number & _WORD) ^ (1 << 31)) - (1 << 31)


def _draws(scores: Scores) -> tuple[torch.Tensor | None, int]:
    """(the seed, the threshold) of the dropout."""
    drop = scores.dropout
    if drop is None:
        return None, 0
    seed = drop.seed
    if not isinstance(seed, torch.Tensor):
        seed = torch.tensor([((seed & _LONG) ^ (1 << 63)) - (1 << 63)], device=scores.far.device)
    return seed, _word(drop.threshold)


def _kind(scores: Scores) -> dict[str, Any]:
    """What a kernel is compiled for. The numbers are among it: Triton passes floats as float32."""
    dropout = scores.dropout
    scale = 1.0 if dropout is None else dropout.scale
    return {"KIND": scores.kind, "SLOPE": scores.slope, "DROPS": dropout is not None, "SCALE": scale}


def _checked(scores: Scores, value: torch.Tensor, heads: int) -> int:
    """The columns of a head."""
    if scores.kind not in ("gat", "leaky", "dot"):
        raise InputError(f"scores: unknown kind {scores.kind!r}; known are gat, leaky, dot")
    if scores.is_shared or scores.near is None:
        raise InputError("scores: a GPU needs near, and a far row for every head; expand the shared row")
    if value.shape[1] % heads:
        raise InputError(f"value has {value.shape[1]} columns; pass a multiple of heads = {heads}")
    return value.shape[1] // heads


def attend(
    pattern: Pattern | Rows,
    scores: Scores,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    heads: int,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor:
    """out[i, h] = sum over edges of softmax(score)[h] * value[j, h]; statistics: see statistics_of.

    scores.near: [targets, heads] (gat) or [targets, heads * columns]. leaky takes its far rows from `value`.
    scores.edge: [edges, heads] (gat) or rows that are added to far, for dot to value too.
    """
    columns, rows = _checked(scores, value, heads), rows_on(pattern, value.device)
    if not out.numel():
        return out
    tiles = (
        _tiles_of("forward", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
    )
    items, shape = rows.items(tiles.short, tiles.most), _shape(tiles, heads, columns)
    sums, acc = accumulator(value.dtype)
    parts = value.new_empty((items.num_parts, heads * columns), dtype=sums)
    part_statistics = value.new_empty((items.num_parts, 2, heads), dtype=sums)
    numbers = {"ACC": acc, "LOWEST": float(torch.finfo(sums).min) / 2}
    arguments = (
        scores.far, scores.near, value, scores.att, scores.edge, out, statistics, parts, part_statistics,
        rows.indices, items.items, scores.far.stride(0), _stride(scores.near), value.stride(0),
        _stride(scores.edge), out.stride(0), items.num_pieces, items.num_pieces + items.num_short,
        heads, columns, *_draws(scores),
    )  # fmt: skip
    _run_forward((items.grid(tiles.slots),), arguments, _kind(scores) | numbers | shape, tiles.warps)
    if items.num_splits:
        merged = (parts, part_statistics, items.splits, out, statistics, out.stride(0), heads, columns)
        _run_merge((items.num_splits,), merged, numbers | shape | {"SLOTS": 8}, 1)
    return out


def _add_up(items: Items, rows: Rows, parts: torch.Tensor | None, out: torch.Tensor | None) -> None:
    if parts is not None and out is not None:
        add_parts(items, rows.indptr, parts, out)


def attend_targets(
    pattern: Pattern | Rows,
    scores: Scores,
    value: torch.Tensor,
    out: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    near_grad: torch.Tensor,
    heads: int,
    *,
    edge_grad: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor | None:
    """The pass over targets, the first backwards: near_grad, edge_grad and the second statistic.

    out is what `attend` wrote, without a bias. kept[edges, 2, heads] gets the weights and the gradients of
    the scores for attend_sources. Returns the targets' part of att's gradient (leaky only).
    """
    columns, rows = _checked(scores, value, heads), rows_on(pattern, value.device)
    tiles = (
        _tiles_of("targets", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
    )
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(value.dtype)
    grid = items.grid(tiles.slots)
    near_parts = value.new_empty((items.num_parts, near_grad.shape[1]), dtype=sums)
    att_parts = value.new_empty((grid, heads * columns), dtype=sums) if scores.kind == "leaky" else None
    if grid:
        arguments = (
            scores.far, scores.near, value, scores.att, scores.edge, out, grad, statistics,
            near_grad, near_parts, att_parts, edge_grad, kept, rows.indices, items.items,
            scores.far.stride(0), _stride(scores.near), value.stride(0), _stride(scores.edge), out.stride(0),
            grad.stride(0), near_grad.stride(0), near_parts.stride(0), _stride(edge_grad),
            items.num_pieces, items.num_pieces + items.num_short, heads, columns,
            *_draws(scores),
        )  # fmt: skip
        _run_targets(
            (grid,), arguments, _kind(scores) | {"ACC": acc} | _shape(tiles, heads, columns), tiles.warps
        )
    _add_up(items, rows, near_parts, near_grad)
    return None if att_parts is None else att_parts.sum(0)


def attend_sources(
    transpose: Pattern | Rows,
    order: torch.Tensor | None,
    scores: Scores,
    value: torch.Tensor,
    grad: torch.Tensor,
    statistics: torch.Tensor,
    value_grad: torch.Tensor,
    far_grad: torch.Tensor | None,
    heads: int,
    *,
    kept: torch.Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor | None:
    """The pass over sources, after attend_targets: the gradients of value and of far (leaky: value_grad is
    both). order[t] is the row-order number of the transpose's edge t; only dropout, edge scores and `kept`
    need it. Returns the sources' part of att's gradient (leaky only)."""
    columns, rows = _checked(scores, value, heads), rows_on(transpose, value.device)
    tiles = (
        _tiles_of("sources", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
    )
    if order is None and (kept is not None or scores.edge is not None or scores.dropout is not None):
        raise InputError("order: dropout, edge scores and kept weights need it; pass the transpose's order")
    needs_order = kept is not None or scores.edge is not None or scores.dropout is not None
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(value.dtype)
    grid = items.grid(tiles.slots)
    value_parts = value.new_empty((items.num_parts, heads * columns), dtype=sums)
    far_parts = (
        None if far_grad is None else value.new_empty((items.num_parts, far_grad.shape[1]), dtype=sums)
    )
    att_parts = value.new_empty((grid, heads * columns), dtype=sums) if scores.kind == "leaky" else None
    if grid:
        arguments = (
            scores.far, scores.near, value, scores.att, scores.edge, grad, statistics, value_grad,
            value_parts, far_grad, far_parts, att_parts, kept, rows.indices,
            order if needs_order else None, items.items,
            scores.far.stride(0), _stride(scores.near), value.stride(0), _stride(scores.edge), grad.stride(0),
            value_grad.stride(0), value_parts.stride(0), _stride(far_grad), _stride(far_parts),
            items.num_pieces, items.num_pieces + items.num_short, heads, columns,
            *_draws(scores),
        )  # fmt: skip
        _run_sources(
            (grid,), arguments, _kind(scores) | {"ACC": acc} | _shape(tiles, heads, columns), tiles.warps
        )
    _add_up(items, rows, value_parts, value_grad)
    _add_up(items, rows, far_parts, far_grad)
    return None if att_parts is None else att_parts.sum(0)
