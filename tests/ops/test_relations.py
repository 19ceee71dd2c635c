"""ops/relations.py: counted work, and gradients of what is asked for alone."""

from __future__ import annotations

from typing import Any

import pytest

from plait.ops.operation import Pattern, operation
from plait.ops.program import Program, Step
from plait.plan.program import differentiate
from plait.plan.relational import RelationalLayer, ways

SIZES = {"N": 10, "M": 10, "E": 30, "NR": 40, "MR": 40, "P": 17, "Q": 19}
INNER, WIDTH, RELATIONS = 6, 4, 4


def program(choice: str, **more: Any) -> Program:
    of = RelationalLayer(INNER, WIDTH, RELATIONS, **more)
    return next(way.program for way in ways(of, SIZES) if way.name == choice)


class Sizes:
    """A program's values on a small graph."""

    def __init__(self, of: Program):
        self.of = of

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.of.shapes[name]
        return SIZES.get(str(rows), rows), cols  # type: ignore[return-value]

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        return Pattern(10, 30, 7, False) if name == "A" else None

    def keeps(self, name: str) -> bool:
        return True


def flops(found: Program, step: Step) -> int:
    return int(sum(operation(step.op).flops(step, Sizes(found)).values()))


def products(found: Program, *ops: str) -> list[int]:
    return [flops(found, step) for step in found.steps if step.op in ops]


def test_a_pair_meets_its_relations_weights_alone() -> None:
    assert products(program("aggregate pairs"), "relate") == [2 * 17 * INNER * WIDTH]
    assert products(program("transform pairs"), "relate") == [2 * 19 * INNER * WIDTH]


@pytest.mark.parametrize(("choice", "layout"), [("aggregate", "inner"), ("transform", "outer")])
def test_blocks_divide_the_work_of_all_relations(choice: str, layout: str) -> None:
    found = program(choice, blocks=2, has_root=False, has_bias=False)
    (step,) = (step for step in found.steps if step.op == "relate")
    assert step.option("layout") == layout
    assert flops(found, step) == 2 * 10 * RELATIONS * INNER * WIDTH // 2


@pytest.mark.parametrize("choice", ["aggregate", "transform", "aggregate pairs", "transform pairs", "bases"])
def test_without_the_gradient_of_x_no_sum_of_its_rows_is_sent_back(choice: str) -> None:
    found = program(choice, bases=2)
    back = differentiate(found, ("W", "T", "V"))
    assert not any(step.op in ("basis_sources", "basis_shares") for step in back.steps)
    collects = [step for step in found.steps if step.op == "spmm" and step["x"] == "X"]
    assert not any(step["matrix"] == s["matrix"] for step in collects for s in back.steps if s.op == "spmm")


def test_shares_of_bases_are_multiplied_out_per_edge_and_basis() -> None:
    found = program("bases", bases=2, is_mean=False)
    (sums,) = products(found, "basis_sums")
    assert sums == 2 * 30 * 2 * INNER
    (shares,) = products(differentiate(found, ("K",)), "basis_shares")
    assert shares == 30 * 2 * (2 * INNER + 1)
