"""Markup, scales and axes: the little a figure needs."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "NARROW", "WIDE", "Figure", "Frame", "Scale", "bold_label", "columns", "decades", "dot", "label", "lanes",
    "padded", "path_of", "percent", "rates_frame", "roof", "short", "svg", "tag", "titled",
]  # fmt: skip

# A figure is drawn twice: for a desk and for a phone. Scaling one drawing would halve its letters.
WIDE, NARROW = 1000, 358
_FONT = "system-ui,-apple-system,Segoe UI,Roboto,Helvetica Neue,Arial,sans-serif"


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and a sentence on how to read it; `draw(width)` gives the SVG."""

    name: str
    title: str
    caption: str
    draw: Callable[[int], str]


def tag(element: str, *children: str, **attributes: object) -> str:
    """One element: attributes are escaped, children are markup; `class_` stands for class."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{element}{shown}>{''.join(children)}</{element}>"


def label(text: str, x: float, y: float, **attributes: object) -> str:
    """Text at a place; grey by default."""
    return tag("text", html.escape(text), **({"x": x, "y": y, "fill": "var(--soft)"} | attributes))


def bold_label(text: str, x: float, y: float, **attributes: object) -> str:
    """A name over marks and lines: cleared of them by a rim of paper (two texts: not all readers of SVG can
    paint the rim of one below its letters)."""
    rim = {"fill": "var(--paper)", "stroke": "var(--paper)", "stroke_width": 4, "aria_hidden": "true"}
    names = [label(text, x, y, **look, font_weight=600) for look in (rim, {"fill": "var(--ink)"})]
    return tag("g", *names, **attributes)


def dot(
    x: float,
    y: float,
    tip: str,
    colour: str,
    facets: Mapping[str, str | None],
    is_filled: bool = True,
    r: float = 4.0,
) -> str:
    """A mark with a tip: filled, or a ring that shows what is below it."""
    look = {"fill": colour if is_filled else "var(--paper)", "fill_opacity": 0.8 if is_filled else 0.5}
    ring = {"stroke": colour, "stroke_width": 1.2, "class_": "mark"}
    return tag("circle", titled(tip), cx=x, cy=y, r=r, **look, **ring, **facets)


def titled(tip: str) -> str:
    """What is shown on hover and read aloud."""
    return tag("title", html.escape(tip))


def svg(width: float, height: float, *children: str, title: str) -> str:
    """A drawing that scales to its column and says what it shows."""
    return tag(
        "svg",
        titled(title),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
        aria_label=title,
        font_family=_FONT,
        font_size=11.5,
    )


def _plain(value: object) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """A map from values to places: linear in the value or in its logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = True

    def __call__(self, value: float) -> float:
        low, high, at = (self.low, self.high, value)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, room: float = 60.0) -> list[float]:
        """Round values at least `room` apart."""
        most = max(2, int(abs(self.end - self.start) / room))
        return decades(self.low, self.high, most) if self.is_log else _round_steps(self.low, self.high, most)


def decades(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round values of a logarithmic axis: 1, 2, 5 of every decade or fewer."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    within = (
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        (1, 1.5, 2, 3, 4, 6, 8),
        (1, 2, 5),
        (1, 3),
    )
    for leads, step in [(leads, 1) for leads in within] + [((1,), step) for step in (1, 2, 3, 4)]:
        values = [lead * 10.0**k for k in range(first, last + 1) if k % step == 0 for lead in leads]
        inside = [value for value in values if low * 0.999 <= value <= high * 1.001]
        if 2 <= len(inside) <= most:
            return inside
    return [low, high]


def _round_steps(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most if high > low else 1.0
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(lead * scale for lead in (1, 2, 5, 10) if lead * scale >= rough)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def padded(values: Iterable[float], factor: float = 1.25) -> tuple[float, float]:
    """Least and greatest positive value with room around them on a logarithmic axis."""
    kept = [value for value in values if value > 0.0 and math.isfinite(value)] or [1.0]
    return min(kept) / factor, max(kept) * factor


@dataclass(frozen=True)
class Frame:
    """The axes of a plot: x along the bottom, y up the left side, each named once and in words.

    x_at: where the x axis has its ticks; round values otherwise.
    """

    x: Scale
    y: Scale
    x_name: str
    y_name: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    x_at: Sequence[float] | None = None

    def axes(self) -> str:
        """Grid lines, numbers at the ticks, names of the axes."""
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        parts = [
            tag("path", d=f"M{left:.1f} {self.y(t):.1f}H{right:.1f}", stroke="var(--grid)", fill="none")
            + label(self.y_text(t), left - 7, self.y(t) + 4, text_anchor="end")
            for t in self.y.ticks(34.0)
        ]
        parts += [
            tag("path", d=f"M{self.x(t):.1f} {bottom:.1f}v4", stroke="var(--faint)", fill="none")
            + label(self.x_text(t), self.x(t), bottom + 17, text_anchor="middle")
            for t in (self.x.ticks(52.0) if self.x_at is None else self.x_at)
        ]
        parts.append(
            tag("path", d=f"M{left:.1f} {bottom:.1f}H{right:.1f}", stroke="var(--faint)", fill="none")
        )
        parts.append(label(self.x_name, right, bottom + 34, text_anchor="end"))
        parts.append(label(self.y_name, left - 40 if left > 42 else 2, top - 12))
        return tag("g", *parts)


def rates_frame(intensities: Iterable[float], rates: Iterable[float], width: float, height: float) -> Frame:
    """The axes of a roofline: flop per byte against flop per second."""
    is_wide = width > NARROW
    left, right = (64.0, width - 16.0) if is_wide else (50.0, width - 10.0)
    x = Scale(*padded(intensities, 2.0), left, right)
    # on a narrow page the names of the bounds reach over that of the axis
    y = Scale(*padded(rates, 2.5), height - 48, 34.0 if is_wide else 46.0)
    return Frame(x, y, "flop per byte that must move →", "flop per second ↑", short, short)


def roof(frame: Frame, peak: float, peak_name: str, stream: float | None) -> str:
    """The bounds of a roofline, named in the corner above: along the lines the names would cover dots."""
    x, y = frame.x, frame.y
    names = f"level: {peak_name}"
    corners = [(x.start, y(peak)), (x.end, y(peak))]
    if stream is not None:
        names = f"slope: memory {short(stream, 'B/s')} · {names}"
        start, knee = max(x.low, y.low / stream), min(max(peak / stream, x.low), x.high)
        corners = [(x(at), y(at * stream)) for at in (start, knee)] + corners[1:]
    line = tag("path", d=path_of(corners), fill="none", stroke="var(--ink)", stroke_width=1.4)
    return line + label(names, x.end, 10, text_anchor="end", fill="var(--ink)")


def columns(
    x: Scale, room: float, span: tuple[float, float], y: float, x_text: Callable[[float], str]
) -> list[str]:
    """A grid line over `span` at every tick, its number at the height y."""
    return [
        tag("path", d=f"M{x(t):.1f} {span[0]:.1f}V{span[1]:.1f}", stroke="var(--grid)", fill="none")
        + label(x_text(t), x(t), y, text_anchor="middle")
        for t in x.ticks(room)
    ]


def lanes(
    x: Scale, step: float, rows: Mapping[str, Sequence[str]], x_text: Callable[[float], str], title: str
) -> str:
    """A row of marks for each name, under one axis; marks are drawn around a height of 0.

    The page's script moves rows together where a filter empties some.
    """
    top = 36.0
    bottom = top + step * len(rows)
    axis = columns(x, 54.0, (top - 6, bottom), top - 14, x_text)
    # 1 is the best value in each of these figures
    axis.append(
        tag("path", d=f"M{x(1):.1f} {top - 6:.1f}V{bottom:.1f}", stroke="var(--ink)", stroke_width=1.3)
    )
    drawn = [
        tag(
            "g",
            label(name, x.start - 12, 4, text_anchor="end", fill="var(--ink)"),
            *marks,
            transform=f"translate(0 {top + (place + 0.5) * step:g})",
            data_op=name,
        )
        for place, (name, marks) in enumerate(rows.items())
    ]
    stack = tag("g", *drawn, data_lanes=step, data_top=top)
    return svg(x.end + 14, bottom + 6, *axis, stack, title=title)


def path_of(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a polyline."""
    return "".join(
        f"{command}{x:.1f} {y:.1f}"
        for command, (x, y) in zip(itertools.chain("M", itertools.repeat("L")), points, strict=False)
    )


def percent(share: float) -> str:
    """A share as a percentage for an axis: three digits, whole numbers from a hundred on."""
    return f"{100 * share:.3g}%" if share < 9.995 else f"{100 * share:,.0f}%"


def short(value: float, unit: str = "") -> str:
    """A number for an axis: "2k", "50 µs", "1.5 G"; at most three digits."""
    if value == 0.0:
        return f"0{f' {unit}' if unit else ''}"
    if unit == "s":
        scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
        size, name = next(((s, n) for s, n in scales if value >= s * 0.9995), scales[-1])
        return f"{_three(value / size)} {name}"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, prefix = next(((s, p) for s, p in prefixes if abs(value) >= s * 0.9995), (1.0, ""))
    return f"{_three(value / size)}{' ' if unit else ''}{prefix}{unit}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
