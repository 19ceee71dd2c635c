"""The table of plait bench models: seconds of a whole training, and plait against the best peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from plait.measure import Record
from plait.report.layers import SUBJECT, Cell, geometric_mean, left_out, load_warning, megabytes
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
    times = " ".join(f"{name} {seconds:.3g}" for name, seconds in cell.seconds.items())
    best = cell.ratio(None)
    tail = f"; best peer / plait {best:.2f}" if best == best else ""
    return f"{cell.case['graph']} {cell.case['model']}: {times} s{tail}"


def _seconds_table(cells: Sequence[Cell]) -> Table:
    epochs = ", ".join(map(str, sorted({int(cell.case["epochs"]) for cell in cells})))
    table = Table(
        ["graph", "model", "as-is", "once", "csr", "DGL", "plait", "best peer", "/best", "/PyG", "loss diff"],
        title=f"seconds for {epochs} epochs, preparation included; ratios are peer / plait",
    )
    columns = (("pyg-default",), ("pyg",), ("pyg-csr",), ("dgl", "dgl-ops"), (SUBJECT,))
    for cell in cells:
        times = [_seconds(cell, names) for names in columns]
        difference = cell.lines.get(SUBJECT, {}).get("max_loss_difference")
        shown = "-" if difference is None else f"{difference:.0e}"
        ratios = (ratio_text(cell.ratio(None)), ratio_text(cell.ratio("pyg")))
        table.add(cell.case["graph"], cell.case["model"], *times, cell.best_peer or "-", *ratios, shown)
    if any(SUBJECT in cell.seconds for cell in cells):
        table.rule()
        means = (geometric_mean(cell.ratio(family) for cell in cells) for family in (None, "pyg"))
        table.add("geometric mean", *[""] * 7, *map(ratio_text, means))
    return table


def _seconds(cell: Cell, names: Sequence[str]) -> str:
    times = [cell.seconds[name] for name in names if name in cell.seconds]
    if times:
        return f"{min(times):.3g}"
    return "wrong" if any(cell.lines.get(name, {}).get("status") == "wrong" for name in names) else "-"


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
