"""Expressions as short text for people, by which constants are identified too."""

from __future__ import annotations

import functools
from collections.abc import Mapping

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
    children,
    sort,
)

__all__ = ["formula"]


_LONG = 400  # terms of a formula, above which what occurs in it several times is written once


@functools.lru_cache(maxsize=4096)  # constants are known by it, in every new graph
def formula(expr: Expr) -> str:
    """The expression as one writes it: `p @ (A @ (q @ (X @ W))) + b`.

    A long one has the parts that it holds more than once in front: `t1 = A @ X; t1 @ W + t1 @ V`.
    """
    if _size(expr) <= _LONG:
        return _text(expr, {})
    names: dict[Expr, str] = {}
    lines = []
    for part in _often(expr):
        lines.append(f"t{len(names) + 1} = {_text(part, names)}")
        names[part] = f"t{len(names) + 1}"
    return "; ".join([*lines, _text(expr, names)])


@functools.lru_cache(maxsize=4096)
def _size(expr: Expr) -> int:
    """How many terms the expression has where every part is written out."""
    return 1 + sum(map(_size, children(expr)))


def _often(expr: Expr) -> list[Expr]:
    """The products and sums of dense matrices that an expression holds more than once, inner ones first."""
    count: dict[Expr, int] = {}

    def visit(part: Expr) -> None:
        count[part] = count.get(part, 0) + 1
        if count[part] == 1:
            for child in children(part):
                visit(child)
            order.append(part)

    order: list[Expr] = []
    visit(expr)
    return [part for part in order if count[part] > 1 and children(part) and sort(part) == "dense"]


def _text(expr: Expr, names: Mapping[Expr, str]) -> str:
    """The expression with names for some of its parts."""
    if expr in names:
        return names[expr]
    of = functools.partial(_text, names=names)
    match expr:
        case Dense(name) | Sparse(name) | Diagonal(name):
            return name
        case Scalar(name, value):
            return name if value is None else f"{value!r}"
        case MatMul(left, right):
            return f"{_factor(left, names)} @ {_factor(right, names)}"
        case Add(terms):
            return " + ".join(
                f"({of(term)})" if isinstance(term, Add) and term not in names else of(term) for term in terms
            )
        case Scale(factor, body):
            return f"{of(factor)} * {_factor(body, names)}"
        case Map(name, body):
            return f"map.{name}({of(body)})"
        case Barrier(name, body):
            return f"barrier.{name}({of(body)})"
        case Aggregate(reduce, graph, body):
            return f"{reduce}({of(graph)}, {of(body)})"
        case Concat(parts, axis):
            return f"{'hcat' if axis else 'vcat'}({', '.join(map(of, parts))})"
        case Fold(body):
            return f"fold({of(body)})"
    raise PlanError(f"{type(expr).__name__} cannot be printed")


def _factor(expr: Expr, names: Mapping[Expr, str]) -> str:
    """An operand of a product: anything that is not one word is bracketed."""
    text = _text(expr, names)
    return f"({text})" if isinstance(expr, MatMul | Add | Scale) and expr not in names else text
