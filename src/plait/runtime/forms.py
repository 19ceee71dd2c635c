"""The form of products with a graph's 0/1 matrix: a forecast, a search within a budget, a timed check.

The plain form (csr) reads every neighbour of every node. The hierarchical form (hag) sums shared neighbours
once; whether the fewer sums are also less time depends on the graph, the width and the machine, so it is used
only where it was timed to be faster on this graph, each way and width by itself. All of this happens when a
model is compiled with its data, never inside a training step. Where self loops are all one they go inside:
nodes that are each other's neighbours then have equal rows (tu_collab: 11.9x less traffic instead of 7.3x).
Maxima and minima have a form of their own, forward only: their gradient asks of every edge whether it attains
the extremum. How many do is counted through the partial extrema, where they cover no neighbour twice.

Differences (diff) take a row from a similar one, adding and subtracting what they do not share. They are
found faster and often run faster, but subtraction cancels digits: with one input in a thousand a million
times larger than the rest, float32 rows came out wrong by 8% (tu_collab), and NaN reaches rows that are no
neighbours of it. So they are used only where asked for. A hierarchy only adds: its worst errors were 0.4 to
2 times CSR's on the same inputs.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from plait.errors import GraphError, InputError
from plait.graph import Graph, hag
from plait.kernels.partial import Sums, partial_sums
from plait.kernels.spmm import Pattern, extremum, spmm
from plait.measure import time_calls
from plait.plan.plan import LayerPlan, PricedStep, Rejected

if TYPE_CHECKING:
    from plait.runtime.constants import Constants, SparseValue
    from plait.runtime.executor import Run

__all__ = [
    "MARGIN", "NAMES", "UNION_SECONDS_PER_EDGE", "USUAL", "Direction", "Form", "Forms", "Use", "adopt",
    "chosen_names", "gathered", "timed", "with_form_text",
]  # fmt: skip

NAMES = ("csr", "hag", "diff", "twins")
USUAL = ("csr", "hag", "twins")

MARGIN = 1.05
"""Least measured gain for which a form is used: timings on a busy machine are off by a few per cent."""
LEAST_TRAFFIC = 1.15
"""Least saving in rows read and written for which a form is timed at all: a gain without one is noise."""
FEWEST_CALLS = 50
_BUDGET_SECONDS, _LONGEST_SECONDS = 5.0, 60.0
_SAFE_RATIO, _SAFE_SHARE, _RISKY_SHARE = 2.15, 0.7, 0.1
"""The search may take a share of the seconds it is expected to save: the larger one from the traffic ratio on
that has never lost against CSR yet, and then more than the usual budget too."""
_TRAFFIC_TO_TIME = 0.3
"""Share of the saved row traffic assumed to show as time, on the low side: at width 64, one thread, it was
0.33 on tu_collab and 0.47 on web_cnr2000 forward; on ego_twitter the form lost."""
_FORECAST_SECONDS, _FORECAST_SECONDS_PER_EDGE = 0.05, 8e-9
_LARGEST_FORECAST = 0.02  # of the run's seconds
# Of one thread on web_cnr2000: the fast search (3e-7) with transpose, placing and timed check, and the exact
# search alone. Unions: the search of tu_collab on two idle cores.
_FAST_SECONDS_PER_EDGE, UNION_SECONDS_PER_EDGE, _EXACT_SECONDS_PER_EDGE = 1e-6, 2e-7, 4e-6
_ROOM = 2.5
"""An exact search is begun with this many times its seconds: cut short, it is worth less than a fast one (on
web_cnr2000, on busy cores: 1.2x less traffic instead of 2.8x)."""
_LEAST_SHARED = 6
"""Merges that fewer rows share save additions, not time (tu_collab, exact: 3 was 1.02 to 1.10x slower)."""
_MOST_DEPTH = 10  # no limit saves 4% of the additions on tu_collab
_CHECK_SECONDS = 0.4
_FORCED_GAIN = 1e3


@dataclass(frozen=True, slots=True)
class Use:
    """A product the plan makes with the matrix: which way, how wide, in which slabs by CSR, sum or max."""

    is_transposed: bool
    width: int
    slab: int = 0
    reduce: str = "sum"
    is_counted: bool = False  # ties of a max or min, for its gradient


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
    is_disjoint: bool = True  # no neighbour is covered twice
    traffic_ratio: float = math.inf  # rows read and written, CSR's over its own

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


class _Found(NamedTuple):
    """The result of a search; the graph is kept, so that its id stays unique."""

    graph: Graph
    form: Form | None
    text: str


class Forms:
    """The forms found for the graphs of one compiled model, and what was said about those that were not."""

    def __init__(
        self, names: tuple[str, ...] = USUAL, calls: int = 200, budget_seconds: float = _BUDGET_SECONDS
    ):
        self.names = names
        self.calls = calls
        self.budget_seconds = budget_seconds
        self.notes: list[str] = []
        self._found: dict[tuple[int, torch.dtype, str], _Found] = {}

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
        key: str = "A",
        matrix: Callable[[], SparseValue] | None = None,
    ) -> Form | None:
        """The form of `graph` that beats CSR where the plan uses it, or None; the reason is noted.

        `seconds` per call, by the plan with CSR: of the products with its matrix, and of everything. `key`
        names the matrix the form is for ("max" for maxima); `matrix` makes it where it has loops besides.
        """
        names = [name for name in self.names if name in _BUILD]
        if not names or (self.calls < FEWEST_CALLS and not self.is_forced):
            return None
        place = (id(graph), dtype, key)
        if place not in self._found:
            counted = Counter(uses)
            budget = self._budget(graph, seconds, counted, lambda use: csr_seconds(pattern, use, dtype))
            if isinstance(budget, str):
                text = f"{' and '.join(_PLAIN[name] for name in names)} not used: {budget}"
                self._found[place] = _Found(graph, None, text)
                self.notes.append(text)
            else:
                self._found[place] = self._best(graph, budget, dtype, counted, pattern, key, matrix)
        return self._found[place].form

    def text_of(self, graph: Graph, dtype: torch.dtype, key: str) -> str:
        """What was said about a form of this graph; empty where none was looked for."""
        found = self._found.get((id(graph), dtype, key))
        return "" if found is None else found.text

    def _best(
        self,
        graph: Graph,
        budget: _Budget,
        dtype: torch.dtype,
        uses: Counter[Use],
        pattern: Callable[[bool], Pattern],
        key: str,
        matrix: Callable[[], SparseValue] | None,
    ) -> _Found:
        """The form that saves most, of those allowed; maxima cannot be subtracted."""
        searched = graph
        if matrix is not None:
            value = matrix()
            searched, pattern = value.graph, lambda is_transposed: value.operands(is_transposed)[0]
        is_extremum = key == "max"
        names = [n for n in self.names if n in _BUILD and not (is_extremum and n == "diff")]
        made, said = [], len(self.notes)
        for name in names:
            may_overlap = is_extremum and not any(use.is_counted for use in uses)
            form = _BUILD[name](searched, budget.seconds, may_overlap)
            form.text = f"{'' if key == 'A' else key + ': '}{form.text}"
            made.append(self._checked(form, dtype, uses, pattern, budget.text))
        found = [form for form in made if form is not None]
        best = max(found, key=lambda form: form.seconds_saved, default=None)
        return _Found(graph, best, "; ".join(self.notes[said:]))

    def _budget(
        self, graph: Graph, seconds: tuple[float, float], uses: Counter[Use], csr: Callable[[Use], float]
    ) -> _Budget | str:
        """Seconds a search may take, or why there is none."""
        if self.is_forced:
            return _Budget(self.budget_seconds)
        run = seconds[1] * self.calls
        forecasting = _FORECAST_SECONDS + graph.num_edges * _FORECAST_SECONDS_PER_EDGE
        if forecasting > _LARGEST_FORECAST * run:
            return f"searching for them costs more than {self.calls} steps would save"
        try:
            expected = hag.forecast(graph)
        except GraphError as error:
            return str(error)
        if not expected.worth_trying:
            return expected.reason
        ratio = expected.expected_traffic_ratio
        gain = 1.0 + _TRAFFIC_TO_TIME * (ratio - 1.0)
        # timed, not priced: the profile was 1.7x off on tu_collab, and the decision depends on it
        saved = self.calls * sum(count * csr(use) for use, count in uses.items()) * (1.0 - 1.0 / gain)
        is_safe = ratio >= _SAFE_RATIO
        share, most = (_SAFE_SHARE, _LONGEST_SECONDS) if is_safe else (_RISKY_SHARE, self.budget_seconds)
        least = UNION_SECONDS_PER_EDGE
        if not is_union(graph):  # no components to keep in cache: web_cnr2000 got half of its forecast
            share, least = share / 2, _FAST_SECONDS_PER_EDGE
        budget = min(most, share * saved)
        if budget < graph.num_edges * least:  # a search that is cut short saves little
            return (
                f"forecast {gain:.2f}x: {self.calls} calls might save {saved:.2g} s, too little for "
                f"a search of {graph.num_edges * least:.2g} s"
            )
        return _Budget(budget, f"forecast {gain:.2f}x")

    def _checked(
        self,
        form: Form,
        dtype: torch.dtype,
        uses: Iterable[Use],
        pattern: Callable[[bool], Pattern],
        forecast: str,
    ) -> Form | None:
        """The form with its timed gains, where one of them is large enough; the verdict is noted."""
        if self.is_forced:
            form.forward.is_forced = form.transposed.is_forced = True
            self.notes.append(f"form {form.name} is forced: {form.text}")
            return form
        if form.traffic_ratio < LEAST_TRAFFIC:
            self.notes.append(f"{_PLAIN[form.name]} not used: {form.text}: too little to gain ({forecast})")
            return None
        lines = [] if not forecast else [forecast]
        for use in sorted(uses, key=lambda use: (use.is_transposed, use.width, use.reduce)):
            direction = form.direction(use.is_transposed)
            csr, own = timed(pattern(use.is_transposed), direction.sums, use, dtype)
            gain = csr / own
            direction.gains[use.width] = min(gain, direction.gains.get(use.width, gain))
            form.seconds_saved += max(0.0, csr - own)
            way = "backward" if use.is_transposed else "forward"
            lines.append(f"{gain:.2f}x {way} at width {use.width}")
        is_used = any(gain >= MARGIN for d in (form.forward, form.transposed) for gain in d.gains.values())
        verdict = "pays" if is_used else f"does not pay (less than {MARGIN:.2f}x)"
        self.notes.append(f"form {form.name} {verdict}: {form.text}; timed against CSR: {', '.join(lines)}")
        return form if is_used else None


class _Budget(NamedTuple):
    """Seconds for a search, and what it is expected to gain."""

    seconds: float
    text: str = ""


def _hierarchy(graph: Graph, budget: float, may_overlap: bool) -> Form:
    """Shared neighbours summed once: searched exactly in unions and where time allows it, else fast.

    Covers for maxima may overlap; that search takes more than twice as long, and finds little more where
    disjoint covers find much (tu_collab: 1% fewer maxima), so it is tried where there is time for it.
    """
    started = time.perf_counter()
    is_exact = is_union(graph) or budget >= _ROOM * graph.num_edges * _EXACT_SECONDS_PER_EDGE
    needed = graph.num_edges * (UNION_SECONDS_PER_EDGE if is_union(graph) else _EXACT_SECONDS_PER_EDGE)
    found = hag.search(
        graph,
        order="idempotent" if may_overlap and is_exact and budget >= 4 * needed else "set",
        max_depth=_MOST_DEPTH,
        min_count=_LEAST_SHARED if is_exact else 3,  # cut at 5 s on tu_collab: 3 gave 2.3x, 6 1.8x
        time_budget=budget,
        mode="exact" if is_exact else "fast",
    )
    brief = f"shared sums, {found.traffic_ratio:.2f}x less traffic"
    forward = Direction(Sums(hag.tile_schedule(found)), brief)
    transposed = forward
    if not graph.is_symmetric and found.order == "set":  # overlapping covers have no transpose
        transposed = Direction(Sums(hag.tile_schedule(found.transpose(graph))), brief)
    seconds = time.perf_counter() - started
    ended = "" if found.is_complete else ", ended by its budget"
    text = (
        f"{found.num_graph_edges:,} -> {found.num_edges:,} rows read, {found.num_aggregation_nodes:,} shared "
        f"sums, {found.traffic_ratio:.2f}x less traffic, found in {seconds:.1f} s{ended}"
    )
    return Form(
        forward, transposed, text, is_disjoint=found.order == "set", traffic_ratio=found.traffic_ratio
    )


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


def _differences(graph: Graph, budget: float, may_overlap: bool) -> Form:
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
_PLAIN = {"hag": "shared sums (hag)", "diff": "rows as differences (diff)"}


def timed(pattern: Pattern, sums: Sums, use: Use, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of one product of this width on this graph by CSR and by the form, taken in turns.

    Medians, or the quick fifth where that favours the form less: on a busy machine medians alone have claimed
    1.4x for schedules that save nothing.
    """
    x = torch.ones((sums.num_columns, use.width), dtype=dtype)
    out = torch.empty((sums.num_rows, use.width), dtype=dtype)
    shared = torch.empty((2 * sums.num_shared, use.width), dtype=dtype)
    ties = torch.empty_like(out) if use.is_counted else None
    variants: Mapping[str, Callable[[], object]] = {
        "csr": lambda: _by_csr(pattern, use, x, out, ties),
        "hag": lambda: partial_sums(sums, x, out, reduce=use.reduce, ties=ties, shared=shared),
    }
    timing = time_calls(
        variants, warmup=1, min_repeats=3, max_repeats=9, budget_seconds=_CHECK_SECONDS, target_spread=0.02
    )
    csr, own = timing["csr"], timing["hag"]
    if csr.p20 / own.p20 < csr.median / own.median:
        return csr.p20, own.p20
    return csr.median, own.median


def _by_csr(
    pattern: Pattern, use: Use, x: torch.Tensor, out: torch.Tensor, ties: torch.Tensor | None
) -> torch.Tensor:
    if ties is not None:
        return extremum(pattern, x, out, ties, use.reduce)
    return spmm(pattern, x, out, reduce=use.reduce, slab=use.slab)


def csr_seconds(pattern: Callable[[bool], Pattern], use: Use, dtype: torch.dtype) -> float:
    """Seconds of one product of this width on this graph by CSR."""
    rows = pattern(use.is_transposed)
    x = torch.ones((rows.num_columns, use.width), dtype=dtype)
    out = torch.empty((rows.num_rows, use.width), dtype=dtype)
    timing = time_calls(
        {"csr": lambda: _by_csr(rows, use, x, out, torch.empty_like(out) if use.is_counted else None)},
        warmup=1, min_repeats=2, max_repeats=3, budget_seconds=_CHECK_SECONDS / 4,
    )  # fmt: skip
    return timing["csr"].p20  # the fastest ones: time added by other programs cannot be saved


def adopt(forms: Forms, runs: Iterable[Run]) -> bool:
    """Give the constants behind these runs the form that beats CSR where their plans use it; True if any."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        if run.place.type == "cpu" and run.constants.weight is None and run.constants.rows is None:
            for key in (run.constants.form_key, "max"):
                groups.setdefault((id(run.constants.graph), key), []).append(run)
    return any([_adopt(forms, key, group) for (_, key), group in groups.items()])


def _adopt(forms: Forms, key: str, group: list[Run]) -> bool:
    """One matrix's form, for the runs that make products with it."""
    constants = group[0].constants
    ops = ("extremum",) if key == "max" else ("spmm", "chain")
    plans = [run.plan for run in group]
    made = [s for plan in plans for s in (*plan.steps, *(plan.hoisted_steps if forms.is_forced else ()))]
    steps = [s for s in made if s.step.op in ops and gathered(s)[0]]
    kept = {name for run in group for name in run.kept}
    if not steps and (key == "max" or not forms.is_forced):  # hoisted: nothing is left to gain per call
        return False
    uses = [
        Use(
            s.step.is_transposed,
            gathered(s)[0],
            s.price.slab,
            s.step.reduce,
            not kept.isdisjoint(s.step.more),
        )
        if key == "max"
        else Use(s.step.is_transposed, gathered(s)[0], s.price.slab)
        for s in steps
    ]
    seconds = sum(gathered(s)[1] for s in steps), sum(plan.seconds for plan in plans)
    matrix = constants.with_unit_loops if key == "fold(A + i)" else None
    form = forms.find(constants.graph, constants.dtype, seconds, uses, constants.pattern, key, matrix)
    for run in group:
        run.constants.form_text[key] = forms.text_of(constants.graph, constants.dtype, key)
        if form is not None:
            run.constants.adopt(key, form)
    return form is not None


def gathered(step: PricedStep) -> tuple[int, float]:
    """(columns, seconds) of the sparse product that a step is, or that a chain begins with."""
    if step.step.op == "chain":
        return step.price.gather_columns, step.price.gather_seconds
    return step.size[1], step.price.seconds


def with_form_text(plan: LayerPlan, constants: Constants) -> LayerPlan:
    """The plan with what was found out about other forms of its products: why used, or among the rejected."""
    for key, text in constants.form_text.items():
        ops = ("extremum",) if key == "max" else ("spmm", "chain")
        backends = {step.price.backend for step in plan.steps if step.step.op in ops}
        if not text or not backends or text in plan.because or any(r.why == text for r in plan.rejected):
            continue
        if backends & set(NAMES):
            plan = replace(plan, because=f"{plan.because}; {text}")
        else:
            lost = Rejected(f"{key} in another form", None, None, text)
            plan = replace(plan, rejected=(lost, *plan.rejected))
    return plan
