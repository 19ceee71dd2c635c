"""Pipelines over time: a row for every worker, a box for every partition."""

from __future__ import annotations

from plait.analysis.analysis import Analysis
from plait.analysis.pipeline import STAGES, Run, Schedule
from plait.report.page.draw import NARROW, Figure, Scale, columns, label, short, svg, tag, titled
from plait.report.table import seconds_text

__all__ = ["gantt_figure"]

_STAGE_COLOURS = dict(zip(STAGES, ("own", "torch", "dgl"), strict=True))


def gantt_figure(analysis: Analysis) -> Figure | None:
    if not analysis.pipelines:
        return None
    partitions = 1 + max((run.partition for run in analysis.pipelines[0].runs), default=0)
    caption = (
        f"The forward pass over {partitions} partitions of the graph, a row for each worker: one worker for "
        "every stage of every layer. A box is one partition (its number inside, where it fits); a gap is a "
        "worker that waits. Micro says whether the stages of a layer wait for all partitions (sync) or not "
        "(async), macro whether the next layer does. All four share one time axis: shorter is better."
    )
    return Figure(
        "pipelines", "Pipelines: which stage waits for which", caption, lambda width: _gantt(analysis, width)
    )


def _gantt(analysis: Analysis, width: int) -> str:
    is_wide = width > NARROW
    left, right = (130.0, width - 16.0) if is_wide else (74.0, width - 8.0)
    longest = max(run.makespan for run in analysis.pipelines)
    x = Scale(0.0, longest, left, right, False)
    parts, top = _legend(2.0, is_wide), 46.0
    bottom = top
    for run in analysis.pipelines:
        drawn, bottom = _chart(run, x, top, is_wide)
        parts += drawn
        top = bottom + 30.0
    grid = columns(x, 76.0, (50.0, bottom), bottom + 16, lambda t: short(t, "s"))
    grid.append(label("time since the forward pass began →", right, bottom + 33, text_anchor="end"))
    return svg(width, bottom + 42, *grid, *parts, title="Four pipelines of the forward pass over time")


def _legend(left: float, is_wide: bool) -> list[str]:
    """What the colours are, in one line."""
    drawn = []
    for stage, text in _NAMED.items():
        caption, room = (text[0], 8.0) if is_wide else (text[1], 4.0)
        colour = f"var(--{_STAGE_COLOURS[stage]})"
        drawn.append(tag("path", d=f"M{left:.1f} 6h11v11h-11z", fill=colour))
        drawn.append(label(caption, left + 16, 15.5, fill="var(--ink)"))
        left += 16 + 6.6 * len(caption) + room
    return drawn


def _chart(run: Schedule, x: Scale, top: float, is_wide: bool) -> tuple[list[str], float]:
    """One mode: its name and figures, then a row for every worker; and where it ends."""
    lane = 15.0
    caption = f"{run.mode.name}: {seconds_text(run.makespan)}, {run.bubble:.0%} waiting"
    edge = x.start if is_wide else 2
    parts = [label(caption, edge, top, fill="var(--ink)", font_weight=600)]
    parts.append(label(_MEANING[run.mode.is_micro_async, run.mode.is_macro_async], edge, top + 14))
    start = top + 21.0
    workers = sorted({(r.layer, r.stage) for r in run.runs})
    for place, (layer, stage) in enumerate(workers):
        name = f"layer {layer + 1} {STAGES[stage]}" if is_wide else f"{layer + 1} {_BRIEF[STAGES[stage]]}"
        parts.append(label(name, x.start - 6, start + place * lane + 11, text_anchor="end", font_size=10.5))
    lanes = {worker: start + place * lane for place, worker in enumerate(workers)}
    busy = {(r.layer, r.stage) for r in run.runs if r.end > r.start}
    for worker in set(workers) - busy:
        caption = "done once, before the first epoch" if worker[1] == 0 else "nothing to do"
        parts.append(label(caption, x.start + 4, lanes[worker] + 11, font_size=10.5, fill="var(--faint)"))
    for r in (r for r in run.runs if r.end > r.start):  # what is done once has no graph operation left
        parts += _box(r, x, lanes[r.layer, r.stage], lane)
    return parts, start + lane * len(workers)


def _box(run: Run, x: Scale, y: float, lane: float) -> list[str]:
    """One partition at one stage: its number inside where it fits, a gap behind it where there is room."""
    begin, size = x(run.start), x(run.end) - x(run.start)
    shown = max(1.4, size - 1.0) if size > 3 else max(1.4, size)
    what = f"layer {run.layer + 1}, {STAGES[run.stage]}, partition {run.partition + 1}"
    tip = titled(f"{what}: {seconds_text(run.end - run.start)}")
    colour = f"var(--{_STAGE_COLOURS[STAGES[run.stage]]})"
    parts = [tag("rect", tip, x=begin, y=y + 1, width=shown, height=lane - 3, fill=colour, class_="mark")]
    if size > 14:
        middle = {"text_anchor": "middle", "fill": "var(--on-deep)", "font_size": 9}
        parts.append(label(str(run.partition + 1), begin + size / 2, y + 10.5, **middle))
    return parts


# by (is micro asynchronous, is macro asynchronous)
_MEANING = {
    (False, False): "graph operations are waited for, and layers too",
    (True, False): "a partition goes through a layer alone; layers wait",
    (False, True): "a layer starts early; its stages wait for all",
    (True, True): "no partition waits for another",
}
# of each stage, at a desk and on a phone
_NAMED = {
    "graph": ("graph operation (gathering neighbours)", "graph operation"),
    "neural": ("neural operation (products with weights)", "weights"),
    "activation": ("non-linearity, or the loss", "non-linearity, loss"),
}
_BRIEF = {"graph": "graph", "neural": "neural", "activation": "active"}
