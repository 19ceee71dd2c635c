"""Schedules of partial sums on a GPU by Triton: sums, maxima and minima, scalings, added term, bias fused in.

One program sums a few rows at a time, a block of columns each; rows of one block have similar lengths, so
none waits long for another, and four operands of each are loaded before the first is added. Operands are
added in their order by one thread: the result does not depend on how the device is scheduled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from plait.errors import InputError
from plait.kernels.partial.rounds import Rounds, rounds

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise InputError(
        "x is on a GPU, but triton is not installed; it comes with CUDA builds of torch. "
        "Install one, or move x to the CPU"
    ) from error

if TYPE_CHECKING:
    from plait.kernels.partial import Sums

__all__ = ["OnDevice", "partial_sums", "sum_rounds"]

# Chosen on an H200 by some thirty settings of tu_collab, web_cnr2000 and an R-MAT graph at widths 16, 64 and
# 256, one run each: best or within 7% on tu_collab and R-MAT. Not so on web_cnr2000: its form was 1.4x faster
# with blocks of 32 rows and 8 warps, its CSR at width 16 1.5x faster with 8 operands ahead.
_AHEAD = 4
_WARPS = 4
_FEWEST_COLUMNS, _MOST_COLUMNS = 16, 64
_WIDE_ROWS, _NARROW_ROWS = 16, 32


@triton.jit  # type: ignore[untyped-decorator]
def _sum_block(  # type: ignore[no-untyped-def]
    p_x, p_buffer, p_out, p_operands, p_begin, p_length, p_to,
    p_source, p_edge, p_target, p_addend, p_addend_scale, p_bias,
    x_stride, buffer_stride, out_stride, addend_stride, num_sources, width,
    first, last, first_column,
    REDUCE: tl.constexpr, HAS_BUFFER: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows [first, last), at most BLOCK_ROWS, of a block of columns."""
    o_row = first + tl.arange(0, BLOCK_ROWS)
    m_row = o_row < last
    o_column = first_column + tl.arange(0, BLOCK_WIDTH)
    m_column = o_column < width
    begin = tl.load(p_begin + o_row, mask=m_row, other=0)
    length = tl.load(p_length + o_row, mask=m_row, other=0)
    to = tl.load(p_to + o_row, mask=m_row, other=0)
    worst = 0.0 if REDUCE == "sum" else float("-inf") if REDUCE == "max" else float("inf")
    total = tl.full((BLOCK_ROWS, BLOCK_WIDTH), worst, p_x.dtype.element_ty)
    for k in range(0, tl.max(length, 0), AHEAD):
        for ahead in tl.static_range(AHEAD):
            m_operand = k + ahead < length
            operand = tl.load(p_operands + begin + (k + ahead), mask=m_operand, other=0)
            row = operand.to(tl.int64)
            p_row = p_x + row * x_stride
            if HAS_BUFFER:
                p_row = tl.where(operand < num_sources, p_row, p_buffer + (row - num_sources) * buffer_stride)
            # [BLOCK_ROWS, BLOCK_WIDTH]
            b_x = tl.load(
                p_row[:, None] + o_column[None, :], mask=m_operand[:, None] & m_column[None, :], other=worst
            )
            m_input = m_operand & (operand < num_sources)
            if p_source is not None:
                b_x *= tl.load(p_source + row, mask=m_input, other=1.0)[:, None]
            if p_edge is not None:
                b_x *= tl.load(p_edge + begin + (k + ahead), mask=m_input, other=1.0)[:, None]
            if REDUCE == "sum":
                total += b_x
            elif REDUCE == "max":
                total = tl.maximum(total, b_x, propagate_nan=tl.PropagateNan.ALL)
            else:
                total = tl.minimum(total, b_x, propagate_nan=tl.PropagateNan.ALL)
    if REDUCE != "sum":
        total = tl.where(length[:, None] > 0, total, 0.0)
    is_output = to >= 0
    node = tl.where(is_output, to, 0).to(tl.int64)
    m_output = m_row & is_output
    if p_target is not None:
        total *= tl.load(p_target + node, mask=m_output, other=1.0)[:, None]
    if p_addend is not None:
        b_addend = tl.load(
            p_addend + node[:, None] * addend_stride + o_column[None, :],
            mask=m_output[:, None] & m_column[None, :],
            other=0.0,
        )
        if p_addend_scale is not None:
            b_addend *= tl.load(p_addend_scale + node, mask=m_output, other=0.0)[:, None]
        total += b_addend
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_column, mask=m_column, other=0.0)
        total += tl.where(is_output[:, None], b_bias[None, :], 0.0)
    p_row = p_out + node * out_stride
    if HAS_BUFFER:
        p_row = tl.where(is_output, p_row, p_buffer + (-1 - to).to(tl.int64) * buffer_stride)
    tl.store(p_row[:, None] + o_column[None, :], total, mask=m_row[:, None] & m_column[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _launch(  # type: ignore[no-untyped-def]
    p_x, p_buffer, p_out, p_operands, p_begin, p_length, p_to,
    p_source, p_edge, p_target, p_addend, p_addend_scale, p_bias,
    x_stride, buffer_stride, out_stride, addend_stride, num_sources, width,
    p_groups, p_starts, first, last,
    REDUCE: tl.constexpr, HAS_BUFFER: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of the rows [first, last), or all rounds of one of the groups [first, last)."""
    i_block, first_column = tl.program_id(0), tl.program_id(1) * BLOCK_WIDTH
    if p_groups is None:
        _sum_block(
            p_x, p_buffer, p_out, p_operands, p_begin, p_length, p_to,
            p_source, p_edge, p_target, p_addend, p_addend_scale, p_bias,
            x_stride, buffer_stride, out_stride, addend_stride, num_sources, width,
            first + i_block * BLOCK_ROWS, last, first_column,
            REDUCE, HAS_BUFFER, AHEAD, BLOCK_ROWS, BLOCK_WIDTH,
        )  # fmt: skip
    else:
        i_group = first + i_block
        for i_round in range(tl.load(p_groups + i_group), tl.load(p_groups + i_group + 1)):
            last_row = tl.load(p_starts + i_round + 1)
            for first_row in range(tl.load(p_starts + i_round), last_row, BLOCK_ROWS):
                _sum_block(
                    p_x, p_buffer, p_out, p_operands, p_begin, p_length, p_to,
                    p_source, p_edge, p_target, p_addend, p_addend_scale, p_bias,
                    x_stride, buffer_stride, out_stride, addend_stride, num_sources, width,
                    first_row, last_row, first_column,
                    REDUCE, HAS_BUFFER, AHEAD, BLOCK_ROWS, BLOCK_WIDTH,
                )  # fmt: skip
            tl.debug_barrier()  # the next round reads what other threads of this program wrote


class OnDevice:
    """The arrays of rounds on one device."""

    def __init__(self, made: Rounds, device: torch.device):
        self.num_sources, self.num_buffer, self.launches = made.num_sources, made.num_buffer, made.launches
        self.arrays, self.bounds = (
            tuple(torch.from_numpy(array).to(device) for array in arrays)
            for arrays in ((made.operands, made.begin, made.length, made.to), (made.groups, made.starts))
        )


def sum_rounds(
    made: OnDevice,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    reduce: str = "sum",
    source: torch.Tensor | None = None,
    edge: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    addend_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = target[i] * sum of edge[e] * source[j] * x[j] over the operands + addend_scale[i] * addend[i]
    + bias, or the largest or smallest x[j] instead of the sum; the launches of `made` one after the other."""
    width = x.shape[1]
    if width == 0:
        return out
    columns = min(max(_FEWEST_COLUMNS, triton.next_power_of_2(width)), _MOST_COLUMNS)
    rows = _WIDE_ROWS if columns == _MOST_COLUMNS else _NARROW_ROWS
    buffer = x.new_empty((made.num_buffer, width)) if made.num_buffer else x
    for launch in made.launches:
        count = launch.last - launch.first
        grid = (count if launch.is_grouped else -(-count // rows), -(-width // columns))
        _launch[grid](
            x, buffer, out, *made.arrays, source, edge, target, addend, addend_scale, bias,
            x.stride(0), buffer.stride(0), out.stride(0), 0 if addend is None else addend.stride(0),
            made.num_sources, width, *(made.bounds if launch.is_grouped else (None, None)),
            launch.first, launch.last,
            REDUCE=reduce, HAS_BUFFER=made.num_buffer > 0, AHEAD=_AHEAD,
            BLOCK_ROWS=rows, BLOCK_WIDTH=columns, num_warps=_WARPS,
        )  # fmt: skip
    return out


_placed: WeakKeyDictionary[Sums, dict[torch.device, OnDevice]] = WeakKeyDictionary()


def partial_sums(
    sums: Sums, x: torch.Tensor, out: torch.Tensor, **options: torch.Tensor | str | None
) -> torch.Tensor:
    """What kernels/partial: partial_sums computes, on x's device; the schedule is copied there once.

    Differences (schedules that subtract) and counted ties are left to the CPU.
    """
    if options.pop("ties", None) is not None:
        raise InputError("ties: no kernel counts them on a GPU yet; move x to the CPU")
    if sums.is_signed:
        raise InputError("sums: schedules that subtract have no kernel on a GPU; use the form hag or csr")
    devices = _placed.setdefault(sums, {})
    if x.device not in devices:
        _, start, _, operands, node, buffer = sums.arrays
        num_columns = sums.num_columns + sums.num_shared + sums.num_slots
        made = rounds(start, operands, node, buffer, sums.num_columns, num_columns)
        devices[x.device] = OnDevice(made, x.device)
    return sum_rounds(devices[x.device], x, out, **options)  # type: ignore[arg-type]
