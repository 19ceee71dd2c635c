"""Dense products of tall matrices under autograd, in pooled buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.kernels import gemm as dense
from plait.runtime.buffers import Buffers
from plait.runtime.trace import clock, timed

__all__ = ["contiguous_rows", "project", "weight_gradient"]


def contiguous_rows(grad: Tensor, buffers: Buffers) -> Tensor:
    """The gradient with contiguous rows; that of a sum arrives as one number with strides of zero."""
    if grad.stride(1) == 1 and (grad.shape[0] <= 1 or grad.stride(0) >= grad.shape[1]):
        return grad
    return buffers.take(grad.shape[0], grad.shape[1], grad.dtype).copy_(grad)


def weight_gradient(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right; vector lanes run over the wider operand."""
    if left.shape[1] > right.shape[1]:
        return dense.gemm_transposed(right, left).t()
    return dense.gemm_transposed(left, right)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffers: Buffers, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.buffers, ctx.has_bias = buffers, bias is not None
        x = contiguous_rows(x, buffers)
        w = w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd project"):
            return dense.gemm(x, w, buffers.take(x.shape[0], w.shape[1], x.dtype), bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        buffers: Buffers = ctx.buffers
        grad = contiguous_rows(grad, buffers)
        _, wants_x, wants_w, wants_bias = ctx.needs_input_grad
        to_x = to_w = None
        if wants_x:
            with timed(ctx.clock, "bwd input gradient"):
                to_x = dense.gemm(grad, w.t(), buffers.take(x.shape[0], x.shape[1], x.dtype))
        if wants_w:
            with timed(ctx.clock, "bwd weight gradient"):
                to_w = weight_gradient(x, grad)
        return None, to_x, to_w, grad.sum(0) if ctx.has_bias and wants_bias else None


def project(buffers: Buffers, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w + bias on plait's tall product, in a pooled buffer."""
    return _Project.apply(buffers, x, w, bias)  # type: ignore[no-any-return, no-untyped-call]
