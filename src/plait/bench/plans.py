"""plait bench plans: every surviving candidate of a layer run, the planner's choice against the best.

regret = measured time of the chosen plan / measured time of the fastest candidate, in one interleaved run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.bench.cases import LayerCase, find_graph
from plait.bench.pace import patient
from plait.bench.problem import Forms, hidden_features
from plait.bench.problem import Problem as LayerProblem
from plait.errors import PlanError
from plait.measure.environment import environment
from plait.measure.record import Record
from plait.measure.timer import Timing, time_calls
from plait.plan.fused import FusedPlan, preferring
from plait.plan.plan import LayerPlan, Plan
from plait.plan.search import Problem, search, survey
from plait.pyg.compile import compile

__all__ = ["KIND", "CandidateTime", "Regret", "regret_of", "run"]

KIND = "bench-plans"


@dataclass(frozen=True)
class CandidateTime:
    """One candidate: what it was predicted to take and what it took."""

    candidate: str
    predicted_seconds: float
    timing: Timing


@dataclass(frozen=True)
class Regret:
    """All candidates of one case; `chosen` is the planner's."""

    case: LayerCase
    chosen: CandidateTime
    others: tuple[CandidateTime, ...]

    @property
    def regret(self) -> float:
        best = min(c.timing.median for c in (self.chosen, *self.others))
        return self.chosen.timing.median / best

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time of the chosen plan, less one."""
        return self.chosen.predicted_seconds / self.chosen.timing.median - 1.0


def _chooser(which: int, seen: list[Any]) -> Callable[[Problem], LayerPlan]:
    """The planner's choice (0) or the candidate of that rank instead."""

    def choose(problem: Problem) -> LayerPlan:
        best = search(problem)
        ranked = sorted(survey(problem), key=lambda plan: plan.seconds)
        others = [plan for plan in ranked if plan.describe() != best.describe()]
        seen[:] = [best, *others]
        return seen[which] if which < len(seen) else best

    return choose


def regret_of(
    case: LayerCase,
    layer: nn.Module,
    x: Tensor,
    *arguments: Tensor,
    budget_seconds: float = 4.0,
    most: int = 12,
) -> Regret:
    """Every candidate of `layer` on one graph, timed side by side; at most `most`, by price."""
    data = _Data(x, arguments)
    plans: list[Any] = []
    is_training = case.mode == "training"
    compiled: Any = compile(layer, None)
    steps = {"0": _step(compiled, plans, 0, data, is_training)}
    steps["0"]()
    fused = None if plans else _fused_plan(compiled.plan)
    if fused is not None:
        plans = [fused]
    count = len(plans) if fused is None else 1 + len(fused.rejected)
    for k in range(1, min(count, most)):
        compiled = compile(layer, None)
        steps[str(k)] = _step(compiled, [], k, data, is_training)
        with preferring(k):
            steps[str(k)]()
        if fused is not None:
            plans.append(_fused_plan(compiled.plan))
    timings = time_calls(
        steps,
        warmup=2,
        min_repeats=5,
        budget_seconds=budget_seconds,
        target_spread=0.01,
        pace=patient(budget_seconds),
    )
    times = [CandidateTime(plans[int(k)].describe(), plans[int(k)].seconds, t) for k, t in timings.items()]
    return Regret(case, times[0], tuple(times[1:]))


def _fused_plan(plan: Plan) -> FusedPlan:
    """The plan of a layer with passes of its own."""
    if not plan.layers:
        raise PlanError(f"nothing to compare: {plan.not_planned[0].reason}")
    only: Any = plan.layers[0]
    return cast("FusedPlan", only)


@dataclass
class _Data:
    x: Tensor
    arguments: tuple[Tensor, ...]


def _step(compiled: Any, seen: list[Any], which: int, data: _Data, is_training: bool) -> Callable[[], object]:
    session = compiled._plait_plan_session
    session.choose = _chooser(which, seen)
    parameters = list(compiled.parameters())
    # of the same size for every candidate, so made once and outside the clock
    state: dict[str, Tensor] = {}

    def inference() -> object:
        with torch.no_grad():
            return compiled(data.x, *data.arguments)

    def training() -> object:
        data.x.grad = None
        for parameter in parameters:
            parameter.grad = None
        out = compiled(data.x, *data.arguments)
        if "g" not in state:
            state["g"] = torch.randn_like(out)
        out.backward(state["g"])
        return out

    return training if is_training else inference


def run(grid: Sequence[LayerCase], data_dir: str | None, budget_seconds: float) -> Iterator[Record]:
    """A record per case: the chosen plan, the others, their predicted and measured times."""
    facts = environment()
    for name, group in itertools.groupby(grid, key=lambda case: case.graph):
        graph = find_graph(name, data_dir).graph
        forms = Forms.of(graph)
        for case in group:
            given = LayerProblem(case.layer, forms, case.width_in, case.width_out, heads=case.heads)
            x = hidden_features(graph.num_nodes, case.width_in).requires_grad_(case.mode == "training")
            regret = regret_of(
                case, given.layer, x, given.edge_index, *given.extra, budget_seconds=budget_seconds
            )
            result = {
                "regret": regret.regret,
                "prediction_error": regret.prediction_error,
                "candidates": [
                    {
                        "candidate": c.candidate,
                        "predicted_seconds": c.predicted_seconds,
                        **c.timing.to_dict(),
                    }
                    for c in (regret.chosen, *regret.others)
                ],
            }
            yield Record(KIND, case.to_dict(), result, facts)
