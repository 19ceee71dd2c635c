"""Rows of a block of edges: near[i] + far[j], and the way back of their gradients to the sources."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.edgewise import cpu
from plait.kernels.spmm import Pattern

__all__ = ["Groups", "mark", "mark_bytes", "pair", "scatter", "unmark"]

_SERIAL_BELOW = 1 << 18  # edges times columns
_PIECE_ROWS = 64
_pair_block, _scatter_block, _marks_block = Block(cpu.PAIR), Block(cpu.SCATTER), Block(cpu.MARKS)


@functools.cache
def _address(name: str, float_bits: int, index_bits: int) -> int:
    build = {"pair": cpu.pair, "scatter": cpu.scatter}[name]
    return address_of(f"edgewise-{name}-f{float_bits}-i{index_bits}", lambda: build(float_bits, index_bits))


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
    size = far.element_size()
    words = _pair_block.words()
    words[1], words[2], words[3] = first, last, _PIECE_ROWS
    words[4], words[5] = pattern.addresses[2], pattern.addresses[3]
    for k, tensor in enumerate((near, far, out)):
        words[6 + 2 * k], words[7 + 2 * k] = tensor.data_ptr(), tensor.stride(0) * size
    words[12] = out.shape[1]
    _pair_block.run(_address("pair", size * 8, pattern.index_bits), words, _threads(out.numel()))
    return out


def scatter(groups: Groups, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[targets[r]] += the sum of the values of group r."""
    size = values.element_size()
    words = _scatter_block.words()
    words[1], words[2] = len(groups.targets), _PIECE_ROWS
    words[3], words[4] = groups.indptr.ctypes.data, groups.order.ctypes.data
    words[5] = groups.targets.ctypes.data
    words[6], words[7] = values.data_ptr(), values.stride(0) * size
    words[8], words[9] = out.data_ptr(), out.stride(0) * size
    words[10] = values.shape[1]
    address = _address("scatter", size * 8, groups.order.dtype.itemsize * 8)
    _scatter_block.run(address, words, _threads(values.numel()))
    return out


@functools.cache
def _marks_address(float_bits: int, index_bits: int, is_back: bool) -> int:
    name = f"edgewise-{'unmark' if is_back else 'mark'}-f{float_bits}-i{index_bits}"
    return address_of(name, lambda: cpu.marks(float_bits, index_bits, is_back))


def mark_bytes(width: int) -> int:
    """Bytes of an edge's marks, one bit a column."""
    return -(-width // cpu.LANES_MARKED) * cpu.LANES_MARKED // 8


def _run_marks(
    pattern: Pattern, near: torch.Tensor, values: torch.Tensor, marks: torch.Tensor, is_back: bool
) -> None:
    size = values.element_size()
    words = _marks_block.words()
    words[1], words[2], words[3] = pattern.num_rows, _PIECE_ROWS, pattern.addresses[2]
    words[4], words[5] = near.data_ptr(), near.stride(0) * size
    words[6], words[7] = values.data_ptr(), values.stride(0) * size
    words[8], words[9], words[10] = marks.data_ptr(), marks.stride(0), values.shape[1]
    address = _marks_address(size * 8, pattern.index_bits, is_back)
    _marks_block.run(address, words, _threads(values.numel()))


def mark(pattern: Pattern, best: torch.Tensor, values: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """marks[e, column] = values[e] == best[i], bit by bit; edge e is the pattern's e-th, of row i."""
    _run_marks(pattern, best, values, marks, False)
    return marks


def unmark(pattern: Pattern, share: torch.Tensor, marks: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[e] = share[i] where marked, else 0."""
    _run_marks(pattern, share, out, marks, True)
    return out
