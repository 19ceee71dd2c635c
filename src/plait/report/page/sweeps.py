"""Curves of time against one size with all else held still, and where two ways of computing cross."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from plait.report.page.draw import (
    Figure,
    Frame,
    Scale,
    bold_label,
    label,
    padded,
    path_of,
    percent,
    short,
    svg,
    tag,
    titled,
)
from plait.report.page.palette import colour_of
from plait.report.page.samples import Sample, number
from plait.report.table import seconds_text

__all__ = ["AXES", "PANEL", "Crossing", "Sweep", "crossings", "sweep_figure", "sweeps_of"]


@dataclass(frozen=True)
class _Axis:
    """A size that is varied: the fields that change with it, how it reads, how many variants make a figure.

    Where the question is whether the size matters at all, one variant is enough.
    """

    along: tuple[str, ...]
    words: str
    fewest_variants: int = 2
    is_log: bool = True


AXES = {
    "density": _Axis(("sparsity", "edges", "degree"), "density of the matrix"),
    "width": _Axis(("width",), "width"),
    "edges": _Axis(("edges", "nodes"), "edges"),
    "degree": _Axis(("degree", "edges", "nodes"), "mean degree"),
    "inner": _Axis(("inner",), "summed width of a dense product"),
    "reduction": _Axis(("reduction",), "targets that share a row", 1),
    "value_sparsity": _Axis(("value_sparsity",), "share of zeros among the values", 1, is_log=False),
    "threads": _Axis(("threads",), "threads", 1),
}
_FEWEST = 3
_MOST_LINES = 6
PANEL = 326
_DASHES = (None, "6 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Sweep:
    """Time of each variant over one size: (size, sample) in order, all other circumstances equal."""

    axis: str
    op: str
    detail: str
    lines: dict[str, list[tuple[float, Sample]]]

    @property
    def first(self) -> Sample:
        """Any of its samples, for what they share."""
        return next(iter(self.lines.values()))[0][1]

    @property
    def title(self) -> str:
        """The operation and what was held still."""
        more = len(self.lines) - _MOST_LINES
        left_out = [f"{more} slower left out"] if more > 0 else []
        return ", ".join(part for part in (self.op, self.detail, *left_out) if part)


@dataclass(frozen=True)
class Crossing:
    """Below `at` the variant `below` is faster than `above`, beyond it the other way round."""

    at: float
    seconds: float
    below: str
    above: str


def sweeps_of(samples: Sequence[Sample]) -> list[Sweep]:
    """Every sweep with at least three sizes and two variants; matrices of growing density come first."""
    timed = [s for s in samples if s.kind == "op" and s.is_timed]
    return [sweep for axis in AXES for sweep in _along(axis, timed)]


def _along(axis: str, timed: Sequence[Sample]) -> list[Sweep]:
    along = AXES[axis].along
    groups: dict[tuple[tuple[str, str], ...], list[tuple[float, Sample]]] = defaultdict(list)
    for sample in timed:
        size = _size(sample, axis)
        if size is None:
            continue
        still = {k: str(v) for k, v in sample.fields.items() if k not in (*along, "variant", "suite")}
        still["file"] = str(sample.file)  # a run measured twice is two curves, not one that jumps
        groups[tuple(sorted(still.items()))].append((size, sample))
    sweeps = []
    for members in groups.values():
        lines: dict[str, list[tuple[float, Sample]]] = defaultdict(list)
        for size, sample in sorted(members, key=lambda item: item[0]):
            lines[sample.variant].append((size, sample))
        long = {name: line for name, line in lines.items() if len({size for size, _ in line}) >= _FEWEST}
        if len(long) >= AXES[axis].fewest_variants:
            first = members[0][1]
            sweeps.append(Sweep(axis, first.op, _detail(first, along), long))
    return sweeps


def _shown(sweep: Sweep) -> dict[str, list[tuple[float, Sample]]]:
    """The lines worth drawing: plait's, the dense one, and the fastest others, few enough to tell apart."""

    def rank(name: str) -> tuple[bool, float]:
        line = sweep.lines[name]
        is_needed = name == "dense" or line[0][1].is_own
        return not is_needed, math.fsum(math.log(s.median) for _, s in line) / len(line)

    return {name: sweep.lines[name] for name in sorted(sweep.lines, key=rank)[:_MOST_LINES]}


def _size(sample: Sample, axis: str) -> float | None:
    sparsity = number(sample.fields.get("sparsity"))
    if axis == "density":
        return 1.0 - sparsity if 0.0 <= sparsity < 1.0 else None
    if sparsity >= 0.0:
        return None  # a matrix of chosen density has its own axis
    size = number(sample.fields.get(axis))
    return size if size > 0.0 or (size == 0.0 and not AXES[axis].is_log) else None


def _detail(sample: Sample, along: Sequence[str]) -> str:
    fields = sample.fields
    shown = [str(fields["direction"])] if fields.get("direction", "forward") != "forward" else []
    if fields.get("graph"):
        shown.append(str(fields["graph"]))
    for name in ("edges", "nodes"):
        if name not in along and number(fields.get(name)) > 0:
            shown.append(f"{short(float(fields[name]))} {name}")
    # the degree follows from edges and nodes unless both vary
    for name in ("width", "inner") if "nodes" not in along else ("width", "inner", "degree"):
        if name not in along and number(fields.get(name)) > 0:
            shown.append(f"{name} {short(float(fields[name]))}")
    unusual = {"law": "uniform", "order": "sorted", "dtype": "float32", "device": "cpu", "axis": 0}
    shown += [
        f"axis {fields[name]}" if name == "axis" else str(fields[name])
        for name, usual in unusual.items()
        if fields.get(name) not in (None, usual)
    ]
    return ", ".join(shown)


def crossings(sweep: Sweep) -> list[Crossing]:
    """Where the dense variant meets the fastest other, on straight lines between the logarithms."""
    dense = next((name for name in sweep.lines if "dense" in name or name == "mm"), None)
    if dense is None or not AXES[sweep.axis].is_log:
        return []
    base = {size: sample.median for size, sample in sweep.lines[dense]}
    rivals: dict[float, tuple[float, str]] = {}
    for name, line in sweep.lines.items():
        for size, sample in line:
            if name != dense and size in base and sample.median < rivals.get(size, (math.inf, ""))[0]:
                rivals[size] = (sample.median, name)
    sizes = sorted(rivals)
    found = []
    for a, b in itertools.pairwise(sizes):
        before, after = (math.log(rivals[size][0] / base[size]) for size in (a, b))
        if before * after < 0.0:
            share = before / (before - after)
            at = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
            seconds = math.exp(math.log(base[a]) + share * (math.log(base[b]) - math.log(base[a])))
            pair = (rivals[a][1], dense) if before < 0.0 else (dense, rivals[b][1])
            found.append(Crossing(at, seconds, *pair))
    return found


def sweep_figure(sweep: Sweep, place: int) -> Figure:
    """One panel; panels stand side by side where there is room."""
    name = f"sweep-{place + 1}-{sweep.op}-{sweep.axis}"
    return Figure(name, sweep.title, "", lambda width: _sweep_svg(sweep))


def _sweep_svg(sweep: Sweep) -> str:
    lines = _shown(sweep)
    height, left, right = 250.0, 54.0, PANEL - 78.0
    sizes = [size for line in lines.values() for size, _ in line]
    times = [t for line in lines.values() for _, s in line for t in (s.median, s.low, s.high)]
    axis = AXES[sweep.axis]
    x = Scale(min(sizes), max(sizes), left, right, axis.is_log)
    y = Scale(*padded(times, 1.3), height - 44, 26.0)
    as_share = sweep.axis in ("density", "value_sparsity")
    frame = Frame(x, y, f"{axis.words} →", "time ↑", percent if as_share else short, lambda v: short(v, "s"))
    parts = [frame.axes()]
    ends: list[tuple[float, str]] = []
    seen: dict[str, int] = defaultdict(int)
    for variant, line in sorted(lines.items(), key=lambda item: item[0].startswith("plait")):
        colour = colour_of(variant)
        # variants of one library share its colour, not its dashes
        parts.append(_curve(variant, line, frame, _DASHES[seen[colour] % len(_DASHES)]))
        seen[colour] += 1
        ends.append((frame.y(line[-1][1].median), variant))
    parts += _end_names(ends, right + 6, sweep.first)
    for crossing in crossings(sweep):
        parts.append(_crossing(crossing, frame, as_share))
    return svg(PANEL, height, *parts, title=sweep.title)


def _curve(variant: str, line: Sequence[tuple[float, Sample]], frame: Frame, dashes: str | None) -> str:
    colour = colour_of(variant)
    points = [(frame.x(size), frame.y(sample.median)) for size, sample in line]
    width = 2.2 if variant.startswith("plait") else 1.3
    parts = [
        tag(
            "path", d=path_of(points), fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dashes
        )
    ]
    for (px, py), (size, sample) in zip(points, line, strict=True):
        tip = f"{sample.op}, {variant}: {seconds_text(sample.median)} at {size:.3g} ({sample.case})"
        parts.append(
            tag(
                "path",
                d=f"M{px:.1f} {frame.y(sample.low):.1f}V{frame.y(sample.high):.1f}",
                stroke=colour,
                opacity=0.45,
            )
        )
        parts.append(tag("circle", titled(tip), cx=px, cy=py, r=2.8, fill=colour, class_="mark"))
    return tag("g", *parts, **line[0][1].facets)


def _end_names(ends: Sequence[tuple[float, str]], x: float, sample: Sample) -> list[str]:
    """Each variant's name at the end of its line, moved apart where they would overlap."""
    shown, lowest = [], -math.inf
    for y, variant in sorted(ends):
        lowest = max(y, lowest + 12.5)
        text = variant if len(variant) <= 12 else variant[:11] + "…"
        weight = 600 if variant.startswith("plait") else 400
        shown.append(label(text, x, lowest + 4, fill=colour_of(variant), font_weight=weight, **sample.facets))
    return shown


def _crossing(crossing: Crossing, frame: Frame, as_share: bool) -> str:
    x, y = frame.x(crossing.at), frame.y(crossing.seconds)
    at = f"{crossing.at:.2%}" if as_share else f"{crossing.at:.3g}"
    tip = f"{crossing.below} is faster below {at}, {crossing.above} beyond"
    line = tag("path", d=f"M{x:.1f} {y:.1f}V{frame.y.start:.1f}", stroke="var(--ink)", stroke_dasharray="2 3")
    ring = tag("circle", titled(tip), cx=x, cy=y, r=6, fill="none", stroke="var(--ink)", class_="mark")
    # on the side where there is more room
    name_x = x - 5 - 6.8 * len(at) if x > (frame.x.start + frame.x.end) / 2 else x + 5
    return line + ring + bold_label(at, name_x, frame.y.start - 6)
