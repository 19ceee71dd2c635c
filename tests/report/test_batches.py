"""report/batches: every bar a line, promises that were not kept marked."""

from __future__ import annotations

from plait.bench.batches.part import Bar
from plait.measure import Record
from plait.report.batches import batches_line, batches_text


def record(*bars: Bar, **result: object) -> Record:
    case = {"part": "sampling", "graph": "cora", "fanout": [10, 5], "batch": 64, "width": 0, "share": 0.25}
    return Record("bench-batches", case, {"bars": [bar.to_dict() for bar in bars], **result})


RUN = record(Bar("edges/s over dgl's", 3.0, 2.5), Bar("overhead, us", 140.0, 100.0, is_least=False))


def test_each_bar_is_a_line_and_a_missed_one_is_marked() -> None:
    text = batches_text([RUN])
    kept, missed = (line for line in text.splitlines() if line.startswith("sampling"))
    assert kept.split()[-2:] == [">=", "2.5"]
    assert missed.split()[-4:] == ["140", "<=", "100", "missed"]
    assert text.endswith("1 of 2 targets are met")


def test_a_case_is_told_in_words_that_differ() -> None:
    line = batches_line(RUN)
    assert line.startswith("sampling cora 10,5 batch 64 capacity 25%: edges/s over dgl's 3")


def test_ratios_without_a_promise_are_shown_too() -> None:
    assert "fused over separate" in batches_text([record(fused_over_separate=1.25)])


def test_no_records_are_said() -> None:
    assert batches_text([]) == "no batches measured"


def test_lines_fit_a_terminal() -> None:
    assert all(len(line) <= 110 for line in batches_text([RUN]).splitlines())
