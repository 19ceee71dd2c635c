"""report/ops: a table per operation, lines for what was not timed, findings in words, CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from plait.measure import Record
from plait.report.ops import case_text, catalogue_text, csv_text, findings_text, group_line, ops_text


def record(variant: str, seconds: float | None, status: str = "ok", **case: Any) -> Record:
    sizes = {"op": "spmm", "direction": "forward", "device": "cpu", "edges": 100_000, "width": 64, **case}
    result: dict[str, Any] = {"status": status, "group": "g", "stream_bytes_per_s": 2e10}
    if seconds is not None:
        result |= {"seconds": {"median_seconds": seconds, "samples_seconds": [seconds]}}
        result |= {"gbytes_per_s": 1.0 / seconds, "bandwidth_share": 0.5}
    else:
        result["reason"] = "not here"
    return Record("op", {**sizes, "variant": variant}, result)


RECORDS = [
    record("torch", 2e-3),
    record("plait", 1e-3),
    record("dgl", None, "absent"),
    record("odd", None, "wrong"),
    record("torch", 8e-3, width=256),
]


def test_a_case_reads_in_a_few_words() -> None:
    assert case_text({"edges": 1_000_000, "width": 64, "law": "uniform"}) == "E=1M F=64 uniform"


def test_variants_are_columns_and_varying_sizes_rows() -> None:
    text = ops_text(RECORDS)
    assert "spmm, forward, cpu: E=100k" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("F=")]
    assert rows[0][:5] == ["F=64", "2", "1", "absent", "WRONG"]
    assert rows[1][:2] == ["F=256", "8"]
    assert "copy: 20.0 GB/s" in text
    assert "dgl: absent in spmm: not here" in text
    assert ops_text([]) == "no operation measured"


def test_a_bout_is_one_line_fastest_first() -> None:
    assert group_line(RECORDS[:4]).endswith("plait 1 ms; torch 2.00x odd WRONG")
    assert group_line(RECORDS[2:3]).endswith("not timed: not here")


def test_a_crowded_machine_is_told() -> None:
    busy = Record("op", RECORDS[0].case, {**RECORDS[0].result, "busy_elsewhere": 0.5})
    assert "measure again on a quiet machine" in ops_text([busy])
    steady = Record("op", busy.case, {**busy.result, "clock": "processor"})
    assert "quiet machine" not in ops_text([steady])


def test_csv_has_a_line_per_record_and_no_samples() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(RECORDS))))
    assert len(rows) == 5
    assert rows[0]["median_seconds"] == "0.002"
    assert rows[2]["status"] == "absent"
    assert "samples_seconds" not in rows[0]


def test_the_catalogue_and_findings_are_printed() -> None:
    @dataclass
    class Found:
        question: str
        answer: str
        figures: tuple[dict[str, Any], ...]

    assert "A @ x" in catalogue_text([("spmm", "A @ x", ["torch", "plait"])])
    text = findings_text([Found("Does it?", "Yes.", ({"op": "mm", "ratio": 2.5},))])
    assert "Does it? Yes." in text
    assert "2.5" in text
