"""Gated sums over a graph's edges: act(near[i] + far[j]) * value[j], and their gradients."""

from __future__ import annotations

import functools

import torch

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.gate import cpu
from plait.kernels.operands import float_bits, read_flat, read_rows, write_rows
from plait.kernels.spmm import Pattern

__all__ = ["gate", "gate_sources"]

_SERIAL_BELOW = 1 << 16  # edges times columns; a gate costs some twenty operations
_forward_block, _sources_block = Block(cpu.FORWARD), Block(cpu.SOURCES)


@functools.cache
def _forward_address(float_bits: int, index_bits: int, kind: str, mode: str) -> int:
    return address_of(
        f"gate-{kind}-{mode}-f{float_bits}-i{index_bits}",
        lambda: cpu.forward(float_bits, index_bits, kind, mode),
    )


@functools.cache
def _sources_address(float_bits: int, index_bits: int, kind: str) -> int:
    return address_of(
        f"gate-sources-{kind}-f{float_bits}-i{index_bits}", lambda: cpu.sources(float_bits, index_bits, kind)
    )


def _threads(pattern: Pattern, width: int) -> int:
    return launch.num_threads() if (pattern.num_edges + pattern.num_rows) * width > _SERIAL_BELOW else 1


def gate(
    pattern: Pattern,
    kind: str,
    near: torch.Tensor,
    far: torch.Tensor,
    value: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out[i] = sum over edges of act(near[i] + far[j]) * value[j] + addend[i] + bias.

    slopes[i] is the sum with act's derivative, alone where `out` is None. kind sigmoid takes a value, relu
    none.
    """
    mode = "sum" if slopes is None else "slopes" if out is None else "both"
    address = _forward_address(float_bits("far", far), pattern.index_bits, kind, mode)
    dtype, rows, sources, width = far.dtype, pattern.num_rows, pattern.num_columns, far.shape[-1]
    words = _forward_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6] = max(0, pattern.num_edges - 1), width
    near = read_rows(words, 7, "near", near, dtype, rows, width)
    far = read_rows(words, 9, "far", far, dtype, sources, width, True)
    value = read_rows(words, 11, "value", value, dtype, sources, width, True)
    write_rows(words, 13, "out", out, dtype, rows, width)
    write_rows(words, 15, "slopes", slopes, dtype, rows, width)
    addend = read_rows(words, 17, "addend", addend, dtype, rows, width)
    bias = read_flat(words, 19, "bias", bias, dtype, width)
    _forward_block.run(address, words, _threads(pattern, width))


def gate_sources(
    transpose: Pattern,
    kind: str,
    near: torch.Tensor,
    far: torch.Tensor,
    value: torch.Tensor | None,
    grad: torch.Tensor,
    far_grad: torch.Tensor,
    value_grad: torch.Tensor | None,
) -> None:
    """The pass over sources: far_grad[j] = value[j] * sum of grad[i] act'; value_grad[j] = that with act."""
    address = _sources_address(float_bits("far", far), transpose.index_bits, kind)
    dtype, rows, targets, width = far.dtype, transpose.num_rows, transpose.num_columns, far.shape[-1]
    words = _sources_block.words()
    words[1], words[2], words[3], words[4] = transpose.addresses
    words[5], words[6] = max(0, transpose.num_edges - 1), width
    far = read_rows(words, 7, "far", far, dtype, rows, width)
    value = read_rows(words, 9, "value", value, dtype, rows, width)
    near = read_rows(words, 11, "near", near, dtype, targets, width, True)
    grad = read_rows(words, 13, "grad", grad, dtype, targets, width, True)
    write_rows(words, 15, "far_grad", far_grad, dtype, rows, width)
    write_rows(words, 17, "value_grad", value_grad, dtype, rows, width)
    _sources_block.run(address, words, _threads(transpose, width))
