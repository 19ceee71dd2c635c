"""ops/aggregators.py: counted work, and gradients of what is asked for alone."""

from __future__ import annotations

from typing import Any

import pytest

from plait.ops.operation import Pattern, operation
from plait.ops.program import Program
from plait.plan.pna import Towers, ways
from plait.plan.program import differentiate

NODES, EDGES, WIDTH, OUTER = 10, 30, 4, 5


def towers(*names: str, **more: Any) -> Towers:
    kept = (*names, "mean") if {"var", "std"} & {*names} and "mean" not in names else names
    return Towers(WIDTH, OUTER, 1, names, kept, 6, 2, is_divided=False, has_last=False, **more)


def program(choice: str, of: Towers) -> Program:
    return next(way.program for way in ways(of, is_training=True) if way.name == choice)


class Sizes:
    """A program's values on a small graph."""

    def __init__(self, of: Program):
        self.of = of

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.of.shapes[name]
        return {"N": NODES, "E": EDGES}.get(str(rows), rows), cols  # type: ignore[return-value]

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        return Pattern(NODES, EDGES, 7, False) if name == "A" else None

    def keeps(self, name: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("names", "each"),
    [(("sum",), 1), (("mean", "sum"), 1), (("max",), 1), (("mean", "min", "max", "std"), 5), (("var",), 3)],
)
def test_a_gather_serves_all_aggregators_and_counts_each_once(names: tuple[str, ...], each: int) -> None:
    found = program("after", towers(*names))
    step = next(step for step in found.steps if step.op == "aggregate")
    assert operation("aggregate").flops(step, Sizes(found))["aggregate"] == each * EDGES * WIDTH


def test_a_weighed_sum_multiplies_and_adds_every_part() -> None:
    found = program("after", towers("mean"))
    step = next(step for step in found.steps if step.op == "weigh")
    assert operation("weigh").flops(step, Sizes(found)) == {"vertex update": 2 * NODES * 2 * OUTER}


@pytest.mark.parametrize("choice", ["after", "before"])
def test_without_the_gradient_of_messages_no_pass_goes_back_over_the_edges(choice: str) -> None:
    made = program(choice, towers("mean", "std"))
    ops = [step.op for step in differentiate(made, ("W0", "C0")).steps]
    assert "aggregate_sources" not in ops
    assert "row_dots" not in ops
    assert "row_dots" in [step.op for step in differentiate(made, ("S",)).steps]


def test_of_messages_only_wanted_gradients_are_made() -> None:
    made = program("after", towers("mean", edge_width=3, message_layers=2))
    (step,) = (s for s in differentiate(made, ("E",)).steps if s.op == "aggregate_messages_back")
    assert step.option("wanted") == ("w0",)
    assert not step.more
