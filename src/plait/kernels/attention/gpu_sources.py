"""Attention's backward pass over sources on a GPU, the second of two: gradients of value and of far.

It reads the transpose: what every source sent. Weights come from the pass over targets, or are recomputed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plait.errors import InputError
from plait.kernels.attention import Scores
from plait.kernels.attention.gpu_launch import (
    COUNTS,
    AttentionTiles,
    add_up,
    draws_of,
    head_columns,
    kind_of,
    shape_of,
    tiles_of,
    unit_of,
    wide_rows,
)
from plait.kernels.attention.gpu_tiles import (
    by_head,
    cells,
    factor_of,
    halves,
    leaky,
    over,
    slopes_of,
    write_head_sums,
    write_sums,
    zeros,
)
from plait.kernels.colsum.gpu import column_sums
from plait.kernels.csr.gpu import Rows
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import accumulator, rows_on, slots_of, stride_of

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["attend_sources"]


@triton.jit  # type: ignore[untyped-decorator]
def _seen(  # type: ignore[no-untyped-def]
    p_near, p_edge, p_kept, b_far, b_value, target, place, m_tile, m_edge_head, o_cell, o_head,
    near_stride, edge_stride, SLOPE: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of one edge of every slot: near, far and value with the edge's row, near + far, the slopes of that."""
    b_near, b_other, b_seen, slopes = b_far, b_far, b_value, b_value
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
        slopes = slopes_of(b_sum, SLOPE)
    return b_near, b_other, b_seen, b_sum, slopes


@triton.jit  # type: ignore[untyped-decorator]
def _weighed(  # type: ignore[no-untyped-def]
    p_statistics, b_grad, b_near, b_other, b_seen, b_sum, slopes, b_att, target, place, m_edge, m_edge_head,
    o_head, heads, seed_low, seed_high, threshold, SLOPE: tl.constexpr, SCALE: tl.constexpr,
    KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """(the weights after dropout, the gradients of the scores), recomputed: [SLOTS, HEADS]."""
    p_own = p_statistics + target[:, None] * (2 * heads) + o_head[None, :]
    log = tl.load(p_own, mask=m_edge_head, other=0.0)
    mean = tl.load(p_own + heads, mask=m_edge_head, other=0.0)
    if KIND == "gat":
        score = leaky(b_sum, SLOPE)
    elif KIND == "leaky":
        score = by_head(b_att * (b_sum * slopes))
    else:
        score = by_head(b_near * b_other)
    weight = tl.where(m_edge[:, None], tl.exp(score - log), 0.0)
    to_weight = by_head(b_grad * b_seen)
    dropped = weight
    if DROPS:
        factor = factor_of(place, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
        to_weight *= factor
        dropped = weight * factor
    to_score = weight * (to_weight - mean)
    if KIND == "gat":
        to_score = tl.where(b_sum > 0, to_score, to_score * SLOPE)
    return dropped, to_score


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def _sources(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_grad, p_statistics, p_value_grad, p_value_parts,
    p_far_grad, p_far_parts, p_att_parts, p_kept, p_indices, p_order, p_items,
    far_stride, near_stride, value_stride, edge_stride, grad_stride,
    value_grad_stride, value_parts_stride, far_grad_stride, far_parts_stride,
    num_pieces, num_items, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
    heads: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    value_stride, grad_stride = value_stride * UNIT, grad_stride * UNIT
    value_grad_stride = value_grad_stride * UNIT
    if KIND != "gat":
        far_stride, near_stride = far_stride * UNIT, near_stride * UNIT
        far_grad_stride = far_grad_stride * UNIT
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = halves(p_seed)
    o_cell, m_cell = cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    m_head = (o_head < heads)[None, :]
    m_row, node = row >= 0, row.to(tl.int64)
    m_own, at_row = m_row[None, :, None, None] & m_cell, node[None, :, None, None]
    b_value = tl.load(p_value + at_row * value_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    to_value = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    if KIND == "gat":
        b_far = tl.load(p_far + node[:, None] * far_stride + o_head[None, :],
                        mask=m_row[:, None] & m_head, other=0.0).to(ACC)  # fmt: skip
        to_far = tl.zeros((SLOTS, HEADS), ACC)
    else:
        to_far = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
        if KIND == "leaky":
            b_far = b_value
            b_att = tl.load(p_att + o_cell, mask=m_cell, other=0.0).to(ACC)
        else:
            b_far = tl.load(p_far + at_row * far_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    if KIND != "leaky":
        b_att = b_value
    target = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_tile = m_edge[None, :, None, None] & m_cell
        m_edge_head = m_edge[:, None] & m_head
        b_grad = tl.load(p_grad + target[None, :, None, None] * grad_stride + o_cell,
                         mask=m_tile, other=0.0).to(ACC)  # fmt: skip
        place = target  # not used where it is not known
        if p_order is not None:
            place = tl.load(p_order + o_edge, mask=m_edge, other=0).to(tl.int64)
        b_near, b_other, b_seen, b_sum, slopes = _seen(
            p_near, p_edge, p_kept, b_far, b_value, target, place, m_tile, m_edge_head, o_cell, o_head,
            near_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        if p_kept is not None:
            p_mine = p_kept + place[:, None] * (2 * heads) + o_head[None, :]
            dropped = tl.load(p_mine, mask=m_edge_head, other=0.0)
            to_score = tl.load(p_mine + heads, mask=m_edge_head, other=0.0)
        else:
            dropped, to_score = _weighed(
                p_statistics, b_grad, b_near, b_other, b_seen, b_sum, slopes, b_att, target, place, m_edge,
                m_edge_head, o_head, heads, seed_low, seed_high, threshold, SLOPE, SCALE, KIND, DROPS, ACC,
                HEADS,
            )  # fmt: skip
        target = tl.load(p_indices + o_edge + step, mask=o_edge + step < last, other=0).to(tl.int64)
        to_value += b_grad * over(dropped)
        if KIND == "gat":
            to_far += to_score
        elif KIND == "leaky":
            to_far += slopes * over(to_score)
        else:
            to_far += b_near * over(to_score)
    is_piece = i_program < num_pieces
    if KIND == "leaky":
        p_mine = p_att_parts + i_program.to(tl.int64) * (heads * columns)
        tl.store(p_mine + o_cell, tl.sum(to_far * b_value, 1)[:, None, :, :], mask=m_cell)
        to_value += to_far * b_att
    elif KIND == "gat":
        write_head_sums(to_far, row, part, is_piece, o_head, heads,
                         p_far_grad, p_far_parts, far_grad_stride, far_parts_stride)  # fmt: skip
    else:
        write_sums(to_far, row, part, is_piece, o_cell, m_cell,
                    p_far_grad, p_far_parts, far_grad_stride, far_parts_stride)  # fmt: skip
    write_sums(to_value, row, part, is_piece, o_cell, m_cell,
                p_value_grad, p_value_parts, value_grad_stride, value_parts_stride)  # fmt: skip


_run_sources = Launcher(_sources)


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
    columns, rows = head_columns(scores, value, heads), rows_on(transpose, value.device)
    tiles = tiles_of("sources", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
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
        wide = wide_rows(scores)
        unit = unit_of(value, grad, value_grad, *wide, far_grad if wide else None)
        own = unit if wide else 1
        arguments = (
            scores.far, scores.near, value, scores.att, scores.edge, grad, statistics, value_grad,
            value_parts, far_grad, far_parts, att_parts, kept, rows.indices,
            order if needs_order else None, items.items,
            scores.far.stride(0) // own, stride_of(scores.near) // own, value.stride(0) // unit,
            stride_of(scores.edge), grad.stride(0) // unit, value_grad.stride(0) // unit,
            value_parts.stride(0), stride_of(far_grad) // own, stride_of(far_parts),
            items.num_pieces, items.num_pieces + items.num_short, *draws_of(scores),
        )  # fmt: skip
        constants = kind_of(scores) | {"ACC": acc} | shape_of(tiles, heads, columns) | {"UNIT": unit}
        _run_sources((grid,), arguments, constants, tiles.warps)
    add_up(items, rows, value_parts, value_grad)
    add_up(items, rows, far_parts, far_grad)
    return None if att_parts is None else column_sums(att_parts)
