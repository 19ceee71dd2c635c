"""report/page/layout: one well-formed file that loads nothing, whatever the records hold."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from plait.measure import Record
from plait.report.page import Report, Run, printed, read_runs, report_of
from plait.report.page.draw import WIDE
from tests.report.page import made

_VOID = {"meta"}


class _Balance(HTMLParser):
    """Fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.scripts += tag == "script"
        if tag not in _VOID and tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(report: Report) -> None:
    page = report.html()
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"(src|href)=|@import|url\(", page)


def test_every_section_is_there(report: Report) -> None:
    page = report.html()
    for name in ("environment", "ratios", "machine", "curves", "plans", "numbers"):
        assert f'id="{name}"' in page
    assert "Left out" not in page


def test_sections_without_records_are_one_line() -> None:
    records = tuple(made.layers(np.random.default_rng(0)))
    page = report_of(Run((records,), {}, ())).html()
    for name in ("machine", "curves", "plans"):
        assert f'id="{name}"' not in page
    assert "Left out: no records of plait bench ops, plait bench models, plait bench plans, " in page


def test_what_a_record_holds_cannot_become_markup() -> None:
    evil = '"><script>alert(1)</script>'
    rng = np.random.default_rng(0)
    case = {"graph": evil, "law": evil, "edges": 10}
    records = [made.op_record(evil, v, 1.0, rng, 1.0, 1.0, **case) for v in (evil, "plait")]
    records.append(made.untimed(evil, evil, "wrong", evil))
    plan = made.plan()
    plan["layers"][0] |= {"layer": evil, "expression": evil, "because": evil}
    balance = _Balance()
    balance.feed(report_of(Run((tuple(records),), {evil: plan}, (evil,))).html())
    assert balance.open == []
    assert balance.scripts == 1


def test_findings_are_questions_with_their_answers() -> None:
    finding = {"question": "Does it <matter>?", "answer": "No.", "figures": [{"op": "mm"}, {"zeros": 1}]}
    page = report_of(Run((), {}, (), (finding,))).html()
    assert "<h3>Does it &lt;matter&gt;?</h3><p>No.</p>" in page
    assert "<td>mm</td><td></td>" in page
    assert "the figures behind it" in page


def test_figures_are_svg_files_with_a_name_each(report: Report) -> None:
    figures = report.figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        text = printed(figure.draw(WIDE))
        assert "var(" not in text
        assert ElementTree.fromstring(text).attrib["aria-label"]


def test_promises_of_mini_batches_are_listed_kept_or_missed(tmp_path: Path) -> None:
    bars = [
        {"name": "against DGL", "value": 3.1, "limit": 2.0, "is_least": True, "holds": True},
        {"name": "stall", "value": 0.2, "limit": 0.1, "is_least": False, "holds": False},
        {"name": "damaged"},
    ]
    record = Record("bench-batches", {"part": "sampling", "graph": "rmat-2M"}, {"bars": bars})
    made.write(tmp_path / "batches.jsonl", [record])
    page = report_of(read_runs([tmp_path / "batches.jsonl"])).html()
    for text in ("against DGL", "at least 2", "1 of 1", "at most 0.1", "0 of 1", "missed"):
        assert text in page
    assert "damaged" not in page


def test_promises_are_one_row_each_with_the_worst_case_and_the_cases_folded_away(tmp_path: Path) -> None:
    values = (3.5, 1.25, 2.75)
    records = [
        Record(
            "bench-batches",
            {"part": "training", "edges_per_batch": 2929.939393939394, "batch": k},
            {"bars": [{"name": "pyg / plait", "value": v, "limit": 2.0, "is_least": True, "holds": v >= 2}]},
        )
        for k, v in enumerate(values)
    ]
    made.write(tmp_path / "batches.jsonl", records)
    page = report_of(read_runs([tmp_path / "batches.jsonl"])).html()
    shown, _, folded = page.partition("<details><summary>every case</summary>")
    assert "<td>1.25</td><td>at least 2</td><td>2 of 3</td>" in shown
    assert "<td>3.5</td>" not in shown
    assert all(f"<td>{v:g}</td>" in folded for v in values)
    assert "edges per batch 2930" in folded
