"""Sums of columns on a GPU by Triton: shares of the rows first, then the shares, always in the same order.

torch's own sum over the first dimension took 46 us for 131,072 x 64 numbers on an H200 and 140 us for 128
columns, at 0.7 and 0.5 TB/s: a seventh of a GCN layer's training step.
"""

from __future__ import annotations

import torch

from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import accumulator

# isort: split
import triton
import triton.language as tl

__all__ = ["column_sums"]

_ROWS, _COLUMNS = 32, 128  # of a tile
_MOST_SHARES = 512  # about four programs for each multiprocessor
_LEAST_ROWS = 64  # of a share
_FEW = 16  # columns of a program that adds shares


@triton.jit(do_not_specialize=("num_rows", "num_columns", "share"))  # type: ignore[untyped-decorator]
def _sum_rows(  # type: ignore[no-untyped-def]
    p_x, p_out, row_stride, out_stride, num_rows, num_columns, share,
    ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of `share` rows of a block of columns: program (k, block) writes row k of the output."""
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_column = (o_column < num_columns)[None, :]
    first = tl.program_id(0).to(tl.int64) * share
    last = tl.minimum(first + share, num_rows)
    total = tl.zeros((ROWS, COLUMNS), ACC)
    for k in range(first, last, ROWS):
        o_row = k + tl.arange(0, ROWS)
        m_tile = (o_row < last)[:, None] & m_column
        # [ROWS, COLUMNS]
        total += tl.load(p_x + o_row.to(tl.int64)[:, None] * row_stride + o_column[None, :], mask=m_tile,
                         other=0.0).to(ACC)  # fmt: skip
    p_row = p_out + tl.program_id(0).to(tl.int64) * out_stride
    tl.store(p_row + o_column, tl.sum(total, 0), mask=o_column < num_columns)


_run_sum_rows = Launcher(_sum_rows)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """x.sum(0) of a matrix whose rows are contiguous, in its type, summed in float32 or float64."""
    rows, columns = x.shape
    if not rows or not columns:
        return x.new_zeros(columns)
    sums, acc = accumulator(x.dtype)
    share = max(_LEAST_ROWS, triton.cdiv(rows, _MOST_SHARES))
    shares = triton.cdiv(rows, share)
    width = min(_COLUMNS, triton.next_power_of_2(columns))
    numbers = {"ACC": acc, "ROWS": _ROWS, "COLUMNS": width}
    parts = x.new_empty((shares, columns), dtype=sums if shares > 1 else x.dtype)
    grid = (shares, triton.cdiv(columns, width))
    _run_sum_rows(grid, (x, parts, x.stride(0), columns, rows, columns, share), numbers)
    if shares == 1:
        return parts[0]
    out, few = x.new_empty(columns), min(_FEW, width)
    numbers = {"ACC": acc, "ROWS": 4 * _ROWS, "COLUMNS": few}
    arguments = (parts, out, columns, columns, shares, columns, shares)
    _run_sum_rows((1, triton.cdiv(columns, few)), arguments, numbers)
    return out
