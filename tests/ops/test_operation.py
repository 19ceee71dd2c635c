"""ops/operation.py: what the table knows, and what it refuses."""

from __future__ import annotations

import importlib

import pytest

from plait.errors import PlanError
from plait.ops.operation import TABLE, Operation, operation, register
from plait.ops.program import Step
from plait.plan.candidates import candidates
from tests.plan.expressions import LAYERS


def _steps() -> list[Step]:
    found = []
    for forms in LAYERS.values():
        for candidate in candidates(forms):
            wrt = tuple(name for name in candidate.forward.inputs if name != "alpha")
            found += [*candidate.forward.steps, *candidate.backward(wrt).steps]
    return found


def test_every_step_of_every_candidate_has_the_roles_its_operation_declares() -> None:
    steps = _steps()
    assert len(steps) > 500
    for step in steps:
        operation(step.op).check(step)


def test_a_step_with_another_role_or_without_one_is_refused() -> None:
    with pytest.raises(PlanError, match=r"spmm -> v0 lacks 'x'"):
        operation("spmm").check(Step("spmm", "v0", (("matrix", "A"),)))
    with pytest.raises(PlanError, match="has an operand 'speed'"):
        operation("relu").check(Step("relu", "v0", (("x", "X"), ("speed", "s"))))


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(PlanError, match=r"'warp' is not in the table; known are .*spmm"):
        operation("warp")


def test_what_an_operation_overwrites_is_one_of_its_operands() -> None:
    relu = TABLE["relu"]
    with pytest.raises(PlanError, match="overwrites 'y'"):
        Operation("bad", ("x",), relu.flops, relu.depth, relu.request, overwrites="y")


@pytest.mark.parametrize("row", [row for row in TABLE.values() if row.reference], ids=lambda row: row.name)
def test_references_are_where_the_table_says(row: Operation) -> None:
    pytest.importorskip("torch")
    module, _, name = row.reference.partition(":")
    found = importlib.import_module(module)
    assert not name or callable(getattr(found, name))


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="'gemm' is in the table already"):
        register(operation("gemm"))
