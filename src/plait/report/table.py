"""Lays out a table as plain text that fits a terminal, and writes numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Table", "amount", "bytes_text", "count_text", "ratio_text", "seconds_text"]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass
class Table:
    """Rows under a header; `str()` aligns them: text to the left, columns of numbers to the right.

    `align` says so for every column, "l" or "r" each; without it a column is judged by most of its cells.
    Columns shrink (their longest cells are cut with an ellipsis) until a line fits `width`.
    """

    header: Sequence[str]
    title: str = ""
    width: int = 100
    align: str = ""
    rows: list[tuple[str, ...] | None] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """One row; missing cells at the end stay empty, None is an empty cell."""
        texts = tuple("" if cell is None else str(cell) for cell in cells)
        if len(texts) > len(self.header):
            raise ValueError(f"a row of {len(texts)} cells under {len(self.header)} columns")
        self.rows.append(texts + ("",) * (len(self.header) - len(texts)))

    def rule(self) -> None:
        """A line across, between groups of rows."""
        self.rows.append(None)

    def __str__(self) -> str:
        cells = [row for row in self.rows if row is not None]
        widths = self._widths(cells)
        right = [side == "r" for side in self.align]
        right += [_is_numeric(row[k] for row in cells) for k in range(len(right), len(widths))]
        line = "  ".join("-" * width for width in widths)
        body = [line if row is None else _line(row, widths, right) for row in self.rows]
        head = [self.title] if self.title else []
        return "\n".join([*head, _line(tuple(self.header), widths, right), line, *body])

    def _widths(self, rows: Sequence[tuple[str, ...]]) -> list[int]:
        columns = zip(*([tuple(self.header), *rows]), strict=True)
        widths = [max(len(cell) for cell in column) for column in columns]
        while sum(widths) + 2 * (len(widths) - 1) > self.width and max(widths) > 6:
            widths[widths.index(max(widths))] -= 1
        return widths


def _is_numeric(cells: Iterable[str]) -> bool:
    filled = [cell for cell in cells if cell.strip("-")]
    return bool(filled) and sum(cell.lstrip("+-~x")[:1].isdigit() for cell in filled) > len(filled) // 2


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    shown = (
        cell if len(cell) <= width else cell[: width - 1] + "…"
        for cell, width in zip(cells, widths, strict=True)
    )
    parts = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(shown, widths, right, strict=True)
    )
    return "  ".join(parts).rstrip()


def amount(value: float, unit: str) -> str:
    """A number to three digits with a decimal prefix: amount(2.41e9, "FLOP/s") is "2.41 GFLOP/s"."""
    if not math.isfinite(value):
        return f"- {unit}"
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def seconds_text(seconds: float) -> str:
    """A duration to three digits: "0.412 ms", "35.2 ms", "2.31 s"; milliseconds below one second."""
    if not math.isfinite(seconds):
        return "-"
    return f"{_digits(seconds)} s" if seconds >= 1.0 else f"{_digits(seconds * 1e3)} ms"


def bytes_text(count: float) -> str:
    """A size in decimal megabytes, gigabytes or terabytes: "0.31 MB", "12.4 MB", "1.25 GB", "4.52 TB"."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB")):
        if abs(count) >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{_digits(count / 1e6)} MB"


def count_text(count: int, one: str, many: str = "") -> str:
    """A number of things: "1 rank", "2 ranks", "1,500 batches"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def ratio_text(ratio: float) -> str:
    """A ratio: "1.25x", "12.4x"; "-" when there is none."""
    return f"{_digits(ratio)}x" if math.isfinite(ratio) else "-"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}"
        if size >= 9.995
        else f"{value:.2f}"
        if size >= 0.0995 or size == 0.0
        else f"{value:.3f}"
    )
