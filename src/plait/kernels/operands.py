"""The one gate between tensors and machine code: an operand is checked, copied where it must be, and placed.

A kernel takes addresses on trust. So every tensor whose address is written into an argument block passes one
of the functions below: its device, dtype and size are those the kernel expects, and its elements lie as the
kernel walks them. An operand that is only read is copied where it lies otherwise; one that is written is
refused, since a result written to a copy would be lost.

Rows may be any distance apart, and those that are read may overlap (an expanded row is read with stride
zero); the elements of one row follow each other. Everything else lies in one piece.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from plait.errors import InputError, TypesError

__all__ = ["Words", "float_bits", "read_flat", "read_numbers", "read_rows", "write_flat", "write_rows"]

Words = ctypes.Array[ctypes.c_int64]
Given = TypeVar("Given", Tensor, Tensor | None)

_BITS = {torch.float32: 32, torch.float64: 64}


def float_bits(name: str, tensor: Tensor) -> int:
    """The bits of an element, 32 or 64: kernels compute in these two."""
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise InputError(
            f"{name}: kernels compute in float32 and float64, not in {tensor.dtype}; convert it first"
        )
    return bits


def read_rows(
    words: Words,
    at: int,
    name: str,
    tensor: Given,
    dtype: torch.dtype,
    rows: int,
    width: int,
    may_be_longer: bool = False,
) -> Given:
    """Place the address of a matrix and the bytes between its rows, zeros for None.

    Returns the tensor that was placed, a copy perhaps: hold it until the kernel has run.
    """
    if tensor is None:
        words[at] = words[at + 1] = 0
        return None
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise _misfit(name, tensor, dtype)
    if tensor.shape != (rows, width) and not (may_be_longer and _is_longer(tensor, rows, width)):
        raise _misshapen(name, tensor, f"[{rows}{' or more' if may_be_longer else ''}, {width}]")
    stride = width
    try:
        # of tensors whose sign is still to be turned (z.conj().imag) only a single number is contiguous
        if not tensor.is_contiguous() or (rows * width == 1 and tensor.is_neg()):
            tensor, stride = _with_whole_rows(tensor)
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise _without_memory(name, tensor) from error
    if not address and rows and width:
        raise _without_memory(name, tensor)
    words[at], words[at + 1] = address, stride * dtype.itemsize
    return tensor


def write_rows(
    words: Words, at: int, name: str, tensor: Tensor | None, dtype: torch.dtype, rows: int, width: int
) -> None:
    """Place a matrix that the kernel writes; refuse it where its rows are not whole or overlap."""
    if tensor is None:
        words[at] = words[at + 1] = 0
        return
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise _misfit(name, tensor, dtype)
    if tensor.shape != (rows, width):
        raise _misshapen(name, tensor, f"[{rows}, {width}]")
    stride = width
    try:
        address = tensor.data_ptr()
        if not tensor.is_contiguous():
            stride = _apart(name, tensor)
    except RuntimeError as error:
        raise _without_memory(name, tensor) from error
    if not address and rows and width:
        raise _without_memory(name, tensor)
    words[at], words[at + 1] = address, stride * dtype.itemsize


def read_flat(words: Words, at: int, name: str, tensor: Given, dtype: torch.dtype, count: int) -> Given:
    """Place the address of `count` elements in one piece, zero for None; returns what is to be held."""
    if tensor is None:
        words[at] = 0
        return None
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise _misfit(name, tensor, dtype)
    if tensor.numel() != count:
        raise _misshapen(name, tensor, f"{count} elements")
    try:
        if not tensor.is_contiguous() or (count == 1 and tensor.is_neg()):
            tensor = tensor.resolve_neg().contiguous()
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise _without_memory(name, tensor) from error
    if not address and count:
        raise _without_memory(name, tensor)
    words[at] = address
    return tensor


def write_flat(
    words: Words, at: int, name: str, tensor: Tensor | None, dtype: torch.dtype, count: int
) -> None:
    """Place `count` elements that the kernel writes; refuse them where they are not in one piece."""
    if read_flat(words, at, name, tensor, dtype, count) is not tensor and tensor is not None:
        raise InputError(
            f"{name}: its elements are written in one piece, but it has strides {tensor.stride()}; "
            "hand in a contiguous tensor"
        )


def read_numbers(
    words: Words, at: int, name: str, array: np.ndarray[Any, Any] | None, bits: int, count: int
) -> None:
    """Place the address of `count` edge or node numbers of this many bits, zero for None."""
    if array is None:
        words[at] = 0
        return
    if array.dtype.kind != "i" or array.dtype.itemsize * 8 != bits or array.shape != (count,):
        raise InputError(
            f"{name}: is {array.dtype}{list(array.shape)}, wanted int{bits}[{count}] as the graph has"
        )
    if not array.flags.c_contiguous:
        raise InputError(f"{name}: its numbers do not follow each other; use numpy.ascontiguousarray")
    words[at] = array.ctypes.data


def _is_longer(tensor: Tensor, rows: int, width: int) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] > rows and tensor.shape[1] == width


def _with_whole_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(the matrix with contiguous elements in each row, elements between rows): itself, or a copy."""
    between, along = tensor.stride()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    elif along == 1 or tensor.shape[1] == 1:
        return tensor, between
    return tensor.contiguous(), tensor.shape[1]


def _apart(name: str, tensor: Tensor) -> int:
    """Elements between the rows of a matrix that is written; they are whole and do not overlap."""
    (rows, width), (between, along) = tensor.shape, tensor.stride()
    if (along != 1 and width != 1) or (between < width and rows > 1) or tensor.is_neg():
        raise InputError(
            f"{name}: is written row by row, but has strides {(between, along)} for {rows} rows of {width}; "
            "hand in a tensor whose rows are contiguous and do not overlap"
        )
    return between


def _misfit(name: str, tensor: Tensor, dtype: torch.dtype) -> InputError:
    if tensor.is_cpu:
        return TypesError(f"{name}: is {tensor.dtype}, the other operands are {dtype}; convert one of them")
    return InputError(f"{name}: is on {tensor.device}, this kernel runs on the CPU; move all operands there")


def _misshapen(name: str, tensor: Tensor, wanted: str) -> InputError:
    return InputError(
        f"{name}: has shape {list(tensor.shape)}, wanted {wanted}; "
        "check it against the graph and the other operands"
    )


def _without_memory(name: str, tensor: Tensor) -> InputError:
    return InputError(
        f"{name}: a {type(tensor).__name__} ({tensor.layout}) without memory that a kernel can read, as "
        "under vmap, tracing or fake tensors; run the layer in PyG there (PLAIT_DISABLE=1)"
    )
