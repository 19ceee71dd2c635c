"""The table of plait bench compare: what changed, by how much, and how far the machine itself moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.report.ops import case_text
from plait.report.table import Table, seconds_text

if TYPE_CHECKING:
    from plait.bench.compare import Comparison

__all__ = ["compare_text"]


def compare_text(comparison: Comparison, show_all: bool = False) -> str:
    """The changed series, the worst first, then the tally and the drift between the runs."""
    chosen = [change for change in comparison.changes if show_all or change.is_changed]
    parts = []
    if chosen:
        table = Table(["", "case", "variant", "before", "after", "after / before", "95%"], width=120)
        for change in sorted(chosen, key=lambda change: -change.ratio):
            interval = f"{change.low:.2f}..{change.high:.2f}"
            table.add(
                change.verdict,
                _label(change.case),
                change.case.get("variant", ""),
                seconds_text(change.before_seconds),
                seconds_text(change.after_seconds),
                f"{change.ratio:.2f}",
                interval,
            )
        parts.append(str(table))
    return "\n\n".join([*parts, _tally(comparison)])


def _label(case: Mapping[str, Any]) -> str:
    if "op" in case:
        return f"{case['op']} {case['direction']} {case_text(case)}"
    names = ("graph", "layer", "model", "mode")
    words = [str(case[name]) for name in names if name in case]
    if "width_in" in case:
        words.append(f"{case['width_in']}->{case['width_out']}")
    return " ".join(words)


def _tally(comparison: Comparison) -> str:
    total = len(comparison.changes)
    slower, faster, crowded = (comparison.count(name) for name in ("slower", "faster", "crowded"))
    lines = [
        f"{total} compared: {slower} slower, {faster} faster, {total - slower - faster - crowded} the same"
    ]
    if crowded:
        lines.append(f"{crowded} not judged: other processes used over a tenth of the processor")
    lines.append(
        f"the machine's own drift: all times x{comparison.shift:.3f}, scatter x{comparison.drift:.3f}; "
        "a change had to exceed 5%, and what similar series and its own visits did by chance"
    )
    if comparison.only_before or comparison.only_after:
        lines.append(f"not in both: {comparison.only_before} only in A, {comparison.only_after} only in B")
    return "\n".join(lines)
