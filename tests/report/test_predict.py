"""report/predict: shares and medians of the errors, in words."""

from __future__ import annotations

from typing import Any

from plait.measure import Record
from plait.report.predict import predict_line, predict_text, shares

CASE = {"graph": "cora", "layer": "gcn", "width_in": 8, "width_out": 4, "mode": "training"}


def step(predicted: float, measured: float = 1e-3) -> dict[str, Any]:
    return {
        "phase": "forward", "op": "spmm", "is_transposed": False, "rows": 9, "columns": 4, "backend": "plait",
        "predicted_seconds": predicted, "measured_seconds": measured,
    }  # fmt: skip


def record(*steps: dict[str, Any]) -> Record:
    return Record(
        "bench-predict", CASE, {"predicted_seconds": 1.1e-3, "median_seconds": 1e-3, "steps": list(steps)}
    )


def test_shares_count_errors_within_a_quarter() -> None:
    assert shares([0.1, -0.25, 0.3]) == (2 / 3, 0.25)


def test_every_step_is_shown_and_summed_up() -> None:
    text = predict_text([record(step(1.2e-3), step(0.5e-3))])
    assert "cora gcn 8->4 training: predicted 1.10 ms, measured 1.00 ms (+10%)" in text
    assert "+20%" in text
    assert "-50%" in text
    assert "steps: 50% of 2 within 25% of the measured time, median error 35%" in text
    assert "layers: 100% of 1 within 25%" in text


def test_what_was_not_planned_says_why() -> None:
    skipped = Record("bench-predict", CASE, {"reason": "no rule", "steps": []})
    assert "no rule" in predict_line(skipped)
    assert predict_text([skipped]) == "no layer was planned"
