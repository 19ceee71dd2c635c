"""bench/batches/training: planned batches beside PyG's, and what fusing the gather would do."""

from __future__ import annotations

from plait.bench.batches import Options
from plait.bench.batches.training import TOLERANCE, gathering, training

SMALL = Options(is_small=True, budget_seconds=0.05, environment={})


def test_a_cell_compares_with_pyg_and_says_what_a_new_batch_costs() -> None:
    case, result, bars = next(training(SMALL))
    assert case["model"] == "sage"
    assert set(result["peers"]) == {"pyg", "plait", "plait-bare", "again", "graph"}
    assert result["error"] <= TOLERANCE
    assert result["lookup_seconds"] > 0
    assert [bar.name for bar in bars] == ["pyg / plait", "overhead of a new batch, us", "difference to PyG"]


def test_both_ways_of_gathering_give_the_same_sums() -> None:
    _, result, _ = next(gathering(SMALL))
    assert result["error"] < 1e-3
    assert result["fused_over_separate"] > 0
