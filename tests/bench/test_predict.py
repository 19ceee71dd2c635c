"""bench/predict: every step that ran has its price and its time, and the layer both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.bench import predict
from plait.bench.cases import layer_cases
from plait.bench.predict import Options, run
from plait.bench.problem import Problem
from plait.runtime import aside


def predicted(layer: str, mode: str) -> Any:
    grid = layer_cases(["grid:rows=6,cols=6"], [layer], [(8, 4)], [mode])
    (record,) = run(grid, Options(0.05), lambda record: None)
    return record.result


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("layer", ["gcn", "sage-max"])
def test_steps_have_prices_and_times(layer: str, mode: str) -> None:
    result = predicted(layer, mode)
    assert result["predicted_seconds"] > 0.0
    assert result["median_seconds"] > 0.0
    assert all(s["predicted_seconds"] > 0.0 and s["measured_seconds"] > 0.0 for s in result["steps"])
    assert ("backward" in {step["phase"] for step in result["steps"]}) == (mode == "training")


def test_an_attention_layer_has_the_heads_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[int] = []

    def problem(*given: Any, **named: Any) -> Problem:
        made = Problem(*given, **named)
        heads.append(made.layer.heads)
        return made

    monkeypatch.setattr(predict, "Problem", problem)
    (case,) = layer_cases(["grid:rows=6,cols=6"], ["gat"], [(8, 8)], ["inference"])
    list(run([replace(case, heads=2)], Options(0.05), lambda record: None))
    assert set(heads) == {2}


def test_what_is_measured_is_never_left_to_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLAIT_ASIDE", raising=False)
    monkeypatch.setattr(aside._Kind, "fastest", lambda kind, is_pyg: 1e-6 if is_pyg else 1.0)
    assert predicted("gcn", "inference")["steps"]


def test_a_run_gives_a_record_per_case() -> None:
    grid = layer_cases(["grid:rows=4,cols=4"], ["gcn"], [(5, 3)])
    records = run(grid, Options(0.01), lambda record: None)
    assert [record.case["mode"] for record in records] == ["inference", "training"]
    assert {record.kind for record in records} == {"bench-predict"}
