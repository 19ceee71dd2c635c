"""A cache changes its rule when the stall is not what was expected and another rule would save some of it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import Cache, advise, simulate
from plait.features.tune import Choice, Seen, Setting, can_gain, candidates, disagrees, retune, warm_rows

NONE, SIEVE, AHEAD = Setting("none"), Setting("sieve"), Setting("lookahead", 32)


def seen(**given: Any) -> Seen:
    """100 batches of 10 ms computation; 10 s of fetching 1000 rows, 1 s of assembling."""
    usual = {
        "batches": 100,
        "seconds": 11.0,
        "stalled_seconds": 10.0,
        "prepare_seconds": 11.0,
        "fetch_seconds": 10.0,
        "remote_rows": 1000,
    }
    return Seen(**{**usual, **given})


def test_a_stall_is_what_sticks_out_behind_the_computation() -> None:
    assert seen().stall_with(1000) == pytest.approx(10.0)
    assert seen().stall_with(500) == pytest.approx(5.0)
    assert seen().stall_with(0) == 0
    assert seen(is_overlapped=False).stall_with(500) == pytest.approx(6.0)
    assert seen(remote_rows=0, fetch_seconds=0).stall_with(7) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("predicted", "answer"), [(None, True), (10.0, False), (9.0, False), (2.0, True), (20.0, True)]
)
def test_a_prediction_that_is_near_agrees(predicted: float | None, answer: bool) -> None:
    assert disagrees(seen(), predicted) is answer


def test_a_short_stall_of_a_long_epoch_agrees_with_none() -> None:
    assert not disagrees(seen(seconds=100.0, stalled_seconds=3.0), 0.0)


def test_the_rule_that_stalls_least_is_chosen_with_its_reason() -> None:
    choice = retune(SIEVE, seen(), {NONE: 1000, SIEVE: 900, AHEAD: 300})
    assert choice.setting == AHEAD
    assert choice.stall_seconds == pytest.approx(3.0)
    assert "lookahead (window 32) would stall 3 s" in choice.because


def test_of_equals_the_simpler_wins_and_no_cache_where_fetching_hides() -> None:
    hidden = seen(seconds=100.0, stalled_seconds=0.0)
    assert retune(NONE, hidden, {NONE: 1000, AHEAD: 10}).setting == NONE


def test_a_change_that_saves_little_is_not_made() -> None:
    assert retune(SIEVE, seen(), {NONE: 1000, SIEVE: 510, AHEAD: 500}).setting == SIEVE


def test_a_wait_for_something_else_is_said_and_expected_again() -> None:
    slow_sampling = seen(prepare_seconds=0.5, fetch_seconds=0.1)
    choice = retune(AHEAD, slow_sampling, {NONE: 1000, AHEAD: 100})
    assert "not for feature rows" in choice.because
    assert not disagrees(slow_sampling, choice.stall_seconds)


def test_where_fetching_hides_there_is_nothing_to_gain() -> None:
    assert can_gain(seen())
    assert not can_gain(seen(seconds=100.0, stalled_seconds=0.0))
    assert not can_gain(seen(prepare_seconds=0.5, fetch_seconds=0.1))


def test_windows_are_no_longer_than_the_epoch_can_show() -> None:
    assert [s.window for s in candidates(10) if s.policy == "lookahead"] == [32]
    assert [s.window for s in candidates(1000) if s.policy == "lookahead"] == [32, 128, 512]


def test_warm_rows_are_those_of_a_second_round() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.permutation(40)[:12] for _ in range(10)]
    rows = warm_rows(batches, 40, [NONE, SIEVE, AHEAD])
    assert rows == {NONE: 120, SIEVE: 0, AHEAD: 0}
    small = warm_rows(batches, 9, [SIEVE])[SIEVE]
    both = simulate([*batches, *batches], 9, "sieve").remote_rows
    assert small == both - simulate(batches, 9, "sieve").remote_rows


def served(cache: Cache, table: Any, batches: list[Any], measured: Seen) -> None:
    for ids in batches:
        assert np.array_equal(cache.take(ids), table[ids])
    cache.end_epoch(measured)


def test_auto_follows_its_choice_and_keeps_serving_the_right_rows() -> None:
    rng = np.random.default_rng(3)
    table = rng.random((200, 4))
    batches = [rng.integers(0, 200, 30) for _ in range(20)]
    advice = advise(batches, 32, "100gbit")
    cache = Cache(table, 60, "auto", advice=advice)
    assert (cache.policy, cache.choice.setting) == ("none", NONE)
    hidden = seen(batches=20, seconds=100.0, stalled_seconds=0.0, fetch_seconds=0.1, prepare_seconds=0.2)
    served(cache, table, batches, hidden)
    assert cache.policy == "none"
    before = cache.counters.hits
    stalling = seen(batches=20, remote_rows=600)
    served(cache, table, batches, stalling)
    assert cache.counters.hits == before
    assert cache.policy != "none"
    served(cache, table, batches, stalling)
    assert cache.counters.hits > before
    assert cache.capacity == 60


@pytest.mark.parametrize("to", ["presample", "sieve", "lookahead"])
def test_rows_that_are_held_survive_a_change_of_rule(to: str) -> None:
    table = np.arange(100.0)[:, None]
    cache = Cache(table, 30, "auto")
    cache.take(np.arange(10, 40))
    cache._switch(Setting(to, 4 if to == "lookahead" else 0), np.ones(100))
    fetched = cache.counters.remote_rows
    assert np.array_equal(cache.take(np.arange(39, 9, -1)), table[39:9:-1])
    assert cache.counters.remote_rows == fetched


def test_other_rules_are_followed_whatever_happens() -> None:
    cache = Cache(np.zeros((9, 1)), 3, "lru")
    cache.take(np.arange(9))
    cache.end_epoch(seen())
    assert (cache.policy, cache.choice) == ("lru", None)


def test_auto_starts_from_the_advice_and_its_prediction() -> None:
    trace = [np.arange(9), np.arange(5, 14)] * 4
    advice = advise(trace, 64, "1mbit", shares=[1.0], policies=["sieve"], compute_seconds=0)
    cache = Cache(np.zeros((14, 2)), 14, "auto", advice=advice)
    assert cache.policy == "sieve"
    assert cache.choice == Choice(SIEVE, advice.recommended.stall_seconds, advice.reason)
    with pytest.raises(InputError, match="policy='auto'"):
        Cache(np.zeros((14, 2)), 14, "lru", advice=advice)


def test_a_loop_that_stalls_retunes_through_the_loader() -> None:
    from plait.loader import NeighborLoader
    from tests.loader.batches import are_same, small_data

    data = small_data()

    def slow(ids: Any) -> Any:
        time.sleep(2e-5 * ids.size)
        return data.x.numpy()[ids]

    cache = Cache(slow, 60, "auto", num_rows=60)
    loader = NeighborLoader(data, [3], batch_size=5, seed=1, features=cache, prefetch=2)
    plain = NeighborLoader(data, [3], batch_size=5, seed=1)
    for _ in range(3):
        assert are_same(list(loader), list(plain))
    assert cache.choice.because != "nothing measured yet"
    assert cache.choice.stall_seconds is not None
    assert loader.stalled_seconds > 0
