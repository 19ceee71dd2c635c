"""plan/words.py: the order of a layer, the reason for it, and every step, in words."""

from __future__ import annotations

import pytest

from plait.ops.program import Step
from plait.plan import words
from plait.plan.plan import LayerPlan
from plait.plan.search import search, survey
from tests.plan.expressions import LAYERS, learnable
from tests.plan.test_plan import layer
from tests.plan.test_search import problem

BEGINNINGS = {"aggregate", "multiply", "compute", "combine", "take"}


def planned(widths: dict[str, int]) -> LayerPlan:
    return search(problem("gcn", widths=widths, wrt=(*learnable(LAYERS["gcn"]), "X")))


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_plan_has_its_order_in_words(name: str) -> None:
    for plan in survey(problem(name)):
        text = words.order(plan.hoisted, plan.forward, is_training=True)
        assert text.split()[0] in BEGINNINGS, (plan.text, text)


def test_the_order_says_what_comes_first() -> None:
    orders = {words.order(p.hoisted, p.forward, is_training=True) for p in survey(problem("gcn"))}
    assert {"aggregate first, then multiply by W", "multiply by W first, then aggregate"} <= orders


def test_the_reason_compares_the_columns_that_the_two_orders_gather() -> None:
    assert words.why(planned({"K1": 64, "K2": 8})) == "gathering 8 columns per edge is cheaper than 64"
    assert words.why(planned({"K1": 8, "K2": 64})) == "gathering 8 columns per edge is cheaper than 64"
    assert words.why(planned({"K1": 256, "K2": 1})) == "gathering 1 column per edge is cheaper than 256"


def test_what_never_changes_is_done_once() -> None:
    plan = search(problem("gcn", constant=frozenset({"X"}), wrt=("W", "b")))
    text = words.order(plan.hoisted, plan.forward, is_training=True)
    assert text == "aggregate once before training, then only multiply by W"
    assert words.why(plan) == "x never changes"


def test_a_way_without_a_description_shows_its_formula() -> None:
    assert words.of_choice("no such way", "f(x)") == "compute f(x)"
    assert words.of_choice("edge sums", "f(x)") == "sum rows weighted by edge"
    assert words.of_choice("agnn lean", "f(x)").startswith("weight neighbours' rows by cosines")


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_step_has_words_instead_of_its_operation(name: str) -> None:
    for priced in layer(name).steps:
        text = words.step_text(priced.step)
        assert text
        assert "_" not in text, (priced.step, text)


def test_a_transposed_product_is_a_gradient() -> None:
    reads = (("x", "v0"), ("w", "W"))
    assert words.step_text(Step("gemm", "v1", reads)) == "multiply by W"
    assert words.step_text(Step("gemm", "dX", reads, is_transposed=True)) == "gradient of the input, by W"
