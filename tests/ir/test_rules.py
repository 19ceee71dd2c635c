"""Every law of ir/rules.py and ir/build.py on random matrices."""

from __future__ import annotations

import numpy as np
import pytest

from plait.ir import (
    Add,
    Aggregate,
    Concat,
    Dense,
    Diagonal,
    Expr,
    Fold,
    MatMul,
    Scalar,
    Scale,
    Sparse,
    shape,
    total,
)
from plait.ir.build import chebyshev, number, polynomial, propagation
from plait.ir.evaluate import evaluate
from plait.ir.rules import RULES, everywhere, sweep

N = 6
SIZES = {"N": N, "K1": 3, "K2": 4}
X, Y = Dense("X", "N", "K1"), Dense("Y", "N", "K1")
V, W = Dense("V", "K1", "K2", "learnable"), Dense("W", "K1", "K2", "learnable")
A, l, p, q = Sparse("A", "N", "N"), Diagonal("l", "N"), Diagonal("p", "N"), Diagonal("q", "N")
c = Scalar("c", None, "learnable")
S = propagation(left=True, loops=True, right=True)

# one expression for each rule that it must fire on
FIRES: dict[str, Expr] = {
    "update_first": (S @ X) @ W,
    "aggregate_first": S @ (X @ W),
    "distribute_weight": total(A @ X, Y) @ W,
    "factor_weight": total(A @ X @ W, Dense("b", 1, "K2"), Y @ W),
    "scale_outwards": Scale(c, X) @ W,
    "scale_inwards": Scale(c, X @ W),
    "factor_pattern": total(A @ X, A @ Y),
    "concatenate": total(X @ V, Y @ W, Dense("b", 1, "K2")),
    "split_product": S @ X,
    "split_loops": Add((A, l)) @ X,
    "distribute_scaling": p @ total(X, Y),
    "fold_scalings": p @ (q @ X),
    "fold_matrix": S @ X,
    "fold_loops": Add((A, l)) @ X,
    "sum_is_product": Aggregate("sum", A, X),
}


def values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    dense = {name: rng.standard_normal((N, 3)) for name in ("X", "Y")}
    weights = {name: rng.standard_normal((3, 4)) for name in ("V", "W", *(f"W{k}" for k in range(5)))}
    graph = {"A": rng.integers(0, 3, (N, N)).astype(float)}
    diagonals = {name: rng.standard_normal(N) for name in "lpq"}
    return {
        **dense,
        **weights,
        **graph,
        **diagonals,
        "c": rng.standard_normal(),
        "b": rng.standard_normal((1, 4)),
    }


def test_every_rule_has_an_expression_to_fire_on() -> None:
    assert set(FIRES) == set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("seed", range(3))
def test_every_law_holds(name: str, seed: int) -> None:
    expr, given = FIRES[name], values(seed)
    expected = evaluate(expr, given)
    others = list(everywhere(RULES[name], expr))
    assert others, f"{name} does not fire on {expr}"
    for other in [*others, sweep(RULES[name], expr)]:
        assert shape(other) == shape(expr)
        np.testing.assert_allclose(evaluate(other, given), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("degree", range(1, 5))
def test_polynomial_forms_are_equal(degree: int, seed: int) -> None:
    weights = [Dense(f"W{k}", "K1", "K2", "learnable") for k in range(degree + 1)]
    for forms in (
        polynomial(S, X, weights),
        chebyshev(S, X, weights),
        polynomial(S, X, [None, *weights[1:]]),
    ):
        first = evaluate(forms[0], values(seed))
        for form in forms[1:]:
            np.testing.assert_allclose(evaluate(form, values(seed)), first, rtol=1e-9, atol=1e-9)


def test_a_fold_has_the_value_of_its_body() -> None:
    given = values(0)
    np.testing.assert_allclose(evaluate(Fold(S), given), evaluate(S, given))
    assert number(2.0) == number(2.0)


def test_random_rewrites_keep_the_value() -> None:
    rng = np.random.default_rng(5)
    start = total((S @ (S @ X)) @ W, Scale(c, X) @ W, Concat((X, Y), 1) @ Concat((V, W), 0), MatMul(X, V))
    given = values(5)
    expected = evaluate(start, given)
    for _ in range(40):
        expr = start
        for _ in range(6):
            options = [other for rule in RULES.values() for other in everywhere(rule, expr)]
            expr = options[rng.integers(len(options))] if options else expr
        np.testing.assert_allclose(evaluate(expr, given), expected, rtol=1e-8, atol=1e-8)


def _doubled(levels: int) -> Expr:
    """Reads its part twice at every level."""
    value: Expr = X
    for _ in range(levels):
        value = Add((A @ value, value))
    return value


def test_equal_expressions_that_share_their_parts_compare_as_what_they_hold() -> None:
    assert _doubled(60) == _doubled(60)
    assert _doubled(60) != _doubled(59)
    assert _doubled(3) != "another type"


def test_a_rule_that_fits_nowhere_visits_shared_parts_once() -> None:
    assert not list(everywhere(RULES["update_first"], _doubled(60)))
