"""analysis/fused.py: the formulas of attention against a layer counted edge by edge."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.analysis.fused import gathers_raw_rows, of_fused
from plait.analysis.statistics import Statistics
from plait.cost.machine import default_profile
from plait.ops.work import Matrix
from plait.plan import attention, gated
from plait.plan.fused import FusedPlan

STATISTICS = Statistics(40, 200, "regular")
MACHINE = default_profile()


def matrix() -> Matrix:
    return Matrix(40, 40, 240, True, STATISTICS.locality(), STATISTICS.locality(True), 4, 40)


def plan(kind: str, inner: int, width: int, heads: int, is_training: bool = False) -> FusedPlan:
    parts = {"gat": 1, "leaky": 2, "dot": 3}[kind]
    return attention.choose(
        attention.AttentionProblem("a", kind, matrix(), inner, width, heads, parts, MACHINE, is_training)
    )


def counted(found: FusedPlan, inner: int, width: int, heads: int) -> int:
    """A forward pass, edge by edge and head by head; lanes are heads rounded up to a power of two."""
    lanes, nodes = 1 << (heads - 1).bit_length(), 40
    columns = inner if gathers_raw_rows(found) else width
    flops = 2 * nodes * inner * heads * width  # the projection, wherever it stands
    if found.kind == "gat":
        scored = inner if gathers_raw_rows(found) or "folded" in found.choice else heads * width
        flops += 2 * nodes * scored * 2 * lanes
    flops *= {"gat": 1, "leaky": 2, "dot": 3}[found.kind]
    for _ in range(240):
        for _ in range(heads):
            flops += {"gat": 1 + 2, "leaky": (1 + 2 + 2) * width, "dot": 2 * width + 1}[found.kind]  # score
            flops += 1 + 1 + 1 + 1  # largest, minus it, exponential, sum
            flops += 2 * columns  # weighted row added
    return flops + nodes * heads * columns  # over the sum


@pytest.mark.parametrize(("inner", "width", "heads"), [(64, 4, 1), (16, 8, 2), (32, 8, 3), (128, 2, 4)])
@pytest.mark.parametrize("kind", ["gat", "leaky"])
def test_a_forward_pass_is_that_of_a_loop(kind: str, inner: int, width: int, heads: int) -> None:
    found = plan(kind, inner, width, heads)
    ahead = of_fused(found, 6, {"forward": (), "backward": ()})["forward"]
    assert ahead.flops == counted(found, inner, width, heads)


def test_dot_products_of_projected_rows() -> None:
    found = plan("dot", 64, 2, 2)
    if not gathers_raw_rows(found):
        ahead = of_fused(found, 6, {"forward": (), "backward": ()})["forward"]
        assert ahead.flops == counted(found, 64, 2, 2)


def test_gates_that_are_recomputed_gather_projected_rows_all_the_same() -> None:
    found = gated.choose(gated.GatedProblem("g", matrix(), 32, 8, True, MACHINE))
    again = replace(found, choice="recompute")
    assert not gathers_raw_rows(again)


def test_training_costs_more_and_its_formulas_evaluate() -> None:
    phases = of_fused(plan("gat", 32, 8, 2, True), 6, {"forward": (16,), "backward": (16,)})
    assert phases["backward"].flops > phases["forward"].flops
    for phase in phases.values():
        assert phase.formulas["flops"](**phase.values) == phase.flops
        assert phase.gathers == (16,)
        assert not phase.is_exact
