"""ir/text.py: two expressions have one text only where they are the same."""

from __future__ import annotations

from typing import Any

import pytest

from plait.ir import (
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    Map,
    Scalar,
    Scale,
    Sparse,
    children,
    formula,
    total,
)
from plait.ir.build import chebyshev, number, polynomial, propagation
from tests.ir.test_rules import FIRES, S, W, X

EXAMPLES = [
    *FIRES.values(),
    *polynomial(S, X, [W, W, W]),
    *chebyshev(S, X, [W, W, W]),
    Scale(number(-0.5), X),
    Scale(number(1e-07), Fold(S) @ X),
    Scale(Scalar("e", None, "learnable"), X),
    Map("relu", Barrier("dropout", X)),
    Aggregate("max", Sparse("A", "N", "M", True), Dense("Z", "M", 7)),
    Concat((X, X), 1),
    total(propagation(is_weighted=True) @ X, X),
]


def outline(expr: Expr) -> tuple[Any, ...]:
    """An expression with the names of its leaves in their place."""
    if isinstance(expr, Dense | Sparse | Diagonal):
        return (expr.name,)
    if isinstance(expr, Scalar):
        return (expr.name if expr.value is None else expr.value,)
    told = [getattr(expr, name) for name in ("name", "reduce", "axis") if hasattr(expr, name)]
    return (type(expr).__name__, *told, *map(outline, children(expr)))


@pytest.mark.parametrize("expr", EXAMPLES, ids=formula)
def test_what_is_written_alike_is_the_same_but_for_its_leaves(expr: Expr) -> None:
    for other in EXAMPLES:
        assert (formula(other) == formula(expr)) == (outline(other) == outline(expr))


def test_products_are_bracketed_as_they_are_associated() -> None:
    assert formula((S @ X) @ W) != formula(S @ (X @ W))
    assert formula(Scale(number(-0.5), X)) == "-0.5 * X"
    assert formula(Aggregate("max", Sparse("A", "N", "M"), X)) == "max(A, X)"


def _recurrence(count: int) -> Expr:
    return chebyshev(S, X, [Dense(f"W{k}", "K1", "K2", "learnable") for k in range(count)])[0]


def test_what_a_long_expression_holds_often_is_written_once() -> None:
    """Written out, the recurrence doubles with every weight."""
    text = formula(_recurrence(60))
    assert len(text) < 10_000
    assert text.startswith("t1 = ")
    assert formula(_recurrence(59)) != text
    assert ";" not in formula(_recurrence(5))
