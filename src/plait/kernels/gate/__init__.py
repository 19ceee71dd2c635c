"""Gated sums over a graph's edges: act(near[i] + far[j]) * value[j], and their gradients."""

from __future__ import annotations

import torch

from plait.kernels.compiled import stored
from plait.kernels.gate import cpu
from plait.kernels.operands import float_bits, read_flat, read_rows, write_rows
from plait.kernels.spmm import Pattern

__all__ = ["gate", "gate_sources"]

_SERIAL_BELOW = 1 << 16  # edges times columns; a gate costs some twenty operations


_forward_address = stored("gate", cpu.forward)
_sources_address = stored("gate-sources", cpu.sources)


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
    at = cpu.FORWARD
    words = at.over(pattern.addresses)
    words[at.last_edge], words[at.width] = max(0, pattern.num_edges - 1), width
    near = read_rows(words, at.near, "near", near, dtype, rows, width)
    far = read_rows(words, at.far, "far", far, dtype, sources, width, True)
    value = read_rows(words, at.value, "value", value, dtype, sources, width, True)
    write_rows(words, at.out, "out", out, dtype, rows, width)
    write_rows(words, at.slopes, "slopes", slopes, dtype, rows, width)
    addend = read_rows(words, at.addend, "addend", addend, dtype, rows, width)
    bias = read_flat(words, at.bias, "bias", bias, dtype, width)
    at.run(address, words, pattern.threads(width, _SERIAL_BELOW))


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
    at = cpu.SOURCES
    words = at.over(transpose.addresses)
    words[at.last_edge], words[at.width] = max(0, transpose.num_edges - 1), width
    far = read_rows(words, at.own, "far", far, dtype, rows, width)
    value = read_rows(words, at.value, "value", value, dtype, rows, width)
    near = read_rows(words, at.near, "near", near, dtype, targets, width, True)
    grad = read_rows(words, at.grad, "grad", grad, dtype, targets, width, True)
    write_rows(words, at.far_out, "far_grad", far_grad, dtype, rows, width)
    write_rows(words, at.value_out, "value_grad", value_grad, dtype, rows, width)
    at.run(address, words, transpose.threads(width, _SERIAL_BELOW))
