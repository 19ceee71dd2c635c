"""bench/calibrate_attention: every pass of every candidate gets a factor, and prices follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.bench import calibrate_attention
from plait.bench.calibrate_attention import attention_factors
from plait.cost.machine import default_profile
from plait.graph import generate
from plait.ops.work import Matrix, Uniform
from plait.plan.attention import AttentionProblem, choose, correction


def test_every_candidate_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_attention, "_WIDTHS", ((8, 8),))
    monkeypatch.setattr(calibrate_attention, "_HEADS", (4,))
    monkeypatch.setattr(calibrate_attention, "_TOO_DEAR", float("inf"))
    found = attention_factors([generate.erdos(60, 200, 1)])
    assert {name.partition(" fwd ")[0].partition(" bwd ")[0] for name in found} == {
        "gat", "gat folded", "recompute", "leaky", "dot", "dot recompute",
    }  # fmt: skip
    assert all(factor > 0.0 for factor in found.values())
    assert "recompute bwd attendᵀ" in found
    assert "recompute fwd project each head" in found
    kinds = ("gat", "gat folded", "recompute", "leaky", "dot", "dot recompute")
    assert {f"{kind} bwd targets again" for kind in kinds} <= set(found)


def test_a_measured_factor_changes_the_price_and_the_choice() -> None:
    rows = 50_000
    matrix = Matrix(rows, rows, 2_000_000, True, Uniform(rows), Uniform(rows))
    problem = AttentionProblem("layer", "gat", matrix, 16, 64, 4, 1, default_profile())
    assert choose(problem).choice == "recompute"
    slow = {f"recompute {step}": 50.0 for step in ("fwd attend", "bwd attendᵀ")}
    machine = replace(default_profile(), measured={"attention": slow})
    assert choose(replace(problem, machine=machine)).choice != "recompute"


@pytest.mark.parametrize("measured", [{}, {"attention": 3}, {"attention": {"gat fwd attend": "fast"}}])
def test_a_profile_without_factors_corrects_nothing(measured: dict[str, object]) -> None:
    machine = replace(default_profile(), measured=measured)
    assert correction(machine, "gat", "fwd attend") == 1.0
