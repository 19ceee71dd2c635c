"""What attention's kernels on a GPU are made of: tiles of heads and columns, scores, what they write.

A row of heads x columns lies in a program as [CHUNKS, SLOTS, HEADS, LANES]: threads divide the last three, so
a score is summed over CHUNKS inside a thread and over two or four threads; with whole rows side by side it
would be summed over eight, in three rounds of shuffles per edge, which took longer than fetching the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "by_head", "cells", "factor_of", "leaky", "merged", "over", "seen", "slopes_of", "write_head_sums",
    "write_row", "write_sums", "zeros",
]  # fmt: skip

# Triton gives threads to the last dimension first, then to the others from the first (up to 3.6) or from the
# last one (3.9). Chunks are to lie in registers, so they have the dimension it comes to last.
_HEADS_FIRST = tl.constexpr(tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 6))


@triton.jit  # type: ignore[untyped-decorator]
def cells(  # type: ignore[no-untyped-def]
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
def zeros(  # type: ignore[no-untyped-def]
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr
):
    """A tile of zeros."""
    if _HEADS_FIRST:
        tile = tl.zeros((HEADS, SLOTS, CHUNKS, LANES), ACC)
    else:
        tile = tl.zeros((CHUNKS, SLOTS, HEADS, LANES), ACC)
    return tile


@triton.jit
def by_head(tile):  # type: ignore[no-untyped-def]
    """The sums over a head's columns: tile -> [SLOTS, HEADS]."""
    if _HEADS_FIRST:  # noqa: SIM108 - Triton compiles one branch alone
        sums = tl.trans(tl.sum(tl.sum(tile, 2), 2))
    else:
        sums = tl.sum(tl.sum(tile, 0), 2)
    return sums


@triton.jit
def over(weights):  # type: ignore[no-untyped-def]
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
def halves(p_seed):  # type: ignore[no-untyped-def]
    """The low and the high 32 bits of the seed, which lies on the device: a CUDA graph draws it again."""
    if p_seed is not None:  # noqa: SIM108 - Triton compiles one branch alone
        seed = tl.load(p_seed)
    else:
        seed = tl.full((), 0, tl.int64)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def factor_of(  # type: ignore[no-untyped-def]
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
def leaky(total, SLOPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.where(total > 0, total, total * SLOPE)


@triton.jit  # type: ignore[untyped-decorator]
def slopes_of(total, SLOPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of leaky; of the tile's own type, two plain numbers would be float32."""
    return tl.where(
        total > 0, tl.full((1, 1, 1, 1), 1.0, total.dtype), tl.full((1, 1, 1, 1), SLOPE, total.dtype)
    )


@triton.jit
def merged(largest, powers, total):  # type: ignore[no-untyped-def]
    """The softmaxes of all slots as one: (largest [1, HEADS], sum of powers [1, HEADS], total
    [CHUNKS, 1, HEADS, LANES])."""
    top = tl.max(largest, 0)[None, :]
    weight = tl.exp(largest - top)
    return top, tl.sum(powers * weight, 0)[None, :], tl.sum(total * over(weight), 1)[:, None, :, :]


@triton.jit
def write_row(  # type: ignore[no-untyped-def]
    largest, powers, total, row, o_cell, m_cell, o_head, heads, p_bias, p_out, p_statistics, out_stride
):
    """out and the first statistic of some rows: [rows, HEADS], [CHUNKS, rows, HEADS, LANES]."""
    node = row.to(tl.int64)
    m_row = row >= 0
    inverse = tl.where(powers > 0, 1.0 / tl.where(powers > 0, powers, 1.0), 0.0)
    p_row = p_out + node[None, :, None, None] * out_stride
    made = total * over(inverse)
    if p_bias is not None:
        made += tl.load(p_bias + o_cell, mask=m_cell, other=0.0).to(total.dtype)
    tl.store(p_row + o_cell, made, mask=m_row[None, :, None, None] & m_cell)
    p_own = p_statistics + node[:, None] * (2 * heads) + o_head[None, :]
    log = largest + tl.log(tl.where(powers > 0, powers, 1.0))
    tl.store(p_own, log, mask=m_row[:, None] & (o_head < heads)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def seen(  # type: ignore[no-untyped-def]
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
        score = leaky(b_sum, SLOPE)
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
        if KIND == "leaky":  # noqa: SIM108 - Triton compiles one branch alone
            score = by_head(b_att * leaky(b_near + b_far, SLOPE))
        else:
            score = by_head(b_near * b_far)
    return b_value, score


@triton.jit
def write_sums(  # type: ignore[no-untyped-def]
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
def write_head_sums(  # type: ignore[no-untyped-def]
    total, row, part, is_piece, o_head, heads, p_out, p_parts, out_stride, parts_stride
):
    """write_sums for one number per head: [SLOTS, HEADS]."""
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
