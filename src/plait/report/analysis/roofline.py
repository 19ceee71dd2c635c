"""Where the passes of the layers stand under the roof of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from plait.analysis.analysis import Analysis
from plait.analysis.work import Phase
from plait.report.page.draw import (
    NARROW,
    Figure,
    Frame,
    Scale,
    bold_label,
    label,
    padded,
    path_of,
    short,
    svg,
    tag,
    titled,
)

__all__ = ["roofline_figure"]

from plait.report.analysis.bars import phases_of


def roofline_figure(analysis: Analysis) -> Figure | None:
    points = [(n, p) for n, p in phases_of(analysis) if p.flops and p.bytes_least and p.seconds > 0]
    if not points:
        return None
    caption = (
        "Each dot is one pass of one layer: operations per byte that must move, against operations per "
        "second at the predicted time. On the slope memory is the limit, below the flat roof arithmetic; the "
        "distance to the roof is what gathers and calls cost."
    )
    return Figure(
        "roofline", "Layers under the roofline of the machine", caption,
        lambda width: _roofline(analysis, points, width),
    )  # fmt: skip


def _roofline(analysis: Analysis, points: Sequence[tuple[str, Phase]], width: int) -> str:
    roof, is_wide = analysis.roof, width > NARROW
    height = 440.0 if is_wide else 380.0
    left, right = (64.0, width - 16.0) if is_wide else (48.0, width - 10.0)
    x_low, x_high = padded((*(p.intensity for _, p in points), roof.ridge), 2.0)
    rates = [p.flops / p.seconds for _, p in points]
    y_low, y_high = padded((*rates, roof.flops_per_s), 1.6)
    frame = Frame(
        Scale(x_low, x_high, left, right), Scale(y_low, y_high, height - 48, 34.0),
        "flop per byte that must move →", "flop per second ↑", lambda v: short(v), lambda v: short(v),
    )  # fmt: skip
    x, y = frame.x, frame.y
    start = max(x_low, y_low / roof.bytes_per_s)
    corners = [(x(start), y(start * roof.bytes_per_s)), (x(roof.ridge), y(roof.flops_per_s)),
               (x.end, y(roof.flops_per_s))]  # fmt: skip
    line = tag("path", d=path_of(corners), fill="none", stroke="var(--ink)", stroke_width=1.4)
    words = f"slope: memory {short(roof.bytes_per_s, 'B/s')} · level: {short(roof.flops_per_s, 'flop/s')}"
    caption = label(words, x.end, 10, text_anchor="end", fill="var(--ink)")
    dots: list[str] = []
    taken: list[tuple[float, float]] = []
    for place, ((name, phase), rate) in enumerate(zip(points, rates, strict=True)):
        at = (x(phase.intensity), y(rate))
        tip = f"{name}: {short(rate, 'flop/s')} at {phase.intensity:.2f} flop/B"
        number = str(place + 1)
        dots.append(
            tag(
                "circle",
                titled(tip),
                cx=at[0],
                cy=at[1],
                r=5.0,
                fill="var(--own)",
                fill_opacity=0.85,
                class_="mark",
            )
        )
        beside = _beside(at, taken)
        dots.append(bold_label(number, *beside))
    rows = [f"{place + 1}  {name}" for place, (name, _) in enumerate(points)]
    legend = [label(text, left, height + 14 + 17 * k, fill="var(--ink)") for k, text in enumerate(rows)]
    return svg(
        width, height + 22 + 17 * len(rows), frame.axes(), line, caption, *dots, *legend,
        title="Roofline: flop per byte against flop per second",
    )  # fmt: skip


def _beside(at: tuple[float, float], taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Where a dot's number goes: right of it, or where no other number stands."""
    for shift in ((8, 4), (-16, 4), (-3, -9), (-3, 18), (8, -10), (8, 18), (-18, -10), (-18, 18)):
        place = (at[0] + shift[0], at[1] + shift[1])
        if all(abs(place[0] - a) > 14 or abs(place[1] - b) > 12 for a, b in taken):
            break
    taken.append(place)
    return place
