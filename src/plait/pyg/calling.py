"""Times planned layers: what a call takes besides its steps, in the forward and the backward pass."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plait.plan.plan import LayerPlan, Measured, PricedStep, owner
from plait.pyg.active import Seats
from plait.pyg.listening import in_this_thread
from plait.pyg.planned import is_planned
from plait.runtime.clock import now

__all__ = ["Calls", "timed_calls"]

_PLANNED = "_ExpressionBackward"  # the autograd nodes that plans make


class Calls:
    """Seconds of planned layers in one step of a model, their steps included."""

    def __init__(self) -> None:
        self.forward: dict[str, float] = defaultdict(float)  # by layer
        self.backward: dict[str, float] = defaultdict(float)  # by plan: a layer may have several

    def beside(
        self, plans: Mapping[str, LayerPlan], trace: Sequence[tuple[str, Measured]]
    ) -> dict[str, dict[str, float]]:
        """By plan, "fwd" and "bwd": what a call took less the steps in it, which `trace` has by plan\\0step.

        The call of a layer with several plans counts with its first.
        """
        steps: dict[str, float] = defaultdict(float)
        for name, measured in trace:
            steps[name] += measured.seconds
        left = dict(self.forward)
        found: dict[str, dict[str, float]] = {name: {} for name in plans}
        for name, plan in plans.items():
            if owner(name) in left:
                left[owner(name)] -= _total(name, plan.steps[: plan.num_forward], steps)
        for name, plan in plans.items():
            if owner(name) in left:
                found[name]["fwd"] = max(0.0, left.pop(owner(name)))
            if name in self.backward:
                own = _total(name, plan.steps[plan.num_forward :], steps)
                found[name]["bwd"] = max(0.0, self.backward[name] - own)
        return found


def _total(name: str, priced: Sequence[PricedStep], steps: Mapping[str, float]) -> float:
    return sum(steps.get(f"{name}\0{one.step.out}", 0.0) for one in priced)


@contextmanager
def timed_calls(seats: Seats, clock: Callable[[], float] = now) -> Iterator[Calls]:
    """While it is open: seconds of the planned layers this thread calls, and of their autograd nodes."""
    calls = Calls()
    begun: list[list[float]] = []  # of each layer that is running: when it began, seconds of those inside it
    seen: set[Any] = set()

    def enter(module: nn.Module, _: Any) -> None:
        if is_planned(module.__class__):
            begun.append([clock(), 0.0])

    def leave(module: nn.Module, _: Any, out: Any) -> None:
        if not is_planned(module.__class__):
            return
        start, inside = begun.pop()
        seconds = clock() - start
        if begun:
            begun[-1][1] += seconds
        calls.forward[seats.of(module).name] += seconds - inside
        _listen(out, calls, seen, clock)

    handles = (
        register_module_forward_pre_hook(in_this_thread(enter)),
        register_module_forward_hook(in_this_thread(leave)),
    )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _listen(out: Any, calls: Calls, seen: set[Any], clock: Callable[[], float]) -> None:
    """Put a clock on the nodes that the plans behind `out` have made, those of earlier layers apart."""
    given = out if isinstance(out, tuple | list) else (out,)
    nodes: list[Any] = [one.grad_fn for one in given if isinstance(one, Tensor)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        if node.name() == _PLANNED:
            begun: list[float] = []
            node.register_prehook(functools.partial(_begin, begun, clock))
            node.register_hook(functools.partial(_end, begun, clock, calls, node.run.plan.layer))


def _begin(begun: list[float], clock: Callable[[], float], _: Any) -> None:
    begun.append(clock())


def _end(begun: list[float], clock: Callable[[], float], calls: Calls, name: str, *_: Any) -> None:
    calls.backward[name] += clock() - begun.pop()
