"""Dense products of many rows under autograd, where no plan says how: x @ weight.T + bias + addend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.kernels import gemm as dense
from plait.runtime.twice import added, differentiable

__all__ = ["TALL", "linear"]

# Rows from which plait's kernels take less time than MKL's, the call from Python included (64 x 32 and
# 32 x 8 on one and two threads: as long at 640 rows, 0.5 to 0.85 of it at 4,096).
TALL = 2048
_FLOATS = (torch.float32, torch.float64)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias + addend; the weight is [out, in], as PyG stores it, and so is its gradient."""
    if x.shape[0] < TALL or x.dtype not in _FLOATS or not x.is_cpu:
        return _by_torch(x, weight, bias, addend)
    result: Tensor = _Linear.apply(x, weight, bias, addend)  # type: ignore[no-untyped-call]
    return result


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    out = functional.linear(x, weight, bias)
    return out if addend is None else out + addend


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        ctx.is_given, ctx.inner = (bias is not None, addend is not None), x.shape[1]
        # each is there for the other's gradient; what is not saved may change before the backward pass
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        out = x.new_empty(x.shape[0], weight.shape[0])
        return dense.gemm(x, weight.t(), out, bias=bias, addend=addend)

    @staticmethod
    @differentiable(lambda *given: _in_torch(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        if weight is not None:
            to_x = dense.gemm(grad, weight, grad.new_empty(grad.shape[0], ctx.inner))
        if x is not None:
            # vector lanes run over the wider operand
            is_wider = x.shape[1] >= grad.shape[1]
            to_weight = dense.gemm_transposed(grad, x) if is_wider else dense.gemm_transposed(x, grad).t()
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_x, to_weight, to_bias, grad if ctx.needs_input_grad[3] else None


def _in_torch(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    x, weight = saved
    x = added((grad.shape[0], ctx.inner), grad) if x is None else x
    weight = added((grad.shape[1], ctx.inner), grad) if weight is None else weight
    bias = added(grad.shape[1:], grad) if ctx.is_given[0] else None
    addend = added(grad.shape, grad) if ctx.is_given[1] else None
    return _by_torch(x, weight, bias, addend), (x, weight, bias, addend)
