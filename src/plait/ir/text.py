"""Expressions as short text for people, by which constants are identified too."""

from __future__ import annotations

import functools

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

__all__ = ["formula"]


@functools.lru_cache(maxsize=4096)  # constants are known by it, in every new graph
def formula(expr: Expr) -> str:
    """The expression as one writes it: `p @ (A @ (q @ (X @ W))) + b`."""
    match expr:
        case Dense(name) | Sparse(name) | Diagonal(name):
            return name
        case Scalar(name, value):
            return name if value is None else f"{value!r}"
        case MatMul(left, right):
            return f"{_factor(left)} @ {_factor(right)}"
        case Add(terms):
            return " + ".join(
                f"({formula(term)})" if isinstance(term, Add) else formula(term) for term in terms
            )
        case Scale(factor, body):
            return f"{formula(factor)} * {_factor(body)}"
        case Map(name, body):
            return f"map.{name}({formula(body)})"
        case Barrier(name, body):
            return f"barrier.{name}({formula(body)})"
        case Aggregate(reduce, graph, body):
            return f"{reduce}({formula(graph)}, {formula(body)})"
        case Concat(parts, axis):
            return f"{'hcat' if axis else 'vcat'}({', '.join(map(formula, parts))})"
        case Fold(body):
            return f"fold({formula(body)})"
    raise PlanError(f"{type(expr).__name__} cannot be printed")


def _factor(expr: Expr) -> str:
    """An operand of a product: anything that is not one word is bracketed."""
    text = formula(expr)
    return f"({text})" if isinstance(expr, MatMul | Add | Scale) else text
