"""Plans as trees: every step with the time that was predicted and the time that was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.report.page.draw import (
    NARROW,
    Figure,
    Frame,
    Scale,
    dot,
    label,
    lanes,
    padded,
    path_of,
    short,
    svg,
    tag,
    titled,
)
from plait.report.page.samples import Sample, number
from plait.report.table import amount, seconds_text

__all__ = ["Prediction", "prediction_figure", "predictions_of", "regret_figure", "tree_figure"]

_MOST_REJECTED = 4
_NEAR = 0.25


@dataclass(frozen=True)
class _Line:
    """A row of the tree: a heading (no times) or a step."""

    text: str
    depth: int
    predicted: float = math.nan
    measured: float = math.nan
    tip: str = ""
    op: str = ""
    rank: str = ""  # "chosen" or "lost" for the price of a whole candidate
    is_once: bool = False  # done once, drawn on a scale of its own: it may take as long as a thousand steps

    @property
    def is_step(self) -> bool:
        return self.predicted > 0.0 or self.measured > 0.0


def tree_figure(name: str, plan: Mapping[str, Any]) -> Figure:
    """The tree of one plan: model, layers, phases, steps, and what lost."""
    caption = (
        "Hollow bar: predicted. Solid bar: measured. Thin bars: what the whole layer was priced at, and what "
        "the candidates that lost would have cost. In brackets: predicted less measured, as a share of "
        "measured; + means that the prediction was too long. What is done once has its own scale."
    )
    lines = [line for layer in plan["layers"] for line in _layer_lines(layer)]
    lines += [
        _Line(f"{skipped.get('layer')}: runs in PyG", 0, tip=str(skipped.get("reason")))
        for skipped in plan.get("not_planned") or ()
    ]
    title = f"{name}: predicted {seconds_text(number(plan.get('seconds')))} per step" + _total(lines)
    return Figure(f"plan-{name}", title, caption, lambda width: _tree_svg(lines, title, width))


def _total(lines: Sequence[_Line]) -> str:
    steps = [line.measured for line in lines if line.is_step and not line.rank]
    measured = sum(seconds for seconds in steps if seconds > 0.0)
    return f", steps measured {seconds_text(measured)}" if measured else ""


def _layer_lines(layer: Mapping[str, Any]) -> list[_Line]:
    because = str(layer.get("because") or "")
    lines = [_Line(str(layer.get("layer")), 0, tip=because)]
    if layer.get("in_words"):
        lines.append(_Line(str(layer["in_words"]), 1, tip=because))
    lines.append(_Line(f"{layer.get('expression')}  [{layer.get('form')}]", 1, tip=because))
    steps = [*(layer.get("hoisted") or ()), *(layer.get("steps") or ())]
    for phase in dict.fromkeys(str(step.get("phase")) for step in steps):
        lines.append(_Line("once, on its own scale" if phase == "once" else phase, 1))
        lines += [_step_line(step) for step in steps if str(step.get("phase")) == phase]
    return lines + _choice_lines(layer)


def _choice_lines(layer: Mapping[str, Any]) -> list[_Line]:
    """The price of the layer among those of the candidates that lost."""
    losers = [loser for loser in layer.get("rejected") or () if number(loser.get("seconds")) > 0.0]
    if not losers:
        return []
    nearest = sorted(losers, key=lambda loser: number(loser["seconds"]))[:_MOST_REJECTED]
    own = number(layer.get("seconds"))
    lines = [
        _Line(
            "choice"
            if len(losers) == len(nearest)
            else f"choice, the {len(nearest)} nearest of {len(losers)}",
            1,
        )
    ]
    lines.append(_Line("this plan", 2, own, tip=str(layer.get("because") or ""), rank="chosen"))
    for loser in nearest:
        tip = f"{loser.get('candidate')}: {loser.get('why')}"
        lines.append(_Line(str(loser.get("candidate")), 2, number(loser["seconds"]), tip=tip, rank="lost"))
    return lines


def _step_line(step: Mapping[str, Any]) -> _Line:
    reads: Mapping[str, Any] = step.get("reads") or {}
    op = str(step.get("op"))
    name = op + ("ᵀ" if step.get("is_transposed") else "")
    matrix = f" {reads['matrix']}" if reads.get("matrix") else ""
    predicted, measured = number(step.get("seconds")), number(step.get("measured_seconds"))
    tip = (
        f"{name}{matrix}, on {step.get('backend')}: {amount(number(step.get('flops')), 'FLOP')}, "
        f"predicted {seconds_text(predicted)}, measured {seconds_text(measured)}; {step.get('because')}; "
        + "reads "
        + ", ".join(f"{key} = {value}" for key, value in reads.items())
    )
    text = f"{name}{matrix} → {step.get('rows')}×{step.get('columns')}"
    return _Line(text, 2, predicted, measured, tip, op, is_once=step.get("phase") == "once")


def _tree_svg(lines: Sequence[_Line], title: str, width: int) -> str:
    is_wide = width > NARROW
    left = 400.0 if is_wide else 14.0
    end = width - (150.0 if is_wide else 120.0)
    scales = {
        is_once: Scale(0.0, _longest(lines, is_once), left, end, is_log=False) for is_once in (False, True)
    }
    parts: list[str] = []
    trunk: list[tuple[int, float]] = []
    y = 6.0
    for line in lines:
        y += 16.0 if line.depth == 0 and trunk else 0.0
        text_y = y + 16
        parts.append(
            _heading(line, text_y, width)
            if not line.is_step
            else _step(line, scales[line.is_once], y, is_wide)
        )
        trunk.append((line.depth, text_y - 4))
        y += 26.0 if is_wide or not line.is_step else 40.0
    return svg(width, y + 8, _branches(trunk), *parts, title=title)


def _longest(lines: Sequence[_Line], is_once: bool) -> float:
    """The longest time of the lines done once, or of the others."""
    times = [t for line in lines if line.is_once == is_once for t in (line.predicted, line.measured)]
    return max((t for t in times if t > 0.0), default=1.0)


def _branches(trunk: Sequence[tuple[int, float]]) -> str:
    """The lines of the tree: from each row left to its parent's stem."""
    stem: dict[int, float] = {}
    drawn = []
    for depth, y in trunk:
        if depth and depth - 1 in stem:
            x = 6.0 + 14.0 * (depth - 1)
            drawn.append(f"M{x:.0f} {stem[depth - 1] + 7:.1f}V{y:.1f}h7")
        stem[depth] = y
    return tag("path", d="".join(drawn), fill="none", stroke="var(--rule)", stroke_width=1.2)


def _indent(line: _Line) -> float:
    return 2.0 + 14.0 * line.depth


def _heading(line: _Line, y: float, width: int) -> str:
    room = (width - _indent(line)) / 6.6
    text = line.text if len(line.text) <= room else line.text[: int(room) - 1] + "…"
    style: dict[str, object] = {"fill": "var(--ink)", "font_weight": 650} if line.depth == 0 else {}
    if line.depth == 1 and "@" in line.text:
        style = {"font_family": "ui-monospace,Menlo,Consolas,monospace", "font_size": 11}
    # a mark only where there is something more to say
    more: dict[str, object] = {"class_": "mark"} if line.tip else {}
    return tag("g", titled(line.tip or line.text), label(text, _indent(line), y, **style), **more)


def _step(line: _Line, x: Scale, y: float, is_wide: bool) -> str:
    room = 57 if is_wide else 52
    text = line.text if len(line.text) <= room else line.text[: room - 1] + "…"
    bar_y = y + 5 if is_wide else y + 20
    colour = "var(--soft)" if line.rank == "lost" else "var(--ink)"
    parts = [titled(line.tip), label(text, _indent(line), y + 16 if is_wide else y + 14, fill=colour)]
    start, end = x.start + (0.0 if is_wide else _indent(line)), x.start
    if line.predicted > 0.0:
        end = max(end, x(line.predicted))
        length = x(line.predicted) - x.start
        if line.rank:
            fill = "var(--own)" if line.rank == "chosen" else "var(--faint)"
            parts.append(_bar(start, bar_y + 5, length, 3, fill, None))
        else:
            parts.append(_bar(start, bar_y, length, 6, "var(--wash)", "var(--own)"))
    if line.measured > 0.0:
        end = max(end, x(line.measured))
        parts.append(_bar(start, bar_y + 8, x(line.measured) - x.start, 6, "var(--own)", None))
    parts.append(label(_times(line), end + start - x.start + 8, bar_y + 11, fill="var(--soft)"))
    return tag("g", *parts, class_="mark", data_op=line.op or None, data_fade="")


def _bar(x: float, y: float, width: float, height: float, fill: str, stroke: str | None) -> str:
    return tag("rect", x=x, y=y, width=max(width, 1.0), height=height, fill=fill, stroke=stroke, rx=1)


def _times(line: _Line) -> str:
    if line.rank or not line.measured > 0.0:
        return short(line.predicted, "s")
    if not line.predicted > 0.0:
        return short(line.measured, "s")
    return f"{short(line.measured, 's')} ({line.predicted / line.measured - 1:+.0%})"


@dataclass(frozen=True)
class Prediction:
    """A time that was predicted and then measured."""

    what: str
    predicted: float
    measured: float
    op: str
    is_chosen: bool
    graph: str | None = None
    device: str | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0


def predictions_of(samples: Iterable[Sample], plans: Mapping[str, Mapping[str, Any]]) -> list[Prediction]:
    """Candidates of `bench plans`, layers and steps of `bench layers --predict`, steps of analysed plans."""
    found = []
    for s in samples:
        if s.kind in ("plan", "predict") and s.is_timed:
            what = f"{s.op} {s.case} on {s.graph}"
            price, is_chosen = number(s.result.get("predicted_seconds")), bool(s.result.get("is_chosen"))
            name = what if s.kind == "predict" else f"{what}, {s.variant}"
            found.append(Prediction(name, price, s.median, s.op, is_chosen, s.graph, s.device))
            for step in s.result.get("steps", ()):
                times = number(step.get("predicted_seconds")), number(step.get("measured_seconds"))
                op = str(step.get("op"))
                found.append(Prediction(f"step {op} of {what}", *times, op, True, s.graph, s.device))
    for name, plan in plans.items():
        for layer in plan["layers"]:
            for step in layer.get("steps") or ():
                times = number(step.get("seconds")), number(step.get("measured_seconds"))
                found.append(
                    Prediction(f"step {step.get('op')} of {name}", *times, str(step.get("op")), True)
                )
    return [p for p in found if p.predicted > 0.0 and p.measured > 0.0]


def prediction_figure(predictions: Sequence[Prediction]) -> Figure | None:
    """Predicted against measured; on the diagonal the model was right."""
    if len(predictions) < 2:
        return None
    near = sum(abs(p.error) <= _NEAR for p in predictions) / len(predictions)
    caption = (
        f"Each dot is a plan or a step that was priced and then run; {near:.0%} of {len(predictions)} lie "
        "within 25% of the measured time (the band). Above the diagonal it was too long (+), below "
        "too short (−). Filled: what the planner chose, and its steps."
    )
    title = "Predicted against measured time"
    return Figure("predictions", title, caption, lambda width: _prediction_svg(predictions, title, width))


def _prediction_svg(predictions: Sequence[Prediction], title: str, width: int) -> str:
    side = min(width, 520)
    low, high = padded((t for p in predictions for t in (p.predicted, p.measured)), 1.4)
    x = Scale(low, high, 58.0, side - 14.0)
    y = Scale(low, high, side - 50.0, 32.0)
    frame = Frame(x, y, "measured →", "predicted ↑", lambda v: short(v, "s"), lambda v: short(v, "s"))
    band = [(x(low), y(low * 1.25)), (x(high / 1.25), y(high)), (x(high), y(high)), (x(high), y(high / 1.25))]
    band += [(x(low * 1.25), y(low)), (x(low), y(low))]
    parts = [
        tag("path", d=path_of(band) + "Z", fill="var(--wash)"),
        frame.axes(),
        tag("path", d=path_of([(x(low), y(low)), (x(high), y(high))]), stroke="var(--ink)", stroke_width=1.2),
    ]
    for p in sorted(predictions, key=lambda p: p.is_chosen):
        times = f"predicted {seconds_text(p.predicted)}, measured {seconds_text(p.measured)}"
        tip = f"{p.what}: {times} ({p.error:+.0%})"
        colour = "var(--own)" if p.is_chosen else "var(--peer)"
        facets = {"data_op": p.op, "data_graph": p.graph, "data_device": p.device}
        parts.append(dot(x(p.measured), y(p.predicted), tip, colour, facets, p.is_chosen, 3.6))
    return svg(side, side, *parts, title=title)


def regret_figure(samples: Sequence[Sample]) -> Figure | None:
    """Measured time of the chosen plan over that of the fastest candidate: a dot per case."""
    chosen = [
        s
        for s in samples
        if s.kind == "plan" and s.result.get("is_chosen") and number(s.result.get("regret")) > 0.0
    ]
    if not chosen:
        return None
    caption = (
        "Time of the plan that was chosen over that of the fastest candidate, a dot per graph and width. "
        "At 1 the planner was right."
    )
    return Figure("regret", "Regret of the planner", caption, lambda width: _regret_svg(chosen, width))


def _regret_svg(chosen: Sequence[Sample], width: int) -> str:
    worst = max(float(s.result["regret"]) for s in chosen)
    x = Scale(1.0, max(1.25, worst * 1.08), 92.0, min(width, 420) - 14.0, is_log=False)
    rows: dict[str, list[str]] = defaultdict(list)
    for s in chosen:
        regret = float(s.result["regret"])
        tip = f"{s.op} {s.case} on {s.graph}: regret {regret:.2f}, {s.variant}"
        height = (len(rows[s.op]) % 5 - 2) * 4.0  # equal ones side by side
        rows[s.op].append(dot(x(regret), height, tip, "var(--own)", s.facets))
    return lanes(x, 34.0, rows, lambda t: f"{t:.4g}×", "Regret of the planner by layer")
