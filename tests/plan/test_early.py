"""plan/early.py: what comes before a send and after a receive; values are compared in test_exchange.py."""

from __future__ import annotations

import pytest

from plait.plan.candidates import candidates
from plait.plan.early import early, early_backward
from plait.plan.exchange import overlapped
from plait.plan.program import differentiate
from tests.plan.expressions import LAYERS, learnable
from tests.plan.test_exchange import apart


@pytest.mark.parametrize("layer", ["gcn", "sage mean", "gin"])
def test_no_product_of_all_rows_comes_before_a_send_or_after_a_receive(layer: str) -> None:
    """Where rows are scaled inside a product with the graph; gradients where the graph comes first."""
    every = [candidate for candidate in candidates(LAYERS[layer]) if candidate.form != "rows"]
    programs = [early(overlapped(candidate.forward)) for candidate in every]
    whole, wrt = overlapped(every[0].forward), ("X", *learnable(LAYERS[layer]))
    programs.append(early_backward(differentiate(whole, wrt), whole, programs[0]))
    for program in map(apart, programs):
        ops = [step.op for step in program.steps]
        outside = (*program.steps[: ops.index("send")], *program.steps[ops.index("receive") :])
        dense = [step.out for step in outside if step.op in ("gemm", "gemm_transposed")]
        assert not [name for name in dense if program.shapes[name][0] not in ("S", "B")]


def test_gradients_recompute_the_sums_that_values_left_out() -> None:
    gin = candidates(LAYERS["gin"])[0]
    whole = overlapped(gin.forward)
    forward = early(whole)
    assert "v0" not in {step.out for step in forward.steps}
    for wrt, is_read in ((("X", "W"), True), (("X",), False)):  # the gradient of W alone reads them
        backward = early_backward(differentiate(whole, wrt), whole, forward)
        assert ("v0" in {step.out for step in backward.steps}) == is_read
