"""ops/pieces.py: what pieces of attention cost, counted in a loop, and the steps of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from plait.ops.operation import Pattern, operation
from plait.ops.program import Program, Step
from plait.plan.pieces import Dots, DotSoftmax, Leaky, Piece, Softmax, Sums
from plait.plan.program import differentiate

NODES, SOURCES, EDGES, HEADS, LANES, WIDTH, FEATURES = 40, 30, 240, 3, 4, 6, 5
COLUMNS = HEADS * WIDTH


@dataclass(frozen=True)
class Sizes:
    """A program on a graph of so many nodes and edges."""

    program: Program

    def size(self, name: str) -> tuple[int, int]:
        rows, cols = self.program.shapes[name]
        known = {"N": NODES, "M": SOURCES, "E": EDGES}
        return known[rows] if isinstance(rows, str) else rows, int(cols)

    def pattern(self, name: str, is_transposed: bool) -> Pattern | None:
        return Pattern(NODES, EDGES, 9, False)

    def keeps(self, name: str) -> bool:
        return True


def flops(step: Step, program: Program) -> int:
    return int(sum(operation(step.op).flops(step, Sizes(program)).values()))


def counted(piece: Piece) -> int:
    """Operations of a piece, edge by edge and column by column."""
    total = 0
    for _ in range(EDGES):
        if isinstance(piece, Softmax):
            total += 5 * LANES  # largest, minus it, exponential, sum, division
        elif isinstance(piece, Leaky):
            total += 3 * COLUMNS  # both ends, comparison, slope
            total += 2 * COLUMNS * LANES + 2 * FEATURES * COLUMNS + 5 * LANES
        else:
            total += 2 * COLUMNS  # multiply, add
    return total


@pytest.mark.parametrize(
    "piece",
    [
        Dots(HEADS, LANES, COLUMNS),
        Sums(HEADS, LANES, COLUMNS),
        Sums(HEADS, LANES, COLUMNS, of_edges=True),
        Softmax(LANES),
        Leaky(LANES, COLUMNS, 0.2, FEATURES),
    ],
    ids=str,
)
def test_a_piece_costs_what_a_loop_counts(piece: Piece) -> None:
    program = piece.program()
    assert sum(flops(step, program) for step in program.steps) == counted(piece)


def test_the_gradient_of_dots_is_sums_and_of_sums_dots() -> None:
    dots = differentiate(Dots(HEADS, LANES, COLUMNS).program(), ["X", "X1"])
    assert [(step.op, step.is_transposed) for step in dots.steps] == [
        ("edge_sums", False),
        ("edge_sums", True),
    ]
    sums = differentiate(Sums(HEADS, LANES, COLUMNS).program(), ["X", "E"])
    assert [(step.op, step.is_transposed) for step in sums.steps] == [
        ("edge_dots", False),
        ("edge_sums", True),
    ]


@pytest.mark.parametrize(
    ("piece", "wrt"),
    [
        (Dots(HEADS, LANES, COLUMNS), "X1"),
        (Sums(HEADS, LANES, COLUMNS), "E"),
        (Sums(HEADS, LANES, COLUMNS, of_edges=True), "X"),
    ],
    ids=str,
)
def test_nothing_is_computed_for_an_input_that_needs_no_gradient(piece: Piece, wrt: str) -> None:
    assert len(differentiate(piece.program(), [wrt]).steps) == 1


def test_rows_of_edges_serve_all_heads_and_so_do_their_gradients() -> None:
    program = DotSoftmax(HEADS, LANES, COLUMNS, FEATURES).program()
    backward = differentiate(program, ["X", "X1", "Y", "E"])
    by_input = dict(zip(["X", "X1", "Y", "E"], backward.outputs, strict=True))
    made = {step.out: step for step in backward.steps}
    assert made[by_input["E"]].option("is_out_shared")
    assert made[by_input["Y"]].option("is_shared")
    assert not made[by_input["X"]].option("of_edges")
    for name, output in by_input.items():
        assert backward.shapes[output] == program.shapes[name]


@pytest.mark.parametrize("wrt", [["X"], ["W", "a"], ["E"], ["X", "X1", "a", "E", "W"]], ids=str)
def test_one_pass_makes_the_gradients_of_leaky_scores_that_are_needed(wrt: list[str]) -> None:
    backward = differentiate(Leaky(LANES, COLUMNS, 0.2, FEATURES).program(), wrt)
    softmax, scores = backward.steps
    assert (softmax.op, scores.op) == ("edge_softmax_back", "leaky_scores_back")
    assert {scores.out, *scores.more} == set(backward.outputs)
