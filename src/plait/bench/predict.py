"""plait bench layers --predict: the price of every step and layer next to its measured time."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch_geometric.data import Data

from plait.bench import plans
from plait.bench.cases import LayerCase
from plait.bench.pace import pace, patient
from plait.bench.problem import Forms, Problem, forms_of, training_step
from plait.bench.suite import Suite, case_reader
from plait.errors import PlaitError
from plait.measure import BusyElsewhere, Record, Timing, time_calls
from plait.measure.device import clock_of
from plait.plan.plan import Plan
from plait.pyg.compile import compile, explain
from plait.pyg.probe import Probe

__all__ = ["KIND", "Options", "left", "run"]

KIND = "bench-predict"
_ROUNDS = 3  # over the cases of a graph: a slow minute of the machine is not one case's time
_LONG_SECONDS = 90.0  # after so long no further round begins: steps of a large graph outlast a slow moment
_MOST_ANALYSES = 3  # in one round
_PASSES = 9  # of one EXPLAIN ANALYZE


@dataclass(frozen=True)
class Options(plans.Options):
    """Those of the candidates' comparison; a case is measured longer."""

    budget_seconds: float = 5.0


@dataclass(frozen=True)
class _Visit:
    """What one round saw of a case: its plans as they were analysed, and the layer's own time."""

    plans: list[Plan]
    timing: Timing
    busy: float | None
    keeps_pace: bool


def _take(grid: list[LayerCase], options: Options) -> Iterator[Record]:
    """A record per case: predicted and measured seconds of the layer and of each of its steps.

    Steps are timed one by one inside running passes; the layer is timed as a user runs it, without a clock
    on its steps. A layer that is not planned gives its reason instead.
    """
    for name, group in itertools.groupby(grid, key=lambda case: case.graph):
        cases = list(group)
        forms = forms_of(name, options.data_dir, options.device)
        rounds: list[list[_Visit | str]] = []
        begun = time.perf_counter()
        while len(rounds) < _ROUNDS and time.perf_counter() - begun < _LONG_SECONDS:
            rounds.append([_visit(case, forms, options.budget_seconds / _ROUNDS) for case in cases])
        for case, visits in zip(cases, zip(*rounds, strict=True), strict=True):
            yield Record(KIND, case.to_dict(), _joined(visits), options.environment)


_SUITE = Suite(KIND, case_reader(LayerCase), _take)
run, left = _SUITE.run, _SUITE.left


def _visit(case: LayerCase, forms: Forms, budget_seconds: float) -> _Visit | str:
    """The layer compiled, analysed and timed; or why it could not be."""
    problem = Problem(case.layer, forms, case.width_in, case.width_out, heads=case.heads)
    on_cpu = problem.x.device.type == "cpu"  # whose pace others on this machine may slow
    patient(budget_seconds)
    # a hidden activation, which needs a gradient: nothing may be computed beforehand
    data = Data(x=problem.x, edge_index=problem.edge_index, num_nodes=problem.num_nodes)
    try:
        layer = compile(copy.deepcopy(problem.layer), data, mode=case.mode)
        Probe(layer)  # or timing could leave a small graph to PyG, and the next analysis find no plan
        if on_cpu:
            pace().wait()
        with BusyElsewhere() as busy:
            plan = explain(layer, data, analyze=True, mode=case.mode)
            timing = time_calls(
                {"layer": _step(layer, problem, case.mode)},
                budget_seconds=budget_seconds,
                clock=clock_of(problem.x.device.type),
            )
            # a step of 50 µs is known from many passes, before and after
            more = min(_MOST_ANALYSES, max(1, int(budget_seconds / (_PASSES * timing["layer"].median))))
            plans = [plan, *(explain(layer, data, analyze=True, mode=case.mode) for _ in range(more))]
    except PlaitError as error:
        return str(error)
    problem.x.grad = None
    if not plan.layers:
        return "; ".join(n.reason for n in plan.not_planned) or "not planned"
    return _Visit(plans, timing["layer"], busy.share, not on_cpu or pace().is_kept())


def _joined(visits: Sequence[_Visit | str]) -> dict[str, object]:
    """One result of all visits to a case."""
    seen = [visit for visit in visits if isinstance(visit, _Visit)]
    if not seen:
        return {"reason": str(visits[0]), "steps": []}
    seen = [visit for visit in seen if visit.keeps_pace] or seen
    first = seen[0].plans[0]
    plans = [plan for visit in seen for plan in visit.plans]
    samples = tuple(sample for visit in seen for sample in visit.timing.samples)
    return {
        "predicted_seconds": first.seconds,
        **Timing(samples, seen[0].timing.warmup, seen[0].timing.calls_per_sample).to_dict(),
        "is_default_machine": any(getattr(part, "is_default_machine", False) for part in first.layers),
        "keeps_pace": seen[0].keeps_pace,
        "busy_elsewhere": max((visit.busy for visit in seen if visit.busy is not None), default=None),
        "steps": [
            step
            for part in zip(*(plan.layers for plan in plans), strict=True)
            for step in _steps([one.to_dict() for one in part])
        ],
    }


def _step(layer: Any, problem: Problem, mode: str) -> Any:
    edge_index, x = problem.edge_index, problem.x

    def inference() -> object:
        with torch.no_grad():
            return layer(x, edge_index)

    if mode == "training":
        return training_step(layer, x, edge_index, cotangent=problem.cotangent)
    return inference


def _steps(plans: Sequence[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """The steps that run on every call and were seen by the clock, by the middle of the visits to a plan."""
    kept = ("phase", "op", "is_transposed", "rows", "columns", "backend", "flops", "bytes_least", "because")
    for steps in zip(*(plan["steps"] for plan in plans), strict=True):
        seen = [step["measured_seconds"] for step in steps if step.get("measured_seconds")]
        if seen:
            yield {name: steps[0].get(name) for name in kept} | {
                "predicted_seconds": steps[0]["seconds"],
                "measured_seconds": median(seen),
            }
