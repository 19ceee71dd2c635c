"""Several aggregators, degree scalers and the dense maps around them under torch autograd.

Scaling a row and multiplying it from the right commute: the aggregates meet the weights of every scaler at
once and the scalers weigh the results (`joined`, `weighed`), or scaled copies of the aggregates meet the
weights in one product (`spread_out`), where the output is wider than the aggregates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from plait.kernels import gemm as dense
from plait.kernels import multi as kernel
from plait.kernels.multi import Layout
from plait.kernels.multi.reference import LEAST_VARIANCE
from plait.runtime.buffers import Buffers
from plait.runtime.messages import Message, all_messages, blockwise_gradients, gathered, row_blocks
from plait.runtime.orders import EdgeBlock, EdgeOrders
from plait.runtime.project import contiguous_rows, weight_gradient
from plait.runtime.segments import segment_extremum, segment_sum
from plait.runtime.trace import clock, timed
from plait.runtime.twice import added, differentiable

__all__ = ["Layout", "aggregate_all", "aggregate_messages", "joined", "spread_out", "weighed"]


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edges: EdgeOrders, buffers: Buffers, layout: Layout, v: Tensor) -> Tensor:
        given, v = v, contiguous_rows(v, buffers)
        rows, columns = edges.pattern.num_rows, v.shape[1]
        wants = ctx.needs_input_grad[3]
        out = buffers.take(rows, len(layout.kept) * columns, v.dtype)
        ties = buffers.take(rows, 2 * columns, v.dtype) if wants and layout.has_ends else None
        kernel.aggregate(edges.pattern, v, layout, out, ties)
        ctx.edges, ctx.buffers, ctx.layout = edges, buffers, layout
        ctx.save_for_backward(given, out, ties)
        return out

    @staticmethod
    @differentiable(lambda *given: _aggregate_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        edges, buffers, layout = ctx.edges, ctx.buffers, ctx.layout
        v, out, ties = ctx.saved_tensors
        v = contiguous_rows(v, buffers)
        grad = contiguous_rows(grad, buffers)
        shares = buffers.take(out.shape[0], layout.sections * v.shape[1], v.dtype)
        kernel.aggregate_shares(edges.pattern, layout, grad, out, ties, shares)
        to_v = buffers.take(v.shape[0], v.shape[1], v.dtype)
        return None, None, None, kernel.aggregate_sources(edges.transpose, v, layout, shares, to_v)


def _all_of(rows: Tensor, targets: Tensor, count: int, layout: Layout) -> Tensor:
    """Every aggregator of the edges' rows, laid out as the kernel does, recorded by torch."""
    degrees = segment_sum(rows.new_ones(len(rows), 1), targets, count).clamp(min=1)
    # part of a message may be shifted out of `rows`: that they are 0 does not make the result 0
    found: dict[str, Tensor] = {
        name: segment_extremum(rows, targets, count, name, counts_zero=False)
        for name in ("max", "min")
        if name in layout.names
    }
    found["sum"] = segment_sum(rows, targets, count)
    found["mean"] = found["sum"] / degrees
    if layout.has_spread:
        found["var"] = segment_sum(rows * rows, targets, count) / degrees - found["mean"] * found["mean"]
        spread = found["var"].clamp(min=LEAST_VARIANCE).sqrt()
        found["std"] = spread.masked_fill(found["var"] <= LEAST_VARIANCE, 0.0)
    parts = [found[name].view(count, layout.towers, layout.width) for name in layout.kept]
    return torch.stack(parts, 2).flatten(1)


def _aggregate_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    v, _, _ = saved
    orders: EdgeOrders = ctx.edges
    out = _all_of(v.index_select(0, orders.sources), orders.targets, len(grad), ctx.layout)
    return out, (None, None, None, v)


def aggregate_all(edges: EdgeOrders, buffers: Buffers, layout: Layout, v: Tensor) -> Tensor:
    """[targets, towers * names * width]: every aggregator of v over the neighbours."""
    return _Aggregate.apply(edges, buffers, layout, v)  # type: ignore[no-any-return, no-untyped-call]


class _AggregateMessages(torch.autograd.Function):
    """Messages of a block of edges are made, aggregated and dropped; the backward pass makes them again.

    The block's aggregates are computed again too: an edge that attained an extremum then attains it whatever
    the bits of its message.
    """

    @staticmethod
    def forward(
        ctx: Any, orders: EdgeOrders, buffers: Buffers, layout: Layout, message: Message,
        near: Tensor | None, far: Tensor, attr: Tensor | None, *more: Tensor,
    ) -> Tensor:  # fmt: skip
        out = buffers.take(orders.pattern.num_rows, len(layout.kept) * layout.columns, far.dtype)
        ctx.clock = clock()
        with timed(ctx.clock, "fwd all aggregators of messages in blocks"):
            for block in row_blocks(orders, far):
                rows = message(*gathered(orders, block, near, far, attr), *more).contiguous()
                kernel.aggregate(block.to_targets, rows, layout, out[block.rows])
        ctx.orders, ctx.buffers, ctx.layout, ctx.message = orders, buffers, layout, message
        ctx.save_for_backward(near, far, attr, *more)
        return out

    @staticmethod
    @differentiable(lambda *given: _aggregate_messages_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = contiguous_rows(grad, ctx.buffers)

        def to_messages(block: EdgeBlock, rows: Tensor) -> Tensor:
            return _message_gradients(ctx.layout, block, rows.contiguous(), grad[block.rows])

        with timed(ctx.clock, "bwd messages again"):
            found = blockwise_gradients(ctx.orders, ctx.message, to_messages, ctx.saved_tensors)
        return None, None, None, None, *found


def _aggregate_messages_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    near, far, attr, *more = saved
    rows = all_messages(ctx.orders, ctx.message, near, far, attr, more)
    return _all_of(rows, ctx.orders.targets, len(grad), ctx.layout), (None, None, None, None, *saved)


def _message_gradients(layout: Layout, block: EdgeBlock, rows: Tensor, grad: Tensor) -> Tensor:
    """The gradients of a block's messages from those of its targets' aggregates."""
    count, columns = grad.shape[0], rows.shape[1]
    out, shares = torch.empty_like(grad), rows.new_empty((count, layout.sections * columns))
    ties = rows.new_empty((count, 2 * columns)) if layout.has_ends else None
    kernel.aggregate(block.to_targets, rows, layout, out, ties)
    kernel.aggregate_shares(block.to_targets, layout, grad, out, ties, shares)
    return kernel.aggregate_sources(block.to_edges, rows, layout, shares, torch.empty_like(rows))


def aggregate_messages(
    orders: EdgeOrders, buffers: Buffers, layout: Layout, message: Message,
    near: Tensor | None, far: Tensor, attr: Tensor | None, *more: Tensor,
) -> Tensor:  # fmt: skip
    """[targets, towers * names * width]: every aggregator of message(near[i], far[j], attr[e], *more)."""
    near = None if near is None else near.contiguous()
    attr = None if attr is None else attr.contiguous()
    return _AggregateMessages.apply(orders, buffers, layout, message, near, far.contiguous(), attr, *more)  # type: ignore[no-any-return, no-untyped-call]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffers: Buffers, x: Tensor, c: Tensor, bias: Tensor, agg: Tensor, w: Tensor, first: int
    ) -> Tensor:
        ctx.buffers, ctx.first = buffers, first
        ctx.save_for_backward(x, c, agg, w)
        x, agg = contiguous_rows(x, buffers), contiguous_rows(agg, buffers)
        c, w = c.contiguous(), w.contiguous()
        out = dense.gemm(x, c, buffers.take(x.shape[0], c.shape[1], x.dtype), bias=bias)
        part = out[:, first : first + w.shape[1]]
        dense.gemm(agg, w, part, addend=part)
        return out

    @staticmethod
    @differentiable(lambda *given: _joined_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, c, agg, w = ctx.saved_tensors
        buffers: Buffers = ctx.buffers
        x, agg = contiguous_rows(x, buffers), contiguous_rows(agg, buffers)
        grad = contiguous_rows(grad, buffers)
        part = grad[:, ctx.first : ctx.first + w.shape[1]]
        _, wants_x, wants_c, wants_bias, wants_agg, wants_w, _ = ctx.needs_input_grad

        def back(rows: Tensor, weights: Tensor, like: Tensor) -> Tensor:
            return dense.gemm(rows, weights.t(), buffers.take(like.shape[0], like.shape[1], like.dtype))

        return (
            None,
            back(grad, c, x) if wants_x else None,
            weight_gradient(x, grad) if wants_c else None,
            dense.column_sums(grad) if wants_bias else None,
            back(part, w, agg) if wants_agg else None,
            weight_gradient(agg, part) if wants_w else None,
            None,
        )


def _joined_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    x, c, agg, w = saved
    bias = added(grad.shape[1:], grad)
    more = grad.shape[1] - ctx.first - w.shape[1]
    out = x @ c + bias + pad(agg @ w, (ctx.first, more))
    return out, (None, x, c, bias, agg, w, None)


def joined(
    buffers: Buffers, x: Tensor, c: Tensor, bias: Tensor, agg: Tensor, w: Tensor, first: int
) -> Tensor:
    """x @ c + bias, with agg @ w added to the columns from `first` on."""
    return _Joined.apply(buffers, x, c, bias, agg, w, first)  # type: ignore[no-any-return, no-untyped-call]


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffers: Buffers, y: Tensor, scales: Tensor) -> Tensor:
        width = y.shape[1] // (scales.shape[1] + 1)
        out = buffers.take(y.shape[0], width, y.dtype)
        out.copy_(y[:, :width])
        for k in range(scales.shape[1]):
            out.addcmul_(y[:, (k + 1) * width : (k + 2) * width], scales[:, k : k + 1])
        ctx.buffers = buffers
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, scales)
        return out

    @staticmethod
    @differentiable(lambda *given: _weighed_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, scales = ctx.saved_tensors
        width, count = grad.shape[1], scales.shape[1]
        to_y = None
        if ctx.needs_input_grad[1]:
            to_y = ctx.buffers.take(grad.shape[0], width * (count + 1), grad.dtype)
            to_y[:, :width] = grad
            for k in range(count):
                torch.mul(grad, scales[:, k : k + 1], out=to_y[:, (k + 1) * width : (k + 2) * width])
        to_scales = None
        if y is not None:
            parts = [(grad * y[:, (k + 1) * width : (k + 2) * width]).sum(1) for k in range(count)]
            to_scales = torch.stack(parts, 1)
        return None, to_y, to_scales


def _weighed_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    y, scales = saved
    count, width = scales.shape[1], grad.shape[1]
    y = added((grad.shape[0], (count + 1) * width), grad) if y is None else y
    parts = y.split(width, 1)
    out = parts[0]
    for k, part in enumerate(parts[1:]):
        out = out + part * scales[:, k : k + 1]
    return out, (None, y, scales)


def weighed(buffers: Buffers, y: Tensor, scales: Tensor) -> Tensor:
    """y_0 + sum over k of scales[:, k] * y_k, where y holds y_0, y_1, … side by side."""
    return _Weighed.apply(buffers, y, scales)  # type: ignore[no-any-return, no-untyped-call]


class _SpreadOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffers: Buffers, x: Tensor, u: Tensor, found: Tensor, scales: Tensor, often: Tensor
    ) -> Tensor:
        rows, width = u.shape
        count, names = scales.shape[1], often.shape[1]
        shifted = _shifted(buffers, u, found, often)
        out = buffers.take(rows, (1 + count * names) * width, u.dtype)
        out[:, :width] = x
        for k in range(count):
            first = (1 + k * names) * width
            torch.mul(shifted, scales[:, k : k + 1], out=out[:, first : first + names * width])
        ctx.buffers = buffers
        ctx.save_for_backward(u, found, scales, often)
        return out

    @staticmethod
    @differentiable(lambda *given: _spread_out_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        u, found, scales, often = ctx.saved_tensors
        rows, width = u.shape
        count, names = scales.shape[1], often.shape[1]
        grad = contiguous_rows(grad, ctx.buffers)
        parts = [grad[:, (1 + k * names) * width : (1 + (k + 1) * names) * width] for k in range(count)]
        to_found = ctx.buffers.take(rows, names * width, u.dtype)
        torch.mul(parts[0], scales[:, :1], out=to_found)
        for k in range(1, count):
            to_found.addcmul_(parts[k], scales[:, k : k + 1])
        to_u = torch.zeros_like(u)
        for a in range(names):
            to_u.addcmul_(to_found[:, a * width : (a + 1) * width], often[:, a : a + 1])
        to_scales = None
        if ctx.needs_input_grad[4]:
            shifted = _shifted(ctx.buffers, u, found, often)
            to_scales = torch.stack([(part * shifted).sum(1) for part in parts], 1)
        return None, grad[:, :width], to_u, to_found, to_scales, None


def _spread_out_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    u, found, scales, often = saved
    x = added(u.shape, grad)
    shifted = found + torch.cat([u * often[:, a : a + 1] for a in range(often.shape[1])], 1)
    out = torch.cat([x, *(shifted * scales[:, k : k + 1] for k in range(scales.shape[1]))], 1)
    return out, (None, x, u, found, scales, None)


def _shifted(buffers: Buffers, u: Tensor, found: Tensor, often: Tensor) -> Tensor:
    """Every aggregate plus the shift, as often as it enters it."""
    width = u.shape[1]
    shifted = buffers.take(u.shape[0], often.shape[1] * width, u.dtype).copy_(found)
    for a in range(often.shape[1]):
        shifted[:, a * width : (a + 1) * width].addcmul_(u, often[:, a : a + 1])
    return shifted


def spread_out(
    buffers: Buffers, x: Tensor, u: Tensor, found: Tensor, scales: Tensor, often: Tensor
) -> Tensor:
    """[x | scales_0 * (found + shift) | scales_1 * (found + shift) | …]; the shift is often[:, a] * u."""
    return _SpreadOut.apply(buffers, x, u, found, scales, often)  # type: ignore[no-any-return, no-untyped-call]
