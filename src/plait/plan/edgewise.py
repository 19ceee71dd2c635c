"""Plans of learned maps of edges (EdgeConv): what of the map is done by node, what by edge.

linear     the whole map is linear: it commutes with sums and maxima alike, so edges only pick projected rows
rectified  first layer by node, ReLU and sum in one pass over edges, the last layer by node
blocks     first layer by node, the rest in blocks of edges; a last linear layer under a sum by node again
marked     blocks of a map that ends in a linear layer, under an extremum: bits remember who attained it
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.machine import MachineProfile
from plait.ops.work import Matrix
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among
from plait.plan.passes import Steps

__all__ = ["EdgewiseProblem", "candidates", "choose"]

# Times of the passes beside a sparse product of the same columns; from a few timings, not fitted.
_ALL, _RECTIFIED = 1.5, 1.2


@dataclass(frozen=True)
class EdgewiseProblem:
    """One such layer on one graph, in numbers."""

    layer: str
    kind: str
    matrix: Matrix
    inner: int
    width: int  # columns after the map's first layer
    by_edge: tuple[tuple[int, int], ...]  # (in, out) of the linear maps that are done by edge
    by_node: tuple[tuple[int, int], ...]  # and of those after the sum
    machine: MachineProfile
    can_mark: bool = False  # the map ends in a linear layer by edge, under an extremum
    is_training: bool = True
    wants_input_grad: bool = True
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None


def _steps(p: EdgewiseProblem, is_marked: bool = False) -> list[FusedStep]:
    """The steps of the kind, priced."""
    made = Steps(p.machine, p.float_bytes, p.threads)
    rows, edges, turned = p.matrix.rows, p.matrix.edges, p.matrix.transposed()
    made.gemm(f"first layer by node -> {rows}x{2 * p.width}", "fwd", rows, p.inner, 2 * p.width)
    factor = {"linear": _ALL, "rectified": _RECTIFIED, "blocks": 1.0}[p.kind]
    title = {"linear": "reduce projected rows", "rectified": "relu and sum", "blocks": "rows of both ends"}
    made.gather(title[p.kind], "fwd", p.matrix, p.width, factor)
    backs = 2 if p.is_training else 0
    if p.kind == "blocks":
        made.stream("block by block", "fwd", edges, p.width, 2)
        for inner, outer in p.by_edge:
            made.gemm(f"by edge {inner} -> {outer}", "fwd", edges, inner, outer)
            made.stream("reduce by target", "fwd", edges, outer, 1)
    for inner, outer in p.by_node:
        made.gemm(f"last layer by node {inner} -> {outer}", "fwd", rows, inner, outer)
    if not p.is_training:
        return made.made
    for inner, outer in p.by_node:
        made.gemm("last layer's gradients", "bwd", rows, inner, outer, backs)
    if p.kind == "blocks":
        made.gather("rows of both ends, again", "bwd", p.matrix, p.width)
        for inner, outer in p.by_edge:
            is_kept = is_marked and (inner, outer) == p.by_edge[-1]
            made.gemm(f"by edge {inner} -> {outer}, back", "bwd", edges, inner, outer, backs + (not is_kept))
            made.stream("gradients by edge", "bwd", edges, outer, 3)
        made.stream("sums by target and source", "bwd", edges, p.width, 4)
    else:
        made.gather(
            "gradient of the sources", "bwd", turned, (1 if p.kind == "linear" else 2) * p.width, factor
        )
    made.gemm("first layer's weight gradient", "bwd", rows, p.inner, 2 * p.width, is_transposed=True)
    if p.wants_input_grad:
        made.gemm("input gradient", "bwd", rows, 2 * p.width, p.inner)
    return made.made


_TEXT = {
    "linear": "reduce(X W₂) + X (W₁ - W₂)",
    "rectified": "(Σ relu(X (W₁ - W₂) + X W₂)) V",
    "blocks": "reduce(f(X (W₁ - W₂) + X W₂))",
    "marked": "reduce(f(X (W₁ - W₂) + X W₂) V), marks kept",
}
_BECAUSE = {
    "linear": "a linear map commutes with the reduction: no edge is projected",
    "rectified": "the first layer splits into both ends, the last commutes with the sum",
    "blocks": "the first layer splits into both ends; edges go in blocks that stay in cache",
    "marked": "one bit per edge and column, kept, saves a product per edge in the backward pass",
}


def candidates(p: EdgewiseProblem) -> list[FusedCandidate]:
    """The ways to run the map's kind: marks are a choice in training where the map ends in a linear layer."""
    rows = p.matrix.rows * (2 * p.width + max([p.width, *(o for _, o in (*p.by_edge, *p.by_node))]))
    held = rows * (2 if p.is_training else 1) * p.float_bytes
    names = [p.kind, *(["marked"] if p.can_mark and p.is_training else [])]
    more = {"marked": p.matrix.edges * p.by_edge[-1][1] // 8} if p.by_edge else {}
    return [
        FusedCandidate(
            name, _TEXT[name], tuple(_steps(p, name == "marked")), held + more.get(name, 0), _BECAUSE[name]
        )
        for name in names
    ]


def choose(p: EdgewiseProblem) -> FusedPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    sizes = {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "K2": p.width}
    return choose_among(
        candidates(p), layer=p.layer, kind="edgewise", sizes=sizes, machine=p.machine,
        is_training=p.is_training, memory_limit=p.memory_limit,
    )  # fmt: skip
