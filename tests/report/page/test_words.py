"""report/page/words: the summary counts what is there and hides nothing."""

from __future__ import annotations

from plait.measure import Record
from plait.report.page import Report, Run
from plait.report.page.sweeps import sweeps_of
from plait.report.page.trees import predictions_of
from plait.report.page.words import environment_rows, findings, key_figures, lead


def test_the_lead_counts(report: Report) -> None:
    text = lead(report.run, report.samples)
    priced = "2 layers in every plan, 2 layers with their prices"
    assert f"6 layers, 1 model, {priced}, 2 changing loops and 1 plan on 3 graphs" in text
    assert "on made up with 2 threads." in text


def test_a_wrong_answer_is_not_level_with_anything(report: Report) -> None:
    figures = {figure.meaning: figure.value for figure in key_figures(report.samples, [])}
    assert figures["layers and models level with the best peer or ahead"] == "4 of 7"
    assert next(value for meaning, value in figures.items() if meaning.startswith("wrong answers")) == "2"


def test_findings_name_best_worst_wrong_and_crossing(report: Report) -> None:
    predictions = predictions_of(report.samples, report.run.plans)
    told = "\n".join(findings(report.run, report.samples, sweeps_of(report.samples), predictions, 3))
    assert "Layers: best 2.5" in told
    assert "worst 0." in told
    assert "Behind the best peer by more than 5% in 2 of 5." in told
    assert "not timed: plait in 1 and pyg in 1" in told
    assert "cross at a density of 1" in told
    assert "Regret of the planner: geometric mean 1.225, worst 1.50, over 2 layers." in told
    assert "3 records were left out" in told


def test_an_environment_that_changed_is_counted() -> None:
    records = tuple(Record("op", {}, {}, {"torch": version, "gpu": None}) for version in ("1", "2", "2"))
    assert environment_rows(Run((records,), {}, ())) == [("torch", "1 (1), 2 (2)")]
