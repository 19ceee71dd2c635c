"""Which form the products with a graph's 0/1 matrix get: a forecast, a search within a budget, a timed check.

The plain form (csr) reads every neighbour of every node. The hierarchical form (hag) sums shared neighbours
once; whether the fewer sums are also less time depends on the graph, the width and the machine, so it is used
only where it was timed to be faster on this graph, each way and width by itself. All of this happens when a
model is compiled with its data, never inside a training step.

Differences (diff) take a row from a similar one, adding and subtracting what they do not share. They are
found sooner and often run faster, but subtraction cancels: with one input in a thousand a million times
larger than the rest, float32 rows came out wrong by 8% (tu_collab), and NaN reaches rows that are no
neighbours of it. So they are used only where asked for. A hierarchy only adds: its worst errors were 0.4 to
2 times CSR's on the same inputs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.errors import GraphError, InputError
from plait.graph import Graph, hag
from plait.kernels.partial import Sums, partial_sums
from plait.kernels.spmm import Pattern, spmm
from plait.measure import time_calls

if TYPE_CHECKING:
    from plait.runtime.executor import Run

__all__ = ["MARGIN", "NAMES", "USUAL", "Direction", "Form", "Forms", "Use", "adopt", "chosen_names", "timed"]

NAMES = ("csr", "hag", "diff")
USUAL = ("csr", "hag")

MARGIN = 1.05
"""Least measured gain for which a form is used: a timing of a busy machine is a few per cent wrong."""
FEWEST_CALLS = 50
_BUDGET_SECONDS = 5.0
_SAFE_RATIO, _SAFE_SHARE, _RISKY_SHARE = 2.15, 0.5, 0.1
"""The search may take a share of the seconds it is expected to save: the larger one from the traffic ratio on
that has never lost against CSR yet."""
_TRAFFIC_TO_TIME = 0.3
"""Part of the saved row traffic taken to show as time, on the low side: at width 64, one thread, it was 0.33
on tu_collab and 0.47 on web_cnr2000 forward; on ego_twitter the form lost."""
_FORECAST_SECONDS, _FORECAST_SECONDS_PER_EDGE = 0.05, 8e-9
_LARGEST_FORECAST = 0.02  # of the run's seconds
# the fast search and the exact one as timed on web_cnr2000, on busy cores. That of unions is a guess for idle
# cores: tu_collab took 3.5e-7 on busy ones, so there the usual budget cuts it short (1.7x instead of 3.1x).
_FAST_SECONDS_PER_EDGE, _UNION_SECONDS_PER_EDGE, _EXACT_SECONDS_PER_EDGE = 1.4e-7, 2e-7, 4e-6
_LEAST_SHARED = 6
"""Merges that fewer rows share save additions, not time (tu_collab, exact: 3 was 1.02 to 1.10x slower)."""
_MOST_DEPTH = 10  # no limit saves 4% of the additions on tu_collab
_CHECK_SECONDS = 0.6
_FORCED_GAIN = 1e3


@dataclass(frozen=True, slots=True)
class Use:
    """A product the plan makes with the matrix: which way, how wide, in which slabs by CSR."""

    is_transposed: bool
    width: int
    slab: int = 0


@dataclass
class Direction:
    """A form of one matrix, one way: its schedule and what it was timed to gain over CSR by width."""

    sums: Sums
    text: str
    gains: dict[int, float] = field(default_factory=dict)
    is_forced: bool = False
    name: str = "hag"

    def gain(self, width: int) -> float:
        """How many times faster than CSR at this width; 1 where it is not used or was not timed nearby."""
        if self.is_forced:
            return _FORCED_GAIN
        near = min(self.gains, key=lambda w: abs(math.log(w / max(1, width))), default=None)
        if near is None or not near / 2 <= width <= near * 2:
            return 1.0
        return self.gains[near] if self.gains[near] >= MARGIN else 1.0

    def because(self, width: int) -> str:
        """The reason that goes with a price."""
        if self.is_forced:
            return f"{self.text}; forced by forms="
        return f"{self.text}; timed {self.gain(width):.2f}x CSR at about this width"


@dataclass
class Form:
    """Both ways of one graph's form, and its counts in words."""

    forward: Direction
    transposed: Direction
    text: str = ""
    seconds_saved: float = 0.0

    @property
    def name(self) -> str:
        return self.forward.name

    def direction(self, is_transposed: bool) -> Direction:
        return self.transposed if is_transposed else self.forward


def chosen_names(names: Iterable[str] | None) -> tuple[str, ...]:
    """The forms that may be used: PLAIT_FORMS (comma separated) before `names` before the usual ones."""
    given = os.environ.get("PLAIT_FORMS")
    source = "PLAIT_FORMS" if given else "forms"
    chosen = tuple(part.strip() for part in given.split(",")) if given else names
    if chosen is None:
        return USUAL
    if isinstance(chosen, str):
        raise InputError(f'{source}: {chosen!r} is a string; pass a list, for example forms=["csr"]')
    chosen = tuple(chosen)
    unknown = [name for name in chosen if name not in NAMES]
    if unknown or not chosen:
        what = f"unknown form {unknown[0]!r}" if unknown else "no form is left"
        raise InputError(f"{source}: {what}; choose among {', '.join(NAMES)}")
    return chosen


class Forms:
    """The forms found for the graphs of one compiled model, and what was said about those that were not."""

    def __init__(
        self, names: tuple[str, ...] = USUAL, calls: int = 200, budget_seconds: float = _BUDGET_SECONDS
    ):
        self.names = names
        self.calls = calls
        self.budget_seconds = budget_seconds
        self.notes: list[str] = []
        # by graph and dtype; the graph is kept, so that its id stays its own
        self._found: dict[tuple[int, torch.dtype], tuple[Graph, Form | None]] = {}

    @property
    def is_forced(self) -> bool:
        """CSR is not among the forms: the other one is used, timed or not."""
        return "csr" not in self.names

    def find(
        self,
        graph: Graph,
        dtype: torch.dtype,
        seconds: tuple[float, float],
        uses: Iterable[Use],
        pattern: Callable[[bool], Pattern],
    ) -> Form | None:
        """The form of `graph` that beats CSR where the plan uses it, or None; the reason is noted.

        `seconds` per call, by the plan with CSR: of the products with its matrix, and of everything.
        """
        names = [name for name in self.names if name != "csr"]
        if not names or (self.calls < FEWEST_CALLS and not self.is_forced):
            return None
        key = (id(graph), dtype)
        if key not in self._found:
            budget = self._budget(graph, *(part * self.calls for part in seconds))
            if isinstance(budget, str):
                self.notes.append(f"form {' and '.join(names)} not used: {budget}")
                self._found[key] = (graph, None)
            else:
                made = [
                    self._checked(_BUILD[name](graph, budget), dtype, set(uses), pattern) for name in names
                ]
                found = [form for form in made if form is not None]
                best = max(found, key=lambda form: form.seconds_saved, default=None)
                self._found[key] = (graph, best)
        return self._found[key][1]

    def _budget(self, graph: Graph, products: float, run: float) -> float | str:
        """Seconds a search may take, or why there is none."""
        if self.is_forced:
            return self.budget_seconds
        forecasting = _FORECAST_SECONDS + graph.num_edges * _FORECAST_SECONDS_PER_EDGE
        if forecasting > _LARGEST_FORECAST * run:
            return f"{self.calls} calls of {run / self.calls * 1e3:.2g} ms do not pay for a search"
        try:
            expected = hag.forecast(graph)
        except GraphError as error:
            return str(error)
        if not expected.worth_trying:
            return expected.reason
        gain = 1.0 + _TRAFFIC_TO_TIME * (expected.expected_traffic_ratio - 1.0)
        share = _SAFE_SHARE if expected.expected_traffic_ratio >= _SAFE_RATIO else _RISKY_SHARE
        budget = min(self.budget_seconds, share * products * (1.0 - 1.0 / gain))
        least = _UNION_SECONDS_PER_EDGE if is_union(graph) else _FAST_SECONDS_PER_EDGE
        if budget < graph.num_edges * least:  # a search that is cut short saves little
            return f"{self.calls} calls might save {products * (1 - 1 / gain):.2g} s, too little for a search"
        return budget

    def _checked(
        self, form: Form, dtype: torch.dtype, uses: set[Use], pattern: Callable[[bool], Pattern]
    ) -> Form | None:
        """The form with its timed gains, where one of them is large enough; the verdict is noted."""
        if self.is_forced:
            form.forward.is_forced = form.transposed.is_forced = True
            self.notes.append(f"form {form.name} is forced: {form.text}")
            return form
        lines = []
        for use in sorted(uses, key=lambda use: (use.is_transposed, use.width)):
            direction = form.direction(use.is_transposed)
            csr, own = timed(pattern(use.is_transposed), direction.sums, use, dtype)
            gain = direction.gains[use.width] = csr / own
            form.seconds_saved += max(0.0, csr - own)
            way = "backward" if use.is_transposed else "forward"
            lines.append(f"{gain:.2f}x {way} at width {use.width}")
        is_used = any(gain >= MARGIN for d in (form.forward, form.transposed) for gain in d.gains.values())
        verdict = "pays" if is_used else f"does not pay (less than {MARGIN:.2f}x)"
        self.notes.append(f"form {form.name} {verdict}: {form.text}; timed against CSR: {', '.join(lines)}")
        return form if is_used else None


def _hierarchy(graph: Graph, budget: float) -> Form:
    """Shared neighbours summed once: searched exactly in unions and where time allows it, else fast."""
    started = time.perf_counter()
    is_exact = is_union(graph) or budget >= graph.num_edges * _EXACT_SECONDS_PER_EDGE
    found = hag.search(
        graph,
        max_depth=_MOST_DEPTH,
        min_count=_LEAST_SHARED if is_exact else 3,  # cut at 5 s on tu_collab: 3 gave 2.3x, 6 1.8x
        time_budget=budget,
        mode="exact" if is_exact else "fast",
    )
    brief = f"shared sums, {found.traffic_ratio:.2f}x less traffic"
    forward = Direction(Sums(hag.tile_schedule(found)), brief)
    transposed = forward
    if not graph.is_symmetric:
        transposed = Direction(Sums(hag.tile_schedule(found.transpose(graph))), brief)
    seconds = time.perf_counter() - started
    ended = "" if found.is_complete else ", ended by its budget"
    text = (
        f"{found.num_graph_edges:,} -> {found.num_edges:,} rows read, {found.num_aggregation_nodes:,} shared "
        f"sums, {found.traffic_ratio:.2f}x less traffic, found in {seconds:.1f} s{ended}"
    )
    return Form(forward, transposed, text)


def is_union(graph: Graph) -> bool:
    """Whether the graph is a row of smaller ones, as batches of graphs are: none has half of the edges.

    Before node p lies a border when no edge joins a node below p with one from p on.
    """
    if graph.num_nodes != graph.num_sources or graph.num_edges == 0:
        return False
    indptr = np.asarray(graph.indptr, np.int64)
    filled = np.flatnonzero(np.diff(indptr))
    low, high = np.arange(graph.num_nodes), np.arange(graph.num_nodes)
    low[filled] = np.minimum(low[filled], np.minimum.reduceat(graph.indices, indptr[filled]))
    high[filled] = np.maximum(high[filled], np.maximum.reduceat(graph.indices, indptr[filled]))
    highest = np.maximum.accumulate(high)[:-1]
    lowest = np.minimum.accumulate(low[::-1])[::-1][1:]
    borders = np.flatnonzero(
        (highest < np.arange(1, graph.num_nodes)) & (lowest > np.arange(graph.num_nodes - 1))
    )
    cuts = np.concatenate(([0], borders + 1, [graph.num_nodes]))
    return bool(np.diff(indptr[cuts]).max() * 2 <= graph.num_edges)


def _differences(graph: Graph, budget: float) -> Form:
    """Rows taken from similar rows; the transpose has differences of its own."""
    started = time.perf_counter()

    def direction(of: Graph) -> tuple[Direction, float]:
        rows = hag.difference_rows(of, time_budget=budget / 2)
        ratio = (of.num_edges + of.num_nodes) / max(1, rows.traffic)
        sums = Sums(hag.difference_schedule(rows))
        return Direction(sums, f"rows as differences, {ratio:.2f}x less traffic", name="diff"), ratio

    forward, ratio = direction(graph)
    transposed = forward if graph.is_symmetric else direction(graph.transpose)[0]
    text = (
        f"{graph.num_edges:,} -> {forward.sums.num_operands:,} rows read, {ratio:.2f}x less traffic, "
        f"found in {time.perf_counter() - started:.1f} s"
    )
    return Form(forward, transposed, text)


_BUILD = {"hag": _hierarchy, "diff": _differences}


def timed(pattern: Pattern, sums: Sums, use: Use, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one product of this width on this graph by CSR and by the form, taken in turns."""
    x = torch.ones((sums.num_columns, use.width), dtype=dtype)
    out = torch.empty((sums.num_rows, use.width), dtype=dtype)
    shared = torch.empty((sums.num_shared, use.width), dtype=dtype)
    variants: Mapping[str, Callable[[], object]] = {
        "csr": lambda: spmm(pattern, x, out, slab=use.slab),
        "hag": lambda: partial_sums(sums, x, out, shared=shared),
    }
    timing = time_calls(
        variants, warmup=1, min_repeats=3, max_repeats=9, budget_seconds=_CHECK_SECONDS, target_spread=0.02
    )
    return timing["csr"].median, timing["hag"].median


def adopt(forms: Forms, runs: Iterable[Run]) -> bool:
    """Give the constants behind these runs the form that beats CSR where their plans use it; True if any."""
    by_graph: dict[int, list[Run]] = {}
    for run in runs:
        if run.constants.weight is None and run.constants.rows is None:
            by_graph.setdefault(id(run.constants.graph), []).append(run)
    is_any = False
    for group in by_graph.values():
        constants = group[0].constants
        steps = [s for run in group for s in run.plan.steps if s.step.op in ("spmm", "chain")]
        uses = {
            Use(s.step.is_transposed, s.price.gather_columns, s.price.slab)
            for s in steps
            if s.price.gather_columns
        }
        if not uses and not forms.is_forced:  # everything is hoisted: nothing is left to gain per call
            continue
        seconds = sum(s.price.gather_seconds for s in steps), sum(run.plan.seconds for run in group)
        form = forms.find(constants.graph, constants.dtype, seconds, uses, constants.pattern)
        if form is not None:
            is_any = True
            for run in group:
                run.constants.adopt(form)
    return is_any
