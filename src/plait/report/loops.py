"""The table of plait bench loops: milliseconds of a step, and PyG against plait with its spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.measure import Record
from plait.report.layers import SUBJECT, Cell, geometric_mean, left_out, load_warning
from plait.report.table import Table, ratio_text

__all__ = ["loop_line", "loops_text"]


def loops_text(records: Sequence[Record]) -> str:
    """A table for each number of threads with its geometric mean and worst loop, and what was not timed."""
    if not records:
        return "no loops measured"
    parts = []
    for threads in sorted({int(str(record.case["threads"])) for record in records}):
        parts.append(
            _threads_text([record for record in records if record.case["threads"] == threads], threads)
        )
    return "\n\n".join([*parts, *left_out([Cell.of(record) for record in records]), *load_warning(records)])


def loop_line(record: Record) -> str:
    """One loop as a line for a running log."""
    times = " ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in Cell.of(record).seconds.items())
    case = record.case
    return f"{case['loop']}, threads {case['threads']}: {times} ms; PyG / plait {_ratio_text(record)}"


def _threads_text(records: Sequence[Record], threads: int) -> str:
    table = Table(
        ["loop", "PyG", "plait", "PyG / plait", "95% interval"],
        title=f"median ms of a step, {threads} thread{'s' if threads > 1 else ''}",
    )
    for record in records:
        seconds = Cell.of(record).seconds
        shown = [f"{seconds[name] * 1e3:.3g}" if name in seconds else "-" for name in ("pyg", SUBJECT)]
        table.add(record.case["loop"], *shown, ratio_text(_ratio(record)), _interval(record))
    compared = [record for record in records if _ratio(record) == _ratio(record)]
    if not compared:
        return str(table)
    table.rule()
    table.add("geometric mean", "", "", ratio_text(geometric_mean(map(_ratio, compared))), "")
    worst = min(compared, key=_ratio)
    slower = sum(_ratio(record) < 1.0 for record in compared)
    return (
        f"{table}\nworst: {worst.case['loop']} {ratio_text(_ratio(worst))}; "
        f"{slower} of {len(compared)} loops slower than PyG"
    )


def _ratio(record: Record) -> float:
    ratio = record.result.get("ratio")
    return float(str(ratio)) if ratio is not None else math.nan


def _interval(record: Record) -> str:
    if "ratio_low" not in record.result:
        return "-"
    return "{:.2f} to {:.2f}".format(*(float(str(record.result[k])) for k in ("ratio_low", "ratio_high")))


def _ratio_text(record: Record) -> str:
    return f"{ratio_text(_ratio(record))} ({_interval(record)})"
