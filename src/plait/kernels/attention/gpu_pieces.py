"""Attention in pieces on a GPU by Triton: dots of edges, sums by weights, a softmax over each row's edges.

Values of edges are [edges, lanes] as in kernels/attention/pieces.py. Dots go by blocks of edges, all of one
length. Sums and softmax have the programs of kernels/spmm/gpu.py: SLOTS short rows, or one piece of a
long row; the softmaxes of pieces are merged in order before the pieces are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from plait.kernels.attention.pieces import padded
from plait.kernels.csr.gpu import Rows  # first: it says so where triton is missing
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import Tiles, accumulator, add_parts, close_rows, rows_on, slots_of, tiles_of

# isort: split
import triton
import triton.language as tl

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["edge_dots", "edge_softmax", "edge_softmax_gradient", "edge_sums"]

_COUNTS = ("num_pieces", "num_items", "num_edges")
_EDGES = 16  # of a program of dots
_SHORT, _MOST = 64, 512


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _dots(  # type: ignore[no-untyped-def]
    p_near, p_far, p_targets, p_sources, p_out, near_stride, far_stride, num_edges, heads, width,
    IS_SHARED: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, BLOCK_EDGES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    edge = tl.program_id(0).to(tl.int64) * BLOCK_EDGES + tl.arange(0, BLOCK_EDGES)
    m_edge = edge < num_edges
    p_own = p_near + tl.load(p_targets + edge, mask=m_edge, other=0).to(tl.int64)[:, None] * near_stride
    p_other = p_far + tl.load(p_sources + edge, mask=m_edge, other=0).to(tl.int64)[:, None] * far_stride
    for head in range(0, LANES):
        total = tl.zeros((BLOCK_EDGES,), ACC)
        if head < heads:
            for first in range(0, width, BLOCK_WIDTH):
                o_column = (first + tl.arange(0, BLOCK_WIDTH))[None, :]
                m_both = m_edge[:, None] & (o_column < width)
                o_far = o_column if IS_SHARED else head * width + o_column
                b_near = tl.load(p_own + head * width + o_column, mask=m_both, other=0.0).to(ACC)
                b_far = tl.load(p_other + o_far, mask=m_both, other=0.0).to(ACC)
                total += tl.sum(b_near * b_far, 1)
        tl.store(p_out + edge * LANES + head, total, mask=m_edge)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    p_weight, p_far, p_order, p_out, p_parts, p_indptr, p_indices, p_items,
    far_stride, out_stride, num_pieces, num_items, columns, width, heads,
    FAR_IS_SHARED: tl.constexpr, OUT_IS_SHARED: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < columns
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    o_head = o_column // width
    o_far = (o_column % width if FAR_IS_SHARED else o_column)[None, :]
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        source = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)
        number = o_edge
        if p_order is not None:
            number = tl.load(p_order + o_edge, mask=m_edge, other=0)
        p_own = p_weight + number.to(tl.int64)[:, None] * LANES
        p_row = p_far + source[:, None] * far_stride
        if OUT_IS_SHARED:
            for head in range(0, heads):
                b_weight = tl.load(p_own + head, mask=m_edge[:, None], other=0.0).to(ACC)
                b_far = tl.load(p_row + head * width + o_far, mask=m_both, other=0.0).to(ACC)
                total += b_weight * b_far
        else:
            b_weight = tl.load(p_own + o_head[None, :], mask=m_both, other=0.0).to(ACC)
            total += b_weight * tl.load(p_row + o_far, mask=m_both, other=0.0).to(ACC)
    close_rows(
        total, row, part, i_program < num_pieces, o_column, m_column,
        p_out, p_parts, p_indptr, None, None, out_stride, columns, 0,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _taken(  # type: ignore[no-untyped-def]
    p_values, p_grad, o_edge, m_cell, o_lane, top, LANES: tl.constexpr, ACC: tl.constexpr
):
    """What a row's edges add up: exp(score - top), or weight * gradient."""
    p_own = o_edge.to(tl.int64)[:, None] * LANES + o_lane[None, :]
    b_value = tl.load(p_values + p_own, mask=m_cell, other=0.0).to(ACC)
    if p_grad is not None:
        b_value *= tl.load(p_grad + p_own, mask=m_cell, other=0.0).to(ACC)
    else:
        b_value = tl.exp(b_value - top)
    return tl.where(m_cell, b_value, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    p_values, p_grad, p_out, top, total, first, last, step, rounds, o_lane,
    LANES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The results of some rows' edges; top and total: [rows or 1, LANES]."""
    for k in range(0, rounds):
        o_edge = first + k * step
        m_cell = (o_edge < last)[:, None] & (o_lane >= 0)[None, :]
        o_own = o_edge.to(tl.int64)[:, None] * LANES + o_lane[None, :]
        b_value = tl.load(p_values + o_own, mask=m_cell, other=0.0).to(ACC)
        if p_grad is not None:
            made = b_value * (tl.load(p_grad + o_own, mask=m_cell, other=0.0).to(ACC) - total)
        else:
            made = tl.exp(b_value - top) / total
        tl.store(p_out + o_own, made, mask=m_cell)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _softmax(  # type: ignore[no-untyped-def]
    p_values, p_grad, p_out, p_parts, p_merged, p_items, num_pieces, num_items,
    LOWEST: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Rows in one go. Pieces of split rows: with p_merged None what they add up goes to their parts; else
    they are written from what was merged for their row."""
    i_program = tl.program_id(0)
    o_lane = tl.arange(0, LANES)
    _row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    if p_merged is not None:
        part_of = tl.max(part, 0)
        if part_of >= 0:
            p_own = p_merged + part_of.to(tl.int64) * (2 * LANES) + o_lane[None, :]
            _write(p_values, p_grad, p_out, tl.load(p_own), tl.load(p_own + LANES), first, last, step, rounds,
                   o_lane, LANES, ACC)  # fmt: skip
    else:
        top = tl.full((SLOTS, LANES), LOWEST, ACC)
        if p_grad is None:
            for k in range(0, rounds):
                o_edge = first + k * step
                m_cell = (o_edge < last)[:, None] & (o_lane >= 0)[None, :]
                b_value = tl.load(
                    p_values + o_edge.to(tl.int64)[:, None] * LANES + o_lane[None, :],
                    mask=m_cell,
                    other=LOWEST,
                ).to(ACC)
                top = tl.maximum(top, b_value, propagate_nan=tl.PropagateNan.ALL)
        total = tl.zeros((SLOTS, LANES), ACC)
        if i_program < num_pieces:
            top_of = tl.max(top, 0)[None, :]
            for k in range(0, rounds):
                o_edge = first + k * step
                m_cell = (o_edge < last)[:, None] & (o_lane >= 0)[None, :]
                total += _taken(p_values, p_grad, o_edge, m_cell, o_lane, top_of, LANES, ACC)
            total_of = tl.sum(total, 0)[None, :]
            part_of = tl.max(part, 0)
            if part_of >= 0:
                p_own = p_parts + part_of.to(tl.int64) * (2 * LANES) + o_lane[None, :]
                tl.store(p_own, top_of)
                tl.store(p_own + LANES, total_of)
            else:
                _write(
                    p_values, p_grad, p_out, top_of, total_of, first, last, step, rounds, o_lane, LANES, ACC
                )
        else:
            for k in range(0, rounds):
                o_edge = first + k * step
                m_cell = (o_edge < last)[:, None] & (o_lane >= 0)[None, :]
                total += _taken(p_values, p_grad, o_edge, m_cell, o_lane, top, LANES, ACC)
            _write(p_values, p_grad, p_out, top, total, first, last, step, rounds, o_lane, LANES, ACC)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    p_parts, p_merged, p_splits, IS_SUM: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr
):
    """What the parts of a split row add up together, in their order, for each of them."""
    o_lane = tl.arange(0, LANES)
    p_split = p_splits + tl.program_id(0) * 3
    row, first = tl.load(p_split), tl.load(p_split + 1)
    last = tl.where(row >= 0, tl.load(p_split + 2), first)
    top = tl.full((LANES,), float("-inf"), ACC)
    total = tl.zeros((LANES,), ACC)
    for k in range(first, last):
        p_own = p_parts + (k + tl.zeros((LANES,), tl.int64)) * (2 * LANES) + o_lane
        b_top, b_total = tl.load(p_own), tl.load(p_own + LANES)
        if IS_SUM:
            total += b_total
        else:
            higher = tl.maximum(top, b_top, propagate_nan=tl.PropagateNan.ALL)
            total = total * tl.exp(top - higher) + b_total * tl.exp(b_top - higher)
            top = higher
    for k in range(first, last):
        p_own = p_merged + (k + tl.zeros((LANES,), tl.int64)) * (2 * LANES) + o_lane
        tl.store(p_own, top)
        tl.store(p_own + LANES, total)


_run_dots, _run_sums, _run_softmax, _run_merge = (Launcher(k) for k in (_dots, _sums, _softmax, _merge))


def edge_dots(
    targets: torch.Tensor,
    sources: torch.Tensor,
    near: torch.Tensor,
    far: torch.Tensor,
    heads: int,
    *,
    is_shared: bool = False,
) -> torch.Tensor:
    """[edges, lanes]: near[i, h] . far[j, h] for every edge and head; is_shared: far[j] serves all heads."""
    edges, lanes, width = targets.numel(), padded(heads), near.shape[1] // heads
    out = near.new_empty((edges, lanes))
    if edges:
        arguments = (near, far, targets, sources, out, near.stride(0), far.stride(0), edges, heads, width)
        constants = {
            "IS_SHARED": is_shared, "LANES": lanes, "ACC": accumulator(near.dtype)[1], "BLOCK_EDGES": _EDGES,
            "BLOCK_WIDTH": min(64, triton.next_power_of_2(max(1, width))),
        }  # fmt: skip
        _run_dots((-(-edges // _EDGES),), arguments, constants, 2)
    return out


def edge_sums(
    pattern: Pattern | Rows,
    order: torch.Tensor | None,
    weight: torch.Tensor,
    far: torch.Tensor,
    heads: int,
    out: torch.Tensor,
    *,
    far_is_shared: bool = False,
    out_is_shared: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[i, h] = sum over edges e of weight[e, h] * far[j, h]: kernels/attention/pieces.py: edge_sums."""
    rows, columns = rows_on(pattern, far.device), out.shape[1]
    width = columns if out_is_shared else columns // heads
    if not columns or not rows.num_rows:
        return out
    tiles = tiles_of(min(columns, 128), far.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(far.dtype)
    parts = far.new_empty((max(1, items.num_parts), columns), dtype=sums)
    arguments = (
        weight, far, order, out, parts, rows.indptr, rows.indices, items.items, far.stride(0), out.stride(0),
        items.num_pieces, items.num_pieces + items.num_short, columns, width, heads,
    )  # fmt: skip
    constants = {
        "FAR_IS_SHARED": far_is_shared, "OUT_IS_SHARED": out_is_shared, "LANES": weight.shape[1],
        "ACC": acc, "SLOTS": tiles.slots, "BLOCK_WIDTH": tiles.columns,
    }  # fmt: skip
    _run_sums((items.grid(tiles.slots), -(-columns // tiles.columns)), arguments, constants, tiles.warps)
    add_parts(items, rows.indptr, parts, out)
    return out


def _run(
    pattern: Pattern | Rows, values: torch.Tensor, grad: torch.Tensor | None, short: int, most: int
) -> torch.Tensor:
    rows, lanes = rows_on(pattern, values.device), values.shape[1]
    out = torch.empty_like(values)
    if not rows.num_edges or not rows.num_rows:
        return out
    items, (sums, acc) = rows.items(short, most), accumulator(values.dtype)
    parts = values.new_empty((max(1, items.num_parts), 2 * lanes), dtype=sums)
    slots = max(1, min(32, 64 // lanes))
    lowest = torch.finfo(sums).min
    constants = {"LOWEST": lowest, "LANES": lanes, "ACC": acc, "SLOTS": slots}
    arguments: tuple[Any, ...] = (
        values, grad, out, parts, None, items.items, items.num_pieces, items.num_pieces + items.num_short,
    )  # fmt: skip
    _run_softmax((items.grid(slots),), arguments, constants, 1)
    if items.num_splits:
        merged = torch.empty_like(parts)
        shape = {"IS_SUM": grad is not None, "LANES": lanes, "ACC": acc}
        _run_merge((items.num_splits,), (parts, merged, items.splits), shape, 1)
        arguments = (*arguments[:4], merged, *arguments[5:])
        _run_softmax((items.num_pieces,), arguments, constants, 1)
    return out


def edge_softmax(
    pattern: Pattern | Rows, scores: torch.Tensor, short: int = _SHORT, most: int = _MOST
) -> torch.Tensor:
    """The softmax of [edges, lanes] over the edges of each row."""
    return _run(pattern, scores.contiguous(), None, short, most)


def edge_softmax_gradient(
    pattern: Pattern | Rows, weight: torch.Tensor, grad: torch.Tensor, short: int = _SHORT, most: int = _MOST
) -> torch.Tensor:
    """weight * (grad - sum over the row of weight * grad)."""
    return _run(pattern, weight.contiguous(), grad.contiguous(), short, most)
