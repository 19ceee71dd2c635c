"""Messages of edges, made in torch a block of edges at a time, reduced by target and dropped.

For layers whose message is a function of both ends that no fused pass computes. Projections are done once per
node before; the backward pass makes the messages again, so nothing of edges x width outlives a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import ends, meaning
from plait.runtime.orders import EdgeBlock, EdgeOrders
from plait.runtime.segments import segment_extremum, segment_sum

__all__ = [
    "BoundMessages", "Gradients", "Message", "all_messages", "blockwise_gradients", "gathered", "made",
    "messages_in_torch", "reduced_in_torch", "row_blocks",
]  # fmt: skip

Message = Callable[..., Tensor]
"""(near rows, far rows, edge rows, *parameters) -> message rows; near and edge rows may be None."""


def row_blocks(orders: EdgeOrders, far: Tensor) -> list[EdgeBlock]:
    """The edges in blocks whose gathered rows of `far` stay in a cache, or in some part of a GPU's memory."""
    return orders.row_blocks(far.shape[1], far.element_size())


def gathered(
    orders: EdgeOrders, block: EdgeBlock, near: Tensor | None, far: Tensor, attr: Tensor | None
) -> list[Tensor | None]:
    """The rows of both ends of a block's edges, and the edges' own."""
    return [
        None if near is None else near.index_select(0, orders.targets[block.edges]),
        far.index_select(0, orders.sources[block.edges]),
        None if attr is None else attr[block.edges],
    ]


def all_messages(
    orders: EdgeOrders, message: Message, near: Tensor | None, far: Tensor, attr: Tensor | None, more: Any
) -> Tensor:
    """[edges, columns]: every message at once, recorded by torch."""
    mine = None if near is None else near.index_select(0, orders.targets)
    return message(mine, far.index_select(0, orders.sources), attr, *more)


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
            block.reduce(next(found).contiguous(), to_near)
        block.scatter(next(found).contiguous(), to_far)
        if to_attr is not None:
            to_attr[block.edges] = next(found)
        for total, value in zip(to_more, found, strict=True):
            total.add_(value)
    return [to_near, to_far, to_attr, *to_more]


# Steps of programs ------------------------------------------------------------------------------------------


class BoundMessages:
    """A step that makes messages, bound to a graph: its operands, block by block."""

    def __init__(self, b: Binding, step: Step):
        self.b, self.orders = b, b.orders
        self.function, self.far = step["function"], step["far"]
        self.near, self.attr = step.get("near") or "", step.get("attr") or ""
        self.parameters = [(role, name) for role, name in step.reads if role[0] == "p"]
        self.is_paired, self.widest = bool(step.option("is_paired")), step.option("widest", 0)
        self.makes: dict[str, str] = dict(step.option("makes", ()))

    def blocks(self, env: Env) -> list[EdgeBlock]:
        """The edges in blocks that stay in cache."""
        far: Tensor = env[self.far]
        if self.is_paired:
            return self.orders.wide_blocks(self.widest, far.element_size())
        return row_blocks(self.orders, far)

    def rows(self, env: Env, block: EdgeBlock) -> list[Tensor | None]:
        """What the function reads of a block's edges: the sum of both ends, or both and the edges' own."""
        near, far = env.get(self.near), env[self.far]
        if not self.is_paired:
            return gathered(self.orders, block, near, far, env.get(self.attr))
        out = self.b.take(block.num_edges, far.shape[1], far.dtype)
        return [block.pair(env[self.near], far, out)]

    def values(self, env: Env) -> list[Tensor]:
        """The function's parameters."""
        return [env[name] for _, name in self.parameters]

    def cut(self, env: Env) -> list[Tensor]:
        """The parameters detached; those whose gradient is needed require one."""
        return [env[name].detach().requires_grad_(role in self.makes) for role, name in self.parameters]


def made(function: Message, parts: Sequence[Tensor | None], values: Sequence[Tensor]) -> Tensor:
    """The messages of a block, rows of contiguous numbers."""
    rows = function(*parts, *values)
    return rows if rows.stride(1) == 1 else rows.contiguous()


@kernel("messages", "any", "blocks")
def _messages(b: Binding, step: Step, owns: bool) -> Bound:
    of, reduce = BoundMessages(b, step), step.reduce
    (_, columns), ties = b.program.shapes[step.out], step.more[0] if step.more else ""
    rows = b.orders.pattern.num_rows

    def run(env: Env) -> Tensor:
        far, function, values = env[of.far], env[of.function], of.values(env)
        out = b.take(rows, int(columns), far.dtype)
        counts = env[ties] = b.like(out) if ties else None
        for block in of.blocks(env):
            y = far.new_empty((0, int(columns)))
            if block.num_edges:
                y = made(function, of.rows(env, block), values)
            if counts is None:
                block.reduce(y, out, reduce)
            else:
                block.extremum(y, out, counts, reduce)
        return out

    return run


class Gradients:
    """Where a backward pass over blocks writes: to the sources, and to all else that needs a gradient."""

    def __init__(self, of: BoundMessages, env: Env, out: str):
        self.of, b, makes = of, of.b, of.makes
        self.to_far = _zeros(b, env, out, env[of.far])
        self.to_near = self.to_attr = None
        if "near" in makes:
            near: Tensor = env[of.near]
            self.to_near = env[makes["near"]] = b.room(env, makes["near"], near.shape[0], near.shape[1], near)
        if "attr" in makes:
            self.to_attr = env[makes["attr"]] = b.like(env[of.attr])
        self.totals = []
        for role, name in of.parameters:
            if role in makes:
                env[makes[role]] = torch.zeros_like(env[name])
                self.totals.append(env[makes[role]])

    def skip(self, block: EdgeBlock) -> None:
        """Targets without edges."""
        if self.to_near is not None:
            self.to_near[block.rows].zero_()

    def leaves(self, parts: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
        """What a block's messages are differentiated by; `parts` are made to want it."""
        if self.of.is_paired:
            wanted = list(parts)
        else:
            near, far, attr = parts
            wanted = [
                None if self.to_near is None else near, far, None if self.to_attr is None else attr
            ]  # fmt: skip
        leaves = [part.requires_grad_() for part in wanted if part is not None]
        return leaves + [value for value in values if value.requires_grad]

    def add(self, block: EdgeBlock, found: Sequence[Tensor]) -> None:
        """The gradients of a block's leaves, to where they go."""
        each = iter(found)
        if self.of.is_paired:
            pairs = next(each).contiguous()
            if self.to_near is not None:
                block.reduce(pairs, self.to_near)
            block.scatter(pairs, self.to_far)
        else:
            if self.to_near is not None:
                block.reduce(next(each).contiguous(), self.to_near)
            block.scatter(next(each).contiguous(), self.to_far)
            if self.to_attr is not None:
                self.to_attr[block.edges] = next(each)
        for total, value in zip(self.totals, each, strict=True):
            total.add_(value)


def _zeros(b: Binding, env: Env, name: str, like: Tensor) -> Tensor:
    return b.room(env, name, like.shape[0], like.shape[1], like).zero_()


@kernel("messages_back", "any", "blocks")
def _messages_back(b: Binding, step: Step, owns: bool) -> Bound:
    of, best, grad = BoundMessages(b, step), step.get("best") or "", step["grad"]

    def run(env: Env) -> Tensor:
        into, function, values, to_out = (
            Gradients(of, env, step.out),
            env[of.function],
            of.cut(env),
            env[grad],
        )
        for block in of.blocks(env):
            if not block.num_edges:
                into.skip(block)
                continue
            parts = of.rows(env, block)
            with torch.enable_grad():
                leaves = into.leaves(parts, values)
                y = made(function, parts, values)
            to_y = b.take(block.num_edges, y.shape[1], y.dtype)
            if best:
                block.attained(y.detach(), env[best], to_out, to_y)
            else:
                block.spread(to_out, to_y)
            into.add(
                block, torch.autograd.grad(y, leaves, to_y, allow_unused=True, materialize_grads=True)
            )  # fmt: skip
        return into.to_far

    return run


def messages_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    """[edges, columns]: every message at once, recorded by torch."""
    near, far, attr = env.get(step.get("near") or ""), env[step["far"]], env.get(step.get("attr") or "")
    values = [env[name] for role, name in step.reads if role[0] == "p"]
    name = step.get("function")
    function: Message = torch.relu if name is None else env[name]
    if not step.option("is_paired"):
        return all_messages(edges, function, near, far, attr, values)
    assert near is not None
    sources, targets = ends(edges, far)
    rows: Tensor = function(near.index_select(0, targets) + far.index_select(0, sources), *values)
    return rows


def reduced_in_torch(step: Step, rows: Tensor, edges: EdgeOrders) -> Tensor:
    """[targets, columns]: messages reduced as the step says."""
    count = edges.pattern.num_rows
    if step.reduce == "sum":
        return segment_sum(rows, edges.targets, count)
    return segment_extremum(rows, edges.targets, count, step.reduce)


@meaning("messages")
def _messages_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    out = reduced_in_torch(step, messages_in_torch(step, env, edges), edges)
    return out.detach() if step.option("is_fixed") else out


# Rows counted by their edges --------------------------------------------------------------------------------


@kernel("per_edge", "cuda", "torch")
def _per_edge_on_gpu(b: Binding, step: Step, owns: bool) -> Bound:
    return lambda env: _per_edge_in_torch(step, env, b.orders)


@kernel("per_edge", "cpu")
def _per_edge(b: Binding, step: Step, owns: bool) -> Bound:
    x_name, orders, is_once = step["x"], b.orders, bool(step.option("is_once"))

    def run(env: Env) -> Tensor:
        x: Tensor = env[x_name]
        out = torch.mul(x, orders.counts(x.dtype, is_once), out=b.like(x))
        # no message, no NaN: 0 * x would have those of x
        return out.index_fill_(0, orders.bare, 0.0) if len(orders.bare) else out

    return run


@meaning("per_edge")
def _per_edge_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x: Tensor = env[step["x"]]
    times = edges.counts(x.dtype, bool(step.option("is_once")))
    return torch.where(times > 0, x * times, x.new_zeros(()))
