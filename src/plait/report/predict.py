"""The lines of plait bench layers --predict: predicted next to measured, and how far apart they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from plait.measure import Record
from plait.report.table import Table, seconds_text

__all__ = ["predict_line", "predict_text", "shares"]

_CLOSE = 0.25


def predict_line(record: Record) -> str:
    """One case as a line for a running log."""
    case, result = _parts(record)
    head = f"{case['graph']} {case['layer']} {case['width_in']}->{case['width_out']} {case['mode']}"
    if "predicted_seconds" not in result:
        return f"{head}: {result['reason']}"
    predicted, measured = result["predicted_seconds"], result["median_seconds"]
    return (
        f"{head}: predicted {seconds_text(predicted)}, measured {seconds_text(measured)} "
        f"({predicted / measured - 1.0:+.0%})"
    )


def shares(errors: Sequence[float]) -> tuple[float, float]:
    """(share within 25%, median of the magnitudes) of relative errors."""
    return sum(abs(error) <= _CLOSE for error in errors) / len(errors), median(map(abs, errors))


def predict_text(records: Sequence[Record]) -> str:
    """Every step, then by operation and for the layers: the share within 25% and the median error."""
    steps: dict[str, list[float]] = defaultdict(list)
    layers: list[float] = []
    parts = []
    for record in records:
        _, result = _parts(record)
        if "predicted_seconds" not in result:
            continue
        layers.append(result["predicted_seconds"] / result["median_seconds"] - 1.0)
        parts.append(_step_table(record))
        for step in result["steps"]:
            error = step["predicted_seconds"] / step["measured_seconds"] - 1.0
            steps[f"{step['op']}, {step['phase']}"].append(error)
    if not layers:
        return "no layer was planned"
    table = Table(["step", "count", "within 25%", "median error", "median bias"], title="prediction by step")
    for name, errors in sorted(steps.items()):
        close, middle = shares(errors)
        table.add(name, len(errors), f"{close:.0%}", f"{middle:.0%}", f"{median(errors):+.0%}")
    every = [error for errors in steps.values() for error in errors]
    return "\n\n".join([*parts, str(table), _summary("steps", every) + "\n" + _summary("layers", layers)])


def _step_table(record: Record) -> str:
    _, result = _parts(record)
    table = Table(["step", "size", "backend", "predicted", "measured", "error"], title=predict_line(record))
    for step in result["steps"]:
        error = step["predicted_seconds"] / step["measured_seconds"] - 1.0
        times = (seconds_text(step["predicted_seconds"]), seconds_text(step["measured_seconds"]))
        name = f"{step['phase'][:3]} {step['op']}{'ᵀ' if step['is_transposed'] else ''}"
        table.add(name, _size(step), step["backend"], *times, f"{error:+.0%}")
    return str(table)


def _size(step: Any) -> str:
    # steps of attention carry their sizes in their names
    return f"{step['rows']}x{step['columns']}" if step["rows"] else ""


def _summary(what: str, errors: Sequence[float]) -> str:
    if not errors:
        return f"{what}: none measured"
    close, middle = shares(errors)
    return f"{what}: {close:.0%} of {len(errors)} within 25% of the measured time, median error {middle:.0%}"


def _parts(record: Record) -> tuple[Any, Any]:
    return record.case, record.result
