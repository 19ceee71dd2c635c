"""report/compare: changed lines are listed, the worst first, with the machine's own drift."""

from __future__ import annotations

from plait.bench.compare import Change, Comparison
from plait.report.compare import compare_text

OP = {"op": "mm", "variant": "torch", "direction": "forward", "width": 8}
LAYER = {"graph": "cora", "layer": "gcn", "mode": "training", "width_in": 8, "width_out": 4, "variant": "pyg"}
FOUND = Comparison(
    (
        Change(OP, 1e-3, 2e-3, 2.0, 1.9, 2.1, "slower"),
        Change(LAYER, 1e-3, 0.5e-3, 0.5, 0.4, 0.6, "faster"),
        Change(OP, 1e-3, 1e-3, 1.0, 0.9, 1.1, "same"),
        Change(OP, 1e-3, 3e-3, 3.0, 2.9, 3.1, "crowded"),
    ),
    1.01,
    1.02,
    1,
    0,
)


def test_changes_are_listed_and_counted() -> None:
    text = compare_text(FOUND)
    lines = text.splitlines()
    assert lines[2].startswith("slower  mm forward F=8")
    assert "cora gcn training 8->4" in lines[3]
    assert "4 compared: 1 slower, 1 faster, 1 the same" in text
    assert "1 not judged" in text
    assert "all times x1.010, scatter x1.020" in text
    assert "1 only in A, 0 only in B" in text


def test_unchanged_lanes_are_shown_on_request() -> None:
    assert len(compare_text(FOUND, show_all=True).splitlines()) == len(compare_text(FOUND).splitlines()) + 2
