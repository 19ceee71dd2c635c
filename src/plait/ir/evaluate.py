"""The value of an expression in numpy: the meaning every law and plan is checked against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from plait.errors import PlanError
from plait.ir.expr import (
    Add,
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    Map,
    MatMul,
    Scalar,
    Scale,
    Sparse,
)

__all__ = ["evaluate"]

Array = np.ndarray[Any, Any]
_MAPS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda v: np.maximum(v, 0),
    "neg": lambda v: -v,
    "tanh": np.tanh,
}


def evaluate(expr: Expr, values: Mapping[str, Any]) -> Array:
    """The expression's value, everything dense; sparse leaves come as dense arrays, diagonals as vectors."""
    match expr:
        case Dense(name) | Sparse(name):
            return np.atleast_2d(np.asarray(values[name]))
        case Diagonal(name):
            return np.diag(np.asarray(values[name]))
        case Scalar(name, value):
            return np.asarray(values[name] if value is None else value)
        case MatMul(left, right):
            return np.asarray(evaluate(left, values) @ evaluate(right, values))
        case Add(terms):
            result = evaluate(terms[0], values)
            for term in terms[1:]:
                result = result + evaluate(term, values)
            return result
        case Scale(factor, body):
            return np.asarray(evaluate(factor, values) * evaluate(body, values))
        case Map(name, body) | Barrier(name, body):
            return np.asarray(_MAPS[name](evaluate(body, values)))
        case Fold(body):
            return evaluate(body, values)
        case Concat(parts, axis):
            return np.concatenate([evaluate(part, values) for part in parts], axis=axis)
        case Aggregate(reduce, graph, body):
            return _aggregate(reduce, evaluate(graph, values), evaluate(body, values))
    raise PlanError(f"{type(expr).__name__} cannot be evaluated")


def _aggregate(reduce: str, graph: Array, x: Array) -> Array:
    out = np.zeros((graph.shape[0], x.shape[1]), x.dtype)
    for i, row in enumerate(graph):
        neighbours = np.repeat(np.arange(len(row)), row.astype(int))  # multiplicity counts
        if len(neighbours):
            out[i] = getattr(x[neighbours], reduce)(axis=0)
    return out
