"""plait bench layers --predict: the price of every step and layer beside what it took."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch_geometric.data import Data

from plait.bench.cases import LayerCase, find_graph
from plait.bench.problem import Forms, Problem
from plait.errors import PlaitError
from plait.measure import BusyElsewhere, Record, environment, time_calls
from plait.pyg.compile import compile, explain

__all__ = ["KIND", "predict", "run"]

KIND = "bench-predict"
_MOST_VISITS = 6
_PASSES = 9  # of one EXPLAIN ANALYZE


def run(grid: Sequence[LayerCase], data_dir: str | None, budget_seconds: float) -> Iterator[Record]:
    """A record per case: predicted and measured seconds of the layer and of each of its steps."""
    facts = environment()
    for name, cases in itertools.groupby(grid, key=lambda case: case.graph):
        graph = find_graph(name, data_dir).graph
        forms = Forms.of(graph)
        for case in cases:
            yield Record(KIND, case.to_dict(), predict(case, forms, budget_seconds), facts)


def predict(case: LayerCase, forms: Forms, budget_seconds: float) -> dict[str, object]:
    """Steps with "predicted_seconds" and "measured_seconds", and the same of the whole layer.

    Steps are timed one by one inside running passes; the layer is timed as a user runs it, without a clock
    on its steps. A layer that is not planned gives its reason instead.
    """
    problem = Problem(case.layer, forms, case.width_in, case.width_out)
    # a hidden activation, which wants a gradient: nothing may be computed beforehand
    data = Data(x=problem.x, edge_index=problem.edge_index, num_nodes=problem.num_nodes)
    try:
        layer = compile(copy.deepcopy(problem.layer), data, mode=case.mode)
        with BusyElsewhere() as busy:
            plan = explain(layer, data, analyze=True, mode=case.mode)
            timing = time_calls({"layer": _step(layer, problem, case.mode)}, budget_seconds=budget_seconds)
            # a step of 50 µs is known from many passes, before and after: one slow spell is not its time
            visits = min(_MOST_VISITS, max(1, int(budget_seconds / (_PASSES * timing["layer"].median))))
            plans = [plan, *(explain(layer, data, analyze=True, mode=case.mode) for _ in range(visits))]
    except PlaitError as error:
        return {"reason": str(error), "steps": []}
    problem.x.grad = None
    if not plan.layers:
        return {"reason": "; ".join(n.reason for n in plan.not_planned) or "not planned", "steps": []}
    return {
        "predicted_seconds": plan.seconds,
        **timing["layer"].to_dict(),
        "is_default_machine": any(getattr(part, "is_default_machine", False) for part in plan.layers),
        "busy_elsewhere": busy.share,
        "steps": [
            step
            for visits_of_part in zip(*(plan.layers for plan in plans), strict=True)
            for step in _steps([part.to_dict() for part in visits_of_part])
        ],
    }


def _step(layer: Any, problem: Problem, mode: str) -> Any:
    edge_index, x, parameters = problem.edge_index, problem.x, list(layer.parameters())

    def inference() -> object:
        with torch.no_grad():
            return layer(x, edge_index)

    def training() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(layer(x, edge_index), problem.cotangent)

    return training if mode == "training" else inference


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
