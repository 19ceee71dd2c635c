"""report/page/roofline: points, the bandwidth of the run, and what has no arithmetic."""

from __future__ import annotations

import pytest

from plait.report.page import Report
from plait.report.page.draw import NARROW, WIDE
from plait.report.page.roofline import bandwidth_figure, bandwidths, points_of, roofline_figures
from tests.report.page import made


def test_the_bandwidth_is_that_of_the_run(report: Report) -> None:
    assert bandwidths(report.samples) == {"cpu": pytest.approx(made.STREAM)}


def test_measured_steps_of_plans_are_points_too(report: Report) -> None:
    steps = points_of([], report.run.plans)
    assert [(p.op, p.seconds) for p in steps] == [("gemm", 1.2e-4), ("spmm", 9e-5)]
    assert steps[0].intensity == 5.0
    assert steps[0].rate == pytest.approx(1e6 / 1.2e-4)


def test_every_operation_with_arithmetic_is_a_dot(report: Report) -> None:
    points = points_of(report.samples, {})
    ((device, figure),) = roofline_figures(points, bandwidths(report.samples))
    assert device == "cpu"
    for width in (WIDE, NARROW):
        drawn = figure.draw(width)
        assert drawn.count("<circle") == sum(p.flops > 0 for p in points)
        assert "slope: memory 20 GB/s" in drawn


def test_without_a_bandwidth_there_is_a_level_and_no_slope(report: Report) -> None:
    ((_, figure),) = roofline_figures(points_of([], report.run.plans), {})
    assert "slope" not in figure.caption
    assert ">level: " in figure.draw(WIDE)


def test_operations_without_arithmetic_have_a_share_of_the_bandwidth(report: Report) -> None:
    figure = bandwidth_figure(report.samples, bandwidths(report.samples))
    assert figure is not None
    assert ">sort<" in figure.draw(WIDE)
    assert bandwidth_figure([], {}) is None
