"""Messages of edges under torch autograd, made a block of edges at a time, summed by target and dropped.

For layers whose message is a function of both ends that no fused pass computes. Projections are done once a
node before; the backward pass makes the messages again, so nothing of edges x width outlives a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.kernels import edgewise
from plait.kernels import spmm as sparse
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeBlock, EdgeOrders
from plait.runtime.project import contiguous_rows
from plait.runtime.segments import segment_sum
from plait.runtime.trace import clock, timed
from plait.runtime.twice import added, differentiable

__all__ = [
    "Message", "blockwise_gradients", "gathered",
    "message_max", "message_sums", "neighbour_sums", "row_blocks",
]  # fmt: skip

_BLOCK_FLOATS = 1 << 17  # of the rows gathered for a block: half a megabyte stays in the second cache

Message = Callable[..., Tensor]
"""(near rows, far rows, edge rows, *parameters) -> message rows; near and edge rows may be None."""


def row_blocks(orders: EdgeOrders, far: Tensor) -> list[EdgeBlock]:
    """The edges in blocks whose gathered rows of `far` stay in the second cache."""
    width = 1 << max(4, (max(1, far.shape[1]) - 1).bit_length())
    return orders.blocks(max(64, _BLOCK_FLOATS // width))


def gathered(
    orders: EdgeOrders, block: EdgeBlock, near: Tensor | None, far: Tensor, attr: Tensor | None
) -> list[Tensor | None]:
    """The rows of both ends of a block's edges, and the edges' own."""
    return [
        None if near is None else near.index_select(0, orders.targets[block.edges]),
        far.index_select(0, orders.sources[block.edges]),
        None if attr is None else attr[block.edges],
    ]


def _summed(block: EdgeBlock, rows: Tensor, out: Tensor, reduce: str = "sum") -> None:
    sparse.spmm(block.to_targets, rows.contiguous(), out[block.rows], reduce=reduce)


def _columns(message: Message, near: Tensor | None, far: Tensor, attr: Tensor | None, more: Any) -> int:
    """The width of a message, from no edges at all."""
    none = [None if part is None else part[:0] for part in (near, far, attr)]
    return int(message(*none, *more).shape[1])


class _Messages(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        orders: EdgeOrders,
        message: Message,
        near: Tensor | None,
        far: Tensor,
        attr: Tensor | None,
        *more: Tensor,
    ) -> Tensor:
        ctx.orders, ctx.message, ctx.clock = orders, message, clock()
        ctx.save_for_backward(near, far, attr, *more)
        with timed(ctx.clock, "fwd messages in blocks"):
            out = far.new_empty((orders.pattern.num_rows, _columns(message, near, far, attr, more)))
            for block in row_blocks(orders, far):
                _summed(block, message(*gathered(orders, block, near, far, attr), *more), out)
        return out

    @staticmethod
    @differentiable(lambda *given: _messages_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        orders: EdgeOrders = ctx.orders

        def to_messages(block: EdgeBlock, rows: Tensor) -> Tensor:
            return grad.index_select(0, orders.targets[block.edges])

        with timed(ctx.clock, "bwd messages again"):
            return None, None, *blockwise_gradients(orders, ctx.message, to_messages, ctx.saved_tensors)


def all_messages(
    orders: EdgeOrders, message: Message, near: Tensor | None, far: Tensor, attr: Tensor | None, more: Any
) -> Tensor:
    """[edges, columns]: every message at once, recorded by torch."""
    mine = None if near is None else near.index_select(0, orders.targets)
    return message(mine, far.index_select(0, orders.sources), attr, *more)


def _messages_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    orders: EdgeOrders = ctx.orders
    near, far, attr, *more = saved
    rows = all_messages(orders, ctx.message, near, far, attr, more)
    return segment_sum(rows, orders.targets, len(grad)), (None, None, *saved)


def blockwise_gradients(
    orders: EdgeOrders,
    message: Message,
    to_messages: Callable[[EdgeBlock, Tensor], Tensor],
    saved: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Gradients of near, far, attr and the parameters, from to_messages(block, its messages)."""
    near, far, attr, *more = saved
    assert far is not None
    to_near = None if near is None else torch.empty_like(near)
    to_attr = None if attr is None else torch.empty_like(attr)
    to_far = torch.zeros_like(far)
    to_more = [torch.zeros_like(value) for value in more if value is not None]
    parameters = [value.detach().requires_grad_() for value in more if value is not None]
    for block in row_blocks(orders, far):
        parts = [
            part if part is None else part.detach().requires_grad_()
            for part in gathered(orders, block, near, far, attr)
        ]
        leaves = [part for part in (*parts, *parameters) if part is not None]
        with torch.enable_grad():
            rows = message(*parts, *parameters)
        direction = to_messages(block, rows.detach())
        found = iter(torch.autograd.grad(rows, leaves, direction, allow_unused=True, materialize_grads=True))
        if to_near is not None:
            _summed(block, next(found), to_near)
        edgewise.scatter(block.groups, next(found).contiguous(), to_far)
        if to_attr is not None:
            to_attr[block.edges] = next(found)
        for total, value in zip(to_more, found, strict=True):
            total.add_(value)
    return [to_near, to_far, to_attr, *to_more]


def message_sums(
    orders: EdgeOrders, message: Message, near: Tensor | None, far: Tensor, attr: Tensor | None, *more: Tensor
) -> Tensor:
    """[targets, columns]: the sum of message(near[i], far[j], attr[e], *more) over each target's edges.

    `message` works row by row and reads no other tensor that wants a gradient.
    """
    near = None if near is None else near.contiguous()
    attr = None if attr is None else attr.contiguous()
    return _Messages.apply(orders, message, near, far.contiguous(), attr, *more)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def message_max(
    orders: EdgeOrders, message: Message, near: Tensor | None, far: Tensor, attr: Tensor | None, *more: Tensor
) -> Tensor:
    """The largest message of each target and column, without gradients; 0 where there is no edge."""
    out = far.new_empty((orders.pattern.num_rows, _columns(message, near, far, attr, more)))
    for block in row_blocks(orders, far):
        _summed(block, message(*gathered(orders, block, near, far, attr), *more), out, "max")
    return out


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, orders: EdgeOrders, buffers: Buffers, x: Tensor, target: Tensor | None) -> Tensor:
        x = contiguous_rows(x, buffers)
        ctx.orders, ctx.buffers, ctx.target, ctx.clock = orders, buffers, target, clock()
        with timed(ctx.clock, "fwd sums of neighbours"):
            out = buffers.take(orders.pattern.num_rows, x.shape[1], x.dtype)
            return sparse.spmm(orders.pattern, x, out, target=target)

    @staticmethod
    @differentiable(lambda *given: _neighbours_again(*given))
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = contiguous_rows(grad, ctx.buffers)
        with timed(ctx.clock, "bwd sums of neighbours"):
            out = ctx.buffers.take(ctx.orders.transpose.num_rows, grad.shape[1], grad.dtype)
            return None, None, sparse.spmm(ctx.orders.transpose, grad, out, source=ctx.target), None


def _neighbours_again(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    orders: EdgeOrders = ctx.orders
    x = added((orders.pattern.num_columns, grad.shape[1]), grad)
    out = segment_sum(x.index_select(0, orders.sources), orders.targets, len(grad))
    return out if ctx.target is None else out * ctx.target.unsqueeze(1), (None, None, x, None)


def neighbour_sums(orders: EdgeOrders, buffers: Buffers, x: Tensor, target: Tensor | None = None) -> Tensor:
    """[targets, width]: the sum of x[j] over each target's edges, times target[i] where given."""
    return _Neighbours.apply(orders, buffers, x, target)  # type: ignore[no-any-return, no-untyped-call]
