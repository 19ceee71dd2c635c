"""report/page/strips: a row per timing, a dot per sample, a line per reason why there is none."""

from __future__ import annotations

from plait.report.page import Report
from plait.report.page.strips import not_timed_table, strip_figure, strip_table


def test_every_timing_has_a_row_and_every_sample_a_dot(report: Report) -> None:
    layers = [s for s in report.samples if s.kind == "layer"]
    table = strip_table("layers", layers)
    timed = [s for s in layers if s.is_timed]
    assert table.count("<tr") == 1 + len(timed)
    assert table.count("h0") == sum(len(s.times) for s in timed)


def test_rows_of_a_case_go_from_fast_to_slow_though_some_have_no_time(report: Report) -> None:
    table = strip_table("layers", [s for s in report.samples if s.graph == "middle" and s.op == "gin"])
    assert table.index(">dgl<") < table.index(">pyg-default<")
    assert ">plait<" not in table


def test_one_sample_has_no_interval(report: Report) -> None:
    table = strip_table("models", [s for s in report.samples if s.kind == "model"])
    assert table.count(">–<") == 2


def test_what_has_no_time_says_why_and_wrong_comes_first(report: Report) -> None:
    table = not_timed_table(report.samples)
    for text in ("torch_scatter is not installed", "output differs by 3.1e-01", "no gradient here"):
        assert text in table
    assert table.index("wrong") < table.index("absent")
    assert not_timed_table([s for s in report.samples if s.is_timed]) == ""


def test_the_figure_is_cut_to_a_page(report: Report) -> None:
    ops = [s for s in report.samples if s.kind == "op"]
    short, long = (strip_figure("strips", "All", ops, most).draw(1000) for most in (5, 50))
    assert len(short) < len(long)
