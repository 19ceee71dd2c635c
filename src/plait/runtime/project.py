"""Dense products on plait's kernels under autograd: of parameters, and inside functions of edges' rows.

What a layer multiplies once per node is a step of its program (gemm); these products are in what programs are
given: weights folded into each other, and the linear layers of a map that blocks of edges go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from plait.kernels import gemm as dense
from plait.kernels.chain import Chain, ones
from plait.runtime.buffers import Buffers
from plait.runtime.twice import added, differentiable

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


@lru_cache(maxsize=64)
def _chain(rows: int, dtype: torch.dtype, inner: int, width: int, has_product: bool, has_bias: bool) -> Chain:
    """The gradients of x[rows, inner] @ w[inner, width] + bias as one pass over the rows."""
    sums = [(min(inner, width), max(inner, width)), *([(1, width)] if has_bias else [])]
    return Chain(rows, dtype, None, [width] if has_product else [], inner if has_product else 0, sums)


def _gradients(
    buffers: Buffers, x: Tensor, w: Tensor | None, grad: Tensor, *, has_bias: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(grad @ w.T where w is given, x.T @ grad, the sum of grad's rows): grad and x are read once for all."""
    (rows, inner), width = x.shape, grad.shape[1]
    chain = _chain(rows, x.dtype, inner, width, w is not None, has_bias)
    is_turned = inner > width  # vector lanes run over the wider operand
    pairs: list[tuple[Tensor, Tensor]] = [(grad, x) if is_turned else (x, grad)]
    if has_bias:
        pairs.append((ones(rows, grad.dtype), grad))
    to_x = None if w is None else buffers.take(rows, inner, x.dtype)
    product = ([], []) if w is None else ([grad], [w.t().contiguous()])
    made = chain.run(buffers.take, *product, pairs, out=to_x)
    to_w = made[0].t() if is_turned else made[0]
    return to_x, to_w, made[1].reshape(-1) if has_bias else None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffers: Buffers, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.buffers, ctx.has_bias, ctx.inner = buffers, bias is not None, w.shape[0]
        _, wants_x, wants_w, _ = ctx.needs_input_grad
        # each is there for the other's gradient; what is not saved may change before the backward pass
        ctx.save_for_backward(x if wants_w else None, w if wants_x else None)
        x, w = contiguous_rows(x, buffers), w.contiguous()
        return dense.gemm(x, w, buffers.take(x.shape[0], w.shape[1], x.dtype), bias=bias)

    @staticmethod
    @differentiable(lambda *given: _project_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        buffers: Buffers = ctx.buffers
        grad = contiguous_rows(grad, buffers)
        _, wants_x, wants_w, wants_bias = ctx.needs_input_grad
        if wants_w:
            x = contiguous_rows(x, buffers)
            to_x, to_w, to_bias = _gradients(buffers, x, w, grad, has_bias=ctx.has_bias and wants_bias)
            return None, to_x, to_w, to_bias
        to_x = None
        if wants_x:
            to_x = dense.gemm(grad, w.t(), buffers.take(grad.shape[0], ctx.inner, grad.dtype))
        return None, to_x, None, dense.column_sums(grad) if ctx.has_bias and wants_bias else None


def _project_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    x, w = saved
    x = added((grad.shape[0], ctx.inner), grad) if x is None else x
    w = added((ctx.inner, grad.shape[1]), grad) if w is None else w
    bias = added(grad.shape[1:], grad) if ctx.has_bias else None
    out = x @ w
    return out if bias is None else out + bias, (None, x, w, bias)


def project(buffers: Buffers, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w + bias on plait's tall product, in a pooled buffer; on a GPU by cuBLAS."""
    if not x.is_cpu:
        return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
    return _Project.apply(buffers, x, w, bias)  # type: ignore[no-any-return, no-untyped-call]
