"""plan/program.py: every candidate's program against the algebra, gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import PlanError
from plait.ir import Concat, Dense, formula
from plait.ir.evaluate import evaluate
from plait.ops.program import Step
from plait.plan.candidates import Candidate, candidates
from plait.plan.program import apart, differentiate, hoist, schedule
from tests.plan.expressions import LAYERS, A, B, W, X, learnable, values
from tests.plan.interpreter import run

ALL = [
    pytest.param(candidate, name, id=f"{name}: {candidate.name} [{candidate.form}]")
    for name, forms in LAYERS.items()
    for candidate in candidates(forms)
]


@pytest.mark.parametrize(("candidate", "layer"), ALL)
def test_every_candidate_computes_the_layer(candidate: Candidate, layer: str) -> None:
    expr, rng = LAYERS[layer][0], np.random.default_rng(1)
    given = values(expr, rng)
    env = run(candidate.forward, given, given)
    np.testing.assert_allclose(env[candidate.forward.outputs[0]], evaluate(expr, given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("candidate", "layer"), ALL)
def test_gradients_are_those_of_finite_differences(candidate: Candidate, layer: str) -> None:
    expr, rng = LAYERS[layer][0], np.random.default_rng(2)
    given = values(expr, rng)
    wrt = ("X", *learnable(LAYERS[layer]))
    forward = run(candidate.forward, given, given)
    direction = rng.standard_normal(forward[candidate.forward.outputs[0]].shape)
    backward = candidate.backward(wrt)
    env = run(backward, {**forward, "grad": direction}, given)
    for name, output in zip(wrt, backward.outputs, strict=True):
        step = rng.standard_normal(np.shape(given[name]))
        ends = [
            np.sum(direction * evaluate(expr, {**given, name: given[name] + h * step})) for h in (1e-6, -1e-6)
        ]
        expected = (ends[0] - ends[1]) / 2e-6
        assert np.sum(env[output] * step) == pytest.approx(expected, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("candidate", "layer"), ALL)
def test_nothing_is_computed_for_an_input_nobody_asked_for(candidate: Candidate, layer: str) -> None:
    wrt = learnable(LAYERS[layer])
    backward = candidate.backward(wrt)
    wanted, frontier = set(), {name for name in backward.outputs if name}
    made = {step.out: step for step in backward.steps}
    while frontier:
        name = frontier.pop()
        wanted.add(name)
        frontier |= {operand for _, operand in made[name].reads if operand in made} - wanted
    assert set(made) == wanted | ({"grad"} & set(made))
    assert not [s for s in backward.steps if s.out.endswith("_X")], "a gradient of X"


def test_hoisted_steps_read_nothing_that_changes() -> None:
    for forms in LAYERS.values():
        for candidate in candidates(forms):
            once, each = hoist(candidate.forward, frozenset({"X"}))
            made = {step.out for step in once.steps}
            for step in once.steps:
                assert {n for _, n in step.reads} <= made | {"X"} | set(candidate.forward.constants)
            assert len(once.steps) + len(each.steps) == len(candidate.forward.steps)
            assert set(once.outputs) <= made


def test_hoisting_and_the_rest_compute_the_layer() -> None:
    for forms in LAYERS.values():
        given = values(forms[0], np.random.default_rng(3))
        for candidate in candidates(forms):
            once, each = hoist(candidate.forward, frozenset({"X"}))
            first = run(once, {"X": given["X"]}, given)
            kept = {name: first[name] for name in once.outputs}
            env = run(each, {**given, **kept}, given)
            np.testing.assert_allclose(env[each.outputs[0]], evaluate(forms[0], given), rtol=1e-9, atol=1e-9)


def test_a_product_that_never_changes_is_computed_once_whatever_is_added_to_it() -> None:
    found = set()
    for name, forms in LAYERS.items():
        given = values(forms[0], np.random.default_rng(4))
        for candidate in candidates(forms):
            program = apart(candidate.forward, frozenset({"X"}))
            if program is None:
                continue
            found.add(name)
            once, each = hoist(program, frozenset({"X"}))
            assert len(hoist(candidate.forward, frozenset({"X"}))[0].steps) < len(once.steps)
            first = run(once, {"X": given["X"]}, given)
            env = run(each, {**given, **first}, given)
            np.testing.assert_allclose(env[each.outputs[0]], evaluate(forms[0], given), rtol=1e-9, atol=1e-9)
    assert {"gin", "gin, both maps"} <= found
    assert apart(schedule((A @ X) @ W + B), frozenset({"X"})) is None


def test_an_input_without_influence_has_no_gradient() -> None:
    program = schedule((A @ X) @ W)
    assert differentiate(program, ["W", "absent"]).outputs[1] == ""


def test_a_bias_is_fused_into_the_last_product() -> None:
    (step,) = [s for s in schedule((A @ X) @ W + B).steps if s.get("bias")]
    assert step.op == "gemm"


def test_a_missing_operand_is_named() -> None:
    with pytest.raises(PlanError, match="no operand 'addend'"):
        _ = Step("gemm", "v0", (("x", "X"),))["addend"]


def test_what_no_kernel_computes_is_said_with_the_expression() -> None:
    with pytest.raises(PlanError, match="runs in PyG"):
        schedule(Concat((X, Dense("Y", "N", "K1")), 0))
    with pytest.raises(PlanError, match="a weight must be a leaf"):
        schedule(X @ (W @ Dense("U", "K2", "K3", "learnable")))
    assert formula((A @ X) @ W) == "(A @ X) @ W"
