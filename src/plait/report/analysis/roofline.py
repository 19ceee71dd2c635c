"""Where the passes of the layers stand under the roof of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from plait.analysis.analysis import Analysis
from plait.analysis.work import Phase
from plait.report.analysis.bars import phases_of
from plait.report.page.draw import NARROW, Figure, bold_label, dot, label, rates_frame, roof, short, svg

__all__ = ["roofline_figure"]


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
    top, height = analysis.roof, 440.0 if width > NARROW else 380.0
    rates = [p.flops / p.seconds for _, p in points]
    intensities = (*(p.intensity for _, p in points), top.ridge)
    frame = rates_frame(intensities, (*rates, top.flops_per_s), width, height)
    dots: list[str] = []
    taken: list[tuple[float, float]] = []
    for place, ((name, phase), rate) in enumerate(zip(points, rates, strict=True)):
        at = (frame.x(phase.intensity), frame.y(rate))
        tip = f"{name}: {short(rate, 'flop/s')} at {phase.intensity:.2f} flop/B"
        dots.append(dot(*at, tip, "var(--own)", {}, r=5.0))
        dots.append(bold_label(str(place + 1), *_beside(at, taken)))
    rows = [f"{place + 1}  {name}" for place, (name, _) in enumerate(points)]
    left = frame.x.start
    legend = [label(text, left, height + 14 + 17 * k, fill="var(--ink)") for k, text in enumerate(rows)]
    bounds = roof(frame, top.flops_per_s, short(top.flops_per_s, "flop/s"), top.bytes_per_s)
    return svg(
        width, height + 22 + 17 * len(rows), frame.axes(), bounds, *dots, *legend,
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
