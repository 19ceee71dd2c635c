"""bench/batches/caching: policies, look-up, throttled epochs and the advisor, in small."""

from __future__ import annotations

import numpy as np
import pytest

from plait.bench.batches import Options
from plait.bench.batches.caching import _binary_search, advisor, lookup, simulation, throttled
from plait.graph.partition import has_metis

SMALL = Options(is_small=True, budget_seconds=0.05, environment={})


@pytest.mark.skipif(not has_metis(), reason="needs pymetis")
def test_every_policy_is_replayed_and_none_beats_belady() -> None:
    case, result, bars = next(simulation(SMALL))
    rows = {name: line["remote_rows"] for name, line in result["policies"].items()}
    assert {"massivegnn", "massivegnn, mended", "auto", "lookahead", "vip", "sieve"} < set(rows)
    assert all(rows["belady"] <= fetched for fetched in rows.values())
    assert case["share"] == 0.05
    assert len(bars) == 3


def test_the_look_up_is_checked_against_binary_search() -> None:
    for _, result, _ in lookup(SMALL):
        assert result["is_equal"]


def test_binary_search_finds_what_is_there() -> None:
    out = np.empty(4, np.int32)
    _binary_search(np.array([2, 5, 9]), np.array([5, 1, 9, 10]), out)
    assert out.tolist() == [1, -1, 2, -1]


def test_throttled_epochs_are_taken_in_turn_with_and_without_a_cache() -> None:
    case, result, _ = next(throttled(SMALL))
    assert case["network"] == "1gbit"
    assert len(result["epochs"]["none"]) == len(result["epochs"]["auto"]) == 4
    assert result["epochs"]["auto"][-1]["remote_rows"] <= result["epochs"]["none"][-1]["remote_rows"]


@pytest.mark.processes
def test_the_advisor_is_run_as_a_user_would() -> None:
    _, result, _ = next(advisor(SMALL))
    assert "cache" in result["answer"] or "policy" in result["answer"]
