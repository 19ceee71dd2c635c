"""plan/attention: lean backward passes are candidates, priced, and chosen where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.machine import default_profile
from plait.errors import PlanError
from plait.ops.work import Matrix, Uniform
from plait.plan.attention import AttentionProblem, candidates, choose, without_lean

ROWS, EDGES = 50_000, 2_000_000


def problem(kind: str = "gat", **changes: object) -> AttentionProblem:
    matrix = Matrix(ROWS, ROWS, EDGES, True, Uniform(ROWS), Uniform(ROWS))
    made = AttentionProblem("layer", kind, matrix, 64, 16, 4, 1, default_profile())
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_every_training_candidate_has_a_lean_twin_that_holds_no_edges(kind: str) -> None:
    plan = choose(problem(kind))
    bytes_of = {r.candidate: r.peak_bytes for r in plan.rejected} | {plan.text: plan.peak_bytes}
    lean = {text for text in bytes_of if text.endswith(", lean")}
    assert len(lean) * 2 == len(bytes_of)
    for text in lean:
        kept = bytes_of[text.removesuffix(", lean")]
        assert kept is not None
        assert kept - (bytes_of[text] or 0) == EDGES * 4 * 4


@pytest.mark.parametrize("kind", ["gat", "leaky", "dot"])
def test_lean_costs_more_and_is_chosen_under_a_memory_limit(kind: str) -> None:
    free = choose(problem(kind))
    assert without_lean(free.choice) == free.choice
    bound = choose(problem(kind, memory_limit=free.peak_bytes - 1))
    assert without_lean(bound.choice) != bound.choice
    assert bound.seconds > free.seconds
    assert bound.peak_bytes < free.peak_bytes
    assert "gathers values again" in bound.because
    with pytest.raises(PlanError, match="memory_limit"):
        choose(problem(kind, memory_limit=1000))


@pytest.mark.parametrize("is_training", [True, False])
def test_raw_rows_win_for_narrow_inputs_of_transformer_and_lose_for_wide_ones(is_training: bool) -> None:
    given = {"is_training": is_training, "parts": 4}
    narrow = choose(problem("dot", inner=32, width=64, **given))
    assert without_lean(narrow.choice) == "dot recompute"
    assert choose(problem("dot", inner=64, width=16, **given)).choice == "dot"
    assert choose(problem("dot", inner=256, width=64, **given)).choice == "dot"
    texts = {loser.candidate for loser in narrow.rejected} | {narrow.text}
    assert len(texts) == (4 if is_training else 2)
    assert max(map(len, narrow.lines())) <= 100


def test_raw_rows_without_an_input_gradient_need_no_pass_over_sources() -> None:
    found = candidates(problem("dot", wants_input_grad=False))
    assert set(found) == {"dot", "dot lean", "dot recompute lean"}
    assert not any("attendᵀ" in step.title for step in found["dot recompute lean"])


def test_inference_and_gradients_of_edges_have_no_lean_candidates() -> None:
    for changes in ({"is_training": False}, {"can_be_lean": False}):
        assert all(without_lean(name) == name for name in candidates(problem(**changes)))
