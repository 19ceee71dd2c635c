"""plait bench plans: every surviving candidate of a layer run, the planner's choice against the best.

regret = measured time of the chosen plan / measured time of the fastest candidate, interleaved. A layer alone
has an input that needs a gradient. In a whole model on real features the input stays the same: there sparse
views of it, and products computed once, are candidates too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from plait.bench import suite
from plait.bench.cases import LayerCase, find_graph, known
from plait.bench.pace import clock, patient
from plait.bench.problem import Forms, Problem, forms_of, hidden_features, training_step
from plait.bench.suite import Suite, case_reader
from plait.bench.task import build_model, load_task
from plait.errors import PlanError
from plait.graph import LoadedGraph
from plait.measure.device import clock_of
from plait.measure.record import Record
from plait.measure.timer import Timing, time_calls
from plait.pyg.compile import compile
from plait.pyg.probe import Probe

__all__ = [
    "KIND", "MODELS", "MODEL_GRAPHS", "CandidateTime", "ModelCase", "Options", "Regret", "left",
    "model_cases", "regret_of", "regret_of_model", "run",
]  # fmt: skip

KIND = "bench-plans"
MODELS = ("gcn", "sage", "gin")
MODEL_GRAPHS = ("cora", "pubmed", "amazon_photo", "coauthor_cs", "flickr_attr")


@dataclass(frozen=True)
class Options(suite.Options):
    """How long a case is measured, and on what."""

    budget_seconds: float = 2.0
    device: str = "cpu"


@dataclass(frozen=True)
class ModelCase:
    """A two-layer model trained on a graph with its own features."""

    graph: str
    model: str
    mode: str = "training"

    def to_dict(self) -> dict[str, object]:
        """Plain values for a record."""
        return asdict(self)


def model_cases(graphs: Sequence[str] = MODEL_GRAPHS, models: Sequence[str] = MODELS) -> list[ModelCase]:
    """The grid, graph by graph; unknown models are refused."""
    chosen = [known("--models", model, MODELS) for model in models]
    return [ModelCase(*cell) for cell in itertools.product(graphs, chosen)]


@dataclass(frozen=True)
class CandidateTime:
    """One candidate: what it was predicted to take, what it took, and the chosen plan in the same run."""

    candidate: str
    predicted_seconds: float
    timing: Timing
    chosen: Timing

    def to_dict(self) -> dict[str, object]:
        """Plain values for a record."""
        return {
            "candidate": self.candidate,
            "predicted_seconds": self.predicted_seconds,
            "chosen_seconds": self.chosen.median,
            **self.timing.to_dict(),
        }


@dataclass(frozen=True)
class Regret:
    """All candidates of one case; `chosen` is the planner's."""

    case: LayerCase | ModelCase
    chosen: CandidateTime
    others: tuple[CandidateTime, ...]

    @property
    def regret(self) -> float:
        """Measured time of the chosen plan over that of the fastest candidate."""
        return max([1.0, *(other.chosen.median / other.timing.median for other in self.others)])

    @property
    def prediction_error(self) -> float:
        """Predicted over measured time of the chosen plan, less one."""
        return self.chosen.predicted_seconds / self.chosen.timing.median - 1.0


def regret_of(
    case: LayerCase,
    layer: nn.Module,
    x: Tensor,
    *arguments: Tensor,
    budget_seconds: float = 4.0,
    most: int = 12,
) -> Regret:
    """Every candidate of `layer` on one graph, timed side by side; at most `most`, by price."""
    step = partial(_step, x=x, arguments=arguments, is_training=case.mode == "training")
    probe, first = _with_candidate(compile(layer, None), 0, step)
    name = _only(probe)
    steps, plans = {"0": first}, [probe.plans[name]]
    for k in range(1, min(probe.count(name), most)):
        other, steps[str(k)] = _with_candidate(compile(layer, None), k, step)
        plans.append(other.plans[name])
    timings = _timed(steps, budget_seconds, x.device.type)
    times = [
        CandidateTime(plans[int(k)].describe(), plans[int(k)].seconds, timing, timings["0"])
        for k, timing in timings.items()
    ]
    return Regret(case, times[0], tuple(times[1:]))


def regret_of_model(
    case: ModelCase, loaded: LoadedGraph, budget_seconds: float = 4.0, most: int = 6
) -> Regret:
    """Every candidate of every layer, the other layers as planned; at most `most` of a layer, by price.

    Each is timed only against the chosen plans: what is computed once may be as large as the features.
    """
    task = load_task(loaded, case.graph)
    model = build_model(case.model, task.x.shape[1], task.num_classes)
    data = Data(x=task.x, edge_index=task.edge_index)
    step = partial(_step, x=task.x, arguments=(task.edge_index,), is_training=True)
    made = partial(compile, model, data, mode="training", epochs=200)
    probe, first = _with_candidate(made(), 0, step)
    planned = sum(plan.seconds for plan in probe.plans.values())
    alone = _timed({"chosen": first}, budget_seconds)["chosen"]
    chosen = CandidateTime("as planned", planned, alone, alone)
    others = []
    for name, own in list(probe.plans.items()):
        for k in range(1, min(probe.count(name), most)):
            other, second = _with_candidate(made(), k, step, name)
            plan = other.plans[name]
            timings = _timed({"chosen": first, "other": second}, budget_seconds)
            seconds = planned - own.seconds + plan.seconds
            text = f"{name}: {plan.describe()}"
            others.append(CandidateTime(text, seconds, timings["other"], timings["chosen"]))
    return Regret(case, chosen, tuple(others))


Step = Callable[[], object]


def _with_candidate(
    compiled: Any, rank: int, step: Callable[[Any], Step], layer: str | None = None
) -> tuple[Probe, Step]:
    """A model opened with the candidate of this rank taken, and its step."""
    probe, call = Probe(compiled), step(compiled)
    probe.take(rank, call, layer)
    if not probe.plans:
        raise PlanError(f"nothing to compare: {compiled.plan.not_planned[0].reason}")
    return probe, call


def _only(probe: Probe) -> str:
    """The layer whose candidates are compared: the first expression of a layer that has several."""
    return next(iter(probe.plans))


def _step(compiled: Any, x: Tensor, arguments: tuple[Tensor, ...], is_training: bool) -> Step:
    def inference() -> object:
        with torch.no_grad():
            return compiled(x, *arguments)

    return training_step(compiled, x, *arguments) if is_training else inference


def _timed(steps: dict[str, Step], budget_seconds: float, device: str = "cpu") -> dict[str, Timing]:
    is_cpu = device == "cpu"
    return time_calls(
        steps, warmup=2, min_repeats=5, budget_seconds=budget_seconds, target_spread=0.01,
        clock=clock() if is_cpu else clock_of(device), pace=patient(budget_seconds) if is_cpu else None,
    )  # fmt: skip


def _take(grid: list[LayerCase | ModelCase], options: Options) -> Iterator[Record]:
    """A record per case: the chosen plan, the others, their predicted and measured times."""
    for name, group in itertools.groupby(grid, key=lambda case: case.graph):
        forms = functools.cache(functools.partial(forms_of, name, options.data_dir, options.device))
        loaded = functools.cache(functools.partial(find_graph, name, options.data_dir))
        for case in group:
            if isinstance(case, ModelCase):
                regret = regret_of_model(case, loaded(), options.budget_seconds)
            else:
                regret = _regret_of_case(case, forms(), options.budget_seconds)
            result = {
                "regret": regret.regret,
                "prediction_error": regret.prediction_error,
                "candidates": [c.to_dict() for c in (regret.chosen, *regret.others)],
            }
            yield Record(KIND, case.to_dict(), result, options.environment)


def _case_of(found: Mapping[str, object]) -> LayerCase | ModelCase | None:
    return case_reader(ModelCase)(found) if "model" in found else case_reader(LayerCase)(found)


def _regret_of_case(case: LayerCase, forms: Forms, budget_seconds: float) -> Regret:
    given = Problem(case.layer, forms, case.width_in, case.width_out, heads=case.heads)
    x = hidden_features(given.num_nodes, case.width_in, device=given.edge_index.device)
    x.requires_grad_(case.mode == "training")
    return regret_of(case, given.layer, x, given.edge_index, *given.extra, budget_seconds=budget_seconds)


_SUITE = Suite(KIND, _case_of, _take)
run, left = _SUITE.run, _SUITE.left
