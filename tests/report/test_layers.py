"""report/layers: ratios, means and excuses come out of records as they went in."""

from __future__ import annotations

import math

import pytest

from plait.measure import Record
from plait.report.layers import Cell, cell_line, geometric_mean, layers_text

CASE = {"graph": "g", "layer": "gcn", "width_in": 64, "width_out": 32, "mode": "training"}


def record(milliseconds: dict[str, float], busy: float = 0.0, **case: object) -> Record:
    peers = {name: {"status": "timed", "median_seconds": value / 1e3} for name, value in milliseconds.items()}
    return Record("bench-layers", CASE | case, {"peers": peers, "busy_elsewhere": busy})


FAST = record({"pyg-default": 40.0, "pyg-csr": 12.0, "dgl": 6.0, "plait": 4.0})
SLOW = record({"pyg-default": 4.0, "pyg-csr": 4.0, "dgl": 1.0, "plait": 2.0}, graph="h")


def test_ratios_are_peer_over_plait() -> None:
    cell = Cell.of(FAST)
    assert cell.ratio(None) == 1.5
    assert cell.ratio("pyg") == 3.0
    assert cell.ratio("dgl") == 1.5
    assert cell.ratio_to_default == 10.0
    assert cell.best_peer == "dgl"


def test_without_plait_there_are_no_ratios_but_a_table() -> None:
    alone = record({"pyg-default": 40.0, "dgl": 6.0})
    assert math.isnan(Cell.of(alone).ratio(None))
    assert "geometric" not in layers_text([alone])
    assert "dgl" in layers_text([alone])


def test_the_text_has_means_the_worst_cell_and_the_count_under_the_line() -> None:
    text = layers_text([FAST, SLOW])
    assert "worst cell: h gcn 64->32 training: 0.50x against dgl" in text
    mean = next(line for line in text.splitlines() if line.startswith("training  all"))
    assert mean.split() == ["training", "all", "2", "0.87x", "2.45x", "0.87x", "4.47x", "-", "1"]
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_distance_to_the_floor_is_shown_where_it_is_known() -> None:
    known = Record("bench-layers", CASE, {**FAST.result, "floor_seconds": 2e-3})
    assert Cell.of(known).over_floor == 2.0
    assert "2.00x" in layers_text([known])
    assert math.isnan(Cell.of(FAST).over_floor)


def test_missing_and_wrong_peers_are_lines_with_their_reason() -> None:
    lines = {
        "pyg-default": {"status": "timed", "median_seconds": 0.1},
        "dgl": {"status": "missing", "reason": "not installed"},
        "pyg-csr": {"status": "wrong", "reason": "output differs by 1e-1"},
    }
    text = layers_text([Record("bench-layers", CASE, {"peers": lines})])
    assert "dgl: missing in 1 cells: not installed" in text
    assert "pyg-csr: wrong in 1 cells: output differs by 1e-1" in text
    assert " wrong " in text


def test_a_busy_machine_is_told() -> None:
    assert "quiet machine" not in layers_text([FAST])
    assert "other processes used 50%" in layers_text([record({"plait": 1.0}, busy=0.5)])


def test_memory_is_shown_where_measured() -> None:
    line = {
        "status": "timed",
        "median_seconds": 0.1,
        "peak_tensor_bytes": 12_000_000,
        "peak_process_bytes": 15_000_000,
    }
    text = layers_text([Record("bench-layers", CASE, {"peers": {"plait": line}})])
    assert "12 (15)" in text


def test_a_cell_is_a_line() -> None:
    assert cell_line(FAST).startswith("g gcn 64->32 training: pyg-default 40 ")
    assert cell_line(FAST).endswith("best peer / plait 1.50")


def test_no_records_are_no_error() -> None:
    assert layers_text([]) == "no cells measured"


def test_the_geometric_mean_leaves_out_what_is_missing() -> None:
    assert geometric_mean([2.0, math.nan, 8.0]) == pytest.approx(4.0)
    assert math.isnan(geometric_mean([]))
