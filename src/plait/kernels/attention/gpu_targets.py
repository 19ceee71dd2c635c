"""Attention's backward pass over targets on a GPU, the first of two: gradients of near and of edges.

Kept from forward to backward: log(sum(exp(score))) per node and head, and grad . out, which is the softmax
gradient's sum term. The weights are recomputed, and kept for the pass over sources where it needs them.
GATv2's gradient of `att` needs nothing per edge: the sum over edges of ds * leaky(near[i] + far[j]) is the
sum over targets of near[i] times the sum of ds * leaky', plus the same over sources; only rows per edge,
where there are any, add theirs edge by edge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

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

__all__ = ["attend_targets"]


@triton.jit  # type: ignore[untyped-decorator]
def _scored(  # type: ignore[no-untyped-def]
    p_far, p_value, p_edge, b_near, b_att, source, at_edge, m_tile, m_edge_head, o_cell, o_head,
    far_stride, value_stride, edge_stride, SLOPE: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of one edge of every slot: values, what the score is made of, its slopes, the edge's row, the score.

    What a kind does not have, slopes or a row, is the values instead, and not used.
    """
    b_value = tl.load(p_value + source[None, :, None, None] * value_stride + o_cell,
                      mask=m_tile, other=0.0).to(ACC)  # fmt: skip
    slopes, b_edge = b_value, b_value
    if KIND == "gat":
        b_sum = b_near + tl.load(p_far + source[:, None] * far_stride + o_head[None, :],
                                 mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
        if p_edge is not None:
            b_sum += tl.load(p_edge + at_edge[:, None] * edge_stride + o_head[None, :],
                             mask=m_edge_head, other=0.0).to(ACC)  # fmt: skip
        score = leaky(b_sum, SLOPE)
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
            slopes = slopes_of(b_sum, SLOPE)
            score = by_head(b_att * (b_sum * slopes))
        else:
            score = by_head(b_near * b_sum)
    return b_value, b_sum, slopes, b_edge, score


@triton.jit  # type: ignore[untyped-decorator]
def _write_edge(  # type: ignore[no-untyped-def]
    p_edge_grad, p_kept, edge_grad_stride, to_score, dropped, slopes, b_near, b_att, b_grad,
    at_edge, m_tile, m_edge_head, o_cell, o_head, heads, KIND: tl.constexpr,
):  # fmt: skip
    """The gradients of edges' rows, and the weights with the scores' gradients for attend_sources."""
    if p_edge_grad is not None:
        if KIND == "gat":
            tl.store(p_edge_grad + at_edge[:, None] * edge_grad_stride + o_head[None, :],
                     to_score, mask=m_edge_head)  # fmt: skip
        elif KIND == "leaky":
            tl.store(p_edge_grad + at_edge[None, :, None, None] * edge_grad_stride + o_cell,
                     slopes * over(to_score) * b_att, mask=m_tile)  # fmt: skip
        else:
            tl.store(p_edge_grad + at_edge[None, :, None, None] * edge_grad_stride + o_cell,
                     b_near * over(to_score) + b_grad * over(dropped), mask=m_tile)  # fmt: skip
    if p_kept is not None:
        p_mine = p_kept + at_edge[:, None] * (2 * heads) + o_head[None, :]
        tl.store(p_mine, dropped, mask=m_edge_head)
        tl.store(p_mine + heads, to_score, mask=m_edge_head)


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def _targets(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_bias, p_out, p_grad, p_statistics, p_near_grad, p_near_parts,
    p_att_parts, p_edge_grad, p_kept, p_indices, p_items,
    far_stride, near_stride, value_stride, edge_stride, out_stride, grad_stride, near_grad_stride,
    near_parts_stride, edge_grad_stride,
    num_pieces, num_items, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
    heads: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    value_stride, out_stride, grad_stride = value_stride * UNIT, out_stride * UNIT, grad_stride * UNIT
    if KIND != "gat":
        far_stride, near_stride = far_stride * UNIT, near_stride * UNIT
        near_grad_stride = near_grad_stride * UNIT
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = halves(p_seed)
    o_cell, m_cell = cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    m_head = (o_head < heads)[None, :]
    m_row, node = row >= 0, row.to(tl.int64)
    m_own, at_row = m_row[None, :, None, None] & m_cell, node[None, :, None, None]
    m_stat = m_row[:, None] & m_head
    b_grad = tl.load(p_grad + at_row * grad_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    b_out = tl.load(p_out + at_row * out_stride + o_cell, mask=m_own, other=0.0).to(ACC)
    if p_bias is not None:
        b_out -= tl.load(p_bias + o_cell, mask=m_cell, other=0.0).to(ACC)
    p_own = p_statistics + node[:, None] * (2 * heads) + o_head[None, :]
    log = tl.load(p_own, mask=m_stat, other=0.0)
    mean = by_head(b_grad * b_out)
    tl.store(p_own + heads, mean, mask=m_stat)  # pieces of one row write the same bits
    if KIND == "gat":
        b_near = tl.load(p_near + node[:, None] * near_stride + o_head[None, :],
                         mask=m_stat, other=0.0).to(ACC)  # fmt: skip
        total = tl.zeros((SLOTS, HEADS), ACC)
    else:
        b_near = tl.load(p_near + at_row * near_stride + o_cell, mask=m_own, other=0.0).to(ACC)
        total = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    b_att = b_near
    if KIND == "leaky":
        b_att = tl.load(p_att + o_cell, mask=m_cell, other=0.0).to(ACC)
        if p_edge is not None:
            to_att = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)  # the edges' own share, see above
    source = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_tile = m_edge[None, :, None, None] & m_cell
        m_edge_head = m_edge[:, None] & m_head
        at_edge = o_edge.to(tl.int64)
        b_value, b_sum, slopes, b_edge, score = _scored(
            p_far, p_value, p_edge, b_near, b_att, source, at_edge, m_tile, m_edge_head, o_cell, o_head,
            far_stride, value_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        source = tl.load(p_indices + o_edge + step, mask=o_edge + step < last, other=0).to(tl.int64)
        weight = tl.where(m_edge[:, None], tl.exp(score - log), 0.0)
        to_weight = by_head(b_grad * b_value)
        dropped = weight
        if DROPS:
            factor = factor_of(o_edge, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
            to_weight *= factor
            dropped = weight * factor
        to_score = weight * (to_weight - mean)
        if KIND == "gat":
            to_score = tl.where(b_sum > 0, to_score, to_score * SLOPE)
            total += to_score
        elif KIND == "leaky":
            total += slopes * over(to_score)
            if p_edge is not None:
                to_att += slopes * over(to_score) * b_edge
        else:
            total += b_sum * over(to_score)
        _write_edge(
            p_edge_grad, p_kept, edge_grad_stride, to_score, dropped, slopes, b_near, b_att, b_grad,
            at_edge, m_tile, m_edge_head, o_cell, o_head, heads, KIND,
        )  # fmt: skip
    is_piece = i_program < num_pieces
    if KIND == "gat":
        write_head_sums(total, row, part, is_piece, o_head, heads,
                         p_near_grad, p_near_parts, near_grad_stride, near_parts_stride)  # fmt: skip
    else:
        if KIND == "leaky":
            p_mine = p_att_parts + i_program.to(tl.int64) * (heads * columns)
            share = total * b_near
            if p_edge is not None:
                share += to_att
            tl.store(p_mine + o_cell, tl.sum(share, 1)[:, None, :, :], mask=m_cell)
            total *= b_att
        write_sums(total, row, part, is_piece, o_cell, m_cell,
                    p_near_grad, p_near_parts, near_grad_stride, near_parts_stride)  # fmt: skip


_run_targets = Launcher(_targets)


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
    bias: torch.Tensor | None = None,
    edge_grad: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> torch.Tensor | None:
    """The pass over targets, the first backwards: near_grad, edge_grad and the second statistic.

    out is what `attend` wrote, with the same bias. kept[edges, 2, heads] gets the weights and the gradients
    of the scores for attend_sources. Returns the targets' part of att's gradient (leaky only).
    """
    columns, rows = head_columns(scores, value, heads), rows_on(pattern, value.device)
    tiles = tiles_of("targets", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(value.dtype)
    grid = items.grid(tiles.slots)
    near_parts = value.new_empty((items.num_parts, near_grad.shape[1]), dtype=sums)
    att_parts = value.new_empty((grid, heads * columns), dtype=sums) if scores.kind == "leaky" else None
    if grid:
        wide = wide_rows(scores)
        unit = unit_of(value, out, grad, *wide, near_grad if wide else None)
        own = unit if wide else 1
        arguments = (
            scores.far, scores.near, value, scores.att, scores.edge, bias, out, grad, statistics,
            near_grad, near_parts, att_parts, edge_grad, kept, rows.indices, items.items,
            scores.far.stride(0) // own, stride_of(scores.near) // own, value.stride(0) // unit,
            stride_of(scores.edge), out.stride(0) // unit, grad.stride(0) // unit, near_grad.stride(0) // own,
            near_parts.stride(0), stride_of(edge_grad),
            items.num_pieces, items.num_pieces + items.num_short, *draws_of(scores),
        )  # fmt: skip
        constants = kind_of(scores) | {"ACC": acc} | shape_of(tiles, heads, columns) | {"UNIT": unit}
        _run_targets((grid,), arguments, constants, tiles.warps)
    add_up(items, rows, near_parts, near_grad)
    return None if att_parts is None else column_sums(att_parts)
