"""ops/gates.py: what a gate costs, counted in a loop, and how its gradient goes with and without slopes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plait.ops.operation import Pattern, operation
from plait.ops.program import Program
from plait.plan.gated import ways
from plait.plan.program import differentiate

NODES, EDGES, WIDTH = 40, 240, 6


@dataclass(frozen=True)
class Sizes:
    """A program on a graph of so many nodes and edges."""

    program: Program

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.program.shapes[name]
        return {"N": NODES, "E": EDGES}.get(str(rows), rows), int(cols)  # type: ignore[return-value]

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        return Pattern(NODES, EDGES, 9, False)

    def keeps(self, name: str) -> bool:
        return True


def programs() -> dict[str, Program]:
    found = ways(4, None, WIDTH, has_skip=True, has_bias=False, is_training=True)
    return {way.name: way.program for way in found}


@pytest.mark.parametrize(
    ("name", "per_edge"), [("gate again", 1 + 4 + 1 + 1), ("keep", 1 + 4 + 1 + 1 + 2 + 2)]
)
def test_a_forward_pass_is_that_of_a_loop(name: str, per_edge: int) -> None:
    program = programs()[name]
    step = program.steps[-1]
    total = 0
    for _ in range(EDGES):
        for _ in range(WIDTH):
            total += per_edge  # add, sigmoid, multiply, sum; the derivative, multiply, sum
    total += NODES * WIDTH  # the skip
    assert sum(operation("gate").flops(step, Sizes(program)).values()) == total


@pytest.mark.parametrize(("name", "ops"), [("keep", {"multiply"}), ("gate again", {"gate_targets"})])
def test_slopes_that_were_kept_save_a_pass_over_the_edges(name: str, ops: set[str]) -> None:
    backward = differentiate(programs()[name], ["X", "W", "b"])
    made = {step.op for step in backward.steps}
    assert ops <= made
    assert "gate_sources" in made
    assert len(made & {"multiply", "gate_targets"}) == 1


def test_nothing_is_computed_for_a_bias_alone() -> None:
    found = ways(4, None, WIDTH, has_skip=False, has_bias=True, is_training=True)
    assert [step.op for step in differentiate(found[0].program, ["c"]).steps] == ["colsum"]
