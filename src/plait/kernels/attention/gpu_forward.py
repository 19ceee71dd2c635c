"""Attention's forward pass on a GPU: softmaxes and weighted sums of all heads in one program.

A program has SLOTS softmaxes under way: one for each of SLOTS short rows, or SLOTS shares of one piece of a
long row, merged at the end (kernels/csr: Items). How a row lies in a program: gpu_tiles.py.
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
    draws_of,
    head_columns,
    kind_of,
    shape_of,
    tiles_of,
    unit_of,
    wide_rows,
)
from plait.kernels.attention.gpu_tiles import cells, factor_of, halves, merged, over, seen, write_row, zeros
from plait.kernels.csr.gpu import Rows
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import accumulator, rows_on, slots_of, stride_of

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["attend", "statistics_of"]


@triton.jit(do_not_specialize=COUNTS)  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    p_far, p_near, p_value, p_att, p_edge, p_bias, p_out, p_statistics, p_parts, p_part_statistics,
    p_indices, p_items, far_stride, near_stride, value_stride, edge_stride, out_stride,
    num_pieces, num_items, p_seed, threshold,
    SLOPE: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    LOWEST: tl.constexpr, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
    heads: tl.constexpr, columns: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    value_stride, out_stride = value_stride * UNIT, out_stride * UNIT
    if KIND != "gat":
        far_stride, near_stride = far_stride * UNIT, near_stride * UNIT
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    seed_low, seed_high = halves(p_seed)
    o_cell, m_cell = cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
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
    total = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
    source = tl.load(p_indices + first, mask=first < last, other=0).to(tl.int64)
    other = tl.load(p_indices + first + step, mask=first + step < last, other=0).to(tl.int64)
    # two edges at a time: what was summed so far is scaled once for both
    for k in range(0, rounds, 2):
        o_edge = first + k * step
        o_other = o_edge + step
        m_edge, m_other = o_edge < last, o_other < last
        b_value, score = seen(
            p_far, p_value, p_edge, b_near, b_att, source, o_edge, m_edge, o_cell, m_cell, o_head, m_head,
            far_stride, value_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        b_next, next_score = seen(
            p_far, p_value, p_edge, b_near, b_att, other, o_other, m_other, o_cell, m_cell, o_head, m_head,
            far_stride, value_stride, edge_stride, SLOPE, KIND, ACC,
        )  # fmt: skip
        # the next ones are prefetched while these are worked on
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
            power *= factor_of(o_edge, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
            next_power *= factor_of(o_other, o_head, seed_low, seed_high, threshold, SCALE, ACC, HEADS)
        total = total * over(shrink) + b_value * over(power) + b_next * over(next_power)
        largest = top
    if i_program < num_pieces:
        top_of, powers_of, total_of = merged(largest, powers, total)
        part_of = tl.max(part, 0).to(tl.int64)
        if part_of >= 0:
            tl.store(p_parts + part_of * (heads * columns) + o_cell, total_of, mask=m_cell)
            p_own = p_part_statistics + part_of * (2 * heads) + o_head[None, :]
            tl.store(p_own, top_of, mask=m_head)
            tl.store(p_own + heads, powers_of, mask=m_head)
        else:
            row_of = tl.max(row, 0) + tl.zeros((1,), row.dtype)
            write_row(top_of, powers_of, total_of, row_of, o_cell, m_cell, o_head, heads,
                       p_bias, p_out, p_statistics, out_stride)  # fmt: skip
    else:
        write_row(largest, powers, total, row, o_cell, m_cell, o_head, heads,
                   p_bias, p_out, p_statistics, out_stride)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    p_parts, p_part_statistics, p_splits, p_bias, p_out, p_statistics, out_stride,
    ACC: tl.constexpr, LOWEST: tl.constexpr, SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, EVEN: tl.constexpr,
    heads: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """A row that was split: the softmaxes of its parts as one, always in the same order."""
    o_cell, m_cell = cells(heads, columns, CHUNKS, HEADS, LANES, EVEN)
    o_head = tl.arange(0, HEADS)
    p_split = p_splits + tl.program_id(0) * 3
    row = tl.load(p_split) + tl.zeros((1,), p_splits.dtype.element_ty)
    first = tl.load(p_split + 1)
    last = tl.where(tl.max(row, 0) >= 0, tl.load(p_split + 2), first)
    largest = tl.full((SLOTS, HEADS), LOWEST, ACC)
    powers = tl.zeros((SLOTS, HEADS), ACC)
    total = zeros(SLOTS, CHUNKS, HEADS, LANES, ACC)
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
        total = total * over(shrink) + b_part * over(weight)
        largest = top
    largest, powers, total = merged(largest, powers, total)
    write_row(largest, powers, total, row, o_cell, m_cell, o_head, heads,
               p_bias, p_out, p_statistics, out_stride)  # fmt: skip


_run_forward, _run_merge = Launcher(_forward), Launcher(_merge)


def statistics_of(rows: Rows, value: torch.Tensor, heads: int) -> torch.Tensor:
    """Room for what forward keeps per row and head: log(sum(exp(score))), then grad . out."""
    return value.new_empty((rows.num_rows, 2, heads), dtype=accumulator(value.dtype)[0])


def attend(
    pattern: Pattern | Rows,
    scores: Scores,
    value: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    heads: int,
    tiles: AttentionTiles | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i, h] = sum over edges of softmax(score)[h] * value[j, h] + bias; statistics: see statistics_of.

    scores.near: [targets, heads] (gat) or [targets, heads * columns]. leaky takes its far rows from `value`.
    scores.edge: [edges, heads] (gat) or rows that are added to far, for dot to value too.
    """
    columns, rows = head_columns(scores, value, heads), rows_on(pattern, value.device)
    if not out.numel():
        return out
    tiles = tiles_of("forward", scores.kind, heads, columns, value.element_size()) if tiles is None else tiles
    items, shape = rows.items(tiles.short, tiles.most), shape_of(tiles, heads, columns)
    sums, acc = accumulator(value.dtype)
    parts = value.new_empty((items.num_parts, heads * columns), dtype=sums)
    part_statistics = value.new_empty((items.num_parts, 2, heads), dtype=sums)
    numbers = {"ACC": acc, "LOWEST": float(torch.finfo(sums).min) / 2}
    wide = wide_rows(scores)
    unit = unit_of(value, out, *wide)
    own = unit if wide else 1
    arguments = (
        scores.far, scores.near, value, scores.att, scores.edge, bias, out, statistics, parts,
        part_statistics, rows.indices, items.items, scores.far.stride(0) // own,
        stride_of(scores.near) // own, value.stride(0) // unit, stride_of(scores.edge),
        out.stride(0) // unit, items.num_pieces, items.num_pieces + items.num_short,
        *draws_of(scores),
    )  # fmt: skip
    constants = kind_of(scores) | numbers | shape | {"UNIT": unit}
    _run_forward((items.grid(tiles.slots),), arguments, constants, tiles.warps)
    if items.num_splits:
        merged = (parts, part_statistics, items.splits, bias, out, statistics, out.stride(0))
        _run_merge((items.num_splits,), merged, numbers | shape | {"SLOTS": 8}, 1)
    return out
