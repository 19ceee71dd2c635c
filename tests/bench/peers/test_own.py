"""bench/peers/own: plait answers like PyG, and its input is not taken for a constant."""

from __future__ import annotations

import pytest

from plait.bench.cases import EVERY_LAYER
from plait.bench.check import TOLERANCE, answer, worst_error
from plait.bench.peers import prepare
from plait.bench.problem import Forms, Problem
from plait.graph import generate


@pytest.mark.parametrize("kind", EVERY_LAYER)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_plait_equals_pyg(kind: str, mode: str) -> None:
    problem = Problem(kind, Forms.of(generate.erdos(30, 90)), 6, 4, heads=4)
    runner = prepare("plait", problem, mode)
    expected = answer(prepare("pyg-default", problem, mode), problem, mode)
    assert worst_error(answer(runner, problem, mode), expected, kind)[0] <= TOLERANCE


def test_a_changed_input_changes_the_answer() -> None:
    problem = Problem("sgc", Forms.of(generate.grid(4, 4)), 6, 4)
    runner = prepare("plait", problem, "inference")
    first = answer(runner, problem, "inference")["output"].clone()
    problem.x.data.mul_(2.0)
    assert not answer(runner, problem, "inference")["output"].equal(first)
