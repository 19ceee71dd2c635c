"""The advisor: the arithmetic of an epoch, when a cache pays and when it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import advise, simulate
from plait.features.advise import Network, parse_network

RNG = np.random.default_rng(2)
HOT = [np.unique(RNG.zipf(1.3, 60) % 200) for _ in range(60)]
SLOW = Network(1e5, 1e-3)


def test_a_point_is_the_simulation_priced() -> None:
    advice = advise(HOT, 100, SLOW, epochs=2, compute_seconds=0.001, sample_seconds=0.002, shares=[0.3])
    (point,) = (p for p in advice.points if p.policy == "lru")
    outcome = simulate(HOT, point.capacity, "lru")
    assert point.remote_rows == outcome.remote_rows / 2
    assert point.remote_bytes == outcome.remote_rows * 50
    step = 0.002 + 1e-3 + outcome.remote_rows / 60 * 100 / 1e5
    assert point.epoch_seconds == pytest.approx(30 * step)
    assert point.stall_seconds == pytest.approx(30 * (step - 0.001))


def test_none_is_beaten_and_belady_is_never() -> None:
    advice = advise(HOT, 100, SLOW)
    for share in {p.share for p in advice.points}:
        here = {p.policy: p.remote_rows for p in advice.points if p.share == share}
        assert min(here.values()) == here["belady"] <= here["lookahead"]
        assert here["lookahead"] <= advice.none.remote_rows


def test_a_slow_network_wants_a_cache_that_can_be_had() -> None:
    advice = advise(HOT, 1000, SLOW, compute_seconds=0)
    assert advice.recommended is not None
    assert advice.recommended.policy != "belady"
    assert advice.recommended.epoch_seconds < advice.none.epoch_seconds
    assert f"capacity={advice.recommended.capacity}" in advice.line


def test_the_smallest_cache_that_is_as_good_is_recommended() -> None:
    batches = [np.arange(20)] * 30 + [np.arange(20, 80)]  # 20 hot rows, the others once
    advice = advise(batches, 1000, SLOW, compute_seconds=0, shares=[0.25, 0.5, 1.0])
    assert advice.recommended is not None
    assert advice.recommended.share == 0.25


def test_a_fetch_that_hides_wants_none() -> None:
    advice = advise(HOT, 100, "100gbit", compute_seconds=1)
    assert advice.recommended is None
    assert "hidden behind the computation" in advice.line


def test_rows_never_used_again_want_none() -> None:
    advice = advise([np.arange(10 * b, 10 * b + 10) for b in range(9)], 1000, SLOW, compute_seconds=0)
    assert advice.recommended is None


def test_nothing_remote_wants_none() -> None:
    advice = advise([np.empty(0, np.int64)] * 3, 10)
    assert advice.recommended is None
    assert advice.points == ()


def test_scores_are_used() -> None:
    cold = -np.bincount(np.concatenate(HOT), minlength=200) + 1000
    with_scores = advise(HOT, 8, policies=["degree"], shares=[0.1], scores={"degree": cold})
    without = advise(HOT, 8, policies=["degree"], shares=[0.1])
    assert with_scores.points[0].hit_rate < without.points[0].hit_rate


@pytest.mark.parametrize(
    ("text", "rate", "wait"),
    [
        ("1gbit", 1.25e8, 1e-4),
        ("100 Mbit/s", 1.25e7, 1e-4),
        ("10gbit,50us", 1.25e9, 5e-5),
        ("8kbit,2ms", 1e3, 2e-3),
    ],
)
def test_networks_are_read_as_people_write_them(text: str, rate: float, wait: float) -> None:
    network = parse_network(text)
    assert network.bytes_per_second == pytest.approx(rate)
    assert network.latency_seconds == pytest.approx(wait)


BAD: list[dict[str, Any]] = [
    {"network": "fast"},
    {"network": "0gbit"},
    {"row_bytes": 0},
    {"epochs": 0},
    {"compute_seconds": -1},
    {"shares": []},
    {"shares": [1.5]},
    {"policies": ["fifo"]},
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_bad_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        advise(**{"trace": HOT, "row_bytes": 8, **given})
