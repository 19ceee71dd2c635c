"""Tables of every number, each with its strip: all samples as dots, the median, its interval."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from plait.report.page.draw import Figure, Scale, label, svg, tag
from plait.report.page.palette import colour_of
from plait.report.page.samples import FEWEST, GENERATED, Contest, Sample, contests
from plait.report.table import ratio_text, seconds_text

__all__ = ["not_timed_table", "strip_figure", "strip_table"]

_WIDTH, _HEIGHT = 250, 24
# The strip's axis: time over the fastest of the case. Slower ones stand at the right edge.
_LOW, _HIGH = 0.75, 24.0
_TICKS = (1.0, 2.0, 4.0, 8.0, 16.0)
_GOLDEN = 0.618033988749895


def _scale() -> Scale:
    return Scale(_LOW, _HIGH, 4.0, _WIDTH - 4.0)


def strip_table(name: str, samples: Sequence[Sample]) -> str:
    """A sortable table: a row per variant and case, with its strip."""
    heads = (
        ("operation", "text"),
        ("case", "text"),
        ("on", "text"),
        ("by", "text"),
        ("median", "number"),
        ("95% ±", "number"),
        ("n", "number"),
        ("÷ fastest", "number"),
    )
    columns = "".join(
        tag(
            "th",
            tag("button", html.escape(text), type="button"),
            scope="col",
            class_="num" if kind == "number" else None,
        )
        for text, kind in heads
    )
    axis = tag("th", _axis(), scope="col", class_="strip", aria_label="every sample over the fastest median")
    rows = [
        _row(sample, fastest.median)
        for contest in contests(samples)
        if (fastest := contest.fastest) is not None
        for sample in sorted((s for s in contest.samples if s.is_timed), key=lambda s: s.median)
    ]
    table = tag("table", tag("thead", tag("tr", columns, axis)), tag("tbody", *rows), class_="data", id=name)
    return tag("div", table, class_="tall-scroll", tabindex=0, role="group", aria_label=f"table of {name}")


def _row(sample: Sample, fastest: float) -> str:
    count = len(sample.times)
    half = (sample.high - sample.low) / (2.0 * sample.median)
    spread = "–" if 0 < count < FEWEST else f"{half:.1%}"
    is_wide = half > 0.5  # the interval is wider than the value itself
    cells = [
        tag("th", html.escape(sample.op), scope="row"),
        tag("td", html.escape(sample.case), class_="case"),
        tag("td", html.escape(_graph(sample)), class_="on"),
        tag("td", html.escape(_variant(sample)), class_="by", style=f"color:{colour_of(sample.variant)}"),
        tag("td", seconds_text(sample.median), class_="num med", data_v=f"{sample.median:.6g}"),
        tag(
            "td",
            f"{spread} ⚠" if is_wide else spread,
            class_="num ci wide" if is_wide else "num ci",
            title="the interval is wider than the value" if is_wide else None,
            data_v=f"{half:.4g}",
        ),
        tag("td", str(count or "–"), class_="num n", data_v=str(count)),
        tag(
            "td",
            ratio_text(sample.median / fastest),
            class_="num rel",
            data_v=f"{sample.median / fastest:.5g}",
        ),
        tag("td", _strip(sample, fastest), class_="strip"),
    ]
    return tag("tr", *cells, class_="own" if sample.is_own else None, **sample.facets)


def _graph(sample: Sample) -> str:
    return "" if sample.graph == GENERATED else sample.graph


def _variant(sample: Sample) -> str:
    return sample.variant + (" (chosen)" if sample.result.get("is_chosen") else "")


def _axis() -> str:
    x = _scale()
    ticks = [
        tag("path", d=f"M{x(t):.1f} 17v5", stroke="var(--faint)")
        + label(f"{t:g}×", x(t), 13, text_anchor="middle")
        for t in _TICKS
    ]
    return svg(_WIDTH, _HEIGHT, *ticks, title="time over the fastest of the case")


def _strip(sample: Sample, fastest: float) -> str:
    low, high = (_place(bound, fastest) for bound in (sample.low, sample.high))
    tip = (
        f"{sample.op}, {sample.variant}: median {seconds_text(sample.median)}, 95% interval "
        f"{seconds_text(sample.low)} to {seconds_text(sample.high)}, {len(sample.times) or 'no'} samples kept"
    )
    return svg(_WIDTH, _HEIGHT, *_marks(sample, fastest, low, high), title=tip)


def _marks(sample: Sample, fastest: float, low: float, high: float) -> list[str]:
    colour = colour_of(sample.variant)
    x = _scale()
    grid = "".join(f"M{x(t):.1f} 0V{_HEIGHT}" for t in _TICKS)
    middle = _HEIGHT / 2
    at = _place(sample.median, fastest)
    parts = [
        tag("path", d=grid, stroke="var(--grid)"),
        tag(
            "path",
            d=f"M{low:.1f} {middle}H{max(high, low + 0.5):.1f}",
            stroke=colour,
            stroke_width=7,
            opacity=0.22,
        ),
    ]
    if sample.times:
        parts.append(
            tag(
                "path",
                d=_dots(sample.times, fastest),
                stroke=colour,
                stroke_width=2.6,
                stroke_linecap="round",
                opacity=0.55,
                fill="none",
            )
        )
    parts.append(tag("path", d=f"M{at:.1f} 3V{_HEIGHT - 3}", stroke=colour, stroke_width=2))
    return parts


def _place(seconds: float, fastest: float) -> float:
    return _scale()(min(max(seconds / fastest, _LOW), _HIGH))


def _dots(times: Sequence[float], fastest: float) -> str:
    """Every sample as a stroke of no length, which round ends make a dot: a tenth of the size of circles.

    The height of a dot means nothing; multiples of the golden ratio spread equal times evenly.
    """
    return "".join(
        f"M{_place(t, fastest):.1f} {5 + (_HEIGHT - 10) * math.modf(k * _GOLDEN)[0]:.0f}h0"
        for k, t in enumerate(times)
    )


def strip_figure(name: str, title: str, samples: Sequence[Sample], most: int = 60) -> Figure:
    """The strips of the slowest-for-plait cases as one drawing, as many as a page holds."""
    found = [c for c in contests(samples) if c.fastest is not None]
    ranked = sorted(found, key=lambda c: c.ratio if not math.isnan(c.ratio) else math.inf)
    caption = (
        "Every sample a dot, the median a line, its 95% interval a bar; time over the fastest of the case."
    )
    return Figure(name, title, caption, lambda width: _strips_svg(ranked, title, width, most))


def _strips_svg(ranked: Sequence[Contest], title: str, width: int, most: int) -> str:
    width = min(width, 680)
    parts, y = [tag("g", _axis(), transform=f"translate({width - _WIDTH} 0)")], 28.0
    for contest in ranked:
        fastest = contest.fastest
        if fastest is None or y / _HEIGHT > most:
            break
        parts.append(label(f"{fastest.op} {fastest.case}, {fastest.graph}", 4, y + 14, fill="var(--ink)"))
        for sample in (s for s in contest.samples if s.is_timed):
            bounds = (_place(bound, fastest.median) for bound in (sample.low, sample.high))
            marks = tag(
                "g", *_marks(sample, fastest.median, *bounds), transform=f"translate({width - _WIDTH} {y:g})"
            )
            text = f"{sample.variant[:28]}  {seconds_text(sample.median)}"
            parts.append(marks + label(text, width - _WIDTH - 10, y + 16, text_anchor="end"))
            y += _HEIGHT
        y += 8
    return svg(width, y + 4, *parts, title=title)


def not_timed_table(samples: Sequence[Sample]) -> str:
    """What has no time and why: wrong answers, missing packages, no such path; equal reasons counted."""
    counts: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        if not sample.is_timed:
            counts.setdefault((sample.variant, sample.status, sample.reason), []).append(sample)
    if not counts:
        return ""
    rows = []
    for (variant, status, reason), members in sorted(
        counts.items(), key=lambda item: (item[0][1] != "wrong", item[0])
    ):
        where = ", ".join(dict.fromkeys(s.op for s in members))
        facets = members[0].facets if len({(s.op, s.graph) for s in members}) == 1 else {}
        cells = (variant, status, str(len(members)), where, reason or "no reason given")
        rows.append(tag("tr", *(tag("td", html.escape(cell)) for cell in cells), class_=status, **facets))
    head = tag(
        "tr", *(tag("th", text, scope="col") for text in ("by", "status", "cases", "operations", "reason"))
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="plain")
    return tag("div", table, class_="wide-scroll", tabindex=0, role="group", aria_label="not timed")
