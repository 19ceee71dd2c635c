"""report/page/samples: numbers come out of every kind of record as they went in; bad files are told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from plait.errors import InputError
from plait.measure import Record
from plait.report.page import Report, read_runs
from plait.report.page.samples import contests, samples_of
from tests.report.page import made


def test_every_kind_is_read(report: Report) -> None:
    assert {s.kind for s in report.samples} == {"op", "layer", "model", "plan", "predict", "loop"}
    assert report.odd == 0
    assert list(report.run.plans) == ["gcn"]


def test_times_are_those_of_the_record(tmp_path: Path) -> None:
    record = made.op_record("spmm", "plait", 1e-3, np.random.default_rng(0), 10.0, 20.0, edges=5)
    made.write(tmp_path / "a.jsonl", [record])
    (sample,) = samples_of(read_runs([tmp_path / "a.jsonl"]))[0]
    seconds = record.result["seconds"]
    assert sample.median == seconds["median_seconds"]  # type: ignore[index]
    assert [sample.low, sample.high] == seconds["interval_seconds"]  # type: ignore[index]
    assert list(sample.times) == seconds["samples_seconds"]  # type: ignore[index]


def test_variants_of_a_case_meet_and_files_do_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rng = np.random.default_rng(0)
        records = [
            made.op_record("spmm", v, t, rng, 1.0, 1.0, edges=5) for v, t in (("plait", 1.0), ("torch", 3.0))
        ]
        made.write(tmp_path / f"{name}.jsonl", records)
    found = contests(samples_of(read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]))[0])
    assert [len(contest.samples) for contest in found] == [2, 2]
    assert found[0].ratio == pytest.approx(3.0, rel=0.1)


def test_a_wrong_answer_has_no_ratio(report: Report) -> None:
    (wrong,) = [c for c in contests(report.samples) if c.is_own_wrong]
    assert math.isnan(wrong.ratio)
    assert wrong.samples[0].graph == "middle"


def test_a_peer_that_is_the_same_is_not_counted_twice(report: Report) -> None:
    assert "pyg" not in {s.variant for s in report.samples if s.kind == "layer"}


def test_stripped_samples_leave_the_median(tmp_path: Path) -> None:
    record = made.op_record("spmm", "plait", 1e-3, np.random.default_rng(0), 10.0, 20.0, edges=5)
    del record.result["seconds"]["samples_seconds"]  # type: ignore[attr-defined]
    made.write(tmp_path / "a.jsonl", [record])
    (sample,) = samples_of(read_runs([tmp_path / "a.jsonl"]))[0]
    assert sample.times == ()
    assert sample.is_timed


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    line = made.op_record("spmm", "plait", 1.0, np.random.default_rng(0), 1.0, 1.0).to_json()
    path.write_text(f"{line}\n{line[:40]}\nnot json\n")
    run = read_runs([path])
    assert len(run.records) == 1
    assert run.remarks == ("cut.jsonl: skipped 2 damaged or foreign lines",)


def test_records_of_another_form_are_counted(tmp_path: Path) -> None:
    odd = [
        Record("op", {}, {"status": "ok"}),
        Record("bench-layers", {"graph": "g"}, {"peers": {}}),
        Record("bench-plans", {}, {"candidates": [1]}),
        Record("something-else", {}, {}),
    ]
    made.write(tmp_path / "odd.jsonl", odd)
    run = read_runs([tmp_path / "odd.jsonl"])
    assert samples_of(run) == ([], 3)
    assert run.remarks == ("records of kind something-else are not drawn",)


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "[1, 2]", '{"a": 1}'], ids=repr)
def test_a_file_without_records_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="holds no records"):
        read_runs([path])


def test_a_foreign_file_among_others_is_a_remark(tmp_path: Path) -> None:
    made.write(tmp_path / "run.jsonl", [Record("something", {}, {})])
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    run = read_runs([tmp_path / "foreign.json", tmp_path / "run.jsonl"])
    assert len(run.records) == 1
    assert any("foreign.json holds no records" in remark for remark in run.remarks)


def test_a_folder_is_every_file_of_records_in_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        made.write(tmp_path / "runs" / f"{name}.jsonl", [Record("something", {}, {})])
    (tmp_path / "runs" / "README.md").write_text("words")
    assert len(read_runs([tmp_path / "runs"]).records) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.jsonl or \.json files"):
        read_runs([tmp_path / "empty"])


def test_a_misspelt_file_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "layers.jsonl").write_text("")
    with pytest.raises(InputError, match=r"did you mean 'layers\.jsonl'"):
        read_runs([tmp_path / "layer.jsonl"])


def test_a_missing_file_and_a_damaged_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_runs([tmp_path / "none.jsonl"])
    (tmp_path / "plan.json").write_text(json.dumps({"format": "plait-plan-1", "layers": 3}))
    with pytest.raises(InputError, match="damaged plan"):
        read_runs([tmp_path / "plan.json"])


def test_findings_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = [{"name": "a", "question": "Does it?", "answer": "No.", "figures": [{"op": "mm"}], "groups": []}]
    (tmp_path / "findings.json").write_text(json.dumps(found))
    assert read_runs([tmp_path / "findings.json"]).findings == tuple(found)


def test_two_plans_of_one_name_are_both_kept(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gcn.json").write_text(json.dumps(made.plan()))
    run = read_runs([tmp_path / "a" / "gcn.json", tmp_path / "b" / "gcn.json"])
    assert list(run.plans) == ["gcn", "gcn (2)"]


def test_a_training_step_by_the_form_of_its_graph_stands_beside_its_peers(tmp_path: Path) -> None:
    line = {"median_seconds": 1e-3, "samples_seconds": [1e-3], "interval_seconds": [1e-3, 1e-3]}
    case = {"graph": "tu_collab", "model": "gcn", "width": 64, "epochs": 200}
    sides = {"csr": line, "forms": line, "dgl": line}
    made.write(tmp_path / "forms.jsonl", [Record("bench-forms-training", case, {"sides": sides})])
    found, odd = samples_of(read_runs([tmp_path / "forms.jsonl"]))
    assert odd == 0
    assert {(sample.kind, sample.op, sample.variant) for sample in found} == {
        ("model", "gcn by its form", "plait"),
        ("model", "gcn by its form", "dgl"),
    }
