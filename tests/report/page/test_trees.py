"""report/page/trees: every step is drawn with both times; predictions and regret are those of the records."""

from __future__ import annotations

import re

import pytest

from plait.report.page import Report
from plait.report.page.draw import NARROW, WIDE
from plait.report.page.trees import prediction_figure, predictions_of, regret_figure, tree_figure
from tests.report.page import made


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_tree_has_its_layers_steps_and_losers(width: int) -> None:
    figure = tree_figure("gcn", made.plan())
    drawn = figure.draw(width)
    for text in ("convs.0 GCNConv", "(A @ X) @ W", "gemm A → 100×8", "spmmᵀ A", "this plan", "A @ (X @ W)"):
        assert f">{text}" in drawn
    assert "120 µs (-17%)" in drawn
    assert "convs.1 OddConv: runs in PyG" in drawn
    assert figure.title == "gcn: predicted 0.20 ms per step, steps measured 0.21 ms"
    # two steps with both bars, one without a measurement, two prices of candidates
    assert len(re.findall("<rect", drawn)) == 2 * 2 + 1 + 2


def test_a_plan_of_nothing_is_drawn() -> None:
    assert "<svg" in tree_figure("empty", {"layers": []}).draw(WIDE)
    assert "<svg" in tree_figure("bare", {"layers": [{"layer": "x", "steps": [{"op": "gemm"}]}]}).draw(WIDE)


def test_predictions_are_of_candidates_and_steps(report: Report) -> None:
    found = predictions_of(report.samples, report.run.plans)
    assert len(found) == 2 * 3 + 2 + 2
    assert [p.error < 0 for p in found if p.what.endswith("gcn 64→32 training on small")] == [True, True]
    assert found[-1].error == pytest.approx(1e-4 / 9e-5 - 1)
    figure = prediction_figure(found)
    assert figure is not None
    assert figure.draw(WIDE).count("<circle") == len(found)
    assert prediction_figure([]) is None


def test_regret_has_a_dot_per_case(report: Report) -> None:
    figure = regret_figure(report.samples)
    assert figure is not None
    assert figure.draw(NARROW).count("<circle") == 2
    assert "regret 1.50" in figure.draw(NARROW)
    assert regret_figure([]) is None
