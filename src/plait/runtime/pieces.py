"""Attention in pieces: its kernels on a CPU, and their meaning in torch.

Where no fused pass computes a layer's scores, or its attention weights are requested, the layer is
lowered to these: dot products of both ends of every edge, a softmax over each target's edges, weighted sums.
One number per edge and head is kept, rows per edge are not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, leaky_relu_, pad

from plait.kernels.attention import pieces as kernels
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.meaning import meaning
from plait.runtime.messages import row_blocks
from plait.runtime.orders import EdgeOrders, Incidence
from plait.runtime.segments import segment_softmax, segment_sum

__all__ = ["seen"]


def seen(orders: EdgeOrders, step: Step) -> EdgeOrders | Incidence:
    """The edges as the step goes over them: from nodes, or each from itself."""
    return orders.incidence if step.option("of_edges") else orders


@kernel("edge_dots", "cpu")
def _dots(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, near, far = seen(b.orders, step).pattern, step["near"], step["far"]
    heads, is_shared = step.option("heads"), bool(step.option("is_shared"))
    return lambda env: kernels.edge_dots(pattern, env[near], env[far], heads, is_shared=is_shared)


@kernel("edge_sums", "cpu")
def _sums(b: Binding, step: Step, owns: bool) -> Bound:
    edges, weight, far = seen(b.orders, step), step["weight"], step["far"]
    pattern, order = (edges.transpose, edges.order) if step.is_transposed else (edges.pattern, None)
    heads, columns = step.option("heads"), int(b.program.shapes[step.out][1])
    is_shared, is_out_shared = bool(step.option("is_shared")), bool(step.option("is_out_shared"))

    def run(env: Env) -> Tensor:
        rows: Tensor = env[far]
        out = b.room(env, step.out, pattern.num_rows, columns, rows)
        return kernels.edge_sums(
            pattern, order, env[weight], rows, heads, far_is_shared=is_shared, out_is_shared=is_out_shared,
            out=out,
        )  # fmt: skip

    return run


@kernel("edge_softmax", "cpu")
def _softmax(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, scores = b.orders.pattern, step["scores"]
    return lambda env: kernels.edge_softmax(pattern, env[scores])


@kernel("edge_softmax_back", "cpu")
def _softmax_back(b: Binding, step: Step, owns: bool) -> Bound:
    pattern, weight, grad = b.orders.pattern, step["weight"], step["grad"]
    return lambda env: kernels.edge_softmax_gradient(pattern, env[weight], env[grad])


# Leaky scores: blocks of edges, whose rows are made, scored and dropped; the backward pass makes them again


class _Leaky:
    """A step that scores edges, bound to a graph: what it reads, block by block."""

    def __init__(self, b: Binding, step: Step):
        self.orders, self.slope = b.orders, step.option("slope")
        self._names = {role: name for role, name in step.reads if role != "matrix"}

    def operand(self, env: Env, role: str) -> Tensor | None:
        """The operand in this role, if the step has one."""
        name = self._names.get(role)
        return None if name is None else env[name]

    def rows(self, env: Env, span: slice) -> Tensor:
        """near[i] + far[j] + attr[e] @ w of some edges."""
        near, far = env[self._names["near"]], env[self._names["far"]]
        attr, w = self.operand(env, "attr"), self.operand(env, "w")
        rows: Tensor = near.index_select(0, self.orders.targets[span])
        rows.add_(far.index_select(0, self.orders.sources[span]))
        return rows if attr is None or w is None else rows.addmm_(attr[span], w)


@kernel("leaky_scores", "any", "blocks")
def _leaky_scores(b: Binding, step: Step, owns: bool) -> Bound:
    of, far, spread = _Leaky(b, step), step["far"], step["spread"]

    def run(env: Env) -> Tensor:
        scores: Tensor = env[far].new_empty((of.orders.pattern.num_edges, env[spread].shape[1]))
        for block in row_blocks(of.orders, env[far]):
            bent = leaky_relu_(of.rows(env, block.edges), of.slope)
            torch.mm(bent, env[spread], out=scores[block.edges])
        return scores

    return run


@kernel("leaky_scores_back", "any", "blocks")
def _leaky_scores_back(b: Binding, step: Step, owns: bool) -> Bound:
    of, far, spread, grad = _Leaky(b, step), step["far"], step["spread"], step["grad"]
    makes = dict(zip(step.option("makes"), (step.out, *step.more), strict=True))
    is_summed = {"near": False, "attr": False, "far": True, "spread": True, "w": True}

    def blank(env: Env, role: str) -> Tensor:
        value = of.operand(env, role)
        assert value is not None
        return value.new_zeros(value.shape) if is_summed[role] else value.new_empty(value.shape)

    def run(env: Env) -> Tensor:
        made = {role: blank(env, role) for role in makes}
        one, slope = env[far].new_tensor(1.0), env[far].new_tensor(of.slope)
        attr, w = of.operand(env, "attr"), of.operand(env, "w")
        for block in row_blocks(of.orders, env[far]):
            span = block.edges
            rows, to_scores = of.rows(env, span), env[grad][span]
            bent = torch.where(rows > 0, one, slope)
            if "spread" in made:
                made["spread"].addmm_((rows * bent).t(), to_scores)
            to_rows = torch.mm(to_scores, env[spread].t()).mul_(bent)
            if "near" in made:
                block.reduce(to_rows, made["near"])
            if "far" in made:
                block.scatter(to_rows, made["far"])
            if "attr" in made and w is not None:
                torch.mm(to_rows, w.t(), out=made["attr"][span])
            if "w" in made and attr is not None:
                made["w"].addmm_(attr[span].t(), to_rows)
        env.update({makes[role]: value for role, value in made.items()})
        first: Tensor = env[step.out]
        return first

    return run


# What they mean -------------------------------------------------------------------------------------------


def _by_head(rows: Tensor, heads: int, is_shared: bool) -> Tensor:
    """[rows, heads, width]; one head where it is shared by all."""
    count = 1 if is_shared else heads
    return rows.reshape(len(rows), count, rows.shape[1] // count)


def _far_of_edges(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    rows = env[step["far"]].index_select(0, seen(edges, step).sources)
    return _by_head(rows, step.option("heads"), bool(step.option("is_shared")))


@meaning("edge_dots")
def _dots_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    heads = step.option("heads")
    mine = _by_head(env[step["near"]].index_select(0, edges.targets), heads, False)
    return pad((mine * _far_of_edges(step, env, edges)).sum(-1), (0, kernels.padded(heads) - heads))


@meaning("edge_sums")
def _sums_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    weight = env[step["weight"]][:, : step.option("heads"), None]
    rows = (weight * _far_of_edges(step, env, edges)).flatten(1)
    return segment_sum(rows, edges.targets, edges.pattern.num_rows)


@meaning("edge_softmax")
def _softmax_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    return segment_softmax(env[step["scores"]], edges.targets, edges.pattern.num_rows)


@meaning("leaky_scores")
def _leaky_in_torch(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    near, far, attr = env[step["near"]], env[step["far"]], step.get("attr")
    rows = near.index_select(0, edges.targets) + far.index_select(0, edges.sources)
    rows = rows if attr is None else rows + env[attr] @ env[step["w"]]
    scores: Tensor = leaky_relu(rows, step.option("slope")) @ env[step["spread"]]
    return scores
