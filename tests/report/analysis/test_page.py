"""report/analysis: every figure is well-formed at both widths and says what the analysis says."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from plait.analysis import Analysis, Options, Statistics, analyse
from plait.analysis.layers import layers_of
from plait.analysis.models import layers_by_name
from plait.cost.machine import default_profile
from plait.plan.plan import NotPlanned, Plan
from plait.report.analysis import figures_of, page_of
from plait.report.page.draw import NARROW, WIDE

MACHINE = default_profile()


def analysis(model: str = "gin", workers: tuple[int, ...] = (1, 4), nodes: int = 5000) -> Analysis:
    statistics = Statistics(nodes, 12 * nodes, "poisson")
    layers = layers_by_name(model, (32, 16, 8), statistics, MACHINE)
    return analyse(model, layers, statistics, MACHINE, Options(workers))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("model", ["gin", "gat"])
def test_figures_are_well_formed_and_stay_inside(model: str, width: int) -> None:
    figures = figures_of(analysis(model))
    assert [f.name for f in figures] == [
        "epoch", "communication", "scaling", "parallelism", "roofline", "pipelines"
    ]  # fmt: skip
    for figure in figures:
        root = ElementTree.fromstring(figure.draw(width))
        box = [float(v) for v in root.attrib["viewBox"].split()]
        assert box[2] == width
        for mark in root.iter():
            if mark.tag.endswith("rect"):
                assert float(mark.attrib["x"]) + float(mark.attrib["width"]) <= width + 1.0
            if mark.tag.endswith("circle"):
                assert 0 <= float(mark.attrib["cx"]) <= width
                assert 0 <= float(mark.attrib["cy"]) <= box[3]


def test_the_pipelines_have_a_box_for_every_run_that_takes_time() -> None:
    found = analysis()
    figure = next(f for f in figures_of(found) if f.name == "pipelines")
    boxes = figure.draw(WIDE).count("<rect")
    assert boxes == sum(r.end > r.start for run in found.pipelines for r in run.runs)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_pipelines_say_what_their_colours_and_their_axis_are(width: int) -> None:
    drawn = next(f for f in figures_of(analysis()) if f.name == "pipelines").draw(width)
    assert "graph operation" in drawn
    assert "non-linearity" in drawn
    assert "time since the forward pass began" in drawn


def test_the_scaling_curves_name_the_line_of_perfect_scaling() -> None:
    drawn = next(f for f in figures_of(analysis()) if f.name == "scaling").draw(WIDE)
    assert ">perfect scaling<" in drawn


def test_the_page_says_who_wins_and_loads_nothing() -> None:
    found = analysis()
    page = page_of(found)
    assert found.advice is not None
    assert found.advice.winner in page
    assert "default-src 'none'" in page
    assert "<script" not in page


def test_text_from_outside_is_escaped() -> None:
    from dataclasses import replace

    page = page_of(replace(analysis(), model="<b>gin</b>", notes=("<i>odd</i>",)))
    assert "<b>gin</b>" not in page
    assert "<i>odd</i>" not in page


def test_one_worker_and_black_boxes_leave_a_page() -> None:
    assert "one worker" in page_of(analysis(workers=(1,), nodes=1))
    statistics = Statistics(10, 20)
    boxes = layers_of(Plan((), (NotPlanned("conv", "no rule"),)))
    page = page_of(analyse("odd", boxes, statistics, MACHINE, Options((1,))))
    assert "no rule" in page


def test_an_epoch_that_takes_far_longer_than_all_others_is_cut() -> None:
    found = analysis()
    assert ", cut<" not in drawn_epoch(found)
    slow = replace(found.strategies[-1], compute_seconds=1000.0 * found.strategies[0].seconds_per_epoch)
    drawn = drawn_epoch(replace(found, strategies=(*found.strategies[:-1], slow)))
    assert drawn.count(", cut<") == 1


def drawn_epoch(found: Analysis) -> str:
    return next(f for f in figures_of(found) if f.name == "epoch").draw(WIDE)
