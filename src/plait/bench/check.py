"""Compares a runner's output and gradients with the reference's: a wrong answer is never timed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.bench.peers.runner import Runner
from plait.bench.problem import Problem

__all__ = ["TOLERANCE", "answer", "worst_error"]

# Layers with a kink inside (a ReLU, leaky scores, a maximum of projected rows): a sum that lands on the
# other side of it switches a unit, and with it a few entries of the gradients, in whoever sums in another
# order. Their outputs are held to the largest difference, their gradients to its norm, with room for a few
# switched units among millions.
KINKED = ("gin", "gat", "gatv2", "edgeconv", "pna")
_ROOM_FOR_KINKS = 0.01
_LEAST_SHARE = 0.01

# Largest difference as a share of the largest magnitude; float32 sums in another order stay below 1e-5.
TOLERANCE = 1e-4


def answer(runner: Runner, problem: Problem, mode: str) -> dict[str, Tensor]:
    """The output, and in training also the gradients of the input and of every weight, under PyG's names."""
    if mode == "inference":
        with torch.no_grad():
            return {"output": runner.forward(problem.x)}
    problem.x.grad = None
    for parameter in runner.parameters:
        parameter.grad = None
    output = runner.forward(problem.x)
    torch.autograd.backward(output, problem.cotangent)
    gradients = {f"gradient of {name}": value.clone() for name, value in runner.gradients().items()}
    if problem.x.grad is not None:
        gradients["gradient of x"] = problem.x.grad
    problem.x.grad = None
    return {"output": output.detach()} | gradients


def worst_error(
    given: Mapping[str, Tensor], expected: Mapping[str, Tensor], layer: str = ""
) -> tuple[float, str]:
    """(largest difference / largest magnitude, of what); infinite when a part is missing or misshapen.

    Gradients of a layer in KINKED are compared by norm, scaled so that TOLERANCE is the bar here too. A
    gradient that is zero but for rounding (the key's bias, which the softmax cancels) is measured by the
    largest one.
    """
    worst = (0.0, "output")
    floor = _LEAST_SHARE * max(
        (float(value.abs().max()) for name, value in expected.items() if _is_gradient(name, value)), default=0
    )
    for name, want in expected.items():
        have = given.get(name)
        if have is None or have.shape != want.shape:
            return float("inf"), name
        if not want.numel():
            continue
        difference, least = (have - want).abs(), floor if _is_gradient(name, want) else 0.0
        if layer in KINKED and _is_gradient(name, want):
            norm = torch.linalg.vector_norm
            whole = max(float(norm(want)), least * want.numel() ** 0.5) or 1.0
            error = float(norm(difference)) / whole * TOLERANCE / _ROOM_FOR_KINKS
        else:
            error = float(difference.max()) / (max(float(want.abs().max()), least) or 1.0)
        # a NaN anywhere makes the error NaN, which compares false with everything
        worst = max(worst, (error if error == error else float("inf"), name))
    return worst


def _is_gradient(name: str, value: Tensor) -> bool:
    return name.startswith("gradient") and value.numel() > 0
