"""The tables of plait bench layers: milliseconds of the peers, and plait against the best of them."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.measure import Record
from plait.report.table import Table, ratio_text

__all__ = [
    "COLUMNS", "SUBJECT", "Cell", "cell_line", "fastest", "geometric_mean", "layers_text", "left_out",
    "load_warning", "megabytes", "times_text",
]  # fmt: skip

SUBJECT = "plait"
DEFAULT = "pyg-default"
COLUMNS = {
    "as-is": (DEFAULT,), "once": ("pyg",), "csr": ("pyg-csr",), "DGL": ("dgl", "dgl-ops"),
    "plait": (SUBJECT,),
}  # fmt: skip
_SETTLED = 0.95
_CROWDED = 0.1
_LEGEND = (
    "median ms. as-is: PyG with its defaults; once: normalised beforehand; csr: on torch CSR;\n"
    "DGL: the faster of its layer and its operators. Ratios: peer / plait. Other peers show where best.\n"
    "floors: plait over its dense products and gathers alone, at the rates of the machine profile."
)


@dataclass(frozen=True)
class Cell:
    """One record read for the table: seconds by peer, where there are any."""

    case: Mapping[str, Any]
    lines: Mapping[str, Mapping[str, Any]]
    floor: float | None = None  # seconds of its arithmetic and memory traffic alone

    @classmethod
    def of(cls, record: Record) -> Cell:
        """The cell of a bench-layers record."""
        lines: Any = record.result["peers"]
        floor: Any = record.result.get("floor_seconds")
        return cls(record.case, lines, floor)

    @property
    def seconds(self) -> dict[str, float]:
        """Median seconds of the peers that were right and timed."""
        timed = {name: line.get("median_seconds") for name, line in self.lines.items()}
        return {name: float(value) for name, value in timed.items() if value is not None}

    def ratio(self, family: str | None) -> float:
        """Fastest of a family ("pyg", "dgl"; None: any peer) over plait's; NaN when there is none."""
        own = self.seconds.get(SUBJECT)
        rivals = [value for name, value in self.seconds.items() if name != SUBJECT and _is_of(name, family)]
        return min(rivals) / own if own and rivals else math.nan

    @property
    def best_peer(self) -> str | None:
        """Name of the fastest peer that is not plait."""
        rivals = {name: value for name, value in self.seconds.items() if name != SUBJECT}
        return min(rivals, key=rivals.__getitem__) if rivals else None

    @property
    def ratio_to_default(self) -> float:
        """PyG with its defaults over plait."""
        own, default = self.seconds.get(SUBJECT), self.seconds.get(DEFAULT)
        return default / own if own and default else math.nan

    @property
    def over_floor(self) -> float:
        """plait over the least its products and gathers could take at measured rates."""
        own = self.seconds.get(SUBJECT)
        return own / self.floor if own and self.floor else math.nan

    @property
    def label(self) -> str:
        """The case in a few words."""
        case = self.case
        return f"{case['graph']} {case['layer']} {case['width_in']}->{case['width_out']} {case['mode']}"


def layers_text(records: Sequence[Record]) -> str:
    """The full table with its means, the worst cell and the lines of everything not timed."""
    cells = [Cell.of(record) for record in records]
    if not cells:
        return "no cells measured"
    parts = [_LEGEND, *_cell_tables(cells)]
    if any(SUBJECT in cell.seconds for cell in cells):
        parts += [str(_means_table(cells)), _worst(cells)]
    parts += _compiling(cells) + _memory_table(cells) + left_out(cells) + load_warning(records)
    return "\n\n".join(parts)


def cell_line(record: Record) -> str:
    """One cell as a line for a running log."""
    cell = Cell.of(record)
    return f"{cell.label}: {times_text(cell, 1e3, 'ms')}"


def times_text(cell: Cell, scale: float, unit: str) -> str:
    """The time of every peer, and how many times faster than the best of them plait is."""
    times = " ".join(f"{name} {seconds * scale:.3g}" for name, seconds in cell.seconds.items())
    best = cell.ratio(None)
    return f"{times} {unit}" + (f"; best peer / plait {best:.2f}" if best == best else "")


def _is_of(name: str, family: str | None) -> bool:
    return family is None or name.partition("-")[0] == family


def _cell_tables(cells: Sequence[Cell]) -> Iterator[str]:
    """A table for each layer and mode: together they would not fit a line."""
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.case["layer"], cell.case["mode"]].append(cell)
    for (layer, mode), members in groups.items():
        head = ["graph", "widths", *COLUMNS, "best peer", "/best", "/PyG", "/as-is", "floors"]
        table = Table(head, title=f"{layer}, {mode}")
        for cell in members:
            widths = f"{cell.case['width_in']}->{cell.case['width_out']}"
            ratios = [cell.ratio(None), cell.ratio("pyg"), cell.ratio_to_default, cell.over_floor]
            times = fastest(cell, 1e3)
            table.add(cell.case["graph"], widths, *times, cell.best_peer or "-", *map(ratio_text, ratios))
        yield str(table)


def fastest(cell: Cell, scale: float = 1.0) -> Iterator[str]:
    """The times in COLUMNS, the fastest peer of each; "wrong" when one was and none was timed."""
    for names in COLUMNS.values():
        times = [cell.seconds[name] * scale for name in names if name in cell.seconds]
        is_wrong = any(cell.lines.get(name, {}).get("status") == "wrong" for name in names)
        if times:
            yield f"{min(times):.3g}" if min(times) < 1e3 else f"{min(times):.0f}"
        else:
            yield "wrong" if is_wrong else "-"


def _means_table(cells: Sequence[Cell]) -> Table:
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.case["mode"], cell.case["layer"]].append(cell)
        groups[cell.case["mode"], "all"].append(cell)
    table = Table(["mode", "layer", "cells", "/best", "/PyG", "/DGL", "/as-is", "floors", "under 0.95"])
    table.title = "geometric means of peer / plait"
    for (mode, layer), members in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] == "all")):
        columns = [[cell.ratio(family) for cell in members] for family in (None, "pyg", "dgl")]
        columns.append([cell.ratio_to_default for cell in members])
        columns.append([cell.over_floor for cell in members])
        under = sum(ratio < _SETTLED for ratio in columns[0])
        table.add(
            mode, layer, len(members), *(ratio_text(geometric_mean(column)) for column in columns), under
        )
    return table


def geometric_mean(ratios: Iterable[float]) -> float:
    """Geometric mean of those that exist."""
    logs = [math.log(ratio) for ratio in ratios if ratio == ratio and ratio > 0.0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _worst(cells: Sequence[Cell]) -> str:
    compared = [cell for cell in cells if cell.ratio(None) == cell.ratio(None)]
    if not compared:
        return "no cell has both plait and a peer"
    worst = min(compared, key=lambda cell: cell.ratio(None))
    return f"worst cell: {worst.label}: {ratio_text(worst.ratio(None))} against {worst.best_peer}"


def _compiling(cells: Sequence[Cell]) -> list[str]:
    """What torch.compile took before its first step, which no ratio counts."""
    lines = [cell.lines.get("pyg-compile", {}) for cell in cells]
    taken = [float(line["preparation_seconds"]) for line in lines if "median_seconds" in line]
    if not taken:
        return []
    return [
        f"torch.compile took {min(taken):.0f} to {max(taken):.0f} s per cell to compile, not counted above"
    ]


def _memory_table(cells: Sequence[Cell]) -> list[str]:
    """Peak megabytes of a step by torch's count (by the system's in brackets), where measured."""
    measured = [cell for cell in cells if any("peak_tensor_bytes" in line for line in cell.lines.values())]
    if not measured:
        return []
    names = list(dict.fromkeys(name for cell in measured for name in cell.lines))
    table = Table(["cell", *names], title="peak MB of a step, tensors (process), preparation kept included")
    for cell in measured:
        table.add(cell.label, *(megabytes(cell.lines.get(name, {})) for name in names))
    return [str(table)]


def megabytes(line: Mapping[str, Any]) -> str:
    """Peak megabytes of tensors and, in brackets, of the process: "12 (15)"; "-" where not measured."""
    if "peak_tensor_bytes" not in line:
        return "-"
    process = line.get("peak_process_bytes")
    return f"{line['peak_tensor_bytes'] / 1e6:.0f}" + (f" ({process / 1e6:.0f})" if process else "")


def load_warning(records: Sequence[Record], what: str = "cells") -> list[str]:
    """A line when other processes disturbed the times, else nothing; processor time is not disturbed."""
    shares = [
        float(str(record.result["busy_elsewhere"]))
        for record in records
        if record.result.get("busy_elsewhere") and record.result.get("clock") != "processor"
    ]
    crowded = sum(share > _CROWDED for share in shares)
    if not crowded:
        return []
    return [
        f"other processes used {100 * sum(shares) / len(shares):.0f}% of the processor on average, over "
        f"{100 * _CROWDED:.0f}% in {crowded} of {len(records)} {what}: measure again on a quiet machine"
    ]


def left_out(cells: Sequence[Cell]) -> list[str]:
    """Why peers are missing or wrong, each reason once with the number of cells."""
    reasons: dict[tuple[str, str, str], int] = defaultdict(int)
    for cell in cells:
        for name, line in cell.lines.items():
            if line.get("status") in ("missing", "wrong"):
                reasons[name, str(line["status"]), str(line.get("reason", ""))] += 1
    lines = [
        f"{name}: {status} in {count} cells: {reason}"
        for (name, status, reason), count in sorted(reasons.items())
    ]
    wrapped = (textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)
    return ["\n".join(["not timed", *wrapped])] if lines else []
