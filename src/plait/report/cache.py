"""Draws the advisor's findings: a table for the terminal and a figure of hit rate against capacity."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from plait.features.advise import Advice, Point
from plait.report.table import Table, amount, bytes_text, seconds_text

__all__ = ["advice_figure", "advice_text"]

_COLOURS = ("#4c6ef5", "#12b886", "#f59f00", "#e64980", "#7950f2", "#15aabf", "#fd7e14", "#868e96", "#212529")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 400, 60, 20, 150, 50


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
    """An SVG file: one line per policy, hit rate over capacity."""
    names = list(dict.fromkeys(p.policy for p in advice.points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="14">{_escaped(title)}</text>',
        *_axes(),
    ]
    for k, name in enumerate(names):
        points = [p for p in advice.points if p.policy == name]
        parts += _line(points, _COLOURS[k % len(_COLOURS)], name, k)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes() -> list[str]:
    parts = []
    for k in range(5):
        share = k / 4
        x, y = _x(share), _y(share)
        parts.append(f'<line x1="{_x(0)}" x2="{_x(1)}" y1="{y}" y2="{y}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
        parts.append(f'<text x="{x}" y="{_y(0) + 18}" text-anchor="middle">{share:.0%}</text>')
    label = "capacity, share of the distinct remote rows (up: hit rate)"
    parts.append(f'<text x="{_x(0.5)}" y="{_y(0) + 38}" text-anchor="middle">{label}</text>')
    return parts


def _line(points: Sequence[Point], colour: str, name: str, place: int) -> list[str]:
    path = " ".join(f"{_x(p.share):.1f},{_y(p.hit_rate):.1f}" for p in points)
    y = _TOP + 20 + 18 * place
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<line x1="{_x(1) + 10}" x2="{_x(1) + 28}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{_x(1) + 34}" y="{y + 4}">{_escaped(name)}</text>',
    ]


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(rate: float) -> float:
    return _HEIGHT - _BOTTOM - rate * (_HEIGHT - _TOP - _BOTTOM)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
