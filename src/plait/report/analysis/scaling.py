"""Seconds of an epoch against the number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.analysis.analysis import Analysis
from plait.report.analysis.bars import named
from plait.report.page.draw import (
    NARROW,
    Figure,
    Frame,
    Scale,
    label,
    padded,
    path_of,
    short,
    svg,
    tag,
    titled,
)
from plait.report.table import seconds_text

__all__ = ["scaling_figure"]

_COLOURS = ("own", "torch", "dgl", "pyg", "ink", "peer")
_DASHES = (None, "6 3", "2 3")
_MOST_LINES = 7


def scaling_figure(analysis: Analysis) -> Figure | None:
    counts = sorted(analysis.scaling)
    if len(counts) < 2:
        return None
    lines = _scaling_lines(analysis, counts)
    caption = (
        "Predicted time of an epoch by number of workers, both axes logarithmic; lower is better. The dashed "
        "grey line is perfect scaling: one worker's time divided by the number of workers. Where a curve "
        "flattens or turns up, the network costs more than further workers bring."
    )
    return Figure(
        "scaling", "How the strategies scale", caption, lambda width: _scaling(analysis, counts, lines, width)
    )


def _scaling_lines(analysis: Analysis, counts: Sequence[int]) -> list[tuple[str, list[tuple[int, float]]]]:
    """The fastest strategies at the requested number of workers, with seconds by number of workers."""
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    for strategy in analysis.strategies:
        if strategy.workers == 1 or len(lines) == _MOST_LINES:
            continue
        points = [
            (count, s.seconds_per_epoch)
            for count in counts
            for s in analysis.scaling[count]
            if s.name == strategy.name
        ]
        if len(points) > 1:
            lines.append((named(strategy), points))
    return lines


@dataclass(frozen=True)
class _Line:
    """One strategy as it is drawn."""

    name: str
    points: Sequence[tuple[int, float]]
    colour: str
    dash: str | None

    def drawn(self, x: Scale, y: Scale) -> list[str]:
        places = [(x(count), y(seconds)) for count, seconds in self.points]
        tip = ", ".join(f"{count}: {seconds_text(seconds)}" for count, seconds in self.points)
        look = {"fill": "none", "stroke": self.colour, "stroke_width": 2.2, "stroke_dasharray": self.dash}
        path = tag("path", titled(f"{self.name}: {tip}"), d=path_of(places), **look)
        return [path, *(tag("circle", cx=a, cy=b, r=2.8, fill=self.colour) for a, b in places)]


def _lines(found: Sequence[tuple[str, list[tuple[int, float]]]]) -> list[_Line]:
    return [
        _Line(name, points, f"var(--{_COLOURS[k % len(_COLOURS)]})", _DASHES[k // len(_COLOURS)])
        for k, (name, points) in enumerate(found)
    ]


def _scaling(
    analysis: Analysis,
    counts: Sequence[int],
    found: Sequence[tuple[str, list[tuple[int, float]]]],
    width: int,
) -> str:
    is_wide = width > NARROW
    height = 430.0 if is_wide else 340.0
    left, right = (70.0, width - 250.0) if is_wide else (52.0, width - 12.0)
    alone, lines = analysis.work.seconds, _lines(found)
    ideal = [(counts[0], alone / counts[0]), (counts[-1], alone / counts[-1])]
    seconds = [s for line in lines for _, s in line.points] + [s for _, s in ideal]
    x = Scale(counts[0], counts[-1], left, right)
    y = Scale(*padded(seconds, 1.15), height - 48, 34.0)
    parts = [Frame(x, y, "workers →", "time of an epoch ↑", "{:g}".format, _axis_seconds, counts).axes()]
    parts += _marks(analysis.workers, ideal, x, y)
    parts += [mark for line in lines for mark in line.drawn(x, y)]
    title = "Seconds of an epoch against workers"
    if is_wide:
        ends = [(y(line.points[-1][1]), line.name, line.colour) for line in lines]
        return svg(width, height, *parts, *_end_labels(ends, right + 12, y.end), title=title)
    return svg(width, height + 10 + 18 * len(lines), *parts, *_legend(lines, left, height + 6), title=title)


def _axis_seconds(value: float) -> str:
    return short(value, "s")


def _marks(workers: int, ideal: Sequence[tuple[int, float]], x: Scale, y: Scale) -> list[str]:
    """The number of workers asked for, and one worker's time divided perfectly."""
    upright = f"M{x(workers):.1f} {y.end}V{y.start}"
    level = path_of([(x(count), y(seconds)) for count, seconds in ideal])
    look = {"fill": "none", "stroke": "var(--faint)", "stroke_width": 1.5, "stroke_dasharray": "5 4"}
    return [
        tag("path", d=upright, stroke="var(--rule)", fill="none"),
        label(f"{workers} workers", x(workers) - 5, y.end + 2, text_anchor="end"),
        tag("path", titled("one worker's time, divided perfectly"), d=level, **look),
        # left of a falling line is below it, which no strategy reaches
        label("perfect scaling", (x.start + x.end) / 2 - 8, _between(ideal, y) + 5, text_anchor="end"),
    ]


def _between(ends: Sequence[tuple[int, float]], y: Scale) -> float:
    """The height of a line's middle."""
    return (y(ends[0][1]) + y(ends[-1][1])) / 2


def _legend(lines: Sequence[_Line], left: float, top: float) -> list[str]:
    """Names below the drawing, where there is no room beside it."""
    drawn = []
    for k, line in enumerate(lines):
        look = {"stroke": line.colour, "stroke_width": 2.5, "stroke_dasharray": line.dash, "fill": "none"}
        drawn.append(tag("path", d=f"M{left} {top + 18 * k - 4}h18", **look))
        drawn.append(label(line.name, left + 26, top + 18 * k, fill="var(--ink)"))
    return drawn


def _end_labels(ends: Sequence[tuple[float, str, str]], x: float, top: float) -> list[str]:
    """Names behind the lines' ends, moved down where they would cover each other."""
    drawn, at = [], top - 20.0
    for y, name, colour in sorted(ends):
        at = max(at + 15.0, y)
        drawn.append(tag("path", d=f"M{x - 8:.1f} {y:.1f}L{x + 2:.1f} {at:.1f}", stroke=colour, fill="none"))
        drawn.append(label(name, x + 6, at + 4, fill="var(--ink)"))
    return drawn
