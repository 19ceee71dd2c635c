"""bench/calibrate_attention: every kind of pass gets a factor, and prices follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.bench import calibrate_attention
from plait.bench.calibrate_attention import attention_factors
from plait.cost.machine import MachineProfile, default_profile
from plait.graph import generate
from plait.ops.work import Matrix, Uniform
from plait.plan.attention import Attention, base_of, ways
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem
from plait.plan.ways import choose


def test_every_kind_of_pass_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_attention, "_WIDTHS", ((8, 8),))
    monkeypatch.setattr(calibrate_attention, "_HEADS", (4,))
    monkeypatch.setattr(calibrate_attention, "_TOO_DEAR", float("inf"))
    found = attention_factors([generate.erdos(60, 200, 1)])
    assert all(factor > 0.0 for factor in found.values())
    kinds = ("gat", "leaky", "dot")
    assert {f"attend {kind}" for kind in kinds} <= set(found)
    assert {f"attend_sources {kind} kept" for kind in kinds} <= set(found)
    assert {f"attend_again {kind}" for kind in kinds} <= set(found)


def planned(machine: MachineProfile) -> LayerPlan:
    rows = 50_000
    matrix = Matrix(rows, rows, 2_000_000, True, Uniform(rows), Uniform(rows))
    sizes, wrt = {"N": rows, "M": rows, "E": 2_000_000}, ("X", "W", "V")
    problem = Problem((), sizes, lambda expr: matrix, machine, wrt)
    return choose(problem, ways(Attention("gat", 64, 16, 4), wrt))


def test_a_measured_factor_changes_the_price_and_the_choice() -> None:
    plain = replace(default_profile(), measured={})
    before = planned(plain)
    assert before.choice == base_of(before.choice)
    slow = {"attend_sources gat": 50.0}
    after = planned(replace(plain, measured={"attention": slow}))
    assert after.choice.endswith(" targets first")
    assert after.seconds > before.seconds


@pytest.mark.parametrize("measured", [{}, {"attention": 3}, {"attention": {"attend gat": "fast"}}])
def test_a_profile_without_factors_corrects_nothing(measured: dict[str, object]) -> None:
    assert replace(default_profile(), measured=measured).pass_factor("attend gat") == 1.0
