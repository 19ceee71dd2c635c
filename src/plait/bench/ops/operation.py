"""What an operation is: its inputs, its variants, the float64 answer they must give, and its work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.bench.ops.case import Case
from plait.bench.ops.inputs import Draw, Inputs
from plait.bench.trial import first_line

__all__ = [
    "BOTH", "FORWARD", "GRAPH", "Make", "Operation", "Unsupported", "Variant", "Work", "values_of",
    "worst_difference",
]  # fmt: skip

Call = Callable[[], Any]
Make = Callable[[Inputs], Call]

FORWARD = ("forward",)
BOTH = ("forward", "backward", "step")
# Sizes and defaults of an operation on a graph's edges.
GRAPH: Mapping[str, Any] = {
    "edges": 200_000,
    "nodes": None,
    "degree": 16.0,
    "width": 64,
    "law": "uniform",
    "exponent": 2.5,
    "order": "sorted",
    "index_dtype": "int64",
    "dtype": "float32",
    "graph": None,
}


class Unsupported(Exception):  # noqa: N818  a signal, caught and shown, not a fault
    """The variant has no such path (device, dtype, direction); the text says why."""


@dataclass(frozen=True)
class Work:
    """Arithmetic and traffic: bytes_least touches everything once, bytes_most finds nothing in a cache."""

    flops: float
    bytes_least: float
    bytes_most: float


@dataclass(frozen=True)
class Variant:
    """One implementation: `make` prepares what a user prepares once and returns the call to time."""

    name: str
    make: Make
    needs: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    directions: tuple[str, ...] = BOTH
    why: str = ""

    def prepare(self, inputs: Inputs) -> Call:
        """The call; Unsupported where there is none, ImportError where the package is missing."""
        case = inputs.case
        if case.device not in self.devices:
            raise Unsupported(self.why or f"{self.name} runs on {' and '.join(self.devices)} only")
        if case.direction not in self.directions:
            raise Unsupported(self.why or f"{self.name} has no gradient here")
        if self.needs:
            _require(self.needs)
        return self.make(inputs)


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except Exception as error:  # a library built for another torch fails in many ways while it loads
        raise ImportError(first_line(error)) from None


def values_of(out: Any, inputs: Inputs) -> tuple[Tensor, ...]:
    """The answer as tensors to compare: here the output itself."""
    return (out,)


@dataclass(frozen=True)
class Operation:
    """An entry of the catalogue. `takes` names its sizes with their defaults.

    `answer` turns an output, of a variant or of the reference, into tensors that can be compared where the
    output itself cannot (a sparse matrix, a permutation). `check` replaces reference and comparison where
    there is no one right answer: it returns the error of an output.
    """

    name: str
    family: str
    about: str
    takes: Mapping[str, Any]
    draw: Callable[[Case, Draw], Mapping[str, Tensor]]
    variants: tuple[Variant, ...]
    work: Callable[[Case], Work]
    reference: Callable[[Inputs], Any] | None = None
    answer: Callable[[Any, Inputs], tuple[Tensor, ...]] = values_of
    check: Callable[[Any, Inputs], float] | None = None
    leaves: tuple[str, ...] = ()
    has_sparse_path: bool | None = None

    @property
    def has_backward(self) -> bool:
        """Whether it can be differentiated."""
        return bool(self.leaves)

    def bytes_needed(self, case: Case) -> float:
        """Most memory a run takes: operands, a float64 reference and every edge's row gathered, twice."""
        work = self.work(case)
        wide = 8.0 / case.float_bytes
        per_pass = (1.0 + wide) * (work.bytes_least + work.bytes_most)
        return per_pass * (1.0 if case.direction == "forward" else 2.0)


def worst_difference(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest difference as a share of the largest magnitude, over all parts; infinite for other shapes."""
    worst = 0.0
    for have, want in zip(given, wanted, strict=True):
        if have.shape != want.shape:
            return float("inf")
        if not want.numel():
            continue
        difference = float((have.detach().to(torch.float64) - want.detach().to(torch.float64)).abs().max())
        scale = float(want.detach().abs().max()) or 1.0
        # a NaN anywhere makes the difference NaN, which compares false with everything
        worst = max(worst, difference / scale if difference == difference else float("inf"))
    return worst
