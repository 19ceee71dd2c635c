"""ir/text.py: what is printed is read back equal."""

from __future__ import annotations

import pytest

from plait.errors import PlanError
from plait.ir import (
    Aggregate,
    Barrier,
    Concat,
    Dense,
    Fold,
    Map,
    Scalar,
    Scale,
    Sparse,
    formula,
    parse,
    to_text,
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


@pytest.mark.parametrize("expr", EXAMPLES, ids=formula)
def test_parse_inverts_print(expr) -> None:
    assert parse(to_text(expr)) == expr


@pytest.mark.parametrize(
    "text",
    [
        "X",
        "X: dense[N] data; X",
        "X: dense[N, K] wrong; X",
        "X: dense[N, K] data; X @",
        "X: dense[N, K] data; X X",
        "nonsense(X)",
    ],
)
def test_nonsense_is_refused_with_the_place(text: str) -> None:
    with pytest.raises(PlanError, match="text:"):
        parse(text)
