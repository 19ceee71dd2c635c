"""report/plans.py: regret in words."""

from __future__ import annotations

from plait.measure import Record
from plait.report.plans import plans_text, regret_line


def _record(times: list[float]) -> Record:
    candidates = [
        {"candidate": str(k), "predicted_seconds": 1e-3, "median_seconds": t} for k, t in enumerate(times)
    ]
    case = {"graph": "g", "layer": "gcn", "width_in": 4, "width_out": 8, "mode": "training"}
    regret = times[0] / min(times)
    return Record(
        "bench-plans", case, {"regret": regret, "prediction_error": 0.1, "candidates": candidates}, {}
    )


def test_regret_is_the_chosen_over_the_fastest() -> None:
    line = regret_line(_record([2e-3, 1e-3]))
    assert "regret 2.000 of 2" in line
    assert "best 1 ms" in line


def test_the_summary_names_the_worst_case() -> None:
    text = plans_text([_record([1e-3, 1e-3]), _record([4e-3, 1e-3])])
    assert "geometric mean 2.000, worst 4.000" in text
    assert plans_text([]) == "no case was measured"
