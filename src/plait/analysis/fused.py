"""Work of layers with passes of their own (attention, gates), from their sizes.

These layers have no Program yet, so their counts are formulas of one pass over edges each, and their dense
products as the planner sized them: not checked against a run as the Programs are, and marked so. When they
become Programs this file goes.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from plait.analysis.work import KERNELS, Phase
from plait.ops.symbolic import Formula, ceil_log2, symbol
from plait.plan.fused import FusedPlan, FusedStep

__all__ = ["gathers_raw_rows", "of_fused"]

n, m, d, K1, H, F = (symbol(name) for name in ("n", "m", "d", "K1", "heads", "F"))
_ATTENTION = ("gat", "leaky", "dot")
_SOFTMAX = 4  # per edge and head: largest score, minus it, exponential, sum
_AGAIN = 3  # the same from what was kept: minus the largest, exponential, over the sum
_Count = Callable[[Formula], Formula]

# (kind, how a step's title begins) -> operations by columns gathered for all heads together
_PASSES: dict[tuple[str, str], _Count] = {
    # scores add and bend (3), the softmax, the weighted sum, one division of a row
    ("gat", "attend,"): lambda b: m * ((3 + _SOFTMAX) * H + 2 * b) + n * b,
    # weights again, gradient of a weight (a dot), through softmax (2) and slope (2), gradient of the rows
    ("gat", "attendᵀ"): lambda b: m * ((3 + _AGAIN + 4) * H + 4 * b),
    ("gat", "sum of score gradients"): lambda b: m * H,
    ("gat", "targets again"): lambda b: m * ((3 + _AGAIN + 4) * H + 2 * b),
    # a score adds, bends and is multiplied by a: five operations a column
    ("leaky", "attend"): lambda b: m * (_SOFTMAX * H + 7 * b) + n * b,
    ("leaky", "attendᵀ"): lambda b: m * ((_AGAIN + 3) * H + 12 * b),
    ("leaky", "gradient of the targets"): lambda b: m * 8 * b,
    ("leaky", "targets again"): lambda b: m * ((_AGAIN + 3) * H + 14 * b),
    ("dot", "attend"): lambda b: m * ((1 + _SOFTMAX) * H + 4 * b) + n * b,
    ("dot", "attendᵀ"): lambda b: m * ((_AGAIN + 3) * H + 8 * b),
    ("dot", "gradient of the targets"): lambda b: m * 2 * b,
    ("dot", "targets again"): lambda b: m * ((_AGAIN + 3) * H + 6 * b),
    # add, sigmoid, multiply, add
    ("gated", "gate and sum"): lambda b: m * 4 * b,
    ("gated", "gradient of K, gathers"): lambda b: m * 5 * b,
    ("gated", "gradients of Q and V"): lambda b: m * 8 * b,
}
_PRODUCTS = (
    "project",
    "scores of",
    "input gradient",
    "weight gradient",
    "gradient through",
    "gradients by head",
)


def of_fused(plan: FusedPlan, degree: int, gathers: dict[str, tuple[int, ...]]) -> dict[str, Phase]:
    """The "forward" and "backward" of such a layer; `gathers` are the columns each pass would exchange."""
    values = _values(plan, degree)
    names = {"fwd": "forward", "bwd": "backward"}
    phases = {}
    for phase, name in names.items():
        steps = [step for step in plan.steps if step.phase == phase]
        if steps:
            phases[name] = _phase(plan, steps, values, _depth(plan, phase), gathers[name])
    return phases


def gathers_raw_rows(plan: FusedPlan) -> bool:
    """Whether attention sums rows of the input, before any projection."""
    return plan.kind in _ATTENTION and "recompute" in plan.choice


def _values(plan: FusedPlan, degree: int) -> dict[str, int]:
    sizes = dict(plan.sizes)
    heads = sizes.get("heads", 1)
    width = sizes.get("F", sizes.get("K2", 1))
    return {
        "n": sizes["N"],
        "m": sizes.get("E", 0),
        "d": degree,
        "K1": sizes.get("K1", 1),
        "heads": heads,
        "F": width,
    }


def _phase(
    plan: FusedPlan, steps: list[FusedStep], values: dict[str, int], depth: Formula, gathers: tuple[int, ...]
) -> Phase:
    kernels = dict.fromkeys(KERNELS, 0)
    total = Formula({})
    gather_seconds = 0.0
    for step in steps:
        counted = _of_pass(plan, step)
        if counted is None:
            total += _of_rows(step, values["n"])
            kernels["vertex update"] += round(step.price.work.flops)
        else:
            # of what is done on edges, the sums of rows aggregate; scores and weights update the edges
            flops = int(counted(**values))
            summed = min(flops, values["m"] * values["heads"] * values["F"])
            kernels["aggregate"] += summed
            kernels["edge update"] += flops - summed
            total += counted
        if step.title.startswith(_PRODUCTS):
            continue
        gather_seconds += step.price.seconds
    return Phase(
        flops=sum(kernels.values()),
        copies=0,
        depth=int(depth(**values)),
        bytes_least=sum(step.price.work.bytes_least for step in steps),
        bytes_gathered=sum(step.price.work.bytes_gathered for step in steps),
        seconds=sum(step.price.seconds for step in steps),
        kernels=kernels,
        gathers=gathers,
        gather_seconds=gather_seconds,
        formulas={"flops": total, "depth": depth},
        values=values,
        is_exact=False,
    )


def _of_pass(plan: FusedPlan, step: FusedStep) -> Formula | None:
    """The operations of a pass over edges; None for a product of rows and for passes without a formula."""
    # raw rows are summed for every head at their own width
    columns = H * K1 if gathers_raw_rows(plan) else H * F
    found = [
        (begin, count)
        for (kind, begin), count in _PASSES.items()
        if kind == plan.kind and step.title.startswith(begin)
    ]
    if not found:
        return None
    return max(found, key=lambda pair: len(pair[0]))[1](columns)


def _of_rows(step: FusedStep, rows: int) -> Formula:
    """A product's operations: so many for each node where they divide, else a number."""
    flops = round(step.price.work.flops)
    return n * Fraction(flops, rows) if rows and flops % rows == 0 else Formula({}) + flops


def _depth(plan: FusedPlan, phase: str) -> Formula:
    """Project, score, softmax (a tree for the largest), weighted sum (a tree); backwards much the same."""
    product: Formula = 1 + ceil_log2(K1)
    score: Formula = 1 + ceil_log2(F)
    tree: Formula = ceil_log2(d)
    if plan.kind not in _ATTENTION:
        return (product + 3 + tree) * (1 if phase == "fwd" else 2)
    if phase == "fwd":
        return product + score + 3 + tree + 2 + 1 + tree + 1
    rows: Formula = ceil_log2(n)
    return score + _AGAIN + tree + 4 + 1 + tree + 1 + rows
