"""The value of an expression in torch's own operations: what a plan computes, differentiable by torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from plait.errors import PlanError
from plait.ir import (
    Add,
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Expr,
    Fold,
    Map,
    MatMul,
    Scalar,
    Scale,
    children,
    formula,
    leaves,
    sort,
)
from plait.runtime.constants import Constants, SparseValue
from plait.runtime.placed import PlacedGraph, index_of
from plait.runtime.segments import segment_extremum, segment_sum

__all__ = ["evaluate", "gradients_depend_on"]

_MAPS = {"relu": torch.relu, "neg": torch.neg, "tanh": torch.tanh}


def evaluate(expr: Expr, inputs: Mapping[str, Tensor], constants: Constants) -> Tensor:
    """The expression's value; dense leaves and scalars by name in `inputs`, all else from the graph."""
    match expr:
        case Dense(name):
            return inputs[name]
        case MatMul(left, right) if sort(left) == "dense":
            return evaluate(left, inputs, constants) @ evaluate(right, inputs, constants)
        case MatMul(left, right):
            return _applied(left, evaluate(right, inputs, constants), inputs, constants)
        case Add(terms):
            first, *more = (evaluate(term, inputs, constants) for term in terms)
            for term in more:
                first = first + term
            return first
        case Scale(factor, body):
            return _number(factor, inputs) * evaluate(body, inputs, constants)
        case Map(name, body) | Barrier(name, body):
            return _MAPS[name](evaluate(body, inputs, constants))
        case Fold(body):
            return evaluate(body, inputs, constants)
        case Concat(parts, axis):
            return torch.cat([evaluate(part, inputs, constants) for part in parts], axis)
        case Aggregate(reduce, graph, body):
            return _aggregated(reduce, constants.matrix(graph), evaluate(body, inputs, constants))
    raise PlanError(f"{formula(expr)}: no derivative of its derivative is known; set PLAIT_DISABLE=1 for it")


def gradients_depend_on(expr: Expr, wrt: Iterable[str]) -> frozenset[str]:
    """Leaves whose values the gradients by `wrt` depend on: factors of theirs, or under a map with them."""
    wanted, found = frozenset(wrt), frozenset[str]()
    parts = [frozenset(leaves(part)) for part in children(expr)]
    if isinstance(expr, MatMul | Scale):
        mixed = [*combinations(parts, 2)]
    elif isinstance(expr, Map | Barrier | Aggregate):
        mixed = [(parts[-1], parts[-1])]
    else:
        mixed = []
    for one, other in mixed:
        found |= (other if one & wanted else frozenset()) | (one if other & wanted else frozenset())
    return found.union(*(gradients_depend_on(part, wanted) for part in children(expr)))


def _number(factor: Scalar, inputs: Mapping[str, Tensor]) -> Tensor | float:
    return inputs[factor.name].reshape(()) if factor.value is None else factor.value


def _applied(matrix: Expr, x: Tensor, inputs: Mapping[str, Tensor], constants: Constants) -> Tensor:
    """A sparse or diagonal expression times rows."""
    match matrix:
        case MatMul(left, right):
            return _applied(left, _applied(right, x, inputs, constants), inputs, constants)
        case Scale(factor, body):
            return _number(factor, inputs) * _applied(body, x, inputs, constants)
        case Add(terms) if sort(matrix) != "scalar":
            parts = [_applied(term, x, inputs, constants) for term in terms]
            return torch.stack(parts).sum(0)
    value = constants.value(matrix)
    if isinstance(value, Tensor):
        return x * value.to(x.device).unsqueeze(1)
    sources = _sources(value, x)
    rows = x.index_select(0, sources)
    if value.weight is not None:
        rows = rows * value.weight[: len(sources)].to(x.device).unsqueeze(1)
    return segment_sum(rows, _targets(value, x), value.graph.num_nodes)


def _aggregated(reduce: str, matrix: SparseValue, x: Tensor) -> Tensor:
    rows, targets, count = x.index_select(0, _sources(matrix, x)), _targets(matrix, x), matrix.graph.num_nodes
    if reduce in ("max", "min"):
        return segment_extremum(rows, targets, count, reduce)
    out = segment_sum(rows, targets, count)
    degrees = index_of(matrix.graph.degrees).to(x).clamp(min=1)
    return out if reduce == "sum" else out / degrees.unsqueeze(1)


def _sources(value: SparseValue, like: Tensor) -> Tensor:
    return index_of(_listed(value).indices).to(like.device)


def _targets(value: SparseValue, like: Tensor) -> Tensor:
    return index_of(_listed(value).edge_rows()).to(like.device)


def _listed(value: SparseValue) -> Any:
    """The graph with the edges of its rows alone."""
    return value.graph.trimmed() if isinstance(value.graph, PlacedGraph) else value.graph
