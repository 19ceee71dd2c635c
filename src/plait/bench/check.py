"""Compares a runner's output and gradients with the reference's: a wrong result is never timed.

An answer is right where every part (the output, each gradient) is within TOLERANCE of PyG's in float32. Where
a part is not, both are held against PyG in float64: it is right there if its error is within TOLERANCE or
exceeds that of PyG's own float32 answer by 1e-5 at the most. (PNA's deviations cancel in PyG, and a variance
near the 1e-5 below which PyG calls it 0 falls to one side or the other by rounding.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.bench.peers.runner import Runner
from plait.bench.problem import Problem

__all__ = ["TOLERANCE", "Verdict", "answer", "judge", "worst_error"]

# Layers with a kink inside (a ReLU, leaky scores, a maximum of projected rows): a sum that lands on the
# other side of it switches a unit, and with it a few entries of the gradients, in whoever sums in another
# order. Their outputs are held to the largest difference, their gradients to its norm, with room for a few
# switched units among millions.
KINKED = ("gin", "gat", "gatv2", "edgeconv", "pna")
_ROOM_FOR_KINKS = 0.01
_LEAST_SHARE = 0.01

# Largest difference as a share of the largest magnitude; float32 sums in another order stay below 1e-5.
TOLERANCE = 1e-4
# What an answer may be further from float64 than PyG's own float32 answer: rounding in another order.
_MORE_THAN_PYG = 1e-5


def answer(runner: Runner, problem: Problem, mode: str) -> dict[str, Tensor]:
    """The output, and in training also the gradients of the input and of every weight, under PyG's names."""
    if mode == "inference":
        with torch.no_grad():
            return {"output": runner.forward(problem.x)}
    problem.x.grad = None
    for parameter in runner.parameters:
        parameter.grad = None
    output = runner.forward(problem.x)
    torch.autograd.backward(output, problem.cotangent.to(output.dtype))
    gradients = {f"gradient of {name}": value.clone() for name, value in runner.gradients().items()}
    if problem.x.grad is not None:
        gradients["gradient of x"] = problem.x.grad
    problem.x.grad = None
    return {"output": output.detach()} | gradients


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, its largest error against the float32 reference, and of what.

    Where float64 had to decide, the errors of that part against it: this answer's and PyG's.
    """

    is_right: bool
    error: float
    where: str
    float64_error: float | None = None
    float64_error_of_reference: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain values for a record."""
        found: dict[str, object] = {"error": self.error}
        if self.float64_error is not None:
            found |= {
                "float64_error": self.float64_error,
                "float64_error_of_reference": self.float64_error_of_reference,
            }
        return found


def judge(
    given: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    truth: Callable[[], Mapping[str, Tensor] | None],
    layer: str = "",
) -> Verdict:
    """The verdict over an answer; truth() is PyG's in float64 (None: it cannot be had), asked for last."""
    error, where = worst_error(given, expected, layer)
    if error <= TOLERANCE:
        return Verdict(True, error, where)
    exact = truth() if error < float("inf") else None
    if exact is None:
        return Verdict(False, error, where)
    own, reference = _errors(given, exact, layer), _errors(expected, exact, layer)
    # by part: how much further than allowed
    room = {name: max(TOLERANCE, reference[name] + _MORE_THAN_PYG) - own[name] for name in exact}
    worst = min(room, key=room.__getitem__)
    is_right = room[worst] >= 0.0
    shown = where if is_right else worst
    return Verdict(is_right, error, shown, own[shown], reference[shown])


def worst_error(
    given: Mapping[str, Tensor], expected: Mapping[str, Tensor], layer: str = ""
) -> tuple[float, str]:
    """(largest difference / largest magnitude, of what); infinite when a part is missing or misshapen.

    Gradients of a layer in KINKED are compared by norm, scaled so that TOLERANCE is the bar here too. A
    gradient that is zero but for rounding (the key's bias, which the softmax cancels) is measured by the
    largest one.
    """
    errors = _errors(given, expected, layer)
    return max(((error, name) for name, error in errors.items()), default=(0.0, "output"))


def _errors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], layer: str) -> dict[str, float]:
    floor = _LEAST_SHARE * max(
        (float(value.abs().max()) for name, value in expected.items() if _is_gradient(name, value)), default=0
    )
    found = {}
    for name, want in expected.items():
        error = _error(given.get(name), want, floor if _is_gradient(name, want) else 0.0, name, layer)
        # a NaN anywhere makes the error NaN, which compares false with everything
        found[name] = error if error == error else float("inf")
    return found


def _error(have: Tensor | None, want: Tensor, least: float, name: str, layer: str) -> float:
    if have is None or have.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    difference = (have - want).abs()
    if layer in KINKED and _is_gradient(name, want):
        norm = torch.linalg.vector_norm
        whole = max(float(norm(want)), least * want.numel() ** 0.5) or 1.0
        return float(norm(difference)) / whole * TOLERANCE / _ROOM_FOR_KINKS
    return float(difference.max()) / (max(float(want.abs().max()), least) or 1.0)


def _is_gradient(name: str, value: Tensor) -> bool:
    return name.startswith("gradient") and value.numel() > 0
