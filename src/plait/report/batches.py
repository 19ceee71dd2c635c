"""The table of plait bench batches: what was measured, next to its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.measure import Record
from plait.report.table import Table

__all__ = ["batches_line", "batches_text"]

# the fields that distinguish the cases of a part, and their names
_WORDS = {
    "graph": "{}",
    "model": "{}",
    "loader": "{}",
    "fanout": "{}",
    "batch": "batch {}",
    "width": "width {}",
    "threads": "threads {}",
    "share": "capacity {:.0%}",
    "range": "of {:,} ids",
    "compute_seconds": "computing {:g} s",
    "epochs": "{} epochs",
    "breaks": "{} breaks",
}


def batches_text(records: Sequence[Record]) -> str:
    """One line per thing measured, and how many promises were kept."""
    if not records:
        return "no batches measured"
    table = Table(["part", "case", "what", "measured", "promised", ""], title="mini-batches")
    for record in records:
        for name, value, limit, mark in _rows(record):
            table.add(record.case["part"], case_text(record), name, value, limit, mark)
    bars = [bar for record in records for bar in _bars(record)]
    broken = [bar for bar in bars if not bar["holds"]]
    return f"{table}\n\n{len(bars) - len(broken)} of {len(bars)} targets are met"


def batches_line(record: Record) -> str:
    """One record as a line for a running log."""
    measured = "; ".join(" ".join(filter(None, row)) for row in _rows(record))
    return f"{record.case['part']} {case_text(record)}: {measured}"


def case_text(record: Record) -> str:
    """The fields of the case that distinguish it from others of its part."""
    fields = ((form, record.case.get(name)) for name, form in _WORDS.items())
    return " ".join(
        form.format(",".join(map(str, value)) if isinstance(value, list) else value)
        for form, value in fields
        if value
    )


def _rows(record: Record) -> list[tuple[str, str, str, str]]:
    """(what, measured, promised, mark) of its bars and of the ratios nothing was promised for."""
    ratios = {k: v for k, v in record.result.items() if "_over_" in k and isinstance(v, float)}
    bare = [(name.replace("_", " "), f"{value:.2f}", "", "") for name, value in ratios.items()]
    return [_bar_row(bar) for bar in _bars(record)] + bare


def _bars(record: Record) -> list[Mapping[str, Any]]:
    bars = record.result.get("bars")
    return bars if isinstance(bars, list) else []


def _bar_row(bar: Mapping[str, Any]) -> tuple[str, str, str, str]:
    sign = ">=" if bar["is_least"] else "<="
    mark = "" if bar["holds"] else "missed"
    return str(bar["name"]), f"{bar['value']:.3g}", f"{sign} {bar['limit']:.3g}", mark
