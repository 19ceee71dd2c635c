"""The tables of plait bench ops: milliseconds by case and variant, the catalogue, the findings, CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.measure import Record
from plait.report.layers import load_warning
from plait.report.table import Table, ratio_text

if TYPE_CHECKING:
    from plait.bench.ops.findings import Finding

__all__ = ["case_text", "catalogue_text", "csv_text", "findings_text", "group_line", "ops_text"]

# The fields that distinguish cases of one table, in the order of reading.
_SIZES = (
    "graph", "edges", "nodes", "inner", "width", "heads", "batch", "fanout", "degree", "sparsity",
    "value_sparsity", "reduction", "axis", "law", "order", "index_dtype", "dtype", "threads",
)  # fmt: skip
_SHORT = {
    "edges": "E", "nodes": "N", "width": "F", "inner": "K", "heads": "H", "degree": "deg", "batch": "B",
    "sparsity": "empty", "value_sparsity": "zeros", "reduction": "fold", "index_dtype": "", "dtype": "",
    "law": "", "order": "", "graph": "", "fanout": "hops",
}  # fmt: skip
_STATUS_TEXT = {"absent": "absent", "unsupported": "-", "wrong": "WRONG"}


def case_text(case: Mapping[str, Any], names: Iterable[str] = _SIZES) -> str:
    """The sizes of a case in a few words: "E=1e+05 F=64 deg=16 uniform"."""
    words = []
    for name in names:
        if name in case:
            short = _SHORT.get(name, name)
            words.append(f"{short}={_value(case[name])}" if short else str(case[name]))
    return " ".join(words)


def _value(value: object) -> str:
    if isinstance(value, int) and value >= 10_000:
        text = f"{value / 1e6:g}M" if value >= 1_000_000 else f"{value / 1e3:g}k"
        return text if len(text) < 8 else f"{value:.3g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def ops_text(records: Sequence[Record]) -> str:
    """A table per operation and direction, then what was not timed and why."""
    if not records:
        return "no operation measured"
    sections: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        case: Any = record.case
        sections[case["op"], case["direction"], case["device"]].append(record)
    parts = [_section(name, members) for name, members in sections.items()]
    stream: Any = next(
        (r.result["stream_bytes_per_s"] for r in records if "stream_bytes_per_s" in r.result), None
    )
    legend = "median ms by variant; GB/s of the fastest counts every byte once"
    if stream:
        legend += f", copy: {stream / 1e9:.1f} GB/s in this run"
    return "\n\n".join([legend, *parts, *_not_timed(records), *load_warning(records, "records")])


def _section(name: tuple[str, str, str], records: Sequence[Record]) -> str:
    op, direction, device = name
    variants = list(dict.fromkeys(str(record.case["variant"]) for record in records))
    rows: dict[str, dict[str, Record]] = defaultdict(dict)
    varying = [size for size in _SIZES if len({repr(r.case.get(size)) for r in records}) > 1]
    fixed = case_text(records[0].case, [size for size in _SIZES if size not in varying])
    for record in records:
        rows[case_text(record.case, varying) or "all"][str(record.case["variant"])] = record
    table = Table(["case", *variants, "GB/s", "of copy"], title=f"{op}, {direction}, {device}: {fixed}")
    for label, found in rows.items():
        cells = [_cell(found.get(variant)) for variant in variants]
        table.add(label, *cells, *_best_rate(found.values()))
    return str(table)


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    status = str(record.result.get("status"))
    seconds = median_seconds(record)
    return _STATUS_TEXT.get(status, status) if seconds is None else f"{seconds * 1e3:.3g}"


def median_seconds(record: Record) -> float | None:
    """The median of a timed record; None where it was not timed."""
    seconds: Any = record.result.get("seconds")
    return None if not seconds else float(seconds["median_seconds"])


def _best_rate(records: Iterable[Record]) -> tuple[str, str]:
    rated: list[Any] = [record.result for record in records if "gbytes_per_s" in record.result]
    if not rated:
        return "", ""
    best = max(rated, key=lambda result: result["gbytes_per_s"])
    return f"{best['gbytes_per_s']:.3g}", f"{best['bandwidth_share']:.0%}"


def group_line(records: Sequence[Record]) -> str:
    """One group as a line for a running log: the fastest first, the others as multiples of it."""
    case: Any = records[0].case
    head = f"{case['op']} {case['direction']} {case_text(case)}"
    timed = {_label(record, records): median_seconds(record) for record in records}
    known = sorted((value, name) for name, value in timed.items() if value is not None)
    if not known:
        reason = str(records[0].result.get("reason", records[0].result.get("status")))
        return f"{head}: not timed: {reason}"
    best, first = known[0]
    rest = " ".join(f"{name} {ratio_text(value / best)}" for value, name in known[1:])
    wrong = " ".join(f"{_label(r, records)} WRONG" for r in records if r.result.get("status") == "wrong")
    return f"{head}: {first} {best * 1e3:.3g} ms; {rest} {wrong}".rstrip(" ;")


def _label(record: Record, records: Sequence[Record]) -> str:
    """The variant, with what differs where several cases run side by side."""
    varying = [size for size in _SIZES if len({repr(r.case.get(size)) for r in records}) > 1]
    sizes = case_text(record.case, varying)
    return f"{record.case['variant']}({sizes})" if sizes else str(record.case["variant"])


def _not_timed(records: Sequence[Record]) -> list[str]:
    reasons: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in records:
        status = str(record.result.get("status"))
        if status != "ok":
            reason = str(record.result.get("reason", ""))
            reasons[str(record.case["variant"]), status, reason].add(str(record.case["op"]))
    lines = [
        f"{variant}: {status} in {', '.join(sorted(ops))}: {reason}"
        for (variant, status, reason), ops in sorted(reasons.items())
    ]
    wrapped = (textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)
    return ["\n".join(["not timed", *wrapped])] if lines else []


def catalogue_text(operations: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """Every operation with its job and its variants."""
    table = Table(["operation", "what it does", "variants"], width=140)
    for name, about, variants in operations:
        table.add(name, about, " ".join(variants))
    return str(table)


def findings_text(findings: Sequence[Finding]) -> str:
    """The findings in words, each with its figures below it."""
    lines = ["findings on this machine"]
    for finding in findings:
        lines += ["", textwrap.fill(f"{finding.question} {finding.answer}", 100)]
        if finding.figures:
            head = list(finding.figures[0])
            table = Table(head)
            for row in finding.figures:
                table.add(*(_value(row.get(name, "")) for name in head))
            lines.append(textwrap.indent(str(table), "  "))
    return "\n".join(lines)


def csv_text(records: Sequence[Record]) -> str:
    """The records as comma-separated values: the case, then the result, samples left out."""
    rows: list[dict[str, object]] = []
    for record in records:
        result: Any = dict(record.result)
        seconds = result.pop("seconds", None) or {}
        timing = {name: value for name, value in seconds.items() if not isinstance(value, list)}
        rows.append({**record.case, **result, **timing, "taken_at": record.taken_at})
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
