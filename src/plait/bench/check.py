"""Compares a runner's output and gradients with the reference's: a wrong answer is never timed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.bench.peers.runner import Runner
from plait.bench.problem import Problem

__all__ = ["TOLERANCE", "answer", "worst_error"]

# Layers with a ReLU inside: a sum that lands on the other side of zero switches a unit, and with it a few
# entries of the gradients, in whoever sums in another order. Their outputs are held to the largest
# difference, their gradients to its norm, with room for a few switched units among millions.
KINKED = ("gin",)
_ROOM_FOR_KINKS = 0.01

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

    Gradients of a layer in KINKED are compared by norm, scaled so that TOLERANCE is the bar here too.
    """
    worst = (0.0, "output")
    for name, want in expected.items():
        have = given.get(name)
        if have is None or have.shape != want.shape:
            return float("inf"), name
        if not want.numel():
            continue
        if layer in KINKED and name.startswith("gradient"):
            norm = torch.linalg.vector_norm
            share = float(norm(have - want) / norm(want).clamp_min(1e-30))
            error = share * TOLERANCE / _ROOM_FOR_KINKS if share == share else float("inf")
            worst = max(worst, (error, name))
            continue
        difference = float((have - want).abs().max())
        # a NaN anywhere makes the difference NaN, which compares false with everything
        error = difference / (float(want.abs().max()) or 1.0) if difference == difference else float("inf")
        worst = max(worst, (error, name))
    return worst
