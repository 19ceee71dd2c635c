"""plait bench plans --steps: whether the measured steps of a layer add up to the layer's own time.

EXPLAIN ANALYZE gives a time for every step, and one for calling them: the Python and the autograd of a
layer, which are much of a small one. The layer is timed as a user runs it, forward and backward, in turn with
a run whose steps are timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median

from plait.bench.cases import LayerCase
from plait.bench.pace import patient
from plait.bench.plans import Options
from plait.bench.problem import Forms, Problem, forms_of, training_step
from plait.bench.suite import Suite, case_reader
from plait.errors import InputError
from plait.measure.record import Record
from plait.measure.timer import wall_clock
from plait.pyg.compile import compile
from plait.pyg.probe import Probe

__all__ = ["KIND", "LAYERS", "add_up", "left", "run"]

KIND = "bench-clocks"
LAYERS = (
    "gcn", "sage-max", "gin", "sgc", "tag", "gat", "gatv2", "transformer", "rgcn", "pna", "edgeconv",
)  # fmt: skip
_WARM, _LEAST_ROUNDS, _MOST_ROUNDS = 3, 5, 100


def add_up(probe: Probe, step: Callable[[], object], budget_seconds: float) -> dict[str, object]:
    """Seconds of the layer, of its steps and of calling them, their shares, and the steps no clock saw."""
    for _ in range(_WARM):
        step()
    alone: list[float] = []
    together: list[float] = []
    calling: list[float] = []
    seen: set[str] = set()
    begun = time.perf_counter()
    while len(alone) < _LEAST_ROUNDS or (
        len(alone) < _MOST_ROUNDS and time.perf_counter() - begun < budget_seconds
    ):
        step()  # the first call after one with clocks on its steps took longer than those that follow it
        alone.append(wall_clock(step, 1))
        times, beside = probe.spent(step)
        together.append(sum(seconds for _, seconds in times))
        calling.append(beside)
        seen |= {name for name, _ in times}
    steps = [(name, one.step.out) for name, plan in probe.plans.items() for one in plan.steps]
    return {
        "layer_seconds": median(alone),
        "steps_seconds": median(together),
        "calling_seconds": median(calling),
        "share": median(b / a for a, b in zip(alone, together, strict=True)),
        "share_with_calling": median((b + c) / a for a, b, c in zip(alone, together, calling, strict=True)),
        "rounds": len(alone),
        "steps": len(steps),
        "without_a_time": [f"{name}: {value}" for name, value in steps if f"{name}\0{value}" not in seen],
    }


def _take(grid: list[LayerCase], options: Options) -> Iterator[Record]:
    for name, group in itertools.groupby(grid, key=lambda case: case.graph):
        forms = forms_of(name, options.data_dir, options.device)
        for case in group:
            yield Record(KIND, case.to_dict(), _of_case(case, forms, options), options.environment)


def _of_case(case: LayerCase, forms: Forms, options: Options) -> dict[str, object]:
    if case.mode != "training":
        raise InputError(f"--modes: {case.mode}; steps are added up in training only")
    given = Problem(case.layer, forms, case.width_in, case.width_out, heads=case.heads)
    compiled = compile(given.layer, None)
    step = training_step(compiled, given.x, given.edge_index, *given.extra, cotangent=given.cotangent)
    patient(options.budget_seconds).wait()
    return add_up(Probe(compiled), step, options.budget_seconds)


_SUITE = Suite(KIND, case_reader(LayerCase), _take)
run, left = _SUITE.run, _SUITE.left
