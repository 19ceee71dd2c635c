"""Steps bound to kernels: which kernel of an operation runs a step on a device, or why none does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from plait.cost.price import Price
from plait.errors import PlanError
from plait.ops.program import Program, Step
from plait.runtime.chain import Env
from plait.runtime.constants import SparseValue

if TYPE_CHECKING:
    from plait.runtime.executor import Run
    from plait.runtime.orders import EdgeOrders

__all__ = ["Binding", "Bound", "Kernel", "bind", "kernel", "kernels_of"]

Bound = Callable[[Env], Any]
"""A step as a function of the available values; it may put further results into them."""


class Binding:
    """A program on one graph and device: what kernels need when a step is bound to them."""

    def __init__(self, program: Program, run: Run, may_pool: bool = True):
        self.program, self.device = program, run.place.type
        self._run = weakref.ref(run)  # not the run, which holds what is bound: see executor.Compiled
        self.buffers = run.buffers
        # torch pools a GPU's memory itself
        self.take = run.buffers.take if may_pool and self.device == "cpu" else _fresh(run.place)
        self._known: dict[str, Any] = {}  # constants by name, looked up once
        self._places = program.joined

    @property
    def run(self) -> Run:
        """The run that is bound, which lasts as long as anyone carries it out."""
        run = self._run()
        assert run is not None
        return run

    @property
    def orders(self) -> EdgeOrders:
        """The graph's edges by target and by source."""
        assert self.run.orders is not None
        return self.run.orders

    def price(self, step: Step) -> Price | None:
        """The planner's price of the step, if it has one."""
        return self.run.outline.prices.get(step.out)

    def backend(self, step: Step) -> str:
        """The kernel the planner priced the step for; "" where it was not priced."""
        price = self.price(step)
        return "" if price is None else price.backend

    def out(self, step: Step, env: Env, owns: bool, rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for a result of this size: that of the added term, or fresh memory."""
        if owns:
            result: torch.Tensor = env[step["addend"]]
            return result
        return self.take(rows, cols, like.dtype)

    def room(self, env: Env, name: str, rows: int, cols: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for a value of this name: among the columns it will be joined with, or separate."""
        place = self._places.get(name)
        if place is None:
            return self.take(rows, cols, like.dtype)
        joined, start, width = place
        whole: torch.Tensor | None = env.get(joined)
        if whole is None:
            whole = env[joined] = self.take(rows, width, like.dtype)
        return whole.narrow(1, start, cols)

    def room_like(self, env: Env, name: str, like: torch.Tensor) -> torch.Tensor:
        """The same for a value of the shape of another."""
        return self.room(env, name, like.shape[0], like.shape[1], like)

    def placed_in(self, joined: str) -> set[str]:
        """Values that may have been written directly into a join."""
        return {name for name, place in self._places.items() if place[0] == joined}

    def is_part(self, name: str) -> bool:
        """Whether a value has its place among the columns it will be joined with."""
        return name in self._places

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """An uninitialised result of the shape of x."""
        return self.take(x.shape[0], x.shape[1], x.dtype)

    def constant(self, name: str) -> Any:
        """A constant of the graph by its name in the program."""
        value = self._known.get(name)
        if value is None:
            value = self.run.constants.value(self.program.constants[name])
            if self.device != "cpu" and isinstance(value, torch.Tensor):
                value = value.to(self.run.place)
            self._known[name] = value
        return value

    def vector(self, step: Step, role: str) -> torch.Tensor | None:
        """A constant diagonal, if the step has one in this role."""
        name = step.get(role)
        value: torch.Tensor | None = None if name is None else self.constant(name)
        return value

    def matrix(self, step: Step) -> SparseValue:
        """The step's sparse matrix."""
        matrix: SparseValue = self.constant(step["matrix"])
        return matrix

    def row_scale(self, step: Step, role: str, rows: int) -> Callable[[Env], torch.Tensor | None]:
        """A scaling by rows: a constant diagonal, or a scalar input spread over the rows."""
        name, place = step.get(role), self.run.place
        if name is None or name in self.program.constants:
            constant = self.vector(step, role)
            return lambda env: constant
        return lambda env: _spread(name, None, None, rows, env, place)

    def target(self, step: Step, rows: int) -> Callable[[Env], torch.Tensor | None]:
        """What the rows of a sparse product are multiplied by: a diagonal, a number of the call, or both."""
        target, factor, name = self.vector(step, "target"), step.get("factor"), step.get("target")
        place = self.run.place
        if factor is None:
            return lambda env: target
        return lambda env: _spread(factor, name, target, rows, env, place)


def _fresh(place: torch.device) -> Callable[[int, int, torch.dtype], torch.Tensor]:
    """Fresh memory for every result."""
    return lambda rows, cols, dtype: torch.empty((rows, cols), dtype=dtype, device=place)


def _spread(
    scalar: str, name: str | None, diagonal: torch.Tensor | None, rows: int, env: Env, place: torch.device
) -> torch.Tensor:
    """A number of the call on every row, times a diagonal where there is one; made once in a pass."""
    key = f"{scalar}|{name}|{rows}"
    found: torch.Tensor | None = env.get(key)
    if found is None:
        given: torch.Tensor = env[scalar].detach().reshape(1)
        if given.is_cpu and place.type != "cpu":  # a layer's own number: copying it would wait for the device
            value = given.item()
            found = given.new_full((rows,), value, device=place) if diagonal is None else diagonal * value
        else:
            found = given.expand(rows).contiguous() if diagonal is None else diagonal * given
        env[key] = found
    return found


@dataclass(frozen=True)
class Kernel:
    """One way to run an operation on a device."""

    name: str
    bind: Callable[[Binding, Step, bool], Bound]
    """The flag: whether the result may be written over the operand that the operation overwrites."""
    refuses: Callable[[Binding, Step], str | None]
    """Why it does not run this step; None if it does."""


_KERNELS: dict[tuple[str, str], list[Kernel]] = {}


def _never(binding: Binding, step: Step) -> None:
    return None


def kernel(
    operation: str, device: str, name: str = "plait", refuses: Callable[[Binding, Step], str | None] = _never
) -> Callable[[Callable[[Binding, Step, bool], Bound]], Callable[[Binding, Step, bool], Bound]]:
    """Registers a kernel of an operation on a device, after the preferred ones."""

    def enter(function: Callable[[Binding, Step, bool], Bound]) -> Callable[[Binding, Step, bool], Bound]:
        _KERNELS.setdefault((operation, device), []).append(Kernel(name, function, refuses))
        kernels_of.cache_clear()
        return function

    return enter


@functools.cache
def kernels_of(operation: str, device: str) -> tuple[Kernel, ...]:
    """The kernels of an operation on a device in order of preference; those for any device come last."""
    return (*_KERNELS.get((operation, device), ()), *_KERNELS.get((operation, "any"), ()))


def bind(binding: Binding, step: Step, owns: bool) -> Bound:
    """The step bound to the first kernel that accepts it; PlanError with reasons if none does."""
    reasons = []
    for option in kernels_of(step.op, binding.device):
        reason = option.refuses(binding, step)
        if reason is None:
            return option.bind(binding, step, owns)
        reasons.append(f"{option.name}: {reason}")
    why = "; ".join(reasons) or "there is no kernel of this operation"
    raise PlanError(f"step {step.op} -> {step.out} cannot run on {binding.device}: {why}")
