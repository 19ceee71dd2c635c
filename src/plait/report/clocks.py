"""The lines of plait bench plans --steps: the sum of a layer's steps compared with the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.measure import Record

__all__ = ["clocks_line", "clocks_text"]

_BAR = 0.15  # of a layer's time that may lie outside its steps and their calls


def clocks_line(record: Record) -> str:
    """One layer on one line."""
    case: Any = record.case
    result: Any = record.result
    text = (
        f"{case['graph']} {case['layer']} {case['width_in']}->{case['width_out']}: "
        f"{result['layer_seconds'] * 1e3:.3g} ms, its {result['steps']} steps {result['share']:.1%} of it"
    )
    if "share_with_calling" in result:  # records of earlier versions have the steps alone
        text += f", with calling them {result['share_with_calling']:.1%}"
    missing = result["without_a_time"]
    return text + (f"; without a time: {', '.join(missing)}" if missing else "")


def clocks_text(records: Sequence[Record]) -> str:
    """How many layers add up, and the one that does so least."""
    if not records:
        return "no layer was measured"
    results: list[Any] = [record.result for record in records]
    far = [abs(1.0 - result.get("share_with_calling", result["share"])) for result in results]
    timed = sum(not result["without_a_time"] for result in results)
    worst = records[far.index(max(far))]
    near = sum(gap <= _BAR for gap in far)
    return (
        f"the steps and calling them are within {_BAR:.0%} of their layer in {near} of {len(far)}; every "
        f"step has a time in {timed}\nworst: {clocks_line(worst)}"
    )
