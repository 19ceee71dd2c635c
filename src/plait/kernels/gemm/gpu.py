"""Products of groups of rows, each with a weight of its own, in one launch on a GPU by Triton.

Rows lie group after group. A program has BLOCK_ROWS rows of one group and BLOCK_WIDTH columns of the result.
The gradient of the weights goes over each group in fixed chunks, whose partial results are added in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from plait.kernels.csr.gpu import Rows  # first: it says so where triton is missing
from plait.kernels.relaunch import Launcher
from plait.kernels.spmm.gpu import spmm

# isort: split
import triton
import triton.language as tl

__all__ = ["ROWS", "GroupedRows", "chunk_of", "grouped", "grouped_weights"]

ROWS, _WIDTH, _INNER = 64, 64, 32
_CHUNK_BYTES = 64 << 20  # of all partial results of a gradient
_LEAST_CHUNK = 1024


class GroupedRows:
    """Rows by group: group g has those from bounds[g] to bounds[g + 1]; what launches are cut by."""

    def __init__(self, bounds: tuple[int, ...], device: torch.device):
        self.bounds, self.device, self.count = bounds, device, len(bounds) - 1
        self._pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pieces_of(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The groups in pieces of this many rows, made once: see _cut."""
        found = self._pieces.get(most)
        if found is None:
            found = self._pieces[most] = self._cut(most)
        return found

    def _cut(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """([pieces, 3]: group, first and last row of each; [groups + 1]: where a group's pieces begin)."""
        starts = np.asarray(self.bounds[:-1], np.int64)
        sizes = np.asarray(self.bounds[1:], np.int64) - starts
        counts = -(-sizes // most)
        group = np.repeat(np.arange(self.count), counts)
        ends = np.cumsum(counts)
        inside = np.arange(len(group)) - np.repeat(ends - counts, counts)
        first = starts[group] + inside * most
        last = np.minimum(first + most, (starts + sizes)[group])
        table = np.stack([group, first, last], 1).astype(np.int32)
        indptr = np.concatenate([[0], ends]).astype(np.int32)
        return torch.from_numpy(table).to(self.device), torch.from_numpy(indptr).to(self.device)


@triton.jit  # type: ignore[untyped-decorator]
def _grouped(  # type: ignore[no-untyped-def]
    p_x, p_w, p_out, p_pieces, x_stride, out_stride, w_group, w_inner, w_outer, inner, width, blocks,
    PRECISION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """out[rows, block] = x[rows, block] @ w[group, block], rows of one group."""
    p_piece = p_pieces + tl.program_id(0) * 3
    group = tl.load(p_piece).to(tl.int64)
    row = tl.load(p_piece + 1) + tl.arange(0, BLOCK_ROWS)
    m_row = (row < tl.load(p_piece + 2))[:, None]
    i_block = tl.program_id(1)
    o_column = tl.program_id(2) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    o_inner = tl.arange(0, BLOCK_INNER)
    p_row = p_x + row.to(tl.int64)[:, None] * x_stride + i_block * inner
    p_weight = p_w + (group * blocks + i_block) * w_group
    total = tl.zeros((BLOCK_ROWS, BLOCK_WIDTH), tl.float32)
    for first in range(0, inner, BLOCK_INNER):
        o_own = first + o_inner
        b_x = tl.load(p_row + o_own[None, :], mask=m_row & (o_own < inner)[None, :], other=0.0)
        b_w = tl.load(p_weight + o_own[:, None] * w_inner + o_column * w_outer,
                      mask=(o_own < inner)[:, None] & (o_column < width), other=0.0)  # fmt: skip
        total = tl.dot(b_x, b_w, total, input_precision=PRECISION)
    p_own = p_out + row.to(tl.int64)[:, None] * out_stride + i_block * width + o_column
    tl.store(p_own, total, mask=m_row & (o_column < width))


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    p_left, p_right, p_parts, p_pieces, left_stride, right_stride, inner, width, blocks,
    PRECISION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """parts[piece, block] = left[rows, block].T @ right[rows, block], rows of one group."""
    i_piece = tl.program_id(0)
    p_piece = p_pieces + i_piece * 3
    first_row, last_row = tl.load(p_piece + 1), tl.load(p_piece + 2)
    i_block = tl.program_id(1)
    columns = tl.cdiv(width, BLOCK_WIDTH)
    o_inner = (tl.program_id(2) // columns) * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    o_column = (tl.program_id(2) % columns) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    total = tl.zeros((BLOCK_INNER, BLOCK_WIDTH), tl.float32)
    for start in range(first_row, last_row, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        m_row = row < last_row
        at = row.to(tl.int64)
        # [BLOCK_INNER, BLOCK_ROWS]
        b_left = tl.load(p_left + at[None, :] * left_stride + i_block * inner + o_inner[:, None],
                         mask=m_row[None, :] & (o_inner < inner)[:, None], other=0.0)  # fmt: skip
        b_right = tl.load(p_right + at[:, None] * right_stride + i_block * width + o_column[None, :],
                          mask=m_row[:, None] & (o_column < width)[None, :], other=0.0)  # fmt: skip
        total = tl.dot(b_left, b_right, total, input_precision=PRECISION)
    p_part = p_parts + ((i_piece.to(tl.int64) * blocks + i_block) * inner + o_inner[:, None]) * width
    tl.store(p_part + o_column[None, :], total, mask=(o_inner < inner)[:, None] & (o_column < width)[None, :])


_run_grouped, _run_weights = Launcher(_grouped), Launcher(_weights)


def _precision() -> str:
    """TF32 where torch's own switch allows it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _constants(rows: int) -> dict[str, Any]:
    return {"PRECISION": _precision(), "BLOCK_ROWS": rows, "BLOCK_WIDTH": _WIDTH, "BLOCK_INNER": _INNER}


def grouped(
    rows: GroupedRows,
    pieces: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    blocks: int,
    is_transposed: bool,
) -> torch.Tensor:
    """out[rows of g, block b] = x[rows of g, block b] @ w[g, b] (is_transposed: its transpose).

    w is [groups * blocks * inner, width]; pieces: of at most 64 rows, see GroupedRows.
    """
    table, _ = pieces
    high, low = w.shape[0] // max(1, rows.count * blocks), w.shape[1]
    inner, width = (low, high) if is_transposed else (high, low)
    w = w.contiguous()
    if table.shape[0] and width:
        strides = (1, low) if is_transposed else (low, 1)
        arguments = (
            x, w, out, table, x.stride(0), out.stride(0), high * low, *strides, inner, width, blocks,
        )  # fmt: skip
        _run_grouped((table.shape[0], blocks, triton.cdiv(width, _WIDTH)), arguments, _constants(ROWS))
    return out


def chunk_of(rows: GroupedRows, blocks: int, inner: int, width: int) -> int:
    """Rows of a chunk such that the partial results of all of them stay within bounds."""
    each = 4 * blocks * inner * width
    most = max(1, _CHUNK_BYTES // max(1, each))
    wanted = max(_LEAST_CHUNK, -(-rows.bounds[-1] // most))
    return int(triton.next_power_of_2(wanted))


def grouped_weights(
    rows: GroupedRows,
    pieces: tuple[torch.Tensor, torch.Tensor],
    left: torch.Tensor,
    right: torch.Tensor,
    blocks: int,
) -> torch.Tensor:
    """[groups * blocks * inner, width]: left[rows of g, block b].T @ right[rows of g, block b]."""
    table, indptr = pieces
    inner, width = left.shape[1] // blocks, right.shape[1] // blocks
    size = blocks * inner * width
    out = left.new_empty((rows.count, size))
    parts = left.new_empty((table.shape[0], size), dtype=torch.float32)
    if size:
        if table.shape[0]:
            arguments = (
                left, right, parts, table, left.stride(0), right.stride(0), inner, width, blocks,
            )  # fmt: skip
            tiles = triton.cdiv(inner, _INNER) * triton.cdiv(width, _WIDTH)
            _run_weights((table.shape[0], blocks, tiles), arguments, _constants(32))
        numbers = torch.arange(table.shape[0], dtype=indptr.dtype, device=indptr.device)
        spmm(Rows(indptr, numbers, table.shape[0]), parts, out)
    return out.view(rows.count * blocks * inner, width)
