"""bench/check: right answers pass, wrong, missing and NaN ones do not."""

from __future__ import annotations

import math

import pytest
import torch

from plait.bench.check import TOLERANCE, answer, judge, worst_error
from plait.bench.peers import prepare
from plait.bench.problem import Forms, Problem
from plait.graph import generate


def problem() -> Problem:
    return Problem("gcn", Forms.of(generate.erdos(12, 40)), 4, 3)


def test_the_answer_of_training_has_every_gradient_and_leaves_none_behind() -> None:
    task = problem()
    parts = answer(prepare("pyg-default", task, "training"), task, "training")
    assert set(parts) == {"output", "gradient of x", "gradient of bias", "gradient of lin.weight"}
    assert task.x.grad is None


def test_the_answer_of_inference_is_the_output() -> None:
    task = problem()
    parts = answer(prepare("pyg-default", task, "inference"), task, "inference")
    assert set(parts) == {"output"}
    assert not parts["output"].requires_grad


def test_the_error_is_relative_to_the_largest_magnitude() -> None:
    expected = {"output": torch.tensor([100.0, 1.0])}
    error, name = worst_error({"output": torch.tensor([100.0, 1.5])}, expected)
    assert error == pytest.approx(0.005)
    assert name == "output"


def test_the_worst_part_is_named() -> None:
    expected = {"output": torch.ones(2), "gradient of x": torch.ones(2)}
    given = {"output": torch.ones(2), "gradient of x": torch.zeros(2)}
    assert worst_error(given, expected) == (1.0, "gradient of x")


@pytest.mark.parametrize("bad", [torch.full((2,), math.nan), torch.tensor([1.0, math.inf]), torch.ones(3)])
def test_nan_infinity_and_other_shapes_are_wrong(bad: torch.Tensor) -> None:
    error, _ = worst_error({"output": bad}, {"output": torch.ones(2)})
    assert not error <= TOLERANCE


def test_a_missing_part_is_wrong_and_an_empty_one_is_right() -> None:
    assert worst_error({}, {"output": torch.ones(2)})[0] == math.inf
    assert worst_error({"output": torch.ones(0, 3)}, {"output": torch.ones(0, 3)})[0] == 0.0


def test_zero_expected_uses_the_plain_difference() -> None:
    assert worst_error({"output": torch.full((2,), 0.5)}, {"output": torch.zeros(2)})[0] == 0.5


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_the_largest() -> None:
    expected = {
        "output": torch.ones(2),
        "gradient of x": torch.ones(2),
        "gradient of b": torch.full((2,), 1e-8),
    }
    given = expected | {"gradient of b": torch.full((2,), -1e-8)}
    assert worst_error(given, expected)[0] <= TOLERANCE
    assert worst_error(expected | {"gradient of b": torch.full((2,), 0.1)}, expected)[0] > TOLERANCE


def test_float64_decides_where_float32_answers_differ() -> None:
    truth = {"output": torch.ones(2, dtype=torch.float64)}

    def verdict(given: float, pyg: float) -> bool:
        answers = [{"output": torch.full((2,), value)} for value in (given, pyg)]
        return judge(*answers, lambda: truth).is_right

    assert verdict(1.0, 1.001)  # PyG is off, the answer is not
    assert verdict(1.0009, 0.999)  # off by less than PyG, on the other side
    assert not verdict(1.0015, 0.999)
    assert not verdict(1.001, 1.0)


def test_each_part_is_held_against_pygs_error_in_that_part() -> None:
    names = ("output", "gradient of x")
    truth = dict.fromkeys(names, torch.ones(2, dtype=torch.float64))
    pyg = {"output": torch.full((2,), 1.01), "gradient of x": torch.ones(2)}
    given = {"output": torch.ones(2), "gradient of x": torch.full((2,), 1.005)}
    found = judge(given, pyg, lambda: truth)
    assert not found.is_right
    assert found.to_dict()["float64_error"] == pytest.approx(0.005, rel=1e-3)


def test_float64_is_asked_only_in_dispute_and_may_be_missing() -> None:
    one, other = {"output": torch.ones(2)}, {"output": torch.full((2,), 1.1)}
    assert judge(one, one, lambda: pytest.fail("nobody disputed it")).is_right
    assert not judge(other, one, lambda: None).is_right
    assert not judge({}, one, lambda: pytest.fail("a missing part is wrong anyway")).is_right
