"""plan/candidates.py: the closure of associations, graph forms, and the law of restriction."""

from __future__ import annotations

import numpy as np
import pytest

from plait.ir import Aggregate, Dense, Diagonal, Expr, MatMul, Scale, Sparse, total
from plait.ir.build import chebyshev
from plait.ir.evaluate import evaluate
from plait.plan.candidates import FORMS, associations, candidates, restrict
from tests.plan.expressions import EPS, LAYERS, NORMALISED, A, B, V, W, X, values
from tests.plan.interpreter import run

SELECTION = Sparse("E", "Nr", "N")


@pytest.mark.parametrize("matrix", [A, NORMALISED])
def test_the_closure_holds_both_orders_from_either(matrix: Expr) -> None:
    first, last = (matrix @ X) @ W, matrix @ (X @ W)
    assert set(associations((first,))) == set(associations((last,))) == {first, last}


def test_given_forms_come_first() -> None:
    for forms in LAYERS.values():
        assert associations(forms)[: len(forms)] == forms


def test_a_long_polynomial_stays_small() -> None:
    value: Expr = X
    for _ in range(12):
        value = total(Scale(EPS, NORMALISED @ value), Scale(EPS, X))
    assert len(associations((total(value @ W, X @ V),))) <= 96


def test_loops_of_a_deep_product_stay_with_the_matrix() -> None:
    """As added terms they double the expression at every level; it would never end here."""
    value: Expr = X
    for _ in range(60):
        value = total(Scale(EPS, NORMALISED @ value), Scale(EPS, X))
    found = candidates((value,))
    assert {candidate.form for candidate in found} == {"edges"}
    assert len(found[0].forward.steps) <= 240


def test_parts_that_are_shared_at_every_level_are_looked_at_once() -> None:
    """As a tree the recurrence has more parts than can be visited."""
    weights = [Dense(f"W{k}", "K1", "K2", "learnable") for k in range(60)]
    found = candidates(chebyshev(NORMALISED, X, weights))
    assert found
    assert all(len(candidate.forward.steps) <= 400 for candidate in found)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_association_has_the_same_value(name: str) -> None:
    forms = LAYERS[name]
    given = values(forms[0], np.random.default_rng(4))
    expected = evaluate(forms[0], given)
    for expr in associations(forms):
        np.testing.assert_allclose(evaluate(expr, given), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_form_is_described_and_programs_differ(name: str) -> None:
    options = candidates(LAYERS[name])
    assert {option.form for option in options} <= set(FORMS)
    programs = [(option.forward.steps, tuple(option.forward.constants)) for option in options]
    assert len(set(programs)) == len(programs)


def test_only_loops_of_ones_go_inside() -> None:
    inside = "fused, loops inside"
    assert inside in {c.form for c in candidates(LAYERS["gcn, loops of ones"])}
    assert inside not in {c.form for c in candidates(LAYERS["gcn"])}


def test_a_normalised_matrix_is_tried_folded_fused_and_by_rows() -> None:
    assert {c.form for c in candidates(LAYERS["gcn"])} == {"edges", "fused", "rows"}
    assert {c.form for c in candidates(((A @ X) @ W,))} == {"plain"}


def test_restriction_is_a_product_with_the_selection() -> None:
    exprs = [
        *(form for forms in LAYERS.values() for form in forms if not _mapped(form)),
        X,
        total(Scale(EPS, X @ W), B),
        Aggregate("max", A, X),
        MatMul(Diagonal("p", "N"), X),
    ]
    for expr in exprs:
        restricted = restrict(expr, SELECTION)
        given = {**values(expr, np.random.default_rng(5)), **values(restricted, np.random.default_rng(5))}
        expected = evaluate(SELECTION, given) @ evaluate(expr, given)
        np.testing.assert_allclose(evaluate(restricted, given), expected, rtol=1e-9, atol=1e-9)


def _mapped(expr: Expr) -> bool:
    return "map." in str(expr)


def test_restriction_passes_through_maps() -> None:
    (expr,) = LAYERS["gin, both maps"]
    given = {**values(expr, np.random.default_rng(6)), "E": np.eye(7)[[0, 2, 5]]}
    expected = evaluate(expr, given)[[0, 2, 5]]
    np.testing.assert_allclose(evaluate(restrict(expr, SELECTION), given), expected)


def test_restricted_candidates_compute_the_selected_rows() -> None:
    for forms in LAYERS.values():
        restricted = tuple(restrict(form, SELECTION) for form in forms)
        given = {**values(forms[0], np.random.default_rng(7)), "E": np.eye(7)[[0, 2, 5]]}
        expected = evaluate(forms[0], given)[[0, 2, 5]]
        for candidate in candidates(restricted):
            env = run(candidate.forward, given, given)
            np.testing.assert_allclose(env[candidate.forward.outputs[0]], expected, rtol=1e-9, atol=1e-9)
