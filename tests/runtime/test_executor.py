"""runtime/executor.py: programs under autograd, what they keep and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.cost.machine import default_profile
from plait.graph import Graph
from plait.ir import Dense
from plait.ir.build import chebyshev
from plait.ir.evaluate import evaluate
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem, survey
from plait.runtime import linear
from plait.runtime.buffers import Buffers
from plait.runtime.constants import Constants
from plait.runtime.evaluate import gradients_depend_on
from plait.runtime.executor import Run, apply
from tests.plan.expressions import LAYERS, NORMALISED, SIZES, N, X, learnable, values

CASES = [
    pytest.param(name, is_constant, id=f"{name}{', X constant' if is_constant else ''}")
    for name in sorted(LAYERS)
    for is_constant in (False, True)
]


def bound(name: str, is_constant: bool) -> tuple[list[LayerPlan], Constants, dict[str, Any]]:
    """Every plan of a layer, the constants of a small graph, numbers for its inputs."""
    forms = LAYERS[name]
    given = values(forms[0], np.random.default_rng(11))
    target, source = np.nonzero(given["A"])
    is_weighted = "weights" in name
    counts = np.ones(len(target), int) if is_weighted else given["A"][target, source].astype(int)
    graph = Graph.from_edge_index(np.repeat(source, counts), np.repeat(target, counts), N).with_order(None)
    weight = torch.from_numpy(given["A"][graph.edge_rows(), graph.indices]) if is_weighted else None
    vectors = {key: torch.from_numpy(np.atleast_1d(given[key])) for key in "plq" if key in given}
    constants = Constants(graph, weight, vectors, torch.float64)
    wrt = (*learnable(forms), *(() if is_constant else ("X",))) or None
    problem = Problem(
        forms, SIZES, constants.cost_matrix, default_profile(), wrt,
        frozenset({"X"}) if is_constant else frozenset(), float_bytes=8,
    )  # fmt: skip
    return survey(problem), constants, given


def tensors(plan: LayerPlan, given: dict[str, Any]) -> dict[str, Tensor]:
    names = {name for program in (plan.hoisted, plan.forward) for name in program.inputs}
    return {
        name: torch.tensor(given[name], dtype=torch.float64).requires_grad_(name in plan.wrt)
        for name in names
    }


def run_of(plan: LayerPlan, constants: Constants, inputs: dict[str, Tensor]) -> Run:
    run = Run(plan, constants, Buffers())
    with torch.no_grad():
        run.hoisted = run.hoist(dict(inputs)) if plan.hoisted.steps else {}
    return run


@pytest.mark.parametrize(("name", "is_constant"), CASES)
def test_every_plan_computes_the_layer_and_its_gradients(name: str, is_constant: bool) -> None:
    plans, constants, given = bound(name, is_constant)
    expected = evaluate(LAYERS[name][0], given)
    direction = torch.from_numpy(np.random.default_rng(12).standard_normal(expected.shape))
    gradients: list[dict[str, Tensor]] = []
    for plan in plans:
        inputs = tensors(plan, given)
        out = apply(run_of(plan, constants, inputs), inputs)
        np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
        if not plan.wrt:
            continue
        out.backward(direction)
        gradients.append({key: t.grad for key, t in inputs.items() if t.grad is not None})
        assert set(gradients[-1]) == set(plan.wrt)
    for other in gradients[1:]:
        for key, grad in gradients[0].items():
            torch.testing.assert_close(other[key], grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gcn", "gin", "cheb", "sage max"])
def test_gradients_pass_torchs_own_check(name: str) -> None:
    plans, constants, given = bound(name, False)
    inputs = tensors(plans[0], given)
    run = run_of(plans[0], constants, inputs)
    names = list(inputs)
    assert torch.autograd.gradcheck(
        lambda *args: apply(run, dict(zip(names, args, strict=True))), tuple(inputs.values())
    )


def test_a_maximum_has_the_same_gradient_with_marks_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, constants, given = bound("sage max", False)
    gradients = []
    for most in (0, 1000):
        monkeypatch.setattr(linear, "_MOST_MARKED", most)
        inputs = tensors(plans[0], given)
        out = apply(run_of(plans[0], constants, inputs), inputs)
        node: Any = out.grad_fn
        assert any(t is not None and t.dtype == torch.uint8 for t in node.saved_tensors) == (most > 0)
        gradients.append(torch.autograd.grad(out.square().sum(), list(inputs.values())))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(("name", "is_constant"), CASES)
def test_second_derivatives_are_the_same_whatever_the_plan(name: str, is_constant: bool) -> None:
    plans, constants, given = bound(name, is_constant)
    found: list[list[Tensor]] = []
    for plan in plans:
        inputs = tensors(plan, given)
        by = [inputs[key] for key in sorted(plan.wrt)]
        if not by:
            return
        out = apply(run_of(plan, constants, inputs), inputs)
        plain = torch.autograd.grad(out.square().sum(), by, retain_graph=True)
        first = torch.autograd.grad(out.square().sum(), by, create_graph=True)
        torch.testing.assert_close(first, plain)
        total = sum((part * part.detach().cos()).sum() for part in first)
        second = torch.autograd.grad(total, by, materialize_grads=True)  # type: ignore[arg-type]
        assert any(part.any() for part in second)
        found.append([*first, *second])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_inputs_no_gradient_depends_on_are_not_kept() -> None:
    plans, constants, given = bound("gcn", False)
    for plan in plans:
        inputs = tensors(plan, given)
        node: Any = apply(run_of(plan, constants, inputs), inputs).grad_fn
        assert not any(kept is inputs["b"] for kept in node.saved_tensors)


def test_what_gradients_depend_on_is_found_where_parts_are_shared_at_every_level() -> None:
    weights = [Dense(f"W{k}", "K1", "K2", "learnable") for k in range(60)]
    form = chebyshev(NORMALISED, X, weights)[0]
    assert gradients_depend_on(form, ("X",)) >= {weight.name for weight in weights}


def test_no_gradient_is_computed_for_an_input_that_wants_none() -> None:
    plans, _, _ = bound("gcn", True)
    for plan in plans:
        assert plan.backward is not None
        assert not [step for step in plan.backward.steps if step.out.endswith("_X")]
        assert not [step for step in plan.backward.steps if step.op == "spmm"]


def test_intermediates_are_freed_after_the_backward_pass() -> None:
    plans, constants, given = bound("tag", False)
    for plan in plans:
        inputs = tensors(plan, given)
        out = apply(run_of(plan, constants, inputs), inputs)
        node: Any = out.grad_fn
        assert node.saved_tensors
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            _ = node.saved_tensors


def test_inputs_are_left_as_they_were() -> None:
    for name in LAYERS:
        plans, constants, given = bound(name, False)
        for plan in plans:
            inputs = tensors(plan, given)
            before = {key: value.detach().clone() for key, value in inputs.items()}
            apply(run_of(plan, constants, inputs), inputs).sum().backward()
            for key, value in inputs.items():
                assert torch.equal(value.detach(), before[key])


def test_the_gradient_handed_in_is_left_as_it_was() -> None:
    for name in LAYERS:
        plans, constants, given = bound(name, False)
        for plan in plans:
            inputs = tensors(plan, given)
            out = apply(run_of(plan, constants, inputs), inputs)
            direction = torch.ones_like(out).cumsum(0)
            out.backward(direction)
            assert torch.equal(direction, torch.ones_like(out).cumsum(0))


def test_a_trace_times_every_step() -> None:
    plans, constants, given = bound("gcn", False)
    inputs = tensors(plans[0], given)
    run = run_of(plans[0], constants, inputs)
    run.trace = []
    apply(run, inputs).sum().backward()
    assert {label.split("\0")[1] for label, _ in run.trace} == {s.step.out for s in plans[0].steps}
