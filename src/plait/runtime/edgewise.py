"""A last linear layer of messages under an extremum: one bit per edge and column marks where.

Blocks of edges go through the map, a product and the extremum at once; the backward pass makes the rows
before the product again, the product not. Products run on plait's own kernel, whose bits do not depend on a
row's place: an edge that attained the maximum attains it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels import edgewise as kernels
from plait.kernels import gemm as dense
from plait.kernels import rectified
from plait.kernels import spmm as sparse
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import meaning
from plait.runtime.messages import BoundMessages, Gradients, made, messages_in_torch, reduced_in_torch
from plait.runtime.orders import EdgeOrders

__all__: list[str] = []


def _by_function(b: Binding, step: Step) -> str | None:
    return None if step.option("act") else "the map is a function of rows"


@kernel("attained", "cpu", "tiles", refuses=_by_function)
def _tiles(b: Binding, step: Step, owns: bool) -> Bound:
    near, far, w, bias = step["near"], step["far"], step["w"], step.get("bias") or ""
    pattern, columns = b.orders.pattern, int(b.program.shapes[step.out][1])

    def run(env: Env) -> Tensor:
        dtype = env[far].dtype
        out, ties, marks = b.take(pattern.num_rows, columns, dtype), None, None
        if step.more:
            ties = env[step.more[0]] = b.like(out)
            marks = env[step.more[1]] = b.take(pattern.num_edges, rectified.mark_bytes(columns), torch.uint8)
        rows = env[near], env[far]
        return rectified.attain(pattern, step.reduce, *rows, env[w], env.get(bias), out, ties, marks)

    return run


@kernel("attained", "cpu")
def _attained(b: Binding, step: Step, owns: bool) -> Bound:
    of, w_name, bias = BoundMessages(b, step), step["w"], step.get("bias") or ""
    ties, marks = step.more
    pattern = b.orders.pattern

    def run(env: Env) -> Tensor:
        w, function, values = env[w_name].contiguous(), env[of.function], of.values(env)
        out = b.take(pattern.num_rows, w.shape[1], w.dtype)
        counts = env[ties] = b.like(out)
        bits = env[marks] = b.take(pattern.num_edges, kernels.mark_bytes(w.shape[1]), torch.uint8)
        for block in of.blocks(env):
            y = b.take(block.num_edges, w.shape[1], w.dtype)
            if block.num_edges:
                dense.gemm(made(function, of.rows(env, block), values), w, y, bias=env.get(bias))
            sparse.extremum(block.to_targets, y, out[block.rows], counts[block.rows], step.reduce)
            kernels.mark(block.to_targets, out[block.rows], y, bits[block.edges])
        return out

    return run


@kernel("attained_back", "cpu", "tiles", refuses=_by_function)
def _tiles_back(b: Binding, step: Step, owns: bool) -> Bound:
    near, far, w, marks, grad = (step[role] for role in ("near", "far", "w", "marks", "grad"))
    makes: dict[str, str] = dict(step.option("makes", ()))
    orders = b.orders

    def run(env: Env) -> Tensor:
        given = env[near], env[far], env[w].t(), env[grad], env[marks]
        if makes:
            to_near = b.room_like(env, makes.get("near", ""), given[0])
            of_w, of_bias = rectified.target_gradients(orders.pattern, *given, to_near)
            made = {"near": to_near, "w": of_w.t(), "bias": of_bias}
            env.update({name: made[role] for role, name in makes.items()})
        to_far = b.room_like(env, step.out, given[1])
        return rectified.source_gradients(orders.transpose, orders.order, *given, to_far)

    return run


@kernel("attained_back", "cpu")
def _attained_back(b: Binding, step: Step, owns: bool) -> Bound:
    of, w_name, marks, grad = BoundMessages(b, step), step["w"], step["marks"], step["grad"]
    to_w, to_bias = of.makes.get("w", ""), of.makes.get("bias", "")

    def run(env: Env) -> Tensor:
        into, function, values = Gradients(of, env, step.out), env[of.function], of.cut(env)
        w, share = env[w_name], env[grad]
        back = w.t().contiguous()
        of_w, of_bias = torch.zeros_like(w), w.new_zeros(w.shape[1])
        for block in of.blocks(env):
            if not block.num_edges:
                into.skip(block)
                continue
            to_y = b.take(block.num_edges, w.shape[1], w.dtype)
            kernels.unmark(block.to_targets, share[block.rows], env[marks][block.edges], to_y)
            parts = of.rows(env, block)
            with torch.enable_grad():
                leaves = into.leaves(parts, values)
                h = made(function, parts, values)
            if to_w:
                of_w.add_(dense.weight_gradient(h.detach(), to_y))
            if to_bias:
                of_bias.add_(dense.column_sums(to_y))
            to_h = dense.gemm(to_y, back, b.take(block.num_edges, w.shape[0], w.dtype))
            into.add(
                block, torch.autograd.grad(h, leaves, to_h, allow_unused=True, materialize_grads=True)
            )  # fmt: skip
        env.update({name: value for name, value in ((to_w, of_w), (to_bias, of_bias)) if name})
        return into.to_far

    return run


@meaning("attained")
def _attained_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    rows = messages_in_torch(step, env, edges) @ env[step["w"]]
    bias = step.get("bias")
    return reduced_in_torch(step, rows if bias is None else rows + env[bias], edges)
