"""Draws the advisor's findings: a table for the terminal and a figure of hit rate against capacity."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from plait.features.advise import Advice, Point
from plait.report.table import Table, amount, bytes_text, seconds_text

__all__ = ["advice_figure", "advice_text"]

_COLOURS = ("#3b5bdb", "#087f5b", "#b35c00", "#c2255c", "#5f3dc4", "#0b7285", "#a63c06", "#495057", "#212529")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 3", "1 5", "6 2 1 2 1 2")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 680, 440, 74, 84, 170, 60
_LINE = 92  # letters of the answer on one line


def advice_text(advice: Advice) -> str:
    """The table of all points and the recommendation below it."""
    table = Table(("capacity", "policy", "hit rate", "remote rows", "bytes", "epoch", "stall"))
    _add(table, advice.none, "none")
    share = -1.0
    for point in advice.points:
        if point.share != share:
            table.rule()
            share = point.share
        label = f"{point.capacity:,} ({point.share:.0%})"
        _add(table, point, label, is_best=point == advice.recommended)
    lines = textwrap.wrap(f"recommended: {advice.line}", 100)
    return "\n".join([str(table), "", *lines])


def _add(table: Table, point: Point, label: str, is_best: bool = False) -> None:
    table.add(
        label,
        point.policy + (" <-" if is_best else ""),
        f"{point.hit_rate:.1%}",
        amount(point.remote_rows, "").strip(),
        bytes_text(point.remote_bytes),
        seconds_text(point.epoch_seconds),
        seconds_text(point.stall_seconds),
    )


def advice_figure(advice: Advice, title: str) -> str:
    """An SVG file: the recommendation in words, then one line per policy, hit rate over capacity.

    Policies differ in colour, dashes and the shape of their marks.
    """
    names = list(dict.fromkeys(p.policy for p in advice.points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_answer(advice, title),
        *_axes(),
    ]
    for k, name in enumerate(names):
        points = [p for p in advice.points if p.policy == name]
        parts += _line(points, name, k)
    best = advice.recommended
    if best is not None and best in advice.points:
        at = f'cx="{_x(best.share):.1f}" cy="{_y(best.hit_rate):.1f}"'
        parts.append(f'<circle {at} r="9" fill="none" stroke="black" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _answer(advice: Advice, title: str) -> list[str]:
    """The recommendation, in bold, with the case it applies to."""
    ringed = "" if advice.recommended is None else " (ringed)"
    lines = textwrap.wrap(f"Recommended{ringed}: {advice.line}", _LINE)[:3]
    parts = [
        f'<text x="16" y="{20 + 16 * k}" font-weight="bold">{escape(line)}</text>'
        for k, line in enumerate(lines)
    ]
    return [*parts, f'<text x="16" y="{22 + 16 * len(lines)}" fill="#495057">{escape(title)}</text>']


def _axes() -> list[str]:
    parts = []
    for k in range(5):
        share = k / 4
        x, y = _x(share), _y(share)
        parts.append(f'<line x1="{_x(0)}" x2="{_x(1)}" y1="{y}" y2="{y}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
        parts.append(f'<text x="{x}" y="{_y(0) + 18}" text-anchor="middle">{share:.0%}</text>')
    across = "capacity of the cache, as a share of the distinct remote rows"
    middle = f'x="20" y="{_y(0.5)}" text-anchor="middle" transform="rotate(-90 20 {_y(0.5)})"'
    parts.append(f'<text x="{_x(0.5)}" y="{_y(0) + 40}" text-anchor="middle">{across}</text>')
    parts.append(f"<text {middle}>hit rate, share of the requested rows</text>")
    return parts


def _line(points: Sequence[Point], name: str, place: int) -> list[str]:
    colour, dashes = _COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)]
    path = " ".join(f"{_x(p.share):.1f},{_y(p.hit_rate):.1f}" for p in points)
    y = _TOP + 8 + 20 * place
    look = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
    key = f'<line x1="{_x(1) + 14}" x2="{_x(1) + 46}" y1="{y}" y2="{y}" {look}/>'
    marks = [_mark(_x(p.share), _y(p.hit_rate), place, colour) for p in points]
    return [
        f'<polyline points="{path}" fill="none" {look}/>',
        *marks,
        key,
        _mark(_x(1) + 30, y, place, colour),
        f'<text x="{_x(1) + 52}" y="{y + 4}">{escape(name)}</text>',
    ]


def _mark(x: float, y: float, place: int, colour: str) -> str:
    """One of three shapes, hollow from the fourth policy on."""
    fill = colour if place // 3 % 2 == 0 else "white"
    look = f'fill="{fill}" stroke="{colour}" stroke-width="1.5"'
    if place % 3 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}/>'
    if place % 3 == 1:
        return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" {look}/>'
    return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" {look}/>'


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(rate: float) -> float:
    return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)
