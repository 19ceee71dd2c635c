"""ops/entries.py: what products with values that are inputs cost, and the steps of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plait.ops.operation import Pattern, operation
from plait.ops.program import Program, Step
from plait.ops.work import size_of
from plait.plan.draft import Draft
from plait.plan.program import differentiate

SIZES = {"N": 40, "E": 240, "L": 250}
WIDTH = 6


@dataclass(frozen=True)
class Sizes:
    """A program on a graph of so many nodes and edges."""

    program: Program

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.program.shapes[name]
        return size_of(rows, SIZES), size_of(cols, SIZES)

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        return Pattern(SIZES["N"], SIZES["E"], 9, True)

    def keeps(self, name: str) -> bool:
        return True


def flops(step: Step, program: Program) -> int:
    return int(sum(operation(step.op).flops(step, Sizes(program)).values()))


def product(has_own: bool, identity: float = 0.0) -> Program:
    draft = Draft()
    entries = draft.input("E", "E+N" if has_own else "E", 1)
    reads = {"matrix": draft.matrix(), "entries": entries, "x": draft.input("X", "N", WIDTH)}
    return draft.program(draft.add("entry_sums", reads, ("N", WIDTH), has_own=has_own, identity=identity))


def normalisation() -> Program:
    draft = Draft()
    reads = {"places": draft.object("places", "E", 1), "weight": draft.input("w", "L", 1)}
    return draft.program(draft.add("normalise", reads, ("E+N", 1)))


@pytest.mark.parametrize("has_own", [False, True])
def test_a_product_costs_two_operations_per_entry_and_column_each_way(has_own: bool) -> None:
    forward = product(has_own)
    backward = differentiate(forward, ("E", "X"))
    entries = SIZES["E"] + (SIZES["N"] if has_own else 0)
    found = [flops(step, program) for program in (forward, backward) for step in program.steps]
    assert found == [2 * entries * WIDTH] * 3


def test_a_product_with_the_identity_costs_one_more_of_rows() -> None:
    program = product(False, 1.0)
    assert flops(program.steps[0], program) == 2 * (SIZES["E"] + SIZES["N"]) * WIDTH


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (("E",), [("entry_dots", False)]),
        (("X",), [("entry_sums", True)]),
        (("E", "X"), [("entry_dots", False), ("entry_sums", True)]),
    ],
)
def test_the_gradient_of_sums_is_dots_and_sums_the_other_way(
    wrt: tuple[str, ...], expected: list[tuple[str, bool]]
) -> None:
    backward = differentiate(product(True), wrt)
    assert [(step.op, step.is_transposed) for step in backward.steps] == expected
    assert all(step.option("has_own") for step in backward.steps)


def test_the_gradient_of_a_normalisation_reads_no_value_of_the_forward_pass() -> None:
    forward = normalisation()
    backward = differentiate(forward, ("w",))
    (step,) = backward.steps
    assert dict(step.reads) == {"places": "places", "grad": "grad"}
    assert flops(step, backward) == 2 * flops(forward.steps[0], forward)
