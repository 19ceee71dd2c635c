"""plan/fuse.py: a fused program computes what it was fused from, in fewer passes."""

from __future__ import annotations

import numpy as np
import pytest

from plait.ops.program import Program
from plait.plan.candidates import Candidate
from plait.plan.fuse import MOST_PRODUCTS, MOST_SUMS, fuse
from tests.plan.expressions import LAYERS, learnable, values
from tests.plan.interpreter import run
from tests.plan.test_program import ALL


@pytest.mark.parametrize(("candidate", "layer"), ALL)
def test_a_fused_program_computes_the_same_values_and_gradients(candidate: Candidate, layer: str) -> None:
    given = values(LAYERS[layer][0], np.random.default_rng(3))
    wrt = ("X", *learnable(LAYERS[layer]))
    forward, backward = candidate.forward, candidate.backward(wrt)
    read = {name for step in backward.steps for _, name in step.reads}
    fused = fuse(forward, (*forward.outputs, *read)), fuse(backward, backward.outputs)
    plain = run(forward, given, given)
    chained = run(fused[0], given, given)
    out = forward.outputs[0]
    np.testing.assert_allclose(chained[out], plain[out], rtol=1e-9, atol=1e-9)
    grad = {"grad": np.random.default_rng(4).standard_normal(plain[out].shape)}
    one = run(backward, {**plain, **grad}, given)
    other = run(fused[1], {**chained, **grad}, given)
    for name in backward.outputs:
        if name:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-8, atol=1e-8)
    for program in fused:
        _check_sizes(program)


def _check_sizes(program: Program) -> None:
    for step in program.steps:
        if step.op == "chain":
            roles = [role for role, _ in step.reads]
            assert sum(role.startswith("rows") for role in roles) <= MOST_PRODUCTS
            assert sum(role.startswith("right") for role in roles) <= MOST_SUMS


@pytest.mark.parametrize("layer", ["gcn", "sage mean"])
def test_a_layer_that_updates_first_has_one_backward_pass(layer: str) -> None:
    counts = []
    for candidate in (param.values[0] for param in ALL if param.values[1] == layer):
        assert isinstance(candidate, Candidate)
        backward = candidate.backward(("X", *learnable(LAYERS[layer])))
        counts.append([step.op for step in fuse(backward, backward.outputs).steps])
    assert ["chain"] in counts


def test_what_runs_on_other_kernels_stays_apart() -> None:
    (param, *_) = [p for p in ALL if p.values[1] == "gcn"]
    candidate = param.values[0]
    assert isinstance(candidate, Candidate)
    apart = {step.out for step in candidate.forward.steps}
    assert fuse(candidate.forward, candidate.forward.outputs, apart).steps == candidate.forward.steps
