"""Rows of a block of edges: near[i] + far[j], and the way back of their gradients to the sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.errors import InputError
from plait.kernels import launch
from plait.kernels.compiled import stored
from plait.kernels.edgewise import cpu
from plait.kernels.operands import float_bits, read_numbers, read_rows, write_rows
from plait.kernels.spmm import Pattern

__all__ = ["Groups", "mark", "mark_bytes", "pair", "scatter", "unmark"]

_SERIAL_BELOW = 1 << 18  # edges times columns
_PIECE_ROWS = 64


_pair_address = stored("edgewise-pair", cpu.pair)
_scatter_address = stored("edgewise-scatter", cpu.scatter)
_marks_address = stored("edgewise-marks", cpu.marks)


def _threads(work: int) -> int:
    return launch.num_threads() if work > _SERIAL_BELOW else 1


@dataclass(frozen=True)
class Groups:
    """Values by the row they are added to: order[indptr[r] : indptr[r + 1]] go to targets[r]."""

    indptr: np.ndarray[Any, Any]
    order: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]

    @classmethod
    def of(cls, rows: np.ndarray[Any, Any]) -> Groups:
        """Groups of equal entries of `rows`, in their order."""
        order = np.argsort(rows, kind="stable").astype(rows.dtype)
        targets, starts = np.unique(rows[order], return_index=True)
        return cls(np.append(starts, len(rows)).astype(rows.dtype), order, targets)


def pair(
    pattern: Pattern, first: int, last: int, near: torch.Tensor, far: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out[e] = near[i] + far[j], one row for each edge of the pattern's rows from first to last."""
    address = _pair_address(float_bits("far", far), pattern.index_bits)
    dtype, width = far.dtype, far.shape[-1]
    at = cpu.PAIR
    words = at.words()
    words[at.first], words[at.last], words[at.piece_rows] = first, last, _PIECE_ROWS
    words[at.indptr], words[at.indices] = pattern.addresses[2], pattern.addresses[3]
    near = read_rows(words, at.near, "near", near, dtype, pattern.num_rows, width)
    far = read_rows(words, at.far, "far", far, dtype, pattern.num_columns, width, True)
    write_rows(words, at.out, "out", out, dtype, int(pattern.indptr[last] - pattern.indptr[first]), width)
    words[at.width] = width
    at.run(address, words, _threads(out.numel()))
    return out


def scatter(groups: Groups, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[targets[r]] += the sum of the values of group r."""
    dtype, width, bits = values.dtype, values.shape[-1], groups.order.dtype.itemsize * 8
    address = _scatter_address(float_bits("values", values), bits)
    count, rows = len(groups.targets), out.shape[0]
    if count and groups.targets[-1] >= rows:
        raise InputError(
            f"out: has {rows} rows, values are added to row {groups.targets[-1]}; make it longer"
        )
    at = cpu.SCATTER
    words = at.words()
    words[at.rows], words[at.piece_rows], words[at.width] = count, _PIECE_ROWS, width
    read_numbers(words, at.indptr, "indptr", groups.indptr, bits, count + 1)
    read_numbers(words, at.order, "order", groups.order, bits, len(groups.order))
    read_numbers(words, at.targets, "targets", groups.targets, bits, count)
    values = read_rows(words, at.values, "values", values, dtype, len(groups.order), width)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    at.run(address, words, _threads(len(groups.order) * width))
    return out


def mark_bytes(width: int) -> int:
    """Bytes of an edge's marks, one bit per column."""
    return -(-width // cpu.LANES_MARKED) * cpu.LANES_MARKED // 8


def _run_marks(
    pattern: Pattern, near: torch.Tensor, values: torch.Tensor, marks: torch.Tensor, is_back: bool
) -> None:
    address = _marks_address(float_bits("values", values), pattern.index_bits, is_back)
    dtype, edges, width = values.dtype, pattern.num_edges, values.shape[-1]
    at = cpu.MARKS
    words = at.words()
    words[at.rows], words[at.piece_rows], words[at.indptr] = (
        pattern.num_rows,
        _PIECE_ROWS,
        pattern.addresses[2],
    )
    near = read_rows(words, at.near, "near", near, dtype, pattern.num_rows, width)
    if is_back:
        write_rows(words, at.values, "out", values, dtype, edges, width)
        marks = read_rows(words, at.marks, "marks", marks, torch.uint8, edges, mark_bytes(width))
    else:
        values = read_rows(words, at.values, "values", values, dtype, edges, width)
        write_rows(words, at.marks, "marks", marks, torch.uint8, edges, mark_bytes(width))
    words[at.width] = width
    at.run(address, words, _threads(edges * width))


def mark(pattern: Pattern, best: torch.Tensor, values: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """marks[e, column] = values[e] == best[i], bit by bit; edge e is the pattern's e-th, of row i."""
    _run_marks(pattern, best, values, marks, False)
    return marks


def unmark(pattern: Pattern, share: torch.Tensor, marks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[e] = share[i] where marked, else 0."""
    _run_marks(pattern, share, out, marks, True)
    return out
