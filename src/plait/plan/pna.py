"""Plans of layers with several aggregators and degree scalers (PNAConv)."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.machine import MachineProfile
from plait.cost.work import Matrix
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among
from plait.plan.passes import Steps

__all__ = ["AggregatorsProblem", "candidates", "choose"]

# Times of the passes beside a sparse product of the same columns; from a few timings, not fitted.
_ALL, _BACK = 1.5, 1.2


@dataclass(frozen=True)
class AggregatorsProblem:
    """One such layer on one graph, in numbers; width and outer are those of one tower."""

    layer: str
    matrix: Matrix
    inner: int  # columns of x that a tower reads
    width: int  # columns of a tower's messages
    outer: int  # columns of a tower's output
    towers: int
    aggregators: int
    sections: int  # rows that backward gathers for an edge
    scalers: int
    is_folded: bool  # the last linear map is folded into the towers' own
    machine: MachineProfile
    is_training: bool = True
    wants_input_grad: bool = True
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None


def _steps(p: AggregatorsProblem) -> list[FusedStep]:
    steps = Steps(p.machine, p.float_bytes, p.threads)
    rows, columns, t = p.matrix.rows, p.towers * p.width, p.towers
    results, kept = (1 + p.scalers) * p.outer, p.aggregators * p.width
    steps.gemm(f"project the neighbours' part -> {rows}x{columns}", "fwd", rows, p.inner, p.width, t)
    steps.gather("all aggregators", "fwd", p.matrix, columns, _ALL, "one gather for all")
    steps.gemm("own part and shifts", "fwd", rows, p.inner, results, t)
    steps.gemm("aggregates with every scaler's weights", "fwd", rows, kept, p.scalers * p.outer, t)
    steps.stream("weigh by degree", "fwd", rows, p.outer * t, 1 + p.scalers)
    if not p.is_folded:
        steps.gemm("last linear map", "fwd", rows, p.outer * t, p.outer * t)
    if not p.is_training:
        return steps.made
    if not p.is_folded:
        steps.gemm("last linear map's gradients", "bwd", rows, p.outer * t, p.outer * t, 2)
    steps.stream("weigh by degree", "bwd", rows, results * t)
    steps.gemm("gradient of the aggregates", "bwd", rows, p.scalers * p.outer, kept, t)
    steps.gemm("weight gradient", "bwd", rows, kept, p.scalers * p.outer, t, is_transposed=True)
    steps.gemm("own weight gradient", "bwd", rows, p.inner, results, t, is_transposed=True)
    steps.stream("shares of the targets", "bwd", rows, p.sections * columns, 2)
    turned = p.matrix.transposed()
    steps.gather("gradient of the messages", "bwd", turned, p.sections * columns, _BACK, "gathers the shares")
    steps.gemm("weight gradient of the messages", "bwd", rows, p.inner, p.width, t, is_transposed=True)
    if p.wants_input_grad:
        steps.gemm("input gradient", "bwd", rows, p.width + results, p.inner, t)
    return steps.made


def candidates(p: AggregatorsProblem) -> list[FusedCandidate]:
    """The one way this layer is run."""
    columns, results = p.towers * p.width, p.towers * (1 + p.scalers) * p.outer
    held = (1 + p.aggregators) * columns + results + p.towers * p.outer
    if p.is_training:
        held += (2 + p.aggregators + p.sections + 1) * columns + results + p.inner
    because = f"{p.aggregators} aggregators share one gather; the targets' part only shifts them"
    text = "Σₖ Sₖ (X Cₖ + agg(X V) Wₖ)"
    return [FusedCandidate("one pass", text, tuple(_steps(p)), held * p.matrix.rows * p.float_bytes, because)]


def choose(p: AggregatorsProblem) -> FusedPlan:
    """The plan, with its price."""
    sizes = {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "K2": p.outer * p.towers, "T": p.towers}
    return choose_among(
        candidates(p), layer=p.layer, kind="aggregators", sizes=sizes, machine=p.machine,
        is_training=p.is_training, memory_limit=p.memory_limit,
    )  # fmt: skip
