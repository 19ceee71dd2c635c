"""Attention and gates on a GPU, by Triton: the second column of their rows in the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.kernels.attention import Scores
from plait.ops.program import Step
from plait.runtime.bind import Binding, Bound, kernel
from plait.runtime.chain import Env
from plait.runtime.cuda import whole_rows

__all__: list[str] = []


def _scores_of(step: Step) -> Any:
    """The scores of a step as a function of the available values, all rows whole."""
    kind, slope, far, near = step.option("kind"), step.option("slope"), step["far"], step["near"]
    edge, att = step.get("edge"), step.get("att")

    def scores(env: Env) -> Scores:
        return Scores(
            kind, whole_rows(env[far]), whole_rows(env[near]),
            edge=None if edge is None else whole_rows(env[edge]),
            att=None if att is None else env[att].reshape(-1).contiguous(), slope=slope,
            dropout=env.get("dropout"),
        )  # fmt: skip

    return scores


def _bias_of(step: Step) -> Callable[[Env], Tensor | None]:
    """What is added to every row of the output, one number after the other."""
    name = step.get("bias")
    return lambda env: None if name is None else env[name].reshape(-1).contiguous()


@kernel("attend", "cuda", "triton")
def _attend(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu  # here: it needs triton

    rows, scores, heads = b.matrix(step).operands(False)[0], _scores_of(step), step.option("heads")
    value_name, statistics_name, bias = step["value"], step.more[0], _bias_of(step)

    def run(env: Env) -> Tensor:
        value = whole_rows(env[value_name])
        statistics = env[statistics_name] = gpu.statistics_of(rows, value, heads)
        out = b.take(rows.num_rows, value.shape[1], value.dtype)
        return gpu.attend(rows, scores(env), value, out, statistics, heads, bias=bias(env))

    return run


@kernel("attend_again", "cuda", "triton")
def _attend_again(b: Binding, step: Step, owns: bool) -> Bound:
    """The first of the two passes back: it finds what the second one reads of every target."""
    from plait.kernels.attention import gpu

    rows, scores, heads = b.matrix(step).operands(False)[0], _scores_of(step), step.option("heads")
    value, grad, statistics, near, out = (step[r] for r in ("value", "grad", "statistics", "near", "out"))
    to_att = step.more[0] if step.option("kind") == "leaky" else ""
    to_edge, edge, bias = step.option("to_edge"), step.get("edge"), _bias_of(step)

    def run(env: Env) -> Tensor:
        to_near = b.room_like(env, step.out, env[near])
        if to_edge is not None and edge is not None:
            env[to_edge] = torch.empty_like(env[edge], memory_format=torch.contiguous_format)
        made = gpu.attend_targets(
            rows, scores(env), whole_rows(env[value]), env[out], whole_rows(env[grad]), env[statistics],
            to_near, heads, bias=bias(env), edge_grad=None if to_edge is None else env[to_edge],
        )  # fmt: skip
        if to_att and made is not None:
            env[to_att] = made.to(to_near.dtype).reshape(1, -1)
        return to_near

    return run


@kernel("attend_sources", "cuda", "triton")
def _attend_sources(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.attention import gpu

    matrix, scores, heads = b.matrix(step), _scores_of(step), step.option("heads")
    rows, kind, to_far = matrix.operands(True)[0], step.option("kind"), step.option("to_far")
    order: Any = matrix.graph.transpose_order  # on the device, like the graph
    value_name, grad, statistics, far = (step[r] for r in ("value", "grad", "statistics", "far"))
    to_att = step.more[0] if kind == "leaky" else ""

    def run(env: Env) -> Tensor:
        value, given = whole_rows(env[value_name]), scores(env)
        out = b.room_like(env, step.out, value)
        to_scores: Tensor | None = None
        if to_far is not None:
            to_scores = env[to_far] = b.room_like(env, to_far, env[far])
        needs_order = given.edge is not None or given.dropout is not None
        made = gpu.attend_sources(
            rows, order if needs_order else None, given, value, whole_rows(env[grad]),
            env[statistics], out, to_scores, heads,
        )  # fmt: skip
        if to_att and made is not None:
            env[to_att] = made.to(value.dtype).reshape(1, -1)
        return out

    return run


# Gates ----------------------------------------------------------------------------------------------------


@kernel("gate", "cuda", "triton")
def _gate(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.gate import gpu

    rows, names, act = b.matrix(step).operands(False)[0], dict(step.reads), step.option("act", "sigmoid")
    slopes = step.more[0] if step.more else ""

    def run(env: Env) -> Tensor:
        near, far = (whole_rows(env[names[role]]) for role in ("near", "far"))
        value = whole_rows(env[names["value"]]) if "value" in names else None
        out = b.take(rows.num_rows, far.shape[1], far.dtype)
        if slopes:
            env[slopes] = torch.empty_like(out)
        addend = whole_rows(env[names["addend"]]) if "addend" in names else None
        bias = env[names["bias"]].reshape(-1).contiguous() if "bias" in names else None
        gpu.gate(rows, act, near, far, value, out=out, slopes=env.get(slopes), addend=addend, bias=bias)
        return out

    return run


@kernel("gate_targets", "cuda", "triton")
def _gate_targets(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.gate import gpu

    rows, names, act = b.matrix(step).operands(False)[0], dict(step.reads), step.option("act", "sigmoid")

    def run(env: Env) -> Tensor:
        near, far = (whole_rows(env[names[role]]) for role in ("near", "far"))
        value = whole_rows(env[names["value"]]) if "value" in names else None
        out = b.room(env, step.out, rows.num_rows, far.shape[1], far)
        gpu.gate(rows, act, near, far, value, slopes=out)
        return out.mul_(env[step["grad"]])

    return run


@kernel("gate_sources", "cuda", "triton")
def _gate_sources(b: Binding, step: Step, owns: bool) -> Bound:
    from plait.kernels.gate import gpu

    rows, to_value = b.matrix(step).operands(True)[0], step.more[0] if step.more else ""
    names, act = dict(step.reads), step.option("act", "sigmoid")

    def run(env: Env) -> Tensor:
        near, far, grad = (whole_rows(env[names[role]]) for role in ("near", "far", "grad"))
        value = whole_rows(env[names["value"]]) if "value" in names else None
        out = b.room_like(env, step.out, far)
        if to_value:
            env[to_value] = b.room_like(env, to_value, far)
        gpu.gate_sources(rows, act, near, far, value, grad, out, env.get(to_value))
        return out

    return run
