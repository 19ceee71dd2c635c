"""Gated sums over a graph's edges on a GPU by Triton, and the gradients of what the sources give.

The programs are those of kernels/spmm/gpu.py: SLOTS short rows, or one piece of a long row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plait.kernels.csr.gpu import Rows  # first: it says so where triton is missing
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import (
    Tiles,
    accumulator,
    add_parts,
    close_rows,
    rows_on,
    slots_of,
    stride_of,
    tiles_of,
)

# isort: split
import triton
import triton.language as tl

if TYPE_CHECKING:
    from plait.kernels.spmm import Pattern

__all__ = ["gate", "gate_sources"]

_COUNTS = ("num_pieces", "num_items")


@triton.jit  # type: ignore[untyped-decorator]
def _gate_of(total, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the gate, its derivative)."""
    if KIND == "sigmoid":
        act = 1.0 / (1.0 + tl.exp(-total))
        slope = act * (1.0 - act)
    else:
        act = tl.maximum(total, 0.0)
        slope = (total > 0).to(total.dtype)
    return act, slope


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    p_near, p_far, p_value, p_out, p_parts, p_slopes, p_slope_parts, p_indptr, p_indices, p_items,
    p_addend, p_bias, near_stride, far_stride, value_stride, out_stride, slopes_stride,
    parts_stride, addend_stride,
    num_pieces, num_items, width,
    KIND: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    p_own = p_near + row.to(tl.int64)[:, None] * near_stride
    b_near = tl.load(p_own + o_column[None, :], mask=(row >= 0)[:, None] & m_column[None, :], other=0.0).to(
        ACC
    )
    total = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    slopes = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        source = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        b_far = tl.load(p_far + source * far_stride + o_column[None, :], mask=m_both, other=0.0).to(ACC)
        act, slope = _gate_of(b_near + b_far, KIND)
        if p_value is not None:  # 0 for an edge that is not there
            b_value = tl.load(p_value + source * value_stride + o_column[None, :], mask=m_both, other=0.0).to(
                ACC
            )
        else:
            b_value = m_both.to(ACC)
        total += act * b_value
        slopes += slope * b_value
    is_piece = i_program < num_pieces
    if p_out is not None:
        close_rows(total, row, part, is_piece, o_column, m_column,
                   p_out, p_parts, p_indptr, p_addend, p_bias, out_stride, parts_stride,
                   addend_stride)  # fmt: skip
    if p_slopes is not None:
        close_rows(slopes, row, part, is_piece, o_column, m_column,
                   p_slopes, p_slope_parts, p_indptr, None, None, slopes_stride, parts_stride, 0)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)  # type: ignore[untyped-decorator]
def _gated_sources(  # type: ignore[no-untyped-def]
    p_near, p_far, p_value, p_grad, p_far_grad, p_far_parts, p_value_grad, p_value_parts,
    p_indptr, p_indices, p_items,
    near_stride, far_stride, value_stride, grad_stride, far_grad_stride, value_grad_stride, parts_stride,
    num_pieces, num_items, width,
    KIND: tl.constexpr, ACC: tl.constexpr, SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    o_column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    row, first, last, part, step, rounds = slots_of(p_items, i_program, num_pieces, num_items, SLOTS)
    m_own, node = (row >= 0)[:, None] & m_column[None, :], row.to(tl.int64)[:, None]
    b_far = tl.load(p_far + node * far_stride + o_column[None, :], mask=m_own, other=0.0).to(ACC)
    to_far = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    to_value = tl.zeros((SLOTS, BLOCK_WIDTH), ACC)
    for k in range(0, rounds):
        o_edge = first + k * step
        m_edge = o_edge < last
        m_both = m_edge[:, None] & m_column[None, :]
        target = tl.load(p_indices + o_edge, mask=m_edge, other=0).to(tl.int64)[:, None]
        b_near = tl.load(p_near + target * near_stride + o_column[None, :], mask=m_both, other=0.0).to(ACC)
        b_grad = tl.load(p_grad + target * grad_stride + o_column[None, :], mask=m_both, other=0.0).to(ACC)
        act, slope = _gate_of(b_near + b_far, KIND)
        to_far += slope * b_grad
        to_value += act * b_grad
    is_piece = i_program < num_pieces
    if p_value is not None:
        to_far *= tl.load(p_value + node * value_stride + o_column[None, :], mask=m_own, other=0.0).to(ACC)
    close_rows(to_far, row, part, is_piece, o_column, m_column,
               p_far_grad, p_far_parts, p_indptr, None, None, far_grad_stride, parts_stride, 0)  # fmt: skip
    if p_value_grad is not None:
        close_rows(to_value, row, part, is_piece, o_column, m_column,
                   p_value_grad, p_value_parts, p_indptr, None, None, value_grad_stride, parts_stride,
                   0)  # fmt: skip


_run_gated, _run_sources = Launcher(_gated), Launcher(_gated_sources)


def _tiles(width: int, element_size: int) -> Tiles:
    """Those of a product; no two operands are loaded at once, so a wider program holds as many."""
    return tiles_of(min(width, 128), element_size)


def gate(
    pattern: Pattern | Rows,
    kind: str,
    near: torch.Tensor,
    far: torch.Tensor,
    value: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:
    """out[i] = sum over edges of act(near[i] + far[j]) * value[j] + addend[i] + bias: kernels/gate."""
    width, rows = far.shape[1], rows_on(pattern, far.device)
    if not width or not rows.num_rows:
        return
    tiles = _tiles(width, far.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(far.dtype)
    parts, slope_parts = (far.new_empty((items.num_parts, width), dtype=sums) for _ in range(2))
    arguments = (
        near, far, value, out, parts, slopes, slope_parts, rows.indptr, rows.indices, items.items,
        addend, bias, near.stride(0), far.stride(0), stride_of(value), stride_of(out), stride_of(slopes),
        width, stride_of(addend),
        items.num_pieces, items.num_pieces + items.num_short, width,
    )  # fmt: skip
    constants = {"KIND": kind, "ACC": acc, "SLOTS": tiles.slots, "BLOCK_WIDTH": tiles.columns}
    _run_gated((items.grid(tiles.slots), -(-width // tiles.columns)), arguments, constants, tiles.warps)
    if out is not None:
        add_parts(items, rows.indptr, parts, out, addend=addend, bias=bias)
    if slopes is not None:
        add_parts(items, rows.indptr, slope_parts, slopes)


def gate_sources(
    transpose: Pattern | Rows,
    kind: str,
    near: torch.Tensor,
    far: torch.Tensor,
    value: torch.Tensor | None,
    grad: torch.Tensor,
    far_grad: torch.Tensor,
    value_grad: torch.Tensor | None,
    tiles: Tiles | None = None,
) -> None:
    """The pass over sources: far_grad[j] = value[j] * sum of grad[i] act'; value_grad[j] = that with act."""
    width, rows = far.shape[1], rows_on(transpose, far.device)
    if not width or not rows.num_rows:
        return
    tiles = _tiles(width, far.element_size()) if tiles is None else tiles
    items, (sums, acc) = rows.items(tiles.short, tiles.most), accumulator(far.dtype)
    far_parts, value_parts = (far.new_empty((items.num_parts, width), dtype=sums) for _ in range(2))
    arguments = (
        near, far, value, grad, far_grad, far_parts, value_grad, value_parts,
        rows.indptr, rows.indices, items.items, near.stride(0), far.stride(0), stride_of(value),
        grad.stride(0), far_grad.stride(0), stride_of(value_grad), width,
        items.num_pieces, items.num_pieces + items.num_short, width,
    )  # fmt: skip
    constants = {"KIND": kind, "ACC": acc, "SLOTS": tiles.slots, "BLOCK_WIDTH": tiles.columns}
    _run_sources((items.grid(tiles.slots), -(-width // tiles.columns)), arguments, constants, tiles.warps)
    add_parts(items, rows.indptr, far_parts, far_grad)
    if value_grad is not None:
        add_parts(items, rows.indptr, value_parts, value_grad)
