"""What a cache counts is what the simulation counts, with a rate of its own for the halo."""

from __future__ import annotations

import numpy as np
import pytest

from plait.features import Cache, simulate

from .traces import NUM_ROWS, ONLINE, table, trace


@pytest.mark.parametrize("policy", ONLINE)
def test_the_counters_are_those_of_the_simulation(policy: str) -> None:
    rows, scores, batches = table(), np.arange(NUM_ROWS), trace()
    batches[0] = np.append(
        np.setdiff1d(batches[0], NUM_ROWS - 1), NUM_ROWS - 1
    )  # the simulation counts to there
    params = {"window": 0} if policy == "lookahead" else {}
    cache = Cache(rows, 9, policy, scores=scores, **params)
    for ids in batches:
        cache.take(ids)
    expected = simulate(batches, 9, policy, scores=scores, **params)
    counters = cache.counters
    assert (counters.requests, counters.hits, counters.evictions) == (
        expected.requests,
        expected.hits,
        expected.evictions,
    )
    assert counters.remote_rows == expected.remote_rows
    assert counters.remote_bytes == expected.remote_rows * 12
    assert counters.hit_rate == expected.hit_rate


def test_local_rows_pass_by_and_the_halo_has_its_own_rate() -> None:
    rows = table()
    local = np.arange(NUM_ROWS) < 25
    halo = (np.arange(NUM_ROWS) >= 25) & (np.arange(NUM_ROWS) < 30)
    cache = Cache(rows, 8, "lru", local=local, halo=halo)
    batches = trace()
    for ids in batches:
        assert np.array_equal(cache.take(ids), rows[ids])
    expected = simulate([ids[ids >= 25] for ids in batches], 8, "lru")
    counters = cache.counters
    assert (counters.requests, counters.hits) == (expected.requests, expected.hits)
    assert counters.halo_requests == sum(int(halo[ids].sum()) for ids in batches)
    assert 0 < counters.halo_hits <= counters.hits
