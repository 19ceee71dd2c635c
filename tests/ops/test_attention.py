"""ops/attention.py: what attention costs, counted edge by edge, and how its backward pass goes."""

from __future__ import annotations

import pytest

from plait.ops.operation import operation
from plait.ops.program import Program
from plait.plan.attention import Attention, ways
from plait.plan.program import differentiate
from tests.ops.test_gates import EDGES, NODES, Sizes


def program(kind: str, inner: int, width: int, heads: int, name: str) -> Program:
    found = ways(Attention(kind, inner, width, heads), ("X", "W", "a", "M"))
    return next(way.program for way in found if way.name == name)


def counted(kind: str, columns: int, heads: int) -> int:
    """A forward pass, edge by edge and head by head."""
    flops = 0
    for _ in range(EDGES):
        for _ in range(heads):
            flops += {"gat": 1 + 2, "leaky": (1 + 2 + 2) * columns, "dot": 2 * columns}[kind]  # score
            flops += 1 + 1 + 1 + 1  # largest, minus it, exponential, sum
            flops += 2 * columns  # weighted row added
    return flops + NODES * heads * (1 + columns)  # one over the sum, times that


@pytest.mark.parametrize(("inner", "width", "heads"), [(64, 4, 1), (16, 8, 2), (32, 8, 3), (128, 2, 4)])
@pytest.mark.parametrize(("kind", "name"), [("gat", "gat"), ("leaky", "leaky"), ("dot", "dot")])
def test_a_forward_pass_is_that_of_a_loop(kind: str, name: str, inner: int, width: int, heads: int) -> None:
    found = program(kind, inner, width, heads, name)
    step = next(step for step in found.steps if step.op == "attend")
    assert sum(operation("attend").flops(step, Sizes(found)).values()) == counted(kind, width, heads)


def test_raw_rows_are_summed_once_for_every_head() -> None:
    found = program("gat", 5, 8, 3, "recompute")
    step = next(step for step in found.steps if step.op == "attend")
    assert sum(operation("attend").flops(step, Sizes(found)).values()) == counted("gat", 5, 3)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("leaky", ["attend_dots", "attend_sources", "attend_targets"]),
        ("leaky lean", ["attend_dots", "attend_sources", "attend_again"]),
        ("leaky targets first", ["attend_again", "attend_sources"]),
    ],
)
def test_the_order_of_the_backward_pass_is_part_of_the_program(name: str, passes: list[str]) -> None:
    backward = differentiate(program("leaky", 16, 8, 2, name), ["X", "W", "a"])
    assert [step.op for step in backward.steps if step.op.startswith("attend")] == passes
    assert all(backward.outputs)


def test_nothing_is_asked_of_the_edges_for_a_bias_alone() -> None:
    found = ways(Attention("gat", 16, 8, 2, has_bias=True), ("c",))
    for way in found:
        ops = {step.op for step in differentiate(way.program, ["c"]).steps}
        assert not any(op.startswith("attend") for op in ops)
