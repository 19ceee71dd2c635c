"""Opens a compiled model for benchmarks: its plans, the other candidates, the seconds of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from plait.plan.plan import LayerPlan, Measured
from plait.plan.search import Problem, search, survey
from plait.plan.ways import preferring
from plait.pyg.active import Seats
from plait.pyg.calling import timed_calls
from plait.runtime.machine import forget_machine, machine_in_use, using_machine
from plait.runtime.session import Session

__all__ = ["Choose", "Probe", "forget_machine", "machine_in_use", "using_machine"]

Choose = Callable[[Problem], LayerPlan]


class Probe:
    """A compiled model opened for measuring; whatever is set here stays set for the model's later calls."""

    def __init__(self, compiled: Any) -> None:
        self._session: Session = compiled._plait_plan_session
        self._seats: Seats = compiled._plait_seats
        self._candidates: dict[str, list[LayerPlan]] = {}
        self._session.aside.is_off = True  # what is measured are plait's own steps

    @property
    def plans(self) -> Mapping[str, LayerPlan]:
        """The latest plan of each layer and expression, by its name."""
        return self._session.plans

    @property
    def has_twins(self) -> bool:
        """Whether some layer runs on the representatives of twins."""
        return self._session.has_twins

    def candidates(self, layer: str) -> list[LayerPlan]:
        """The plans that `take` can choose, the planner's choice first and the others by price."""
        return self._candidates.get(layer, [])

    def count(self, layer: str) -> int:
        """How many ways there are to run a layer."""
        plan = self.plans[layer]
        return len(self.candidates(layer)) if plan.expr is not None else 1 + len(plan.rejected)

    def choose_by(self, choose: Choose) -> None:
        """Plans expressions by this function instead of the planner's; plans made so far are dropped."""
        self._session.choose = choose
        for name in list(self.plans):
            self._session.forget(name)

    def take(self, rank: int, call: Callable[[], object], layer: str | None = None) -> None:
        """Runs `call` with the candidate of this rank (0: the planner's choice) for one layer or for all.

        Later calls on the same graph and shapes keep it.
        """

        def choose(problem: Problem) -> LayerPlan:
            found = self._candidates[problem.layer] = _ranked(problem)
            is_meant = layer is None or problem.layer == layer
            return found[rank] if is_meant and rank < len(found) else found[0]

        self.choose_by(choose)
        with preferring(rank):
            call()

    def clock(
        self, call: Callable[[], object], warm: int, repeats: int
    ) -> dict[tuple[str, str], list[float]]:
        """Seconds of every step, by (layer, step), in `repeats` calls after `warm` ones without a clock."""
        seen: dict[tuple[str, str], list[float]] = {}
        for _ in range(warm):
            call()
        for _ in range(repeats):
            for name, seconds in self.spent(call)[0]:
                layer, _, step = name.partition("\0")
                seen.setdefault((layer, step), []).append(seconds)
        return seen

    def spent(self, call: Callable[[], object]) -> tuple[list[tuple[str, float]], float]:
        """(seconds of every step, as plan\\0step, in the order they ran; seconds of calling the layers)."""
        trace: list[tuple[str, Measured]] = []
        self._session.trace = trace
        try:
            with timed_calls(self._seats) as calls:
                call()
        finally:
            self._session.trace = None
        beside = calls.beside(self.plans, trace)
        return [(name, step.seconds) for name, step in trace], sum(
            sum(one.values()) for one in beside.values()
        )


def _ranked(problem: Problem) -> list[LayerPlan]:
    best = search(problem)
    others = [plan for plan in survey(problem) if plan.describe() != best.describe()]
    return [best, *sorted(others, key=lambda plan: plan.seconds)]
