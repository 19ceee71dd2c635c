"""Prices and chooses among candidates that are programs: layers that are more than a matrix expression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from plait.cost.machine import MachineProfile
from plait.errors import PlanError
from plait.ops.program import Program
from plait.plan import words
from plait.plan.plan import LayerPlan
from plait.plan.printed import TIE
from plait.plan.program import differentiate
from plait.plan.search import (
    WITHIN_ERROR,
    Problem,
    chained,
    matrices_of,
    memory_of,
    price_program,
    rejected_plan,
    step_pricer,
    too_much,
    within,
)

__all__ = ["Way", "choose", "direct", "preferring", "survey_ways", "unpriced"]

_preferred: ContextVar[int] = ContextVar("preferred", default=0)


@dataclass(frozen=True)
class Way:
    """One legal way to compute a layer: its name, its formula, its program, and the reason for it."""

    name: str
    text: str
    program: Program
    because: str = ""
    prepared: int = 0  # numbers moved in each call to make its weights from the layer's, besides its steps


@contextmanager
def preferring(rank: int) -> Iterator[None]:
    """Plans made inside take the way of this rank by price (0: the cheapest), to be measured."""
    token = _preferred.set(rank)
    try:
        yield
    finally:
        _preferred.reset(token)


def survey_ways(problem: Problem, ways: Sequence[Way]) -> list[LayerPlan]:
    """Every way as a plan, ordered by price; products of the same rows are chained unless that costs more."""
    pricer = step_pricer(problem)
    plans = []
    for way in ways:
        plan = _plan(problem, way)
        found = chained(plan, plan, problem, pricer) if problem.may_chain else None
        is_near = found is not None and found.seconds <= WITHIN_ERROR * plan.seconds
        best = replace(found, form="") if is_near and found is not None else plan
        plans.append(replace(best, seconds=best.seconds + _preparing(problem, way)))
    return sorted(plans, key=lambda plan: plan.seconds)


def _preparing(problem: Problem, way: Way) -> float:
    """Seconds besides the steps; for weights that fit a core's cache they vanish in the call."""
    moved, machine = way.prepared * problem.float_bytes, problem.machine
    return moved / machine.stream_bytes_per_s if moved > machine.l2_bytes else 0.0


def _plan(problem: Problem, way: Way) -> LayerPlan:
    forward, pricer = way.program, step_pricer(problem)
    backward = None if problem.wrt is None else differentiate(forward, problem.wrt)
    once = replace(forward, steps=(), outputs=())
    forward_steps = price_program(forward, problem, pricer, {})
    backward_steps = () if backward is None else price_program(backward, problem, pricer, {})
    steps = (*forward_steps, *backward_steps)
    memory = memory_of(once, forward, backward, problem, {})
    return LayerPlan(
        layer=problem.layer, expr=None, form="", condition="", forward=forward, backward=backward,
        hoisted=once, steps=steps, hoisted_steps=(), num_forward=len(forward_steps),
        seconds=sum(step.price.seconds for step in steps),
        peak_bytes=memory.peak, kept_bytes=memory.kept, kept_output=memory.kept_output,
        sparse_values=(),
        sizes=dict(problem.sizes), mode="inference" if problem.wrt is None else "training",
        machine=problem.machine.name, is_default_machine=problem.machine.is_default,
        wrt=problem.wrt or (), because=way.because, choice=way.name, text=way.text,
    )  # fmt: skip


_NONE = Program((), (), {}, {}, ())


def unpriced(
    layer: str,
    choice: str,
    text: str,
    because: str,
    sizes: Mapping[str, int],
    mode: str,
    machine: MachineProfile,
) -> LayerPlan:
    """The plan of a layer with a single way whose steps are not planned: it has no steps."""
    return replace(
        direct(_NONE, ()), layer=layer, sizes=sizes, mode=mode, machine=machine.name,
        is_default_machine=machine.is_default, because=because, choice=choice, text=text,
    )  # fmt: skip


def direct(program: Program, wrt: tuple[str, ...], layer: str = "") -> LayerPlan:
    """A part of a layer without alternatives: one program, neither chosen nor priced."""
    return LayerPlan(
        layer=layer, expr=None, form="", condition="", forward=program,
        backward=differentiate(program, wrt) if wrt else None, hoisted=_NONE, steps=(), hoisted_steps=(),
        num_forward=0, seconds=0.0, peak_bytes=0, sparse_values=(), sizes={},
        mode="training" if wrt else "inference", machine="", is_default_machine=False, wrt=wrt,
    )  # fmt: skip


def choose(problem: Problem, ways: Sequence[Way]) -> LayerPlan:
    """The cheapest way that fits the memory limit, with the rejected ways and their prices."""
    ranked, limit = survey_ways(problem, ways), problem.memory_limit
    fitting = within(problem, ranked)
    if not fitting:
        least = min(plan.peak_bytes for plan in ranked)
        raise PlanError(
            f"{problem.layer}: memory_limit of {limit} bytes is below the leanest plan's {least}; raise it"
        )
    best = fitting[min(_preferred.get(), len(fitting) - 1)]
    rejected = tuple(
        rejected_plan(
            p, p.text, _why(p, best) if p in fitting else too_much(p, problem),
            words.of_choice(p.choice, p.text),
        )
        for p in ranked
        if p is not best
    )  # fmt: skip
    return replace(best, rejected=rejected, matrices=matrices_of(best, problem))


def _why(loser: LayerPlan, best: LayerPlan) -> str:
    if not best.seconds or loser.seconds <= TIE * best.seconds:
        return "a tie with the chosen plan"
    return f"{loser.seconds / best.seconds:.2f} times the price"
