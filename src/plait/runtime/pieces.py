"""Attention in pieces under torch autograd: numbers of edges and heads are kept, rows of edges are not.

Where a layer's scores are of a kind no fused pass computes, or its weights are asked for, the layer is
lowered to these: dots of the two ends of every edge, a softmax over each target's edges, sums by weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, pad

from plait.kernels import edgewise
from plait.kernels import spmm as sparse
from plait.kernels.attention import pieces as kernel
from plait.runtime.buffers import Buffers
from plait.runtime.messages import row_blocks
from plait.runtime.orders import EdgeOrders, Incidence
from plait.runtime.project import contiguous_rows
from plait.runtime.segments import segment_sum
from plait.runtime.trace import clock, timed
from plait.runtime.twice import differentiable, is_traced

__all__ = ["edge_dots", "edge_softmax", "edge_sums", "leaky_scores", "pair_scores"]


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, orders: Any, buffers: Buffers, heads: int, near: Tensor, far: Tensor, is_shared: bool
    ) -> Tensor:
        ctx.orders, ctx.buffers, ctx.heads, ctx.is_shared = orders, buffers, heads, is_shared
        ctx.save_for_backward(near, far)
        near, far = contiguous_rows(near, buffers), contiguous_rows(far, buffers)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd scores of edges"):
            return kernel.edge_dots(orders.pattern, near, far, heads, is_shared=is_shared)

    @staticmethod
    @differentiable(lambda *given: _dots_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        near, far = (contiguous_rows(rows, ctx.buffers) for rows in ctx.saved_tensors)
        orders, heads, is_shared = ctx.orders, ctx.heads, ctx.is_shared
        grad = grad.contiguous()
        _, _, _, wants_near, wants_far, _ = ctx.needs_input_grad
        to_near = to_far = None
        if wants_near:
            with timed(ctx.clock, "bwd gradient of the targets"):
                to_near = kernel.edge_sums(orders.pattern, None, grad, far, heads, far_is_shared=is_shared)
        if wants_far:
            with timed(ctx.clock, "bwd gradient of the sources"):
                to_far = kernel.edge_sums(
                    orders.transpose, orders.order, grad, near, heads, out_is_shared=is_shared
                )
        return None, None, None, to_near, to_far, None


def _by_head(rows: Tensor, heads: int, is_shared: bool = False) -> Tensor:
    """[rows, heads, width]; one head where it is shared by all."""
    count = 1 if is_shared else heads
    return rows.reshape(len(rows), count, rows.shape[1] // count)


def _dots_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    near, far = saved
    mine = _by_head(near.index_select(0, ctx.orders.targets), ctx.heads)
    others = _by_head(far.index_select(0, ctx.orders.sources), ctx.heads, ctx.is_shared)
    dots = pad((mine * others).sum(-1), (0, kernel.padded(ctx.heads) - ctx.heads))
    return dots, (None, None, None, near, far, None)


def edge_dots(
    orders: EdgeOrders | Incidence,
    buffers: Buffers,
    heads: int,
    near: Tensor,
    far: Tensor,
    *,
    is_shared: bool = False,
) -> Tensor:
    """[edges, lanes]: near[i, h] . far[j, h] by edge and head, edges by target."""
    return _Dots.apply(orders, buffers, heads, near, far, is_shared)  # type: ignore[no-any-return, no-untyped-call]


def pair_scores(orders: EdgeOrders, buffers: Buffers, heads: int, near: Tensor, far: Tensor) -> Tensor:
    """[edges, lanes]: near[i, h] + far[j, h], as dots of (near, 1) and (1, far): its gradients are sums."""
    left = torch.stack([near, torch.ones_like(near)], -1).flatten(1)
    right = torch.stack([torch.ones_like(far), far], -1).flatten(1)
    return edge_dots(orders, buffers, heads, left, right)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, orders: Any, buffers: Buffers, heads: int, weight: Tensor, far: Tensor, is_shared: bool
    ) -> Tensor:
        ctx.orders, ctx.buffers, ctx.heads, ctx.is_shared = orders, buffers, heads, is_shared
        ctx.save_for_backward(weight, far)
        weight, far = weight.contiguous(), contiguous_rows(far, buffers)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd sums by weights"):
            return kernel.edge_sums(orders.pattern, None, weight, far, heads, far_is_shared=is_shared)

    @staticmethod
    @differentiable(lambda *given: _sums_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, far = ctx.saved_tensors
        weight, far = weight.contiguous(), contiguous_rows(far, ctx.buffers)
        orders, heads, is_shared = ctx.orders, ctx.heads, ctx.is_shared
        grad = contiguous_rows(grad, ctx.buffers)
        _, _, _, wants_weight, wants_far, _ = ctx.needs_input_grad
        to_weight = to_far = None
        if wants_weight:
            with timed(ctx.clock, "bwd gradient of the weights"):
                to_weight = kernel.edge_dots(orders.pattern, grad, far, heads, is_shared=is_shared)
        if wants_far:
            with timed(ctx.clock, "bwd gradient of the values"):
                to_far = kernel.edge_sums(
                    orders.transpose, orders.order, weight, grad, heads, out_is_shared=is_shared
                )
        return None, None, None, to_weight, to_far, None


def _sums_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    weight, far = saved
    rows = _by_head(far.index_select(0, ctx.orders.sources), ctx.heads, ctx.is_shared)
    rows = (weight[:, : ctx.heads, None] * rows).flatten(1)
    return segment_sum(rows, ctx.orders.targets, len(grad)), (None, None, None, weight, far, None)


def edge_sums(
    orders: EdgeOrders | Incidence,
    buffers: Buffers,
    heads: int,
    weight: Tensor,
    far: Tensor,
    *,
    is_shared: bool = False,
) -> Tensor:
    """[targets, heads * width]: sums of far[j, h] by weight[edge, h]; is_shared: far[j] serves all heads."""
    return _Sums.apply(orders, buffers, heads, weight, far, is_shared)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, orders: EdgeOrders, scores: Tensor) -> Tensor:
        ctx.orders, ctx.clock = orders, clock()
        with timed(ctx.clock, "fwd softmax by target"):
            weight = kernel.edge_softmax(orders.pattern, scores.contiguous())
        ctx.save_for_backward(weight)
        return weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        if is_traced(grad):  # the weights are the output, which knows where it came from
            orders: EdgeOrders = ctx.orders
            sums = segment_sum(weight * grad, orders.targets, orders.pattern.num_rows)
            return None, weight * (grad - sums.index_select(0, orders.targets))
        with timed(ctx.clock, "bwd gradient of the softmax"):
            return None, kernel.edge_softmax_gradient(ctx.orders.pattern, weight, grad.contiguous())


def edge_softmax(orders: EdgeOrders, scores: Tensor) -> Tensor:
    """The softmax of [edges, lanes] over the edges of each target."""
    return _Softmax.apply(orders, scores)  # type: ignore[no-any-return, no-untyped-call]


class _LeakyScores(torch.autograd.Function):
    """Blocks of edges: their rows are made, scored and dropped; the backward pass makes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        orders: EdgeOrders,
        slope: float,
        near: Tensor,
        far: Tensor,
        spread: Tensor,
        attr: Tensor | None,
        w: Tensor | None,
    ) -> Tensor:
        ctx.orders, ctx.slope = orders, slope
        ctx.save_for_backward(near, far, spread, attr, w)
        scores = near.new_empty((orders.pattern.num_edges, spread.shape[1]))
        for block in row_blocks(orders, far):
            span = block.edges
            rows = _rows(orders, span, near, far, attr, w)
            torch.mm(torch.nn.functional.leaky_relu_(rows, slope), spread, out=scores[span])
        return scores

    @staticmethod
    @differentiable(lambda *given: _leaky_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        orders: EdgeOrders = ctx.orders
        near, far, spread, attr, w = ctx.saved_tensors
        to_near, to_far = torch.empty_like(near), torch.zeros_like(far)
        to_spread = torch.zeros_like(spread)
        to_attr = None if attr is None else torch.empty_like(attr)
        to_w = None if w is None else torch.zeros_like(w)
        for block in row_blocks(orders, far):
            span = block.edges
            rows = _rows(orders, span, near, far, attr, w)
            bent = torch.where(rows > 0, rows.new_tensor(1.0), rows.new_tensor(ctx.slope))
            to_spread.addmm_((rows * bent).t(), grad[span])
            to_rows = torch.mm(grad[span], spread.t()).mul_(bent)
            sparse.spmm(block.to_targets, to_rows, to_near[block.rows])
            edgewise.scatter(block.groups, to_rows, to_far)
            if attr is not None and to_attr is not None and w is not None and to_w is not None:
                torch.mm(to_rows, w.t(), out=to_attr[span])
                to_w.addmm_(attr[span].t(), to_rows)
        return None, None, to_near, to_far, to_spread, to_attr, to_w


def _rows(
    orders: EdgeOrders, span: slice, near: Tensor, far: Tensor, attr: Tensor | None, w: Tensor | None
) -> Tensor:
    rows = near.index_select(0, orders.targets[span]).add_(far.index_select(0, orders.sources[span]))
    return rows if attr is None or w is None else rows.addmm_(attr[span], w)


def _leaky_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    near, far, spread, attr, w = saved
    rows = near.index_select(0, ctx.orders.targets) + far.index_select(0, ctx.orders.sources)
    rows = rows if attr is None or w is None else rows + attr @ w
    return leaky_relu(rows, ctx.slope) @ spread, (None, None, *saved)


def leaky_scores(
    orders: EdgeOrders,
    slope: float,
    near: Tensor,
    far: Tensor,
    spread: Tensor,
    attr: Tensor | None = None,
    w: Tensor | None = None,
) -> Tensor:
    """[edges, lanes]: leaky(near[i] + far[j] + attr[e] @ w) @ spread, in blocks of edges."""
    return _LeakyScores.apply(orders, slope, near, far, spread, attr, w)  # type: ignore[no-any-return, no-untyped-call]
