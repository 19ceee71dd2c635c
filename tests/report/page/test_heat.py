"""report/page/heat: cells hold the ratio to the best peer, wrong answers are not numbers."""

from __future__ import annotations

import re

import pytest

from plait.report.page import Report, Run, heat, report_of
from plait.report.page.heat import grid_figure, grid_html, layer_grids, loop_grids, op_grids
from tests.report.page import made


def test_graphs_stand_from_few_edges_to_many(report: Report) -> None:
    layers, models = layer_grids(report.samples)
    assert list(layers.columns) == ["small", "middle", "large"]
    assert list(models.columns) == ["small"]
    assert "All of them: 64→32 training." in layers.caption


def test_a_cell_is_best_peer_over_plait(report: Report) -> None:
    page = grid_html(layer_grids(report.samples)[0])
    ratios = [float(text) for text in re.findall(r">([\d.]+)</td>", page)]
    assert ratios[:3] == pytest.approx([2.5] * 3, rel=0.1)
    assert ratios[3:] == pytest.approx([0.8] * 2, rel=0.1)
    assert re.search(r'class="h wrong"[^>]*gradient of x differs by 3.4e-03[^>]*>wrong<', page)


def test_operations_without_plait_or_of_chosen_density_are_not_in_the_map(report: Report) -> None:
    (grid,) = op_grids(report.samples)
    assert {row.op for row in grid.rows} == {"spmm", "scatter_add", "mm"}
    assert list(grid.columns) == ["1k", "10k", "20k", "100k", "1M"]
    assert set(grid.columns.values()) == {"generated"}


def test_cases_that_share_a_cell_are_averaged_and_say_so(report: Report) -> None:
    assert "in 4 cases" in grid_html(op_grids(report.samples)[0])


def test_the_drawing_has_the_numbers_of_the_table(report: Report) -> None:
    grid = layer_grids(report.samples)[0]
    numbers = re.findall(r">(\d\.\d+)<", grid_html(grid))
    assert numbers == re.findall(r">(\d\.\d+)<", grid_figure(grid).draw(1000))


def test_nothing_measured_is_no_map() -> None:
    assert layer_grids([]) == []
    assert op_grids([]) == []


def test_long_names_of_columns_take_two_lines() -> None:
    assert heat._lines("cora", 84.0) == ["cora"]
    assert heat._lines("road_luxembourg", 84.0) == ["road_", "luxembourg"]
    assert heat._lines("nameless", 20.0) == ["nameless"]


def test_loops_are_a_map_of_loops_by_threads() -> None:
    records = [
        made.loop_record("new x", 1, 4.0, 2.0),
        made.loop_record("new x", 2, 3.0, 2.0),
        made.loop_record("new graph", 1, 9.0, 2.0),
    ]
    report = report_of(Run((tuple(records),), {}, ()))
    (grid,) = loop_grids(report.samples)
    assert [row.op for row in grid.rows] == ["new x", "new graph"]
    assert list(grid.columns) == ["1 thread", "2 threads"]
    assert re.findall(r">([\d.]+)</td>", grid_html(grid)) == ["2.00", "1.50", "4.50"]
    page = report.html()
    assert "Loops in which something changes at every step" in page
    assert "not drawn" not in page
    assert "geometric mean of 3 changing loops" in page


def test_a_row_without_a_single_measurement_is_no_row() -> None:
    records = [made.loop_record("timed once", 1, 4.0, 2.0, repeats=1), made.loop_record("new x", 1, 4.0, 2.0)]
    (grid,) = loop_grids(report_of(Run((tuple(records),), {}, ())).samples)
    assert [row.op for row in grid.rows] == ["new x"]
