"""plan/draft.py: programs written step by step are programs the table accepts."""

from __future__ import annotations

import pytest

from plait.errors import PlanError
from plait.plan.draft import Draft


def test_a_draft_names_its_values_inputs_and_constants() -> None:
    draft = Draft("M")
    z = draft.gemm(draft.input("X", "M", 3), draft.input("W", 3, 4), draft.input("b", 1, 4))
    reads = {"matrix": draft.matrix(), "near": draft.input("K", "N", 2), "far": draft.columns(z, 0, 2)}
    out = draft.add("gate", {**reads, "value": draft.columns(z, 2, 2)}, ("N", 2), more=[("slopes", ("N", 2))])
    program = draft.program(out)
    assert program.inputs == ("X", "W", "b", "K")
    assert program.outputs == (out,)
    assert program.steps[-1].more == (f"{out}|slopes",)
    assert program.shapes[f"{out}|slopes"] == ("N", 2)
    assert list(program.constants) == ["A"]


def test_a_step_with_a_role_that_its_operation_does_not_know_is_refused() -> None:
    draft = Draft()
    x = draft.input("X", "N", 3)
    with pytest.raises(PlanError, match="left"):
        draft.add("gemm", {"x": x, "w": x, "left": x}, ("N", 3))
