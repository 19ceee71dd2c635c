"""plan/plan.py: what a plan prints and writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from plait.plan.plan import LayerPlan, Measured, NotPlanned, Plan
from plait.plan.search import search
from tests.plan.expressions import LAYERS, learnable
from tests.plan.test_search import problem


def layer(name: str) -> LayerPlan:
    plan = search(problem(name, wrt=(*learnable(LAYERS[name]), "X"), layer=f"convs.0 {name}"))
    return replace(plan, measured={step.step.out: Measured(1e-4, 100) for step in plan.steps})


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_printed_plan_is_at_most_100_columns_wide(name: str) -> None:
    reason = "edge features are not lowered yet; " * 6
    text = str(Plan((layer(name),), (NotPlanned("convs.1 GATConv", reason),), ("a note " * 30,)))
    wide = [line for line in text.splitlines() if len(line) > 100]
    assert not wide, wide


def test_a_step_of_the_long_form_shows_the_size_of_what_it_makes() -> None:
    plan = layer("sgc")
    priced_otherwise = [step for step in plan.steps if plan.size_made(step) != step.size]
    assert priced_otherwise  # the gradient of a bias is priced by the rows it reads
    text = "\n".join(plan.lines())
    for step in priced_otherwise:
        rows, columns = plan.size_made(step)
        assert f"{step.step.op} -> {rows}x{columns} " in text


def test_the_first_lines_name_the_machine_and_that_it_is_the_default() -> None:
    head = str(Plan((layer("gcn"),))).splitlines()[:3]
    assert any("built-in default" in line and "plait calibrate" in line for line in head)


def test_a_calibrated_machine_is_not_called_default() -> None:
    plan = replace(layer("gcn"), is_default_machine=False, machine="bench box")
    assert "built-in default" not in str(Plan((plan,)))
    assert "bench box" in str(Plan((plan,)))


@pytest.mark.parametrize("name", ["gcn", "tag", "gin"])
def test_json_holds_every_step_and_every_loser(name: str) -> None:
    plan = layer(name)
    data = json.loads(Plan((plan,), (NotPlanned("a", "b"),), ("c",)).to_json())
    assert data == Plan((plan,), (NotPlanned("a", "b"),), ("c",)).to_dict()
    (written,) = data["layers"]
    assert len(written["steps"]) == len(plan.steps)
    assert len(written["rejected"]) == len(plan.rejected)
    phases = [step["phase"] for step in written["steps"]]
    assert phases == ["forward"] * plan.num_forward + ["backward"] * (len(plan.steps) - plan.num_forward)
    assert sum(step["share"] for step in written["steps"]) <= 1 + 1e-9
    assert all(step["measured_seconds"] == 1e-4 for step in written["steps"])
    assert data["not_planned"] == [{"layer": "a", "reason": "b"}]


def test_the_plan_of_a_model_is_the_sum_of_its_layers() -> None:
    one, two = layer("gcn"), layer("gin")
    plan = Plan((one, two))
    assert plan.seconds == one.seconds + two.seconds
    assert plan.peak_bytes == max(one.peak_bytes, one.kept_bytes + two.peak_bytes)
    assert Plan(()).peak_bytes == 0
    assert "0 planned" in str(Plan(()))
