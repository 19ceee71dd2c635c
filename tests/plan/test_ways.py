"""plan/ways.py: programs are priced, chained and chosen like expressions, and keep their losers."""

from __future__ import annotations

from plait.cost.machine import default_profile
from plait.ops.work import Matrix, Uniform
from plait.plan.gated import ways
from plait.plan.search import Problem
from plait.plan.ways import choose, preferring, survey_ways

ROWS, EDGES = 20_000, 300_000


def problem(may_chain: bool = True) -> Problem:
    matrix = Matrix(ROWS, ROWS, EDGES, True, Uniform(ROWS), Uniform(ROWS))
    sizes = {"N": ROWS, "M": ROWS, "E": EDGES}
    return Problem((), sizes, lambda expr: matrix, default_profile(), ("X", "W", "b"), may_chain=may_chain)


def found() -> list[object]:
    return list(ways(32, None, 16, has_skip=True, has_bias=True, is_training=True))


def test_the_cheapest_way_is_chosen_and_the_losers_keep_their_prices() -> None:
    plan = choose(problem(), found())  # type: ignore[arg-type]
    assert plan.seconds == sum(step.price.seconds for step in plan.steps)
    assert all(loser.seconds is not None and loser.seconds >= plan.seconds for loser in plan.rejected)
    with preferring(1):
        assert choose(problem(), found()).text == plan.rejected[0].candidate  # type: ignore[arg-type]


def test_gradients_of_the_same_rows_are_one_pass_unless_the_device_has_no_chains() -> None:
    chained = {step.op for step in survey_ways(problem(), found())[0].backward.steps}  # type: ignore[arg-type, union-attr]
    apart = {step.op for step in survey_ways(problem(False), found())[0].backward.steps}  # type: ignore[arg-type, union-attr]
    assert "chain" in chained
    assert {"gemm", "gemm_transposed", "colsum"} <= apart


def test_every_step_says_what_it_reads_makes_and_costs() -> None:
    steps = choose(problem(), found()).to_dict()["steps"]  # type: ignore[arg-type]
    for step in steps:
        assert step["reads"]
        assert step["rows"] > 0
        assert step["columns"] > 0
        assert step["backend"]
