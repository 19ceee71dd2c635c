"""What operations compute, in terms of torch: for higher derivatives, and as the oracle for every kernel.

A layer that is a matrix expression has its meaning in the expression (runtime/evaluate.py). A layer that is
a program has it here, step by step: slow, of edges times width in memory, and differentiable to any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.errors import PlanError
from plait.ops.program import Step
from plait.runtime.chain import Env
from plait.runtime.orders import EdgeOrders
from plait.runtime.placed import PlacedGraph, index_of
from plait.runtime.segments import segment_extremum, segment_sum

if TYPE_CHECKING:
    from plait.runtime.executor import Run

__all__ = ["Meaning", "ends", "evaluate_program", "meaning", "with_terms"]

Meaning = Callable[[Step, Env, EdgeOrders], Any]
_MEANINGS: dict[str, Meaning] = {}


def meaning(operation: str) -> Callable[[Meaning], Meaning]:
    """Enters what an operation computes, as a function of the step, the available values and the edges."""

    def enter(function: Meaning) -> Meaning:
        _MEANINGS[operation] = function
        return function

    return enter


def evaluate_program(run: Run, env: Env) -> Tensor:
    """The program's output, every step recorded by torch."""
    assert run.orders is not None
    program = run.plan.forward
    env.update({name: run.constants.value(expr) for name, expr in program.constants.items()})
    for step in program.steps:
        compute = _MEANINGS.get(step.op)
        if compute is None:
            raise PlanError(
                f"{run.plan.layer}: no second derivative of {step.op} is known; set PLAIT_DISABLE=1"
            )
        env[step.out] = compute(step, env, run.orders)
    result: Tensor = env[program.outputs[0]]
    return result


def with_terms(out: Tensor, step: Step, env: Env) -> Tensor:
    """What an operation adds to its result: rows, and a bias."""
    for role in ("addend", "bias"):
        name = step.get(role)
        out = out if name is None else out + env[name]
    return out


def ends(edges: EdgeOrders, like: Tensor) -> tuple[Tensor, Tensor]:
    """(source, target) of every edge, by target, where `like` is."""
    return edges.sources.to(like.device), edges.targets.to(like.device)


@meaning("columns")
def _columns(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    start, width = step.option("start"), step.option("width")
    whole: Tensor = env[step["x"]]
    return whole[:, start : start + width]


@meaning("reshape")
def _reshape(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x: Tensor = env[step["x"]]
    width = step.option("width")
    return x.reshape(x.numel() // max(1, width), width)


@meaning("spmm")
def _spmm(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    """Forwards, sums of rows by any of the graph's matrices."""
    matrix, x, target = env[step["matrix"]], env[step["x"]], step.get("target")
    graph, weight = matrix.graph, matrix.weight
    graph = graph.trimmed() if isinstance(graph, PlacedGraph) else graph
    sources, targets = (index_of(a).to(x.device) for a in (graph.indices, graph.edge_rows()))
    weight = weight if weight is None else weight[: graph.num_edges]
    rows = x.index_select(0, sources)
    rows = rows if weight is None else rows * weight.unsqueeze(1)
    out = segment_sum(rows, targets, graph.num_nodes)
    return with_terms(out if target is None else out * env[target].unsqueeze(1), step, env)


@meaning("join")
def _join(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    return torch.cat([env[name] for _, name in step.reads], 1)


@meaning("extremum")
def _extremum(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x: Tensor = env[step["x"]]
    sources, targets = ends(edges, x)
    rows, counts_zero = x.index_select(0, sources), step.option("counts_zero", True)
    return segment_extremum(rows, targets, edges.pattern.num_rows, step.reduce, counts_zero)


@meaning("scale_rows")
def _scale_rows(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x, scale = env[step["x"]], env[step["scale"]]
    out: Tensor = x * scale.unsqueeze(1)
    return out


@meaning("gemm")
def _gemm(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    w = env[step["w"]]
    return with_terms(env[step["x"]] @ (w.t() if step.is_transposed else w), step, env)


@meaning("relu")
def _relu(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    x: Tensor = env[step["x"]]
    return x.relu()


@meaning("chain")
def _chain(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    """Forwards, products of the same rows and their sum."""
    products = [role[4:] for role, _ in step.reads if role.startswith("rows")]
    total: Any = 0
    for k in products:
        w = env[step[f"w{k}"]] if step.get(f"w{k}") else env[step[f"wt{k}"]].t()
        total = total + env[step[f"rows{k}"]] @ w
    return with_terms(total, step, env)


@meaning("combine")
def _combine(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    terms = [env[name] for role, name in step.reads if role != "bias"]
    total: Any = 0
    for factor, term in zip(step.factors, terms, strict=True):
        total = total + (term if factor == 1.0 else factor * term)
    bias = step.get("bias")
    result: Tensor = total if bias is None else total + env[bias]
    return result


@meaning("concat")
def _concat(step: Step, env: Env, edges: EdgeOrders) -> Tensor:
    return torch.cat([env[name] for _, name in step.reads], 1)
