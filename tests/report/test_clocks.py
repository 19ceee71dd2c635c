"""report/clocks.py: sums of steps in words."""

from __future__ import annotations

from plait.measure import Record
from plait.report.clocks import clocks_line, clocks_text


def _record(share: float, missing: list[str]) -> Record:
    case = {"graph": "g", "layer": "gcn", "width_in": 8, "width_out": 4}
    result = {"layer_seconds": 2e-3, "share": share, "steps": 3, "without_a_time": missing}
    return Record("bench-clocks", case, result, {})


def test_a_line_says_what_the_steps_are_of_the_layer() -> None:
    assert clocks_line(_record(0.93, [])) == "g gcn 8->4: 2 ms, its 3 steps 93.0% of it"
    record = _record(0.7, [])
    called = Record(record.kind, record.case, {**record.result, "share_with_calling": 0.98}, {})  # type: ignore[dict-item]
    assert clocks_line(called).endswith("its 3 steps 70.0% of it, with calling them 98.0%")
    assert "within 15% of their layer in 1 of 1" in clocks_text([called])
    assert clocks_line(_record(0.93, ["layer: v1"])).endswith("; without a time: layer: v1")


def test_the_text_counts_layers_that_add_up_and_names_the_worst() -> None:
    text = clocks_text([_record(0.93, []), _record(1.2, ["layer: v1"])])
    assert "within 15% of their layer in 1 of 2; every step has a time in 1" in text
    assert "worst: g gcn 8->4: 2 ms, its 3 steps 120.0% of it" in text
    assert clocks_text([]) == "no layer was measured"
