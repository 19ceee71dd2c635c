"""The value of an expression in torch's own operations: what a plan computes, differentiable by torch."""

from __future__ import annotations

import functools
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
    walk,
)
from plait.runtime.constants import Constants, SparseValue
from plait.runtime.placed import PlacedGraph, index_of
from plait.runtime.segments import segment_extremum, segment_sum

__all__ = ["Evaluation", "evaluate", "gradients_depend_on"]

_MAPS = {"relu": torch.relu, "neg": torch.neg, "tanh": torch.tanh}


class Evaluation:
    """Values of expressions on some inputs, each computed once; how matrices are applied is a subclass's."""

    def __init__(self, inputs: Mapping[str, Tensor]):
        self.inputs = inputs
        self._done: dict[Expr, Tensor] = {}

    def value(self, expr: Expr) -> Tensor:
        """The expression's value; dense leaves and scalars are among the inputs by name."""
        found = self._done.get(expr)
        if found is None:
            found = self._done[expr] = self._made(expr)
        return found

    def _made(self, expr: Expr) -> Tensor:
        match expr:
            case Dense(name):
                return self.inputs[name]
            case MatMul(left, right) if sort(left) == "dense":
                return self.product(left, right)
            case MatMul(left, right):
                return self.applied(left, self.value(right))
            case Add(terms):
                return functools.reduce(torch.add, [self.value(term) for term in terms])
            case Scale(factor, body):
                return self.number(factor) * self.value(body)
            case Map(name, body) | Barrier(name, body):
                return _MAPS[name](self.value(body))
            case Fold(body):
                return self.value(body)
            case Concat(parts, axis):
                return torch.cat([self.value(part) for part in parts], axis)
            case Aggregate(reduce, graph, body):
                return self.aggregated(reduce, graph, self.value(body))
        raise PlanError(
            f"{formula(expr)}: no derivative of its derivative is known; set PLAIT_DISABLE=1 for it"
        )

    def number(self, factor: Scalar) -> Tensor | float:
        """A scalar, of the expression or of the call."""
        return self.inputs[factor.name].reshape(()) if factor.value is None else factor.value

    def product(self, left: Expr, right: Expr) -> Tensor:
        """The product of two dense matrices."""
        return self.value(left) @ self.value(right)

    def applied(self, matrix: Expr, x: Tensor) -> Tensor:
        """A sparse or diagonal matrix times rows."""
        raise NotImplementedError

    def aggregated(self, reduce: str, graph: Expr, x: Tensor) -> Tensor:
        """Rows reduced over neighbours."""
        raise PlanError(f"{formula(graph)}: its values are inputs, by which no {reduce} is differentiated")


def evaluate(expr: Expr, inputs: Mapping[str, Tensor], constants: Constants) -> Tensor:
    """The expression's value; dense leaves and scalars by name in `inputs`, all else from the graph."""
    return _OnGraph(inputs, constants).value(expr)


class _OnGraph(Evaluation):
    """The same with the matrices of a graph."""

    def __init__(self, inputs: Mapping[str, Tensor], constants: Constants):
        super().__init__(inputs)
        self._constants = constants

    def applied(self, matrix: Expr, x: Tensor) -> Tensor:
        match matrix:
            case MatMul(left, right):
                return self.applied(left, self.applied(right, x))
            case Scale(factor, body):
                return self.number(factor) * self.applied(body, x)
            case Add(terms) if sort(matrix) != "scalar":
                return torch.stack([self.applied(term, x) for term in terms]).sum(0)
        value = self._constants.value(matrix)
        if isinstance(value, Tensor):
            return x * value.to(x.device).unsqueeze(1)
        sources = _sources(value, x)
        rows = x.index_select(0, sources)
        if value.weight is not None:
            rows = rows * value.weight[: len(sources)].to(x.device).unsqueeze(1)
        return segment_sum(rows, _targets(value, x), value.graph.num_nodes)

    def aggregated(self, reduce: str, graph: Expr, x: Tensor) -> Tensor:
        matrix = self._constants.matrix(graph)
        targets, count = _targets(matrix, x), matrix.graph.num_nodes
        rows = x.index_select(0, _sources(matrix, x))
        if reduce in ("max", "min"):
            return segment_extremum(rows, targets, count, reduce)
        out = segment_sum(rows, targets, count)
        degrees = index_of(matrix.graph.degrees).to(x).clamp(min=1)
        return out if reduce == "sum" else out / degrees.unsqueeze(1)


def gradients_depend_on(expr: Expr, wrt: Iterable[str]) -> frozenset[str]:
    """Leaves whose values the gradients by `wrt` depend on: factors of theirs, or under a map with them."""
    wanted, found = frozenset(wrt), frozenset[str]()
    for term in walk(expr):  # what is shared comes once: Chebyshev's recurrence reads every part twice
        parts = [frozenset(leaves(part)) for part in children(term)]
        if isinstance(term, MatMul | Scale):
            mixed = [*combinations(parts, 2)]
        elif isinstance(term, Map | Barrier | Aggregate):
            mixed = [(parts[-1], parts[-1])]
        else:
            mixed = []
        for one, other in mixed:
            found |= (other if one & wanted else frozenset()) | (one if other & wanted else frozenset())
    return found


def _sources(value: SparseValue, like: Tensor) -> Tensor:
    return index_of(_listed(value).indices).to(like.device)


def _targets(value: SparseValue, like: Tensor) -> Tensor:
    return index_of(_listed(value).edge_rows()).to(like.device)


def _listed(value: SparseValue) -> Any:
    """The graph with the edges of its rows alone."""
    return value.graph.trimmed() if isinstance(value.graph, PlacedGraph) else value.graph
