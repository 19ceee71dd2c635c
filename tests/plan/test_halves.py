"""plan/halves.py: what comes before the halo is needed, and before gradients of the halo are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.plan.exchange import Link, choose_over_ranks
from plait.plan.halves import Halves, halves
from plait.plan.plan import LayerPlan
from tests.plan.expressions import LAYERS
from tests.plan.test_exchange import SIZES, alone, problem

WIDE = {**SIZES, "K1": 64, "K2": 64, "K1/P": 16, "K2/P": 16}


def chosen(layer: str = "gin", split: str | None = "nodes, overlapped", **options: Any) -> LayerPlan:
    wrt = ("X", "W", "V", "b") if layer == "sage mean" else ("X", "W", "b")
    asked = problem(forms=LAYERS[layer], sizes=WIDE, wrt=wrt, **options)
    return choose_over_ranks(asked, Link(1e6, 1e-5, 3), alone, split)[0]


def copied(numbers: float) -> float:
    return numbers * 1e-9


@pytest.mark.parametrize("layer", ["gcn", "sage mean", "gin"])
def test_first_halves_need_nothing_of_the_halo_and_no_gradient_of_inner_rows(layer: str) -> None:
    plan = chosen(layer)
    found = halves(plan, copied)
    assert found is not None
    assert plan.backward is not None
    first, later = plan.forward.steps[: found.forward], plan.forward.steps[found.forward :]
    assert all(step.op != "receive" for step in first)
    assert found.own in {step.out for step in first}
    assert (later[0].op, later[-1].op, later[-1]["addend"]) == ("receive", "spmm", found.own)
    start = plan.backward.steps[: found.backward]
    assert start[-1].op == "send"
    assert [step["matrix"] for step in start if step["x"] == "grad"] == [found.remote]
    assert found.reads <= {"W"}


def test_a_result_that_ends_otherwise_is_not_cut() -> None:
    assert halves(chosen(split="nodes, at once"), copied) is None  # waits before anything is computed
    assert halves(chosen(split="features"), copied) is None
    plan = chosen()
    last = plan.forward.steps[-1]
    scaled = replace(last, reads=(*last.reads, ("bias", "b")))  # rows that the halo does not reach change too
    program = replace(plan.forward, steps=(*plan.forward.steps[:-1], scaled))
    assert halves(replace(plan, forward=program), copied) is None
    assert halves(replace(plan, backward=None), copied) is None  # inference


def test_gradients_that_need_all_rows_are_not_cut() -> None:
    plan = chosen()
    assert plan.backward is not None
    steps = list(plan.backward.steps)
    own = replace(steps[0], reads=(*steps[0].reads, ("addend", "grad")))
    program = replace(plan.backward, steps=(own, *steps[1:]))
    assert halves(replace(plan, backward=program), copied) is None


def test_halves_pay_where_waiting_is_longer_than_copying() -> None:
    found = halves(chosen(), copied)
    assert found is not None
    assert found.copying == pytest.approx(2 * 1000 * 64 * 1e-9)
    assert 0.0 < found.waiting < 2 * Link(1e6, 1e-5, 3).seconds(400 * 64 * 4)
    assert found.gain(0.5) == pytest.approx(found.waiting / 2 - found.copying)
    idle = Halves("own", "remote", 1, 1, frozenset(), 0.0, 1e-3)
    assert idle.gain(1.0) < 0
    assert "go on before the halo is here" in str(found)
    assert found.to_dict() == {"waiting_seconds": found.waiting, "copying_seconds": found.copying}
