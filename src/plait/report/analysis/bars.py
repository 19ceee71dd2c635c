"""Bars of strategies and layers: seconds, bytes, average parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.analysis.analysis import Analysis
from plait.analysis.strategies import Strategy
from plait.analysis.work import Phase
from plait.report.page.draw import NARROW, Figure, Scale, columns, label, short, svg, tag, titled
from plait.report.table import bytes_text, seconds_text

__all__ = ["epoch_figure", "named", "parallelism_figure", "phases_of", "traffic_figure"]

# A bar beyond this multiple of the shortest is cut: on its scale the others could not be told apart.
LONGEST = 20.0


@dataclass(frozen=True)
class _Bar:
    """A row of a bar chart: parts one after the other, and what is written behind them."""

    name: str
    parts: tuple[tuple[float, str, str], ...]  # value, colour, tip
    text: str

    @property
    def total(self) -> float:
        return sum(part[0] for part in self.parts)


def _bars(bars: Sequence[_Bar], x_text: Callable[[float], str], title: str, is_log: bool, width: int) -> str:
    """Names above their bars on a phone, before them at a desk; the axis on top."""
    is_wide = width > NARROW
    step, left = (26.0, 250.0) if is_wide else (38.0, 8.0)
    room = 170.0 if is_wide else 92.0
    most = max((bar.total for bar in bars), default=1.0) if is_log else _longest(bars)
    most = most or 1.0
    least = min((p[0] for bar in bars for p in bar.parts if p[0] > 0), default=1.0)
    low, high = (least / 2.0, most) if is_log else (0.0, most)
    x = Scale(low, high, left, width - room, is_log)
    top = 30.0
    drawn = columns(x, 80.0, (top - 6, top + step * len(bars)), top - 12, x_text)
    for place, bar in enumerate(bars):
        y = top + place * step + (3.0 if is_wide else 16.0)
        named = label(bar.name, *((left - 10, y + 14) if is_wide else (left, y - 3)),
                      text_anchor="end" if is_wide else "start", fill="var(--ink)")  # fmt: skip
        drawn.append(named)
        end, at = x.start, 0.0
        for value, colour, tip in bar.parts:
            if value <= 0:
                continue
            start, at = end, min(at + value, most)
            end = max(start + 1.0, x(at))
            look = {"fill": f"var(--{colour})", "class_": "mark"}
            drawn.append(tag("rect", titled(tip), x=start, y=y, width=end - start, height=18.0, **look))
        is_cut = bar.total > most
        drawn.append(label(f"{bar.text}, cut" if is_cut else bar.text, end + 7, y + 14))
    return svg(width, top + step * len(bars) + 8, *drawn, title=title)


def _longest(bars: Sequence[_Bar]) -> float:
    """The longest bar that is drawn whole."""
    totals = [bar.total for bar in bars if bar.total > 0]
    return max((t for t in totals if t <= LONGEST * min(totals)), default=1.0)


def epoch_figure(analysis: Analysis) -> Figure | None:
    if not analysis.strategies:
        return None
    bars = []
    for s in analysis.strategies:
        mark = "" if s.same_numbers else " *"
        tips = (
            f"{s.name}: {seconds_text(s.compute_seconds)} of work",
            f"{seconds_text(s.communication_seconds)} on the network",
        )
        parts = ((s.compute_seconds, "own", tips[0]), (s.communication_seconds, "torch", tips[1]))
        bars.append(_Bar(named(s) + mark, parts, seconds_text(s.seconds_per_epoch)))
    caption = (
        f"Predicted seconds of an epoch with {analysis.workers} workers, fastest first. Blue: arithmetic of "
        "the most loaded worker. Orange: its time on the network, which nothing overlaps. A star: sampled or "
        "stale rows, so not the numbers one worker computes."
        + (" Bars that would not fit are cut." if max(b.total for b in bars) > _longest(bars) else "")
    )
    return Figure(
        "epoch", "An epoch by strategy", caption,
        lambda width: _bars(bars, lambda v: short(v, "s"), "Seconds of an epoch by strategy", False, width),
    )  # fmt: skip


def named(strategy: Strategy) -> str:
    return strategy.name.replace("pipeline, ", "pipe: ")


def traffic_figure(analysis: Analysis) -> Figure | None:
    sending = [s for s in analysis.strategies if s.traffic.total > 0]
    if not sending:
        return None
    bars = [
        _Bar(
            named(s), ((s.traffic.total, "own", f"{s.name}: {bytes_text(s.traffic.total)} in an epoch"),),
            f"{bytes_text(s.traffic.total)}, {s.synchronisations} syncs",
        )
        for s in sorted(sending, key=lambda s: s.traffic.total)
    ]  # fmt: skip
    caption = (
        "Bytes all workers send in an epoch, and how often they wait for each other. The axis is logarithmic."
    )
    return Figure(
        "communication", "What each strategy sends", caption,
        lambda width: _bars(bars, lambda v: short(v, "B"), "Bytes sent by strategy", True, width),
    )  # fmt: skip


def phases_of(analysis: Analysis) -> list[tuple[str, Phase]]:
    return [
        (f"{layer.name}, {name}", phase) for layer in analysis.layers for name, phase in layer.phases.items()
    ]


def parallelism_figure(analysis: Analysis) -> Figure | None:
    phases = [(name, phase) for name, phase in phases_of(analysis) if phase.parallelism > 0]
    if not phases:
        return None
    bars = [
        _Bar(
            name,
            ((phase.parallelism, "own", f"{name}: work {short(phase.work)}, depth {phase.depth}"),),
            f"{short(phase.work)} / {phase.depth}",
        )
        for name, phase in phases
    ]
    caption = (
        "Average parallelism W/D: operations over the longest chain of dependent ones. That many processors "
        "could be busy at once on an ideal machine; the numbers behind a bar are W and D. The axis is "
        "logarithmic."
    )
    return Figure(
        "parallelism", "Work over depth, layer by layer", caption,
        lambda width: _bars(bars, lambda v: short(v), "Average parallelism by layer and pass", True, width),
    )  # fmt: skip
