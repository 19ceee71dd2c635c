"""Plans of gated layers (ResGatedGraphConv): one projection, one pass over edges, what backward keeps.

keep       the forward pass also sums the gate's derivative, nodes x width: backward is one pass, over sources
recompute  nothing more is kept; backward goes over targets too
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.machine import MachineProfile
from plait.ops.work import Matrix
from plait.plan.fused import FusedCandidate, FusedPlan, FusedStep, choose_among
from plait.plan.passes import Steps

__all__ = ["GatedProblem", "candidates", "choose"]

# Times of the passes beside a sparse product of the same columns: from a few timings on a busy machine, at
# widths 64 and 256; not fitted.
_SUM, _SUM_AND_SLOPES, _SOURCES = 1.1, 1.4, 1.8


@dataclass(frozen=True)
class GatedProblem:
    """One gated layer on one graph, in numbers."""

    layer: str
    matrix: Matrix
    inner: int
    width: int
    has_skip: bool
    machine: MachineProfile
    is_training: bool = True
    wants_input_grad: bool = True
    float_bytes: int = 4
    threads: int | None = None
    memory_limit: int | None = None


def _steps(p: GatedProblem, is_kept: bool) -> list[FusedStep]:
    steps = Steps(p.machine, p.float_bytes, p.threads)
    rows, total = p.matrix.columns, (4 if p.has_skip else 3) * p.width
    steps.gemm(f"project -> {rows}x{total}", "fwd", rows, p.inner, total)
    factor = _SUM_AND_SLOPES if p.is_training and is_kept else _SUM
    steps.gather("gate and sum, gathers Q and V", "fwd", p.matrix, 2 * p.width, factor)
    if not p.is_training:
        return steps.made
    if not is_kept:
        steps.gather("gradient of K, gathers Q and V", "bwd", p.matrix, 2 * p.width, _SUM)
    steps.stream("gradient of K", "bwd", p.matrix.rows, p.width, 2)
    turned = p.matrix.transposed()
    steps.gather("gradients of Q and V", "bwd", turned, 2 * p.width, _SOURCES, "gates are recomputed")
    if p.wants_input_grad:
        steps.gemm("input gradient", "bwd", rows, total, p.inner)
    steps.gemm("weight gradient", "bwd", rows, p.inner, total, is_transposed=True)
    return steps.made


def _peak_bytes(p: GatedProblem, is_kept: bool) -> int:
    rows, total = p.matrix.columns, (4 if p.has_skip else 3) * p.width
    held = rows * total + p.matrix.rows * p.width
    if p.is_training:
        held += rows * total + rows * p.inner + (p.matrix.rows * p.width if is_kept else 0)
    return held * p.float_bytes


def candidates(p: GatedProblem) -> list[FusedCandidate]:
    """Every legal way to compute the layer."""
    text = "X S + Σ σ(X K + X Q) ⊙ (X V)" if p.has_skip else "Σ σ(X K + X Q) ⊙ (X V)"
    named = {"keep": "sums of σ' kept", "gate again": "σ' recomputed"} if p.is_training else {"infer": ""}
    because = {
        "keep": f"{p.width} numbers per node, kept, save a pass over {p.matrix.edges} edges",
        "gate again": "nothing beside the projected rows is kept",
        "infer": "one projection serves gate, value and skip; nothing of edges x width exists",
    }
    return [
        FusedCandidate(
            name, f"{text}, {words}" if words else text, tuple(_steps(p, name == "keep")),
            _peak_bytes(p, name == "keep"), because[name],
        )
        for name, words in named.items()
    ]  # fmt: skip


def choose(p: GatedProblem) -> FusedPlan:
    """The cheapest candidate that fits the memory limit, with the losers and their prices."""
    sizes = {"N": p.matrix.rows, "E": p.matrix.edges, "K1": p.inner, "K2": p.width}
    return choose_among(
        candidates(p), layer=p.layer, kind="gated", sizes=sizes, machine=p.machine,
        is_training=p.is_training, memory_limit=p.memory_limit,
    )  # fmt: skip
