"""The roofline: how near each operation comes to what memory and arithmetic of the machine allow."""

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
    bold_label,
    dot,
    lanes,
    padded,
    percent,
    rates_frame,
    roof,
    short,
    svg,
)
from plait.report.page.palette import colour_of
from plait.report.page.samples import Sample, number
from plait.report.table import amount, seconds_text

__all__ = ["Point", "bandwidth_figure", "bandwidths", "points_of", "roofline_figures"]


@dataclass(frozen=True)
class Point:
    """Work done in a measured time: flops, the bytes that must move at least, seconds."""

    op: str
    variant: str
    device: str
    case: str
    flops: float
    bytes_least: float
    seconds: float
    graph: str = ""

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.bytes_least

    @property
    def rate(self) -> float:
        """Flops per second."""
        return self.flops / self.seconds

    @property
    def tip(self) -> str:
        """The point in words."""
        moved = amount(self.bytes_least / self.seconds, "B/s")
        return (
            f"{self.op}, {self.variant} ({self.case}): {amount(self.rate, 'FLOP/s')}, {moved}, "
            f"{seconds_text(self.seconds)}"
        )

    @property
    def facets(self) -> dict[str, str | None]:
        """What the filters ask for."""
        return {"data_op": self.op, "data_device": self.device, "data_graph": self.graph or None}


def points_of(samples: Iterable[Sample], plans: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Operations with a time, and the measured steps of layers and plans."""
    points = []
    for s in samples:
        if s.kind == "op" and s.is_timed:
            work = _positive(s.result.get("flops")), _positive(s.result.get("bytes_least"))
            points.append(Point(s.op, s.variant, s.device, s.case, *work, s.median, s.graph))
        elif s.kind == "predict":
            where = f"{s.op} {s.case}, {s.graph}"
            points += [_step_point(step, s.device, where, s.graph) for step in s.result["steps"]]
    for name, plan in plans.items():
        for layer in plan["layers"]:
            where = f"{name}, {layer.get('layer')}"
            points += [_step_point(step, "cpu", where, "") for step in layer.get("steps") or ()]
    return [point for point in points if point.bytes_least and point.seconds]


def _step_point(step: Mapping[str, Any], device: str, where: str, graph: str) -> Point:
    work = _positive(step.get("flops")), _positive(step.get("bytes_least"))
    seconds = _positive(step.get("measured_seconds"))
    op = str(step.get("op")).partition(" -> ")[0]  # passes of fused layers carry their shape in the name
    return Point(op, str(step.get("backend")), device, where, *work, seconds, graph)


def _positive(value: object) -> float:
    size = number(value)
    return size if size > 0.0 else 0.0


def bandwidths(samples: Iterable[Sample]) -> dict[str, float]:
    """Bytes per second of the copy that runs measure, the best of each device: others shared the machine."""
    seen: dict[str, float] = {}
    for sample in samples:
        if sample.kind != "op":
            continue
        speed = number(sample.result.get("stream_bytes_per_s"))
        if math.isnan(speed):
            speed = 1e9 * number(sample.result.get("gbytes_per_s")) / _share(sample)
        if speed > 0.0:
            seen[sample.device] = max(speed, seen.get(sample.device, 0.0))
    return seen


def _share(sample: Sample) -> float:
    share = number(sample.result.get("bandwidth_share"))
    return share if share > 0.0 else math.nan


def roofline_figures(points: Sequence[Point], streams: Mapping[str, float]) -> list[tuple[str, Figure]]:
    """One plot per device: (device, figure)."""
    figures = []
    for device in dict.fromkeys(point.device for point in points):
        members = [p for p in points if p.device == device and p.flops > 0.0]
        if members:
            caption = (
                "Each dot is one measured operation: arithmetic per byte that must move, against arithmetic "
                "per second. The flat roof is the fastest rate measured. Filled: plait."
            )
            stream = streams.get(device)
            if stream is not None:
                caption += (
                    " The slope is the memory bandwidth measured in the same run; a dot above it found its "
                    "data in a cache."
                )
            drawn = _Roofline(members, stream)
            figures.append((device, Figure(f"roofline-{device}", f"Roofline, {device}", caption, drawn.draw)))
    return figures


@dataclass(frozen=True)
class _Roofline:
    points: Sequence[Point]
    stream: float | None

    def draw(self, width: int) -> str:
        height = 520.0 if width > NARROW else 400.0
        frame = rates_frame((p.intensity for p in self.points), (p.rate for p in self.points), width, height)
        peak = max(p.rate for p in self.points)
        dots = sorted(self.points, key=lambda p: p.variant.startswith("plait"))
        return svg(
            width,
            height,
            frame.axes(),
            roof(frame, peak, f"{short(peak, 'FLOP/s')}, the fastest", self.stream),
            *(_dot(p, frame) for p in dots),
            *_names(self.points, frame),
            title="Roofline: flop per byte against flop per second",
        )


def _dot(point: Point, frame: Frame) -> str:
    place = frame.x(point.intensity), frame.y(point.rate)
    is_own = point.variant.startswith("plait")
    return dot(*place, point.tip, colour_of(point.variant), point.facets, is_own)


def _names(points: Sequence[Point], frame: Frame) -> list[str]:
    """The name of each operation at its fastest dot, left out where it would cover another name or dot."""
    best: dict[str, Point] = {}
    for point in points:
        if point.op not in best or point.rate > best[point.op].rate:
            best[point.op] = point
    taken = [(x - 4, x + 4, y) for x, y in ((frame.x(p.intensity), frame.y(p.rate)) for p in points)]
    # on the level of the fastest the line would strike the name through
    taken.append((frame.x.start, frame.x.end, frame.y(max(p.rate for p in points))))
    shown = []
    for op, point in sorted(best.items(), key=lambda item: -item[1].rate):
        place = _free_place(frame.x(point.intensity), frame.y(point.rate), 7.8 * len(op), frame, taken)
        if place is None:
            continue
        x, y = place
        taken.append((x, x + 7.8 * len(op), y - 4))
        shown.append(bold_label(op, x, y, **point.facets))
    return shown


def _free_place(
    x: float, y: float, width: float, frame: Frame, taken: Sequence[tuple[float, float, float]]
) -> tuple[float, float] | None:
    """Where a name of this width fits beside a dot: right, left, below or above it."""
    for start, line in ((x + 8, y), (x - 8 - width, y), (x - width / 2, y + 15), (x - width / 2, y - 13)):
        is_inside = start > frame.x.start and start + width < frame.x.end
        if is_inside and not any(
            abs(line - at) < 11 and start < b and start + width > a for a, b, at in taken
        ):
            return start, line + 4
    return None


def bandwidth_figure(samples: Sequence[Sample], streams: Mapping[str, float]) -> Figure | None:
    """What share of the measured bandwidth each operation reached: a line of dots per operation."""
    shares = [
        (s, number(s.result.get("bandwidth_share")))
        for s in samples
        if s.kind == "op" and s.is_timed and number(s.result.get("bandwidth_share")) > 0.0
    ]
    if not shares:
        return None
    speeds = ", ".join(f"{device}: {amount(stream, 'B/s')}" for device, stream in streams.items())
    caption = (
        "Bytes that must move, divided by the time and by the bandwidth a plain copy reached in the same run "
        f"(at best {speeds}). Beyond 100% the data was in a cache. Operations are sorted by how near they "
        "come. Filled: plait."
    )
    return Figure(
        "bandwidth", "Share of the memory bandwidth", caption, lambda width: _bandwidth_svg(shares, width)
    )


def _bandwidth_svg(shares: Sequence[tuple[Sample, float]], width: int) -> str:
    low, high = padded((share for _, share in shares), 1.3)
    x = Scale(low, max(high, 1.2), 130.0 if width > NARROW else 112.0, width - 14.0)
    rows: dict[str, list[str]] = defaultdict(list)
    for sample, share in sorted(shares, key=lambda item: item[0].is_own):
        tip = f"{sample.op}, {sample.variant} ({sample.case}): {share:.1%} of the bandwidth"
        mark = dot(x(share), 0.0, tip, colour_of(sample.variant), sample.facets, sample.is_own)
        rows[sample.op].append(mark)
    best = {op: max(share for sample, share in shares if sample.op == op) for op in rows}
    ordered = {op: rows[op] for op in sorted(rows, key=best.__getitem__)}
    return lanes(x, 22.0, ordered, percent, "Share of the memory bandwidth by operation")
