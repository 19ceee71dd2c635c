"""A small matrix turned into memory of the calling thread: torch takes longer to be called than this takes.

PyG stores weights [out, in] and kernels read rows of [in, out].
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from plait.graph.compiled import compiled
from plait.kernels.operands import Words, read_rows

__all__ = ["MOST_TURNED", "Turned", "read_turned"]

MOST_TURNED = 1 << 11  # elements: of 4,096 torch's copy takes as long (one core)


class Turned(threading.local):
    """A [rows, width] matrix for one place among a kernel's words, made of one stored [width, rows]."""

    def __init__(self, at: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self._at, self._rows, self._width, self._dtype = at, rows, width, dtype
        self._made = torch.empty((rows, width), dtype=dtype)
        self._address, self._between = self._made.data_ptr(), width * dtype.itemsize
        self._turn = _turn_4 if dtype.itemsize == 4 else _turn_8

    def place(self, words: Words, stored: Any) -> bool:
        """Turn it and place it, valid until the next time; False where it is not stored as expected."""
        if type(stored) is not torch.nn.Parameter or stored.dtype is not self._dtype or not stored.is_cpu:
            return False
        if stored.shape != (self._width, self._rows) or not stored.is_contiguous():
            return False
        source = stored.data_ptr()
        if not source:  # memory that was freed under it; whoever reads it instead says so
            return False
        self._turn(source, self._address, self._width, self._rows)
        words[self._at], words[self._at + 1] = self._address, self._between
        return True


class _Scratch(threading.local):
    """Room for the one weight of a product, of either type."""

    def __init__(self) -> None:
        self.made = torch.empty(MOST_TURNED, dtype=torch.float64)
        self.address = self.made.data_ptr()


_scratch = _Scratch()


def read_turned(
    words: Words, at: int, name: str, stored: torch.Tensor, dtype: torch.dtype, rows: int, width: int
) -> torch.Tensor:
    """As `read_rows`, of the transpose of a matrix stored [width, rows]: a small one is turned here.

    It is valid until the thread's next call: a kernel has one such operand.
    """
    is_small = rows * width <= MOST_TURNED and stored.shape == (width, rows)
    if is_small and stored.dtype is dtype and stored.is_cpu and stored.is_contiguous():
        source = _address(stored)
        if source:
            (_turn_4 if dtype.itemsize == 4 else _turn_8)(source, _scratch.address, width, rows)
            words[at], words[at + 1] = _scratch.address, width * dtype.itemsize
            return stored
    return read_rows(words, at, name, stored.t(), dtype, rows, width)


def _address(stored: torch.Tensor) -> int:
    """Where a contiguous matrix lies; 0 where its sign is still to be turned or it has no memory."""
    if stored.numel() == 1 and stored.is_neg():
        return 0
    try:
        return stored.data_ptr()
    except RuntimeError:  # a transform's
        return 0


def _mover(size: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def move(typing: Any, source: Any, target: Any) -> Any:
        """Copy the element at one address to another."""
        kind = ir.IntType(8 * size).as_pointer()

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], kind))
            builder.store(value, builder.inttoptr(args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    return move


_move_4, _move_8 = _mover(4), _mover(8)


@compiled
def _turn_4(source: int, target: int, rows: int, width: int) -> None:
    for j in range(width):
        for i in range(rows):
            _move_4(source + 4 * (i * width + j), target + 4 * (j * rows + i))


@compiled
def _turn_8(source: int, target: int, rows: int, width: int) -> None:
    for j in range(width):
        for i in range(rows):
            _move_8(source + 8 * (i * width + j), target + 8 * (j * rows + i))
