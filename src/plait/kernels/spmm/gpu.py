"""Sparse times dense on a GPU by Triton: sums, means, maxima and minima over neighbours, and their gradients.

A program has SLOTS rows of accumulators. It gives one to each of SLOTS short rows, or all of them to one
piece of a long row and adds them up at the end (kernels/csr: Items). Either way a warp loads several
rows of x before it adds the first, and nothing is reduced across threads inside the loop over edges.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from plait.kernels.csr.gpu import Items, Rows  # first: it says so where triton is missing
from plait.kernels.relaunch import Launcher

# isort: split
import triton
import triton.language as tl

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = [
    "Tiles", "accumulator", "add_parts", "close_rows", "extremum", "extremum_gather", "larger", "rows_on",
    "slots_of", "smaller", "spmm", "stride_of", "tiles_of", "weight_gradient",
]  # fmt: skip


_COUNTS = ("num_pieces", "num_items")
"""Numbers that differ from one mini-batch to the next: kernels are not compiled again for them."""


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut: rows of up to `short` edges share a program, longer ones go in pieces of `most`;
    a program holds `slots` rows of `columns` columns and loads `ahead` operands of each at a time."""

    short: int
    most: int
    columns: int
    slots: int
    ahead: int
    warps: int


def stride_of(tensor: torch.Tensor | None) -> int:
    """From one row to the next, 0 of a tensor that is not there."""
    return 0 if tensor is None else tensor.stride(0)


@functools.cache
def tiles_of(width: int, element_size: int = 4) -> Tiles:
    """The tiles for rows of this many columns.

    Of 84 to 282 settings per graph and width on an H200 (two R-MAT graphs, a mesh, cliques; widths 16 to 256,
    float32) this one was within 11% of the best, but for one R-MAT graph at 16 and 64 columns, where Python
    took longer to issue the launches than the device to run them.
    One warp has 256 columns in flight, four times.
    """
    largest = min(triton.next_power_of_2(max(1, width)), 256)
    # least padding: 602 columns are five blocks of 128, not three of 256
    columns = min((largest, *(c for c in (128, 64) if c < largest)), key=lambda c: -(-width // c) * c)
    in_flight = 256 * max(1, 4 // element_size)
    return Tiles(
        short=64, most=512, columns=columns, slots=min(32, max(2, in_flight // columns)), ahead=4, warps=1
    )


@triton.jit  # type: ignore[untyped-decorator]
def slots_of(p_items, i_program, num_pieces, num_items, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(rows, first edges, last edges, parts) of the slots of a program, -1 for no row; (step, rounds): slot s
    takes the edges first[s], first[s] + step, ... up to last[s]."""
    is_piece = i_program < num_pieces
    o_slot = tl.arange(0, SLOTS)
    o_item = tl.where(
        is_piece, i_program + 0 * o_slot, num_pieces + (i_program - num_pieces) * SLOTS + o_slot
    )
    m_item = o_item < num_items
    p_item = p_items + o_item.to(tl.int64) * 4
    row = tl.load(p_item, mask=m_item, other=-1)
    first = tl.load(p_item + 1, mask=m_item, other=0)
    last = tl.load(p_item + 2, mask=m_item, other=0)
    part = tl.load(p_item + 3, mask=m_item, other=-1)
    first += tl.where(is_piece, o_slot, 0)
    step = tl.where(is_piece, SLOTS, 1)
    return row, first, last, part, step, tl.max((last - first + step - 1) // step, 0)


@triton.jit
def larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _best(total, REDUCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest or smallest of every column; NaN where there is one."""
    if REDUCE == "max":
        return tl.reduce(total, 0, larger)
    return tl.reduce(total, 0, smaller)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    total, row, m_row, o_column, m_column,
    p_out, p_indptr, p_target, p_addend, p_addend_scale, p_bias, out_stride, addend_stride,
    REDUCE: tl.constexpr,
):  # fmt: skip
    """Scales the sums of some rows, adds addend and bias and writes them; total: [rows, columns]."""
    node = row.to(tl.int64)
    m_out = m_row[:, None] & m_column[None, :]
    if REDUCE != "sum":
        degree = tl.load(p_indptr + node + 1, mask=m_row, other=0) - tl.load(
            p_indptr + node, mask=m_row, other=0
        )
        if REDUCE == "mean":
            total = total / tl.maximum(degree, 1).to(total.dtype)[:, None]
        else:
            total = tl.where(degree[:, None] > 0, total, 0.0)
    if p_target is not None:
        total *= tl.load(p_target + node, mask=m_row, other=0.0)[:, None].to(total.dtype)
    if p_addend is not None:
        b_addend = tl.load(
            p_addend + node[:, None] * addend_stride + o_column[None, :], mask=m_out, other=0.0
        ).to(total.dtype)
        if p_addend_scale is not None:
            b_addend *= tl.load(p_addend_scale + node, mask=m_row, other=0.0)[:, None].to(total.dtype)
        total += b_addend
    if p_bias is not None:
        total += tl.load(p_bias + o_column, mask=m_column, other=0.0)[None, :].to(total.dtype)
    tl.store(p_out + node[:, None] * out_stride + o_column[None, :], total, mask=m_out)


@triton.jit
def _write_ties(  # type: ignore[no-untyped-def]
    total, ties, row, m_row, o_column, m_column, p_ties, ties_stride
):
    """How many attain the extremum; one more where it is 0, as torch counts; never below 1."""
    ties = tl.maximum(ties + (total == 0).to(tl.int32), 1)
    p_row = p_ties + row.to(tl.int64)[:, None] * ties_stride
    tl.store(p_row + o_column[None, :], ties, mask=m_row[:, None] & m_column[None, :])


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    p_x, p_out, p_parts, p_ties, p_tie_parts, p_indptr, p_indices, p_items,
    p_edge, p_source, p_target, p_addend, p_addend_scale, p_bias,
    x_stride, out_stride, parts_stride, addend_stride, num_pieces, num_items, width,
    REDUCE: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    worst = float("-inf") if REDUCE == "max" else float("inf") if REDUCE == "min" else 0.0
    total = tl.full((SLOTS, BLOCK_WIDTH), worst, ACC)
    ties = tl.zeros((SLOTS, BLOCK_WIDTH), tl.int32)
    for k in range(0, rounds, AHEAD):
        for ahead in tl.static_range(AHEAD):
            o_edge = first + (k + ahead) * step
            m_edge = o_edge < last
            column = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)
            # [SLOTS, BLOCK_WIDTH]
            b_x = tl.load(
                p_x + column[:, None] * x_stride + o_column[None, :],
                mask=m_edge[:, None] & m_column[None, :],
                other=worst,
            ).to(ACC)
            if p_edge is not None:
                b_x *= tl.load(p_edge + o_edge, mask=m_edge, other=0.0)[:, None].to(ACC)
            if p_source is not None:
                b_x *= tl.load(p_source + column, mask=m_edge, other=0.0)[:, None].to(ACC)
            if REDUCE == "max" or REDUCE == "min":
                if p_ties is not None:
                    is_better = b_x > total if REDUCE == "max" else b_x < total
                    is_tied = (b_x == total) & m_edge[:, None]
                    ties = tl.where(is_better, 1, ties + is_tied.to(tl.int32))
                if REDUCE == "max":  # noqa: SIM108 - Triton compiles one branch alone
                    total = larger(total, b_x)
                else:
                    total = smaller(total, b_x)
            else:
                total += b_x
    if i_program < num_pieces:
        if REDUCE == "max" or REDUCE == "min":
            one = _best(total, REDUCE)[None, :]
            tied = tl.sum(tl.where(total == one, ties, 0), 0)[None, :]
        else:
            one = tl.sum(total, 0)[None, :]
            tied = tl.zeros((1, BLOCK_WIDTH), tl.int32)
        row_of = tl.max(row, 0) + tl.zeros((1,), row.dtype)
        part_of = tl.max(part, 0)
        if part_of >= 0:
            o_part = part_of.to(tl.int64) * parts_stride + o_column[None, :]
            tl.store(p_parts + o_part, one, mask=m_column[None, :])
            if p_ties is not None:
                tl.store(p_tie_parts + o_part, tied, mask=m_column[None, :])
        else:
            _finish(
                one, row_of, row_of >= 0, o_column, m_column, p_out, p_indptr,
                p_target, p_addend, p_addend_scale, p_bias, out_stride, addend_stride, REDUCE,
            )  # fmt: skip
            if p_ties is not None:
                _write_ties(one, tied, row_of, row_of >= 0, o_column, m_column, p_ties, width)
    else:
        _finish(
            total, row, row >= 0, o_column, m_column, p_out, p_indptr,
            p_target, p_addend, p_addend_scale, p_bias, out_stride, addend_stride, REDUCE,
        )  # fmt: skip
        if p_ties is not None:
            _write_ties(tl.where((last > first)[:, None], total, 0.0), ties, row, row >= 0,
                        o_column, m_column, p_ties, width)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(  # type: ignore[no-untyped-def]
    p_parts, p_tie_parts, p_out, p_ties, p_splits, p_indptr, p_target, p_addend, p_addend_scale, p_bias,
    parts_stride, out_stride, addend_stride, width,
    REDUCE: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows that were split: their parts BLOCK_PARTS at a time, always in the same order."""
    i_split = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    p_split = p_splits + i_split * 3
    row = tl.load(p_split) + tl.zeros((1,), p_splits.dtype.element_ty)
    first = tl.load(p_split + 1)
    last = tl.where(tl.max(row, 0) >= 0, tl.load(p_split + 2), first)
    worst = float("-inf") if REDUCE == "max" else float("inf") if REDUCE == "min" else 0.0
    total = tl.full((BLOCK_PARTS, BLOCK_WIDTH), worst, p_parts.dtype.element_ty)
    ties = tl.zeros((BLOCK_PARTS, BLOCK_WIDTH), tl.int32)
    for k in range(first, last, BLOCK_PARTS):
        o_part = k + tl.arange(0, BLOCK_PARTS)
        m_part = (o_part < last)[:, None] & m_column[None, :]
        o_cell = o_part.to(tl.int64)[:, None] * parts_stride + o_column[None, :]
        b_part = tl.load(p_parts + o_cell, mask=m_part, other=worst)
        if REDUCE == "max" or REDUCE == "min":
            if p_ties is not None:
                b_ties = tl.load(p_tie_parts + o_cell, mask=m_part, other=0)
                is_better = b_part > total if REDUCE == "max" else b_part < total
                ties = tl.where(is_better, b_ties, tl.where(b_part == total, ties + b_ties, ties))
            if REDUCE == "max":  # noqa: SIM108 - Triton compiles one branch alone
                total = larger(total, b_part)
            else:
                total = smaller(total, b_part)
        else:
            total += b_part
    if REDUCE == "max" or REDUCE == "min":
        one = _best(total, REDUCE)[None, :]
        if p_ties is not None:
            tied = tl.sum(tl.where(total == one, ties, 0), 0)[None, :]
            _write_ties(one, tied, row, row >= 0, o_column, m_column, p_ties, width)
    else:
        one = tl.sum(total, 0)[None, :]
    _finish(
        one, row, row >= 0, o_column, m_column, p_out, p_indptr,
        p_target, p_addend, p_addend_scale, p_bias, out_stride, addend_stride, REDUCE,
    )  # fmt: skip


_run_product, _run_parts = Launcher(_product), Launcher(_add_parts)
_PARTS_AT_ONCE, _PART_COLUMNS, _PART_WARPS = 16, 64, 4
_placed: WeakKeyDictionary[Pattern, dict[torch.device, Rows]] = WeakKeyDictionary()


def rows_on(pattern: Pattern | Rows, device: torch.device) -> Rows:
    """The pattern on a device; arrays of the host are copied there once."""
    if isinstance(pattern, Rows):
        return pattern
    devices = _placed.setdefault(pattern, {})
    if device not in devices:
        indptr, indices = (torch.from_numpy(a).to(device) for a in (pattern.indptr, pattern.indices))
        devices[device] = Rows(indptr, indices, pattern.num_columns)
    return devices[device]


def _grid(items: Items, tiles: Tiles, width: int) -> tuple[int, int]:
    return items.grid(tiles.slots), -(-width // tiles.columns)


@functools.lru_cache(maxsize=256)
def _constants(reduce: str, acc: Any, tiles: Tiles) -> dict[str, Any]:
    return {"REDUCE": reduce, "ACC": acc} | _shape(tiles)


@functools.cache
def _nowhere(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Partial results of no row."""
    return torch.empty((1, 1), dtype=dtype, device=device)


@functools.cache
def _part_constants(reduce: str, columns: int) -> dict[str, Any]:
    return {"REDUCE": reduce, "BLOCK_PARTS": _PARTS_AT_ONCE, "BLOCK_WIDTH": columns}


@functools.lru_cache(maxsize=256)
def _sum_constants(acc: Any, tiles: Tiles) -> dict[str, Any]:
    return {"ACC": acc} | _shape(tiles)


def _is_long(items: Items) -> bool:
    """Whether counts take 64 bits, which kernels are compiled for."""
    return items.num_pieces + items.num_short >= 1 << 31


def _seen(argument: Any) -> Any:
    """What tells launches apart: of tensors the type and the device, of the rest the value."""
    return (argument.dtype, argument.device) if isinstance(argument, torch.Tensor) else argument


def _shape(tiles: Tiles) -> dict[str, int]:
    return {"SLOTS": tiles.slots, "AHEAD": tiles.ahead, "BLOCK_WIDTH": tiles.columns}


def accumulator(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """What sums of a dtype are kept in: (for torch, for triton)."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


def add_parts(
    items: Items,
    indptr: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
    *,
    reduce: str = "sum",
    target: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    addend_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ties: torch.Tensor | None = None,
    tie_parts: torch.Tensor | None = None,
) -> None:
    """Writes the rows of `out` that were split in pieces: their parts, added in order."""
    if not items.num_splits:
        return
    width = out.shape[1]
    columns = min(triton.next_power_of_2(width), _PART_COLUMNS)
    arguments = (
        parts, tie_parts, out, ties, items.splits, indptr, target, addend, addend_scale, bias,
        parts.stride(0), out.stride(0), stride_of(addend), width,
    )  # fmt: skip
    constants = _part_constants(reduce, columns)
    memo = (reduce, *map(_seen, arguments))
    _run_parts((items.num_splits, -(-width // columns)), arguments, constants, _PART_WARPS, memo)


def spmm(
    pattern: Pattern | Rows,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    reduce: str = "sum",
    edge: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    addend_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ties: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[i] = target[i] * sum_e(edge[e] * source[j] * x[j]) + addend_scale[i] * addend[i] + bias.

    reduce: sum; mean, the sum over the number of edges; max, min, which take neither edge nor source. Rows of
    x, out and addend are contiguous; addend may be `out` itself. 16-bit inputs are summed in float32. ties
    (int32, contiguous; max and min): how many edges attain the extremum, see kernels/spmm: extremum.
    """
    width, rows = x.shape[1], rows_on(pattern, x.device)
    if width == 0 or rows.num_rows == 0:
        return out
    tiles = tiles_of(width, x.element_size()) if tiles is None else tiles
    items = rows.items(tiles.short, tiles.most)
    sums, acc = accumulator(x.dtype)
    # without split rows nothing is written to either
    parts = x.new_empty((items.num_parts, width), dtype=sums) if items.num_parts else _nowhere(x.device, sums)
    tie_parts = None if ties is None else ties.new_empty((items.num_parts, width))
    arguments = (
        x, out, parts, ties, tie_parts, rows.indptr, rows.indices, items.items,
        edge, source, target, addend, addend_scale, bias,
        x.stride(0), out.stride(0), parts.stride(0), stride_of(addend),
        items.num_pieces, items.num_pieces + items.num_short, width,
    )  # fmt: skip
    # counts are left out: kernels are not compiled for them
    memo = (reduce, acc, tiles, *map(_seen, arguments[:18]), width, _is_long(items))
    _run_product(_grid(items, tiles, width), arguments, _constants(reduce, acc, tiles), tiles.warps, memo)
    add_parts(
        items, rows.indptr, parts, out, reduce=reduce, target=target, addend=addend,
        addend_scale=addend_scale, bias=bias, ties=ties, tie_parts=tie_parts,
    )  # fmt: skip
    return out


def extremum(
    pattern: Pattern | Rows, x: torch.Tensor, out: torch.Tensor, ties: torch.Tensor, reduce: str
) -> torch.Tensor:
    """out[i] = the max (min) of x[j] over row i's edges, 0 where it has none; ties[i]: how many attain it."""
    return spmm(pattern, x, out, reduce=reduce, ties=ties)


@triton.jit
def close_rows(  # type: ignore[no-untyped-def]
    total, row, part, is_piece, o_column, m_column,
    p_out, p_parts, p_indptr, p_addend, p_bias, out_stride, parts_stride, addend_stride,
):  # fmt: skip
    """The sums of a program's slots: rows with addend and bias, or of a piece one row or one part."""
    if is_piece:
        one = tl.sum(total, 0)[None, :]
        row_of = tl.max(row, 0) + tl.zeros((1,), row.dtype)
        part_of = tl.max(part, 0)
        if part_of >= 0:
            o_part = part_of.to(tl.int64) * parts_stride + o_column[None, :]
            tl.store(p_parts + o_part, one, mask=m_column[None, :])
        else:
            _finish(one, row_of, row_of >= 0, o_column, m_column, p_out, p_indptr,
                    None, p_addend, None, p_bias, out_stride, addend_stride, "sum")  # fmt: skip
    else:
        _finish(total, row, row >= 0, o_column, m_column, p_out, p_indptr,
                None, p_addend, None, p_bias, out_stride, addend_stride, "sum")  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _attained(  # type: ignore[no-untyped-def]
    p_x, p_best, p_share, p_out, p_parts, p_indptr, p_indices, p_items, p_addend,
    x_stride, best_stride, share_stride, out_stride, parts_stride, addend_stride,
    num_pieces, num_items, width,
    ACC: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own = (row >= 0)[:, None] & m_column[None, :]
    b_x = tl.load(p_x + row.to(tl.int64)[:, None] * x_stride + o_column[None, :], mask=m_own, other=0.0)
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds, AHEAD):
        for ahead in tl.static_range(AHEAD):
            o_edge = first + (k + ahead) * step
            m_edge = o_edge < last
            target = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
            m_both = m_edge[:, None] & m_column[None, :]
            b_best = tl.load(p_best + target * best_stride + o_column[None, :], mask=m_both, other=0.0)
            b_share = tl.load(p_share + target * share_stride + o_column[None, :], mask=m_both, other=0.0)
            total += tl.where(b_best == b_x, b_share, 0.0).to(ACC)
    close_rows(
        total, row, part, i_program < num_pieces, o_column, m_column,
        p_out, p_parts, p_indptr, p_addend, None, out_stride, parts_stride, addend_stride,
    )  # fmt: skip


_run_attained = Launcher(_attained)


def extremum_gather(
    transpose: Pattern | Rows,
    x: torch.Tensor,
    best: torch.Tensor,
    share: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[j] = sum over the targets i of j of share[i] where best[i] == x[j], + addend[j] (may be `out`)."""
    width, rows = x.shape[1], rows_on(transpose, x.device)
    if width == 0 or rows.num_rows == 0:
        return out
    tiles = tiles_of(width, x.element_size()) if tiles is None else tiles
    items = rows.items(tiles.short, tiles.most)
    sums, acc = accumulator(x.dtype)
    parts = x.new_empty((items.num_parts, width), dtype=sums)
    arguments = (
        x, best, share, out, parts, rows.indptr, rows.indices, items.items, addend,
        x.stride(0), best.stride(0), share.stride(0), out.stride(0), parts.stride(0),
        stride_of(addend),
        items.num_pieces, items.num_pieces + items.num_short, width,
    )  # fmt: skip
    memo = (acc, tiles, *map(_seen, arguments[:15]), width, _is_long(items))
    _run_attained(_grid(items, tiles, width), arguments, _sum_constants(acc, tiles), tiles.warps, memo)
    add_parts(items, rows.indptr, parts, out, addend=addend)
    return out


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _dots(  # type: ignore[no-untyped-def]
    p_x, p_grad, p_out, p_indices, p_items, x_stride, grad_stride, num_pieces, num_items, width,
    ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    row, first, last, _part, step, rounds = slots_of(p_items, tl.program_id(0), num_pieces, num_items, SLOTS)
    m_row = row >= 0
    p_own = p_grad + row.to(tl.int64)[:, None] * grad_stride
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = (o_edge < last) & m_row
        p_other = p_x + tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None] * x_stride
        total = tl.zeros((SLOTS,), ACC)
        for first_column in range(0, width, BLOCK_WIDTH):
            o_column = (first_column + tl.arange(0, BLOCK_WIDTH))[None, :]
            m_both = m_edge[:, None] & (o_column < width)
            b_x = tl.load(p_other + o_column, mask=m_both, other=0.0).to(ACC)
            b_grad = tl.load(p_own + o_column, mask=m_both, other=0.0).to(ACC)
            total += tl.sum(b_x * b_grad, 1)
        tl.store(p_out + o_edge, total, mask=m_edge)


_run_dots = Launcher(_dots)


def weight_gradient(
    pattern: Pattern | Rows,
    x: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """out[e] = grad[i] . x[j] for every edge: the gradient of the edge weights of a sum."""
    width, rows = x.shape[1], rows_on(pattern, x.device)
    if width == 0 or rows.num_edges == 0:
        return out.zero_()
    tiles = tiles_of(width, x.element_size()) if tiles is None else tiles
    items = rows.items(tiles.short, tiles.most)
    arguments = (
        x, grad, out, rows.indices, items.items, x.stride(0), grad.stride(0),
        items.num_pieces, items.num_pieces + items.num_short, width,
    )  # fmt: skip
    constants = {"ACC": accumulator(x.dtype)[1], "SLOTS": tiles.slots, "BLOCK_WIDTH": tiles.columns}
    _run_dots((items.grid(tiles.slots),), arguments, constants, tiles.warps)
    return out
