"""Several aggregators of neighbours in one pass on a GPU by Triton, and their gradients.

The programs are those of kernels/spmm/gpu.py: SLOTS short rows, or one piece of a long row. A slot keeps the
sum, the sum of deviations and of their squares, both extrema and how many edges attain them. Deviations are
taken from the row's first neighbour, whichever piece they are in: squares of the values themselves would
cancel to eps x^2, and partial sums of pieces are added as they are.

Between the passes of the gradient the rows lie section after section: a, b, max, its share, min, its share;
out[j] is the sum over targets of a + b x[j] and of the shares where x[j] attains the extremum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from plait.kernels.csr.gpu import Rows  # first: it says so where triton is missing
from plait.kernels.multi import Layout
from plait.kernels.multi.reference import LEAST_VARIANCE
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import (
    Tiles,
    accumulator,
    add_parts,
    close_rows,
    larger,
    rows_on,
    slots_of,
    smaller,
    stride_of,
    tiles_of,
)  # fmt: skip

# isort: split
import triton
import triton.language as tl

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["aggregate", "aggregate_shares", "aggregate_sources", "ties_like"]

_COUNTS = ("num_pieces", "num_items", "num_rows")
_LEAST = tl.constexpr(LEAST_VARIANCE)
_ROWS, _COLUMNS = 8, 64  # of a program that shares the gradients of targets


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    total, off, squares, most, least, most_ties, least_ties, row, o_column, m_column,
    p_out, p_ties, p_indptr, out_stride, ties_stride, width,
    KEPT: tl.constexpr, MEAN: tl.constexpr, SUM: tl.constexpr, VAR: tl.constexpr, STD: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr,
):  # fmt: skip
    """Writes every wanted aggregator of some rows: tiles [rows, columns]; -1 for one that is not wanted."""
    node = row.to(tl.int64)
    m_row = row >= 0
    m_out = m_row[:, None] & m_column[None, :]
    degree = tl.load(p_indptr + node + 1, mask=m_row, other=0) - tl.load(p_indptr + node, mask=m_row, other=0)
    inverse = (1.0 / tl.maximum(degree, 1).to(total.dtype))[:, None]
    has_edges = (degree > 0)[:, None]
    o_inner = o_column % width
    p_row = p_out + node[:, None] * out_stride + ((o_column // width) * (KEPT * width) + o_inner)[None, :]
    if MEAN >= 0:
        tl.store(p_row + MEAN * width, total * inverse, mask=m_out)
    if SUM >= 0:
        tl.store(p_row + SUM * width, total, mask=m_out)
    if VAR >= 0 or STD >= 0:
        variance = squares * inverse - (off * inverse) * (off * inverse)
        if VAR >= 0:
            tl.store(p_row + VAR * width, variance, mask=m_out)
        if STD >= 0:
            is_flat = variance <= _LEAST
            root = tl.sqrt(tl.where(is_flat, 1.0, variance))
            tl.store(p_row + STD * width, tl.where(is_flat, 0.0, root), mask=m_out)
    if MAX >= 0:
        tl.store(p_row + MAX * width, tl.where(has_edges, most, 0.0), mask=m_out)
    if MIN >= 0:
        tl.store(p_row + MIN * width, tl.where(has_edges, least, 0.0), mask=m_out)
    if p_ties is not None:
        p_own = p_ties + node[:, None] * ties_stride + ((o_column // width) * (2 * width) + o_inner)[None, :]
        tl.store(p_own, most_ties.to(tl.float32), mask=m_out)
        tl.store(p_own + width, least_ties.to(tl.float32), mask=m_out)


@triton.jit
def _joined(  # type: ignore[no-untyped-def]
    total, off, squares, most, least, most_ties, least_ties
):
    """The sums and extrema of all slots as those of one: [1, columns]."""
    top = tl.reduce(most, 0, larger)[None, :]
    low = tl.reduce(least, 0, smaller)[None, :]
    return (
        tl.sum(total, 0)[None, :], tl.sum(off, 0)[None, :], tl.sum(squares, 0)[None, :], top, low,
        tl.sum(tl.where(most == top, most_ties, 0), 0)[None, :],
        tl.sum(tl.where(least == low, least_ties, 0), 0)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _aggregated(  # type: ignore[no-untyped-def]
    p_x, p_out, p_ties, p_parts, p_indptr, p_indices, p_items,
    x_stride, out_stride, ties_stride, columns, width, num_pieces, num_items,
    KEPT: tl.constexpr, MEAN: tl.constexpr, SUM: tl.constexpr, VAR: tl.constexpr, STD: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr,
    ACC: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < columns
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    off = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    squares = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    most = tl.full((SLOTS, BLOCK_WIDTH), float("-inf"), ACC)
    least = tl.full((SLOTS, BLOCK_WIDTH), float("inf"), ACC)
    most_ties = tl.zeros((SLOTS, BLOCK_WIDTH), tl.int32)
    least_ties = tl.zeros((SLOTS, BLOCK_WIDTH), tl.int32)
    b_base = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    if VAR >= 0 or STD >= 0:
        m_any = (row >= 0) & (last > first)
        begin = tl.load(p_indptr + row.to(tl.int64), mask=m_any, other=0)
        other = tl.load(p_indices + begin, mask=m_any, other=0).to(tl.int64)
        b_base = tl.load(p_x + other[:, None] * x_stride + o_column[None, :],
                         mask=m_any[:, None] & m_column[None, :], other=0.0).to(ACC)  # fmt: skip
    for k in range(0, rounds, AHEAD):
        for ahead in tl.static_range(AHEAD):
            o_edge = first + (k + ahead) * step
            m_edge = (o_edge < last)[:, None]
            source = tl.load(p_indices + o_edge, mask=o_edge < last, other=0).to(tl.int64)
            # [SLOTS, BLOCK_WIDTH]
            b_x = tl.load(p_x + source[:, None] * x_stride + o_column[None, :],
                          mask=m_edge & m_column[None, :], other=0.0).to(ACC)  # fmt: skip
            total += b_x
            if VAR >= 0 or STD >= 0:
                apart = tl.where(m_edge, b_x - b_base, 0.0)
                off += apart
                squares += apart * apart
            if MAX >= 0:
                b_high = tl.where(m_edge, b_x, float("-inf"))
                if p_ties is not None:
                    is_tied = ((b_high == most) & m_edge).to(tl.int32)
                    most_ties = tl.where(b_high > most, 1, most_ties + is_tied)
                most = larger(most, b_high)
            if MIN >= 0:
                b_low = tl.where(m_edge, b_x, float("inf"))
                if p_ties is not None:
                    is_tied = ((b_low == least) & m_edge).to(tl.int32)
                    least_ties = tl.where(b_low < least, 1, least_ties + is_tied)
                least = smaller(least, b_low)
    if i_program < num_pieces:
        one, one_off, one_squares, top, low, top_ties, low_ties = _joined(
            total, off, squares, most, least, most_ties, least_ties
        )
        row_of = tl.max(row, 0) + tl.zeros((1,), row.dtype)
        part_of = tl.max(part, 0)
        if part_of >= 0:
            p_part = p_parts + part_of.to(tl.int64) * (7 * columns) + o_column[None, :]
            m_part = m_column[None, :]
            tl.store(p_part, one, mask=m_part)
            tl.store(p_part + columns, one_off, mask=m_part)
            tl.store(p_part + 2 * columns, one_squares, mask=m_part)
            tl.store(p_part + 3 * columns, top, mask=m_part)
            tl.store(p_part + 4 * columns, low, mask=m_part)
            tl.store(p_part + 5 * columns, top_ties.to(ACC), mask=m_part)
            tl.store(p_part + 6 * columns, low_ties.to(ACC), mask=m_part)
        else:
            _finish(
                one, one_off, one_squares, top, low, top_ties, low_ties, row_of, o_column, m_column,
                p_out, p_ties, p_indptr, out_stride, ties_stride, width, KEPT, MEAN, SUM, VAR, STD, MAX, MIN,
            )  # fmt: skip
    else:
        _finish(
            total, off, squares, most, least, most_ties, least_ties, row, o_column, m_column,
            p_out, p_ties, p_indptr, out_stride, ties_stride, width, KEPT, MEAN, SUM, VAR, STD, MAX, MIN,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    p_parts, p_out, p_ties, p_splits, p_indptr, out_stride, ties_stride, columns, width,
    KEPT: tl.constexpr, MEAN: tl.constexpr, SUM: tl.constexpr, VAR: tl.constexpr, STD: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr, ACC: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows that were split: their parts BLOCK_PARTS at a time, always in the same order."""
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < columns
    p_split = p_splits + tl.program_id(0) * 3
    row = tl.load(p_split) + tl.zeros((1,), p_splits.dtype.element_ty)
    first = tl.load(p_split + 1)
    last = tl.where(tl.max(row, 0) >= 0, tl.load(p_split + 2), first)
    total = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), ACC)
    off = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), ACC)
    squares = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), ACC)
    most = tl.full((BLOCK_PARTS, BLOCK_WIDTH), float("-inf"), ACC)
    least = tl.full((BLOCK_PARTS, BLOCK_WIDTH), float("inf"), ACC)
    most_ties = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), tl.int32)
    least_ties = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), tl.int32)
    for k in range(first, last, BLOCK_PARTS):
        o_part = k + tl.arange(0, BLOCK_PARTS)
        m_part = (o_part < last)[:, None] & m_column[None, :]
        p_part = p_parts + o_part.to(tl.int64)[:, None] * (7 * columns) + o_column[None, :]
        total += tl.load(p_part, mask=m_part, other=0.0)
        off += tl.load(p_part + columns, mask=m_part, other=0.0)
        squares += tl.load(p_part + 2 * columns, mask=m_part, other=0.0)
        b_high = tl.load(p_part + 3 * columns, mask=m_part, other=float("-inf"))
        b_low = tl.load(p_part + 4 * columns, mask=m_part, other=float("inf"))
        high_ties = tl.load(p_part + 5 * columns, mask=m_part, other=0.0).to(tl.int32)
        low_ties = tl.load(p_part + 6 * columns, mask=m_part, other=0.0).to(tl.int32)
        most_ties = tl.where(
            b_high > most, high_ties, tl.where(b_high == most, most_ties + high_ties, most_ties)
        )
        least_ties = tl.where(
            b_low < least, low_ties, tl.where(b_low == least, least_ties + low_ties, least_ties)
        )
        most = larger(most, b_high)
        least = smaller(least, b_low)
    total, off, squares, most, least, most_ties, least_ties = _joined(
        total, off, squares, most, least, most_ties, least_ties
    )
    _finish(
        total, off, squares, most, least, most_ties, least_ties, row, o_column, m_column,
        p_out, p_ties, p_indptr, out_stride, ties_stride, width, KEPT, MEAN, SUM, VAR, STD, MAX, MIN,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _shared(  # type: ignore[no-untyped-def]
    p_grad, p_made, p_ties, p_shares, p_indptr, grad_stride, made_stride, ties_stride, shares_stride,
    num_rows, columns, width,
    KEPT: tl.constexpr, MEAN: tl.constexpr, SUM: tl.constexpr, VAR: tl.constexpr, STD: tl.constexpr,
    MAX: tl.constexpr, MIN: tl.constexpr, HAS_SPREAD: tl.constexpr, HAS_ENDS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Every target's gradients as the sections that the pass over sources gathers."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    node = row.to(tl.int64)
    m_row = row < num_rows
    m_both = m_row[:, None] & (o_column < columns)[None, :]
    degree = tl.load(p_indptr + node + 1, mask=m_row, other=0) - tl.load(p_indptr + node, mask=m_row, other=0)
    inverse = (1.0 / tl.maximum(degree, 1).to(ACC))[:, None]
    o_inner = o_column % width
    o_kept = ((o_column // width) * (KEPT * width) + o_inner)[None, :]
    p_own = p_grad + node[:, None] * grad_stride + o_kept
    p_value = p_made + node[:, None] * made_stride + o_kept
    p_share = p_shares + node[:, None] * shares_stride + o_column[None, :]
    a = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
    if MEAN >= 0:
        a += tl.load(p_own + MEAN * width, mask=m_both, other=0.0).to(ACC) * inverse
    if SUM >= 0:
        a += tl.load(p_own + SUM * width, mask=m_both, other=0.0).to(ACC)
    if HAS_SPREAD:
        slope = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
        if VAR >= 0:
            slope += 2.0 * tl.load(p_own + VAR * width, mask=m_both, other=0.0).to(ACC)
        if STD >= 0:
            deviation = tl.load(p_value + STD * width, mask=m_both, other=0.0).to(ACC)
            is_flat = deviation == 0.0
            b_grad = tl.load(p_own + STD * width, mask=m_both, other=0.0).to(ACC)
            slope += tl.where(is_flat, 0.0, b_grad / tl.where(is_flat, 1.0, deviation))
        slope *= inverse
        a -= slope * tl.load(p_value + MEAN * width, mask=m_both, other=0.0).to(ACC)
        tl.store(p_share + columns, slope, mask=m_both)
    tl.store(p_share, a, mask=m_both)
    if HAS_ENDS:
        p_count = (
            p_ties + node[:, None] * ties_stride + ((o_column // width) * (2 * width) + o_inner)[None, :]
        )
        p_end = p_share + (1 + HAS_SPREAD) * columns
        best = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
        share = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
        if MAX >= 0:
            best = tl.load(p_value + MAX * width, mask=m_both, other=0.0).to(ACC)
            count = tl.maximum(tl.load(p_count, mask=m_both, other=1.0), 1.0).to(ACC)
            share = tl.load(p_own + MAX * width, mask=m_both, other=0.0).to(ACC) / count
        tl.store(p_end, best, mask=m_both)
        tl.store(p_end + columns, share, mask=m_both)
        best = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
        share = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), ACC)
        if MIN >= 0:
            best = tl.load(p_value + MIN * width, mask=m_both, other=0.0).to(ACC)
            count = tl.maximum(tl.load(p_count + width, mask=m_both, other=1.0), 1.0).to(ACC)
            share = tl.load(p_own + MIN * width, mask=m_both, other=0.0).to(ACC) / count
        tl.store(p_end + 2 * columns, best, mask=m_both)
        tl.store(p_end + 3 * columns, share, mask=m_both)


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _gathered(  # type: ignore[no-untyped-def]
    p_x, p_shares, p_out, p_parts, p_indptr, p_indices, p_items,
    x_stride, shares_stride, out_stride, columns, num_pieces, num_items,
    HAS_SPREAD: tl.constexpr, HAS_MAX: tl.constexpr, HAS_MIN: tl.constexpr,
    ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < columns
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own = (row >= 0)[:, None] & m_column[None, :]
    b_x = tl.load(p_x + row.to(tl.int64)[:, None] * x_stride + o_column[None, :], mask=m_own, other=0.0).to(
        ACC
    )
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        target = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        p_share = p_shares + target * shares_stride + o_column[None, :]
        total += tl.load(p_share, mask=m_both, other=0.0).to(ACC)
        if HAS_SPREAD:
            total += tl.load(p_share + columns, mask=m_both, other=0.0).to(ACC) * b_x
        p_end = p_share + (1 + HAS_SPREAD) * columns
        if HAS_MAX:
            is_it = tl.load(p_end, mask=m_both, other=0.0).to(ACC) == b_x
            total += tl.where(is_it, tl.load(p_end + columns, mask=m_both, other=0.0).to(ACC), 0.0)
        if HAS_MIN:
            is_it = tl.load(p_end + 2 * columns, mask=m_both, other=0.0).to(ACC) == b_x
            total += tl.where(is_it, tl.load(p_end + 3 * columns, mask=m_both, other=0.0).to(ACC), 0.0)
    close_rows(
        total, row, part, i_program < num_pieces, o_column, m_column,
        p_out, p_parts, p_indptr, None, None, out_stride, columns, 0,
    )  # fmt: skip


_run_aggregated, _run_merge = Launcher(_aggregated), Launcher(_merge)
_run_shared, _run_gathered = Launcher(_shared), Launcher(_gathered)
_PARTS_AT_ONCE, _PART_COLUMNS = 8, 32


def _places(layout: Layout) -> dict[str, int]:
    """Where each aggregator lies among a tower's columns; -1: it is not there."""
    kept = layout.kept
    names = ("mean", "sum", "var", "std", "max", "min")
    return {"KEPT": len(kept)} | {n.upper(): kept.index(n) if n in kept else -1 for n in names}


def _tiles(columns: int, element_size: int) -> Tiles:
    """A slot has seven accumulators: fewer columns in flight than for a sum."""
    tiles = tiles_of(min(columns, 64), element_size)
    return Tiles(tiles.short, tiles.most, tiles.columns, max(2, min(tiles.slots, 128 // tiles.columns)), 2, 1)


def ties_like(x: torch.Tensor, rows: int, layout: Layout) -> torch.Tensor:
    """Room for how many edges attain the extrema: numbers that 16 bits would not hold."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((rows, 2 * layout.columns), dtype=dtype)


def aggregate(
    pattern: Pattern | Rows,
    x: torch.Tensor,
    layout: Layout,
    out: torch.Tensor,
    ties: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[i] = every aggregator of `layout.kept` of x[j] over the edges of row i: kernels/multi."""
    rows, columns = rows_on(pattern, x.device), layout.columns
    if not columns or not rows.num_rows:
        return out
    tiles = _tiles(columns, x.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(x.dtype)
    parts = x.new_empty((max(1, items.num_parts), 7 * columns), dtype=sums)
    places, ties_stride = _places(layout), stride_of(ties)
    arguments: tuple[Any, ...] = (
        x, out, ties, parts, rows.indptr, rows.indices, items.items, x.stride(0), out.stride(0), ties_stride,
        columns, layout.width, items.num_pieces, items.num_pieces + items.num_short,
    )  # fmt: skip
    constants = {
        **places, "ACC": acc, "SLOTS": tiles.slots, "AHEAD": tiles.ahead, "BLOCK_WIDTH": tiles.columns,
    }  # fmt: skip
    _run_aggregated(
        (items.grid(tiles.slots), -(-columns // tiles.columns)), arguments, constants, tiles.warps
    )
    if items.num_splits:
        block = min(triton.next_power_of_2(columns), _PART_COLUMNS)
        arguments = (
            parts, out, ties, items.splits, rows.indptr, out.stride(0), ties_stride, columns, layout.width,
        )  # fmt: skip
        constants = {**places, "ACC": acc, "BLOCK_PARTS": _PARTS_AT_ONCE, "BLOCK_WIDTH": block}
        _run_merge((items.num_splits, -(-columns // block)), arguments, constants)
    return out


def aggregate_shares(
    pattern: Pattern | Rows, layout: Layout, grad: torch.Tensor, made: torch.Tensor, ties: torch.Tensor | None
) -> torch.Tensor:
    """[rows, sections * columns]: the gradients of rows as the pass over sources reads them."""
    rows, columns = rows_on(pattern, grad.device), layout.columns
    shares = grad.new_empty((rows.num_rows, layout.sections * columns))
    if not columns or not rows.num_rows:
        return shares
    constants = {
        **_places(layout), "HAS_SPREAD": layout.has_spread, "HAS_ENDS": layout.has_ends,
        "ACC": accumulator(grad.dtype)[1], "BLOCK_ROWS": _ROWS, "BLOCK_WIDTH": _COLUMNS,
    }  # fmt: skip
    arguments = (
        grad, made, ties, shares, rows.indptr, grad.stride(0), made.stride(0),
        stride_of(ties), shares.stride(0), rows.num_rows, columns, layout.width,
    )  # fmt: skip
    _run_shared((-(-rows.num_rows // _ROWS), -(-columns // _COLUMNS)), arguments, constants)
    return shares


def aggregate_sources(
    transpose: Pattern | Rows,
    x: torch.Tensor,
    layout: Layout,
    shares: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[j] = the gradient of x[j], summed over its targets' shares."""
    rows, columns = rows_on(transpose, x.device), layout.columns
    if not columns or not rows.num_rows:
        return out
    tiles = _tiles(columns, x.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(x.dtype)
    parts = x.new_empty((max(1, items.num_parts), columns), dtype=sums)
    arguments = (
        x, shares, out, parts, rows.indptr, rows.indices, items.items, x.stride(0), shares.stride(0),
        out.stride(0), columns, items.num_pieces, items.num_pieces + items.num_short,
    )  # fmt: skip
    constants = {
        "HAS_SPREAD": layout.has_spread, "HAS_MAX": "max" in layout.names, "HAS_MIN": "min" in layout.names,
        "ACC": acc, "SLOTS": tiles.slots, "BLOCK_WIDTH": tiles.columns,
    }  # fmt: skip
    _run_gathered((items.grid(tiles.slots), -(-columns // tiles.columns)), arguments, constants, tiles.warps)
    add_parts(items, rows.indptr, parts, out)
    return out
