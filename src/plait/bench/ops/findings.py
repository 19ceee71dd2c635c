"""Reads the records of the paper suite and answers the study's questions for this machine, in words."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from plait.measure import Record

__all__ = ["Finding", "findings"]

_NATIVE = (
    "torch",
    "index_add",
    "torch-csr",
    "torch-csr32",
    "torch-coo",
    "torch-reduce",
    "gather-scatter",
    "scatter_add",
)
_PYG = ("pyg", "pyg-scatter", "pyg-edgeindex")


Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A question, its answer in words, the figures it rests on and the groups of records behind them."""

    name: str
    question: str
    answer: str
    figures: tuple[Mapping[str, Any], ...]
    groups: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for a file."""
        return asdict(self)


@dataclass(frozen=True)
class _Point:
    """One timed record, read."""

    case: Mapping[str, Any]
    seconds: float
    interval: tuple[float, float]
    group: str

    @property
    def op(self) -> str:
        return str(self.case["op"])

    @property
    def variant(self) -> str:
        return str(self.case["variant"])


def findings(records: Sequence[Record]) -> list[Finding]:
    """Every question the records can answer; those without records are left out."""
    points = [point for record in records if (point := _point(record)) is not None]
    questions: tuple[Callable[[list[_Point]], Finding | None], ...] = (
        _value_zeros,
        _crossover,
        _contiguity,
        _collisions,
        _reductions,
        _pyg_against_native,
        _backward_penalty,
        _two_steps,
    )
    found = [question(points) for question in questions]
    return [finding for finding in [*found, _no_sparse_path(records)] if finding is not None]


def _point(record: Record) -> _Point | None:
    seconds: Any = record.result.get("seconds")
    if record.kind != "op" or not seconds or not seconds["median_seconds"] > 0.0:
        return None
    middle = float(seconds["median_seconds"])
    low, high = seconds.get("interval_seconds") or (middle, middle)
    return _Point(record.case, middle, (float(low), float(high)), str(record.result.get("group")))


def _sweeps(points: Iterable[_Point], size: str) -> dict[tuple[str, str, str], dict[Any, _Point]]:
    """Points timed together that differ in one size: {(op, variant, group): {value: point}}."""
    found: dict[tuple[str, str, str], dict[Any, _Point]] = defaultdict(dict)
    for point in points:
        if size in point.case and point.case["direction"] == "forward":
            found[point.op, point.variant, point.group][point.case[size]] = point
    return {key: values for key, values in found.items() if len(values) > 1}


def _groups(points: Iterable[_Point]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(point.group for point in points))


def _ms(point: _Point) -> float:
    return float(f"{point.seconds * 1e3:.3g}")


def _times(slow: _Point, fast: _Point) -> float:
    return round(slow.seconds / fast.seconds, 2)


def _value_zeros(points: list[_Point]) -> Finding | None:
    rows: list[Row] = []
    behind: list[_Point] = []
    largest: dict[str, float] = {}
    unclear: set[str] = set()
    for (op, variant, _), values in _sweeps(points, "value_sparsity").items():
        if 0.0 not in values:
            continue
        base, others = values[0.0], {zeros: p for zeros, p in sorted(values.items()) if zeros}
        changes = {zeros: p.seconds / base.seconds - 1.0 for zeros, p in others.items()}
        shown = {f"{zeros:.0%} zeros": f"{change:+.1%}" for zeros, change in changes.items()}
        rows.append({"op": op, "variant": variant, **shown})
        behind += values.values()
        # extrema count ties, of which zeros make many: reported in the figures, apart from the question
        if variant == "torch" and op not in ("scatter_max", "scatter_min"):
            far = max(others, key=lambda zeros: abs(changes[zeros]))
            largest[op] = abs(changes[far])
            if largest[op] >= 0.03 and _overlap(base, others[far]):
                unclear.add(op)
    if not largest:
        return None
    small, worst = sum(change < 0.03 for change in largest.values()), max(largest, key=largest.__getitem__)
    answer = (
        f"{'No' if small + len(unclear) == len(largest) else 'Not in most'}: {small} of {len(largest)} dense "
        f"operations of torch change by less than 3% when up to 99% of the values are zero, "
        f"{len(unclear)} more by less than their intervals tell apart; the largest change is "
        f"{largest[worst]:.1%} ({worst})."
    )
    question = "Do zeros among the values change the time?"
    return Finding("value_zeros", question, answer, tuple(rows), _groups(behind))


def _overlap(a: _Point, b: _Point) -> bool:
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _crossover(points: list[_Point]) -> Finding | None:
    cells: dict[tuple[int, float], dict[str, _Point]] = defaultdict(dict)
    for point in points:
        case = point.case
        if point.op == "spmm" and "sparsity" in case and case["direction"] == "forward":
            cells[int(case["width"]), 1.0 - float(case["sparsity"])][point.variant] = point
    formats = {"torch": ("torch-coo", "torch-csr", "torch-csr32", "torch-reduce"), "plait": ("plait",)}
    rows: list[Row] = []
    behind: list[_Point] = []
    for width in sorted({width for width, _ in cells}):
        line = {share: cell for (w, share), cell in sorted(cells.items()) if w == width and "dense" in cell}
        rows.append({"width": width} | {who: _crossing(line, names) for who, names in formats.items()})
        behind += [point for cell in line.values() for point in cell.values()]
    if not behind:
        return None
    parts = [
        f"width {r['width']}: below {r['torch']} (torch's best format), {r['plait']} (plait)" for r in rows
    ]
    answer = "By the share of the matrix that is filled: " + "; ".join(parts) + "."
    question = "Where does sparse beat dense for A @ x?"
    return Finding("crossover", question, answer, tuple(rows), _groups(behind))


def _crossing(line: Mapping[float, Mapping[str, _Point]], rivals: Sequence[str]) -> str:
    """The density at which the best rival takes as long as dense, on straight lines of the logarithms."""
    gaps = []
    for density, cell in sorted(line.items()):
        times = [cell[name].seconds for name in rivals if name in cell]
        if times:
            gaps.append((math.log(density), math.log(min(times) / cell["dense"].seconds)))
    if not gaps:
        return "-"
    for (x0, y0), (x1, y1) in itertools.pairwise(gaps):
        if y0 < 0.0 <= y1:
            return f"{math.exp(x0 - y0 * (x1 - x0) / (y1 - y0)):.1%}"
    densest, sparsest = math.exp(gaps[-1][0]), math.exp(gaps[0][0])
    return f"{densest:.0%} at least" if gaps[-1][1] < 0.0 else f"under {sparsest:.2%}"


def _contiguity(points: list[_Point]) -> Finding | None:
    rows: list[Row] = []
    behind: list[_Point] = []
    for (op, variant, _), values in _sweeps(points, "axis").items():
        slow, fast = sorted(values.values(), key=lambda point: -point.seconds)
        found = {"fast axis": fast.case["axis"], "fast ms": _ms(fast), "slow ms": _ms(slow)}
        rows.append({"op": op, "variant": variant, **found, "ratio": _times(slow, fast)})
        behind += [slow, fast]
    if not rows:
        return None
    native = [row for row in rows if row["variant"] == "torch"]
    large = sum(row["ratio"] > 2.0 for row in native)
    worst = max(native or rows, key=lambda row: float(row["ratio"]))
    answer = (
        f"{'Yes' if large else 'No'}: over 2x in {large} of {len(native)} operations of torch, "
        f"{worst['ratio']:.1f}x for {worst['op']} (axis {worst['fast axis']} is the fast one)."
    )
    return Finding("contiguity", "Does the direction of access matter?", answer, tuple(rows), _groups(behind))


def _collisions(points: list[_Point]) -> Finding | None:
    rows: list[Row] = []
    behind: list[_Point] = []
    for (op, variant, _), values in _sweeps(points, "reduction").items():
        first, last = values[min(values)], values[max(values)]
        found = {"ms without": _ms(first), f"ms at {max(values)}": _ms(last)}
        rows.append({"op": op, "variant": variant, **found, "ratio": _times(last, first)})
        behind += values.values()
    if not rows:
        return None
    native = [row for row in rows if row["variant"] == "torch"] or rows
    most, least = (pick(native, key=lambda row: float(row["ratio"])) for pick in (max, min))
    answer = (
        f"{'Yes' if most['ratio'] > 1.05 else 'No'}: folded onto 8 times fewer rows, which leaves less to "
        f"write too, an operation takes {least['ratio']:.2f}x ({least['op']}) to {most['ratio']:.2f}x "
        f"({most['op']}) the time."
    )
    return Finding("collisions", "Do collisions of targets cost?", answer, tuple(rows), _groups(behind))


def _reductions(points: list[_Point]) -> Finding | None:
    """What each reduction costs compared with a sum, at the study's square shape."""
    base = {
        point.op: point
        for point in points
        if point.op.startswith("scatter_") and point.variant == "torch" and point.case.get("reduction") == 1
    }
    if "scatter_add" not in base or len(base) < 3:
        return None
    times = {op: _times(point, base["scatter_add"]) for op, point in base.items()}
    rows = tuple({"op": op, "ms": _ms(point), "times a sum": times[op]} for op, point in base.items())
    others = {op: ratio for op, ratio in times.items() if op != "scatter_add"}
    cheap, dear = (pick(others, key=others.__getitem__) for pick in (min, max))
    answer = f"{others[cheap]:.2f}x ({cheap}) to {others[dear]:.2f}x ({dear}) a sum, in torch's scatter."
    question = "What do other reductions cost compared with a sum?"
    return Finding("reductions", question, answer, rows, _groups(base.values()))


def _pyg_against_native(points: list[_Point]) -> Finding | None:
    compared: dict[tuple[str, str, str], list[_Point]] = defaultdict(list)
    for point in points:
        sizes = repr(sorted((k, v) for k, v in point.case.items() if k not in ("variant", "suite")))
        compared[point.op, str(point.case["direction"]), sizes].append(point)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    behind: list[_Point] = []
    for (op, direction, _), members in compared.items():
        pyg = [point.seconds for point in members if point.variant in _PYG]
        native = [point.seconds for point in members if point.variant in _NATIVE]
        if pyg and native and not op.startswith("layer"):
            ratios[op, direction].append(min(pyg) / min(native))
            behind += members
    if not ratios:
        return None
    rows = tuple(
        {"op": op, "direction": direction, "cases": len(found), "ratio": round(geometric_mean(found), 2),
         "least": round(min(found), 2), "most": round(max(found), 2)}
        for (op, direction), found in ratios.items()
    )  # fmt: skip
    every = [ratio for found in ratios.values() for ratio in found]
    slower = sum(ratio > 1.05 for ratio in every)
    faster = sum(ratio < 0.95 for ratio in every)
    answer = (
        f"The best of PyG's ways takes {geometric_mean(every):.2f}x the best of torch's (geometric mean of "
        f"{len(every)} cases): over 5% slower in {slower}, over 5% faster in {faster}."
    )
    return Finding("pyg_against_native", "PyG's operations against torch's?", answer, rows, _groups(behind))


def _backward_penalty(points: list[_Point]) -> Finding | None:
    cells: dict[str, dict[str, dict[str, _Point]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        if point.op in ("spmm", "gather_scatter", "spmm_mean") and "sparsity" not in point.case:
            left_out = ("variant", "direction", "suite")
            sizes = repr(sorted((k, v) for k, v in point.case.items() if k not in left_out))
            cells[sizes][point.variant][str(point.case["direction"])] = point
    rows: list[Row] = []
    behind: list[_Point] = []
    for variants in cells.values():
        for variant, both in variants.items():
            if {"forward", "backward"} <= set(both):
                ahead, back = both["forward"], both["backward"]
                found = {"forward ms": _ms(ahead), "backward ms": _ms(back), "ratio": _times(back, ahead)}
                rows.append({"op": ahead.op, "variant": variant, **found})
                behind += [ahead, back]
    csr = [row for row in rows if row["variant"] == "torch-csr"]
    if not csr:
        return None
    own = [row for row in rows if row["variant"] == "plait" and row["op"] == csr[0]["op"]]
    answer = f"torch's CSR takes {csr[0]['ratio']:.1f}x its forward time ({csr[0]['op']})"
    answer += f"; plait, which keeps the transpose, {own[0]['ratio']:.1f}x." if own else "."
    return Finding(
        "backward_penalty", "What does the gradient of A @ x cost?", answer, tuple(rows), _groups(behind)
    )


def _two_steps(points: list[_Point]) -> Finding | None:
    """Gather, then scatter, against one product that never writes the edges' rows."""
    cells: dict[tuple[str, str, str], dict[str, _Point]] = defaultdict(dict)
    for point in points:
        if point.op == "gather_scatter":
            cells[point.op, str(point.case["direction"]), point.group][point.variant] = point
    rows: list[Row] = []
    behind: list[_Point] = []
    for (op, direction, _), cell in cells.items():
        fused = {name: point for name, point in cell.items() if name not in ("gather-scatter", "pyg-scatter")}
        if "gather-scatter" in cell and fused:
            best = min(fused.values(), key=lambda point: point.seconds)
            ratio = cell["gather-scatter"].seconds / best.seconds
            rows.append(
                {"op": op, "direction": direction, "best product": best.variant, "ratio": round(ratio, 2)}
            )
            behind += cell.values()
    if not rows:
        return None
    parts = ", ".join(f"{row['ratio']}x {row['direction']} ({row['best product']})" for row in rows)
    answer = f"Gathering every edge's row and scattering it takes {parts} the time of one product."
    return Finding("fusion", "Two steps or one product?", answer, tuple(rows), _groups(behind))


def _no_sparse_path(records: Sequence[Record]) -> Finding | None:
    from plait.bench.ops.catalogue import OPERATIONS

    ran = dict.fromkeys(str(record.case["op"]) for record in records if record.kind == "op")
    bare = [op for op in ran if op in OPERATIONS and OPERATIONS[op].has_sparse_path is False]
    if not bare:
        return None
    answer = (
        f"{len(bare)} of the {len(ran)} measured take dense rows and know no zero: {', '.join(bare)}. "
        "Zeros among their values are read, multiplied and written like any other."
    )
    return Finding("no_sparse_path", "Which operations have no sparse path?", answer, (), ())
