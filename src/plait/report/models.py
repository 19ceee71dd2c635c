"""The table of plait bench models: seconds of a whole training, and plait against the best peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from plait.measure import Record
from plait.report.layers import (
    COLUMNS,
    SUBJECT,
    Cell,
    fastest,
    geometric_mean,
    left_out,
    load_warning,
    megabytes,
    times_text,
)  # fmt: skip
from plait.report.table import Table, ratio_text

__all__ = ["model_line", "models_text"]


def models_text(records: Sequence[Record]) -> str:
    """The table, its geometric means, the memory where measured, and what was not timed."""
    cells = [Cell.of(record) for record in records]
    if not cells:
        return "no models measured"
    parts = [str(_seconds_table(cells))]
    memory = _memory_table(cells)
    parts += [str(memory)] if memory.rows else []
    parts += left_out(cells) + load_warning(records)
    return "\n\n".join(parts)


def model_line(record: Record) -> str:
    """One cell as a line for a running log."""
    cell = Cell.of(record)
    return f"{cell.case['graph']} {cell.case['model']}: {times_text(cell, 1.0, 's')}"


def _seconds_table(cells: Sequence[Cell]) -> Table:
    epochs = ", ".join(map(str, sorted({int(cell.case["epochs"]) for cell in cells})))
    table = Table(
        ["graph", "model", *COLUMNS, "best peer", "/best", "/PyG", "loss diff"],
        title=f"seconds for {epochs} epochs, preparation included; ratios are peer / plait",
    )
    for cell in cells:
        difference = cell.lines.get(SUBJECT, {}).get("max_loss_difference")
        shown = "-" if difference is None else f"{difference:.0e}"
        ratios = (ratio_text(cell.ratio(None)), ratio_text(cell.ratio("pyg")))
        own = (cell.case["graph"], cell.case["model"], *fastest(cell))
        table.add(*own, cell.best_peer or "-", *ratios, shown)
    if any(SUBJECT in cell.seconds for cell in cells):
        table.rule()
        means = (geometric_mean(cell.ratio(family) for cell in cells) for family in (None, "pyg"))
        table.add("geometric mean", *[""] * 7, *map(ratio_text, means))
    return table


def _memory_table(cells: Sequence[Cell]) -> Table:
    names = list(dict.fromkeys(name for cell in cells for name in cell.lines))
    table = Table(
        ["graph", "model", *names, "ratio"],
        title="peak MB of a step, tensors (process), what was prepared and kept included; ratio of tensors",
    )
    for cell in cells:
        peaks = {
            name: line["peak_tensor_bytes"]
            for name, line in cell.lines.items()
            if "peak_tensor_bytes" in line
        }
        if not peaks:
            continue
        rivals = [value for name, value in peaks.items() if name != SUBJECT]
        ratio = _ratio(rivals, peaks.get(SUBJECT))
        shown = [megabytes(cell.lines.get(name, {})) for name in names]
        table.add(cell.case["graph"], cell.case["model"], *shown, ratio_text(ratio))
    return table


def _ratio(rivals: Iterable[float], own: float | None) -> float:
    least = min(rivals, default=math.nan)
    return least / own if own else math.nan
