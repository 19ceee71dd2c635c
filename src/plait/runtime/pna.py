"""Several aggregators and degree scalers: their kernels on a CPU, and what they mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.kernels import multi as kernels
from plait.kernels.multi import Layout
from plait.kernels.multi.reference import LEAST_VARIANCE
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import ends, meaning, with_terms
from plait.runtime.messages import all_messages, blockwise_gradients, gathered, row_blocks
from plait.runtime.orders import EdgeBlock, EdgeOrders
from plait.runtime.segments import segment_extremum, segment_sum

__all__ = ["layout_of"]


def layout_of(step: Step) -> Layout:
    """How the results of a step lie."""
    return Layout(step.option("names"), step.option("width"), step.option("towers"))


# One gather for all aggregators ---------------------------------------------------------------------------


@kernel("aggregate", "cpu")
def _aggregate(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, layout, x = b.orders.pattern, layout_of(step), step["x"]
    rows, width = pattern.num_rows, len(layout.kept) * layout.columns
    counted = step.more[0] if step.more and step.more[0] in b.run.kept else ""

    def run(env: Env) -> Tensor:
        v: Tensor = env[x]
        out = b.room(env, step.out, rows, width, v)
        ties = None
        if counted:
            ties = env[counted] = b.take(rows, 2 * layout.columns, v.dtype)
        return kernels.aggregate(pattern, v, layout, out, ties)

    return run


@kernel("aggregate_shares", "cpu")
def _aggregate_shares(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, layout, names = b.orders.pattern, layout_of(step), dict(step.reads)
    grad, made, ties = names["grad"], names["made"], names.get("ties", "")
    width = layout.sections * layout.columns

    def run(env: Env) -> Tensor:
        rows: Tensor = env[grad]
        out = b.take(pattern.num_rows, width, rows.dtype)
        return kernels.aggregate_shares(pattern, layout, rows, env[made], env.get(ties), out)

    return run


@kernel("aggregate_sources", "cpu")
def _aggregate_sources(b: Binding, step: Step, owns: bool) -> Bound:
    transpose, layout, x, shares = b.orders.transpose, layout_of(step), step["x"], step["shares"]

    def run(env: Env) -> Tensor:
        v: Tensor = env[x]
        out = b.room(env, step.out, v.shape[0], v.shape[1], v)
        return kernels.aggregate_sources(transpose, v, layout, env[shares], out)

    return run


# Messages in blocks of edges ------------------------------------------------------------------------------


def _parts(step: Step) -> Callable[[Env], list[Tensor | None]]:
    """[near rows, far rows, edges' rows, parameters ...] of messages, None where there are none."""
    near, far, edge = step.get("near") or "", step["far"], step.get("edge") or ""
    maps = [name for role, name in step.reads if role.startswith("w")]
    return lambda env: [env.get(near), env[far], env.get(edge), *(env[name] for name in maps)]


@kernel("aggregate_messages", "any", "blocks")
def _aggregate_messages(b: Binding, step: Step, owns: bool) -> Bound:
    """Messages of a block of edges are made, aggregated and dropped."""
    orders, layout, parts = b.orders, layout_of(step), _parts(step)
    count, width = orders.pattern.num_rows, len(layout.kept) * layout.columns

    def run(env: Env) -> Tensor:
        near, far, edge, *maps = parts(env)
        assert far is not None
        message = env[step.option("message")]
        out = b.room(env, step.out, count, width, far)
        for block in row_blocks(orders, far):
            rows = message(*gathered(orders, block, near, far, edge), *maps).contiguous()
            block.aggregate(rows, layout, out)
        return out

    return run


@kernel("aggregate_messages_back", "any", "blocks")
def _aggregate_messages_back(b: Binding, step: Step, owns: bool) -> Bound:
    """Gradients of what messages are made of, block by block: the messages are made again.

    So are the block's aggregates: an edge that attained an extremum then attains it whatever the bits of its
    message.
    """
    orders, layout, parts = b.orders, layout_of(step), _parts(step)
    maps = [role for role, _ in step.reads if role.startswith("w")]
    names = dict(zip(step.option("wanted"), (step.out, *step.more), strict=True))

    def run(env: Env) -> Tensor:
        grad: Tensor = env[step["grad"]]

        def to_messages(block: EdgeBlock, rows: Tensor) -> Tensor:
            return block.aggregate_back(rows.contiguous(), layout, grad)

        message = env[step.option("message")]
        found = blockwise_gradients(orders, message, to_messages, tuple(parts(env)))
        pairs = zip(("near", "far", "edge", *maps), found, strict=True)
        env.update({names[role]: value for role, value in pairs if role in names})
        result: Tensor = env[step.out]
        return result

    return run


# Rows scaled one by one -----------------------------------------------------------------------------------


@kernel("weigh", "any", "torch")
def _weigh(b: Binding, step: Step, owns: bool) -> Bound:
    """addend + the sum over k of scales[:, k] * x_k, where x holds x_0, x_1, … side by side."""
    x, scales, addend = step["x"], step["scales"], step.get("addend")
    is_taken_over = owns and not b.is_part(step.out)

    def run(env: Env) -> Tensor:
        rows, weights = env[x], env[scales]
        first, *parts = zip(rows.chunk(weights.shape[1], 1), weights.split(1, 1), strict=True)
        plus: Tensor | None = None if addend is None else env[addend]
        if is_taken_over and plus is not None:
            out = plus.addcmul_(*first)
        else:
            out = b.room(env, step.out, len(rows), first[0].shape[1], rows)
            out = torch.mul(*first, out=out) if plus is None else torch.addcmul(plus, *first, out=out)
        for part, weight in parts:
            out.addcmul_(part, weight)
        return out

    return run


@kernel("weighed_copies", "any", "torch")
def _weighed_copies(b: Binding, step: Step, owns: bool) -> Bound:
    """Side by side, addend_k + scales[:, k] * x for every k."""
    x, scales, addend = step["x"], step["scales"], step.get("addend")
    is_taken_over = owns and not b.is_part(step.out)

    def run(env: Env) -> Tensor:
        rows, weights = env[x], env[scales]
        count = weights.shape[1]
        plus: Tensor | None = None if addend is None else env[addend]
        if is_taken_over and plus is not None:
            out = plus
        else:
            out = b.room(env, step.out, rows.shape[0], count * rows.shape[1], rows)
        columns = weights.split(1, 1)
        if plus is None:
            for part, weight in zip(out.chunk(count, 1), columns, strict=True):
                torch.mul(rows, weight, out=part)
            return out
        for part, before, weight in zip(out.chunk(count, 1), plus.chunk(count, 1), columns, strict=True):
            torch.addcmul(before, rows, weight, out=part)
        return out

    return run


@kernel("row_dots", "any", "torch")
def _row_dots(b: Binding, step: Step, owns: bool) -> Bound:
    """[rows, k]: of every row, the product of narrow with each of the parts of wide."""
    wide, narrow = step["wide"], step["narrow"]

    def run(env: Env) -> Tensor:
        rows: Tensor = env[narrow]
        parts = env[wide].split(rows.shape[1], 1)
        out = b.room(env, step.out, rows.shape[0], len(parts), rows)
        for k, part in enumerate(parts):
            torch.sum(rows * part, 1, out=out[:, k])
        return out

    return run


# What they mean -------------------------------------------------------------------------------------------


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


@meaning("aggregate")
def _aggregate_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    v: Tensor = env[step["x"]]
    sources, targets = ends(edges, v)
    return _all_of(v.index_select(0, sources), targets, edges.pattern.num_rows, layout_of(step))


@meaning("aggregate_messages")
def _aggregate_messages_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    near, far, edge, *maps = _parts(step)(env)
    assert far is not None
    rows = all_messages(edges, env[step.option("message")], near, far, edge, maps)
    return _all_of(rows, edges.targets, edges.pattern.num_rows, layout_of(step))


@meaning("weigh")
def _weigh_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x, scales = env[step["x"]], env[step["scales"]]
    out: Tensor = (x.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).sum(1)
    return with_terms(out, step, env)


@meaning("weighed_copies")
def _weighed_copies_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x, scales = env[step["x"]], env[step["scales"]]
    return with_terms((x.unsqueeze(1) * scales.unsqueeze(2)).flatten(1), step, env)
