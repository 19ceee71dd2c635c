"""plan/attention: how the backward pass goes is a candidate, priced, and chosen where memory is short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.cost.machine import default_profile
from plait.errors import PlanError
from plait.ops.work import Matrix, Uniform
from plait.plan.attention import Attention, base_of, ways
from plait.plan.plan import LayerPlan
from plait.plan.search import Problem
from plait.plan.ways import choose

ROWS, EDGES = 50_000, 2_000_000
WRT = ("X", "W", "W1", "b", "b1", "V", "U", "R", "M", "q", "v", "S", "s", "a", "c")


def planned(
    kind: str = "gat",
    wrt: tuple[str, ...] | None = WRT,
    limit: int | None = None,
    edges: int = EDGES,
    **changes: Any,
) -> LayerPlan:
    matrix = Matrix(ROWS, ROWS, edges, True, Uniform(ROWS), Uniform(ROWS))
    sizes = {"N": ROWS, "M": ROWS, "E": edges}
    problem = Problem((), sizes, lambda expr: matrix, default_profile(), wrt, memory_limit=limit)
    return choose(problem, ways(replace(Attention(kind, 64, 16, 4), **changes), wrt))


def names(kind: str = "gat", wrt: tuple[str, ...] | None = WRT, **changes: Any) -> set[str]:
    return {way.name for way in ways(replace(Attention(kind, 64, 16, 4), **changes), wrt)}


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_every_training_candidate_has_a_lean_twin_that_holds_no_more(kind: str) -> None:
    plan = planned(kind)
    held = {r.candidate: r.peak_bytes or 0 for r in plan.rejected} | {plan.text: plan.peak_bytes}
    lean = {text for text in held if text.endswith(", lean")}
    assert len(lean) == sum(not text.endswith(("lean", "first")) for text in held)
    for text in (text for text in lean if "recompute" not in text):
        assert held[text] <= held[text.removesuffix(", lean")]


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_lean_costs_more_and_is_chosen_under_a_memory_limit(kind: str) -> None:
    free = planned(kind)
    assert base_of(free.choice) == free.choice
    bound = planned(kind, limit=free.peak_bytes - 1)
    assert bound.choice.endswith(" lean")
    assert bound.seconds > free.seconds
    assert bound.peak_bytes < free.peak_bytes
    assert "instead of keeping" in bound.because
    with pytest.raises(PlanError, match="memory_limit"):
        planned(kind, limit=1000)


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_few_edges_per_target_begin_with_the_targets(kind: str) -> None:
    assert planned(kind, edges=2 * ROWS).choice.endswith(" targets first")
    assert not planned(kind, edges=40 * ROWS).choice.endswith(" targets first")


@pytest.mark.parametrize("wrt", [WRT, None])
def test_raw_rows_win_for_narrow_inputs_of_transformer_and_lose_for_wide_ones(wrt: Any) -> None:
    narrow = planned("dot", wrt, inner=32, width=64, has_skip=True)
    assert base_of(narrow.choice) == "dot recompute"
    assert base_of(planned("dot", wrt, inner=64, width=16, has_skip=True).choice) == "dot"
    assert base_of(planned("dot", wrt, inner=256, width=64, has_skip=True).choice) == "dot"
    assert max(map(len, narrow.lines())) <= 100


def test_raw_rows_without_an_input_gradient_need_no_pass_over_sources() -> None:
    found = {way.name: way for way in ways(Attention("dot", 64, 16, 4), WRT[1:])}
    assert set(found) == {"dot", "dot lean", "dot targets first", "dot recompute lean"}
    plan = planned("dot", WRT[1:], limit=None, inner=16, width=64)
    assert plan.backward is not None
    if plan.choice == "dot recompute lean":
        assert not any(step.op == "attend_sources" for step in plan.backward.steps)


def test_inference_and_gradients_of_edges_have_no_lean_candidates() -> None:
    assert all(base_of(name) == name for name in names(wrt=None))
    assert not any(name.endswith("lean") for name in names(wrt=(*WRT, "E"), has_edge=True))


def test_weights_of_their_own_for_either_end_leave_one_way_to_score() -> None:
    assert {base_of(name) for name in names(is_single=False)} == {"gat folded"}


def test_on_a_gpu_the_backward_pass_begins_with_the_targets_and_raw_rows_are_not_gathered() -> None:
    assert names(device="cuda") == {"gat targets first, lean", "gat folded targets first, lean"}


def test_wide_weights_are_not_copied_for_the_scores_of_few_rows() -> None:
    matrix = Matrix(60, 60, 260, True, Uniform(60), Uniform(60))
    sizes = {"N": 60, "M": 60, "E": 260}
    problem = Problem((), sizes, lambda expr: matrix, default_profile(), WRT)
    layer = replace(Attention("gat", 64, 16, 4), is_single=True)
    wide = replace(Attention("gat", 4096, 1024, 4), is_single=True)
    assert choose(problem, ways(wide, WRT)).seconds < 1.0
    assert base_of(choose(problem, ways(wide, WRT)).choice) == "gat"
    assert base_of(choose(problem, ways(layer, WRT)).choice) == "gat folded"
