"""Gated sums over a graph's edges: act(near[i] + far[j]) * value[j], and their gradients."""

from __future__ import annotations

import functools

import torch

from plait.kernels import launch
from plait.kernels.block import Block
from plait.kernels.compiled import address_of
from plait.kernels.gate import cpu
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


def _place(tensor: torch.Tensor | None) -> tuple[int, int]:
    """(address, bytes between rows)."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())


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
    words = _forward_block.words()
    words[1], words[2], words[3], words[4] = pattern.addresses
    words[5], words[6] = max(0, pattern.num_edges - 1), far.shape[1]
    for k, tensor in enumerate((near, far, value, out, slopes, addend)):
        words[7 + 2 * k], words[8 + 2 * k] = _place(tensor)
    words[19] = 0 if bias is None else bias.data_ptr()
    address = _forward_address(far.element_size() * 8, pattern.index_bits, kind, mode)
    _forward_block.run(address, words, _threads(pattern, far.shape[1]))


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
    words = _sources_block.words()
    words[1], words[2], words[3], words[4] = transpose.addresses
    words[5], words[6] = max(0, transpose.num_edges - 1), far.shape[1]
    for k, tensor in enumerate((far, value, near, grad, far_grad, value_grad)):
        words[7 + 2 * k], words[8 + 2 * k] = _place(tensor)
    address = _sources_address(far.element_size() * 8, transpose.index_bits, kind)
    _sources_block.run(address, words, _threads(transpose, far.shape[1]))
