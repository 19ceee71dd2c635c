"""Replays against slow obvious caches, Belady against every possible choice, and bad arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import InputError
from plait.features import (
    POLICIES,
    Trace,
    degree,
    inclusion_probability,
    make_policy,
    pack,
    presample,
    simulate,
)
from plait.features.policies import LookAhead
from plait.graph import Graph
from plait.loader import Sampler
from tests.features import slow_caches

ONLINE = {
    "lru": slow_caches.Lru,
    "lfu": slow_caches.Lfu,
    "clock": slow_caches.Clock,
    "sieve": slow_caches.Sieve,
    "s3fifo": slow_caches.S3Fifo,
}


def skewed(rng: np.random.Generator, batches: int = 30, rows: int = 40, most: int = 14) -> list[list[int]]:
    """Batches of distinct rows, small numbers asked for more often; some batches are empty."""
    weight = 1.0 / np.arange(2, rows + 2)
    out = []
    for _ in range(batches):
        size = int(rng.integers(0, most))
        out.append(rng.choice(rows, size, replace=False, p=weight / weight.sum()).tolist())
    return out


@pytest.mark.parametrize("policy", ONLINE)
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 20, 39, 100])
def test_online_rules_agree_with_their_references(policy: str, capacity: int) -> None:
    for seed in range(8):
        trace = skewed(np.random.default_rng(seed))
        slow = ONLINE[policy](min(capacity, pack(trace).num_ids))
        hits = [slow.batch(ids) for ids in trace]
        got = simulate(trace, capacity, policy)
        assert got.hits == sum(hits), f"seed {seed}"
        assert got.remote_rows == got.requests - got.hits


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_belady_is_the_best_of_all_choices(capacity: int) -> None:
    for seed in range(12):
        trace = skewed(np.random.default_rng(seed), batches=7, rows=6, most=5)
        best = slow_caches.most_hits(trace, capacity)
        assert slow_caches.belady_hits(trace, capacity) == best
        assert simulate(trace, capacity, "belady").hits == best


@pytest.mark.parametrize("capacity", [1, 4, 11, 30])
def test_belady_agrees_with_counting_on_longer_traces(capacity: int) -> None:
    for seed in range(6):
        trace = skewed(np.random.default_rng(seed))
        assert simulate(trace, capacity, "belady").hits == slow_caches.belady_hits(trace, capacity)


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_look_ahead_keeps_what_its_window_shows(window: int) -> None:
    """Rows tied beyond the window are ranked differently here and there: hence the slack when it is short."""
    rows, capacity = 8, 3
    opening = [[r for r in range(rows) if r >= b] for b in range(rows)]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        trace = opening + [[int(r)] for r in rng.integers(0, rows, 12)]
        got = simulate(trace, capacity, "lookahead", window=window).hits
        assert abs(got - slow_caches.look_ahead_hits(trace, capacity, window)) <= (0 if window >= 8 else 2)


def test_a_longer_window_ends_at_belady() -> None:
    trace = skewed(np.random.default_rng(3), batches=80, rows=60)
    for capacity in (5, 15, 40):
        best = simulate(trace, capacity, "belady")
        assert simulate(trace, capacity, "lookahead", window=80).hits == best.hits
        assert simulate(trace, capacity, "lookahead").remote_rows <= 1.03 * best.remote_rows


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "none"])
@pytest.mark.parametrize("capacity", [1, 5, 13, 38, 60])
def test_no_rule_fetches_less_than_belady_and_none_fetches_all(policy: str, capacity: int) -> None:
    for seed in range(4):
        trace = skewed(np.random.default_rng(seed))
        least = simulate(trace, capacity, "belady").remote_rows
        got = simulate(trace, capacity, policy)
        assert got.remote_rows >= least
        assert got.requests == simulate(trace, 0, "none").remote_rows
        if policy != "massivegnn":
            assert got.remote_rows == got.requests - got.hits <= got.requests


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("gamma", "delta"), [(0.95, 4), (0.5, 3), (0.995, 5), (0.9, 1)])
def test_massivegnn_agrees_with_its_reference(gamma: float, delta: int, rounded: bool) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        trace = skewed(rng)
        degree = rng.integers(0, 9, pack(trace).num_ids).astype(float)
        slow = slow_caches.Massive(9, dict(enumerate(degree)), gamma, delta, rounded)
        hits = sum(slow.batch(ids) for ids in trace)
        got = simulate(trace, 9, "massivegnn", scores=degree, gamma=gamma, delta=delta, rounded=rounded)
        assert (got.hits, got.prefetched, got.evictions) == (hits, slow.fetched, slow.evicted)
        assert got.remote_rows == got.requests - hits + slow.fetched


@pytest.mark.parametrize(
    ("gamma", "delta", "evicts"), [(0.95, 32, True), (0.95, 256, False), (0.9995, 16, False)]
)
def test_the_published_rounding_decides_whether_anything_is_evicted(
    gamma: float, delta: int, evicts: bool
) -> None:
    trace = [[1]] * (delta + 1)
    options: dict[str, Any] = {"scores": [1.0, 0.0], "gamma": gamma, "delta": delta}
    assert (simulate(trace, 1, "massivegnn", rounded=True, **options).evictions > 0) == evicts
    assert simulate(trace, 1, "massivegnn", rounded=False, **options).evictions == 1


def test_static_rules_keep_the_hottest_and_fill_up_by_arrival() -> None:
    trace = [[4, 0, 1, 2], [0, 1, 2, 4], [3, 0, 1, 2, 4]]
    two = simulate(trace, 2, "degree", scores=[9, 5, 5, 5, 0])
    assert two.hits == 2 + 2  # row 0 and, of the tied, row 1, who came first
    roomy = simulate(trace, 3, "vip", scores=[9, 0, 0, 0, 0])
    assert roomy.hits == 3 + 3  # row 0, and rows 4 and 1 in slots nobody claimed
    assert two.evictions == roomy.evictions == 0


def test_static_rules_without_scores_count_the_first_tenth() -> None:
    trace = [[1, 2]] + [[3, 4, 1]] * 9 + [[2]]
    counted = simulate(trace, 2, "presample")
    assert counted.hits == simulate(trace, 2, "presample", scores=[0, 1, 1]).hits == 10


@pytest.mark.parametrize("capacity", [2, 10, 25, 38, 50])
def test_auto_beats_the_rule_of_massivegnn(capacity: int) -> None:
    for seed in range(5):
        trace = skewed(np.random.default_rng(seed), batches=60)
        rival = min(
            simulate(
                trace, capacity, "massivegnn", scores=np.arange(40, 0, -1), delta=d, gamma=0.95
            ).remote_rows
            for d in (0, 8, 16)
        )
        assert simulate(trace, capacity, "auto").remote_rows <= rival


def test_auto_without_a_future_names_a_rule_that_needs_none() -> None:
    trace = skewed(np.random.default_rng(1), batches=60)
    assert simulate(trace, 9, "auto").policy == "lookahead"
    assert simulate(trace, 9, "auto", window=0).policy not in ("lookahead", "belady", "auto")


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("belady", "auto")])
@pytest.mark.parametrize("capacity", [1, 6, 60])
def test_steps_tell_a_cache_where_every_row_is(policy: str, capacity: int) -> None:
    """A cache of (slot -> row) that only obeys the steps serves every hit with the right row."""
    trace = pack(skewed(np.random.default_rng(2), batches=60))
    rule = make_policy(policy, capacity, trace.num_ids, np.arange(trace.num_ids) % 5)
    cells = np.full(max(rule.capacity, 1), -1)
    first = rule.prefill()
    cells[: first.size] = first
    held = first.size
    for ids in trace:
        step = rule.step(ids)
        hit = step.slots >= 0
        assert np.array_equal(cells[step.slots[hit]], ids[hit])
        assert step.hits == hit.sum()
        assert not hit[step.positions].any()
        cells[step.places] = ids[step.positions]
        cells[step.extra_places] = step.extra
        held += step.positions.size + step.extra.size - step.evicted
        assert held == (cells >= 0).sum() <= capacity


def test_ids_of_any_size_give_the_same_outcome() -> None:
    trace = skewed(np.random.default_rng(4))
    far = [[10**12 + 7 * r for r in ids] for ids in trace]
    for policy in ("lru", "belady", "presample", "lookahead"):
        assert simulate(trace, 6, policy) == simulate(far, 6, policy)


def test_repeats_within_a_batch_count_once() -> None:
    assert simulate([[1, 1, 2], [2, 2]], 5, "lru").requests == 3


def test_capacities_beyond_the_rows_fetch_each_row_once() -> None:
    trace = skewed(np.random.default_rng(5))
    distinct = len({r for ids in trace for r in ids})
    for policy in (
        "random",
        "degree",
        "lru",
        "lfu",
        "clock",
        "sieve",
        "s3fifo",
        "lookahead",
        "belady",
        "auto",
    ):
        assert simulate(trace, 1000, policy).remote_rows == distinct


def test_empty_batches_ask_for_nothing() -> None:
    for policy in POLICIES:
        got = simulate([[], []], 3, policy)
        assert (got.requests, got.hits, got.hit_rate) == (0, 0, 0.0)


def test_a_packed_trace_is_taken_as_it_is() -> None:
    trace = skewed(np.random.default_rng(6))
    packed = pack(trace)
    assert isinstance(packed, Trace)
    assert simulate(packed, 5, "sieve") == simulate(trace, 5, "sieve")


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (([], 5, "lru"), {}, "trace"),
        (([[0.5]], 5, "lru"), {}, "batch 0"),
        (([[1], [-1]], 5, "lru"), {}, "batch 1"),
        (([[1]], 0, "lru"), {}, "capacity"),
        (([[1]], -3, "none"), {}, "capacity"),
        (([[1]], 2.5, "lru"), {}, "capacity"),
        (([[1]], 5, "mru"), {}, "mru"),
        (([[1]], 5, "lru"), {"window": 3}, "window"),
        (([[1]], 5, "lookahead"), {"window": -1}, "window"),
        (([[1]], 5, "massivegnn"), {"gamma": 1.5}, "gamma"),
        (([[1]], 5, "massivegnn"), {"delta": -1}, "delta"),
        (([[1]], 5, "s3fifo"), {"small": 0.0}, "small"),
        (([[1]], 5, "degree"), {"scores": [[1]]}, "scores"),
        (([[1]], 5, "degree"), {"scores": [np.nan]}, "scores"),
    ],
)
def test_bad_arguments_are_named(arguments: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        simulate(*arguments, **options)


def test_names_are_read_without_regard_to_hyphens() -> None:
    assert simulate([[1]], 5, "Look-Ahead").policy == "lookahead"
    assert simulate([[1]], 5, "S3-FIFO").policy == "s3fifo"


def real_graph(name: str) -> Graph:
    """A graph of the shared data: PLAIT_DATA, or ../shared/data beside the repository."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    path = Path(os.environ.get("PLAIT_DATA", beside)) / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; set PLAIT_DATA to the folder that holds it")
    with np.load(path, allow_pickle=False) as stored:
        return Graph.from_csr(stored["indptr"], stored["indices"])


@pytest.mark.parametrize("fanout", [[15, 10, 5], [10, 25]])
def test_on_a_real_graph_the_rules_rank_as_they_should(fanout: list[int]) -> None:
    """A quarter of the nodes is local; what a sample needs of the rest is remote."""
    graph = real_graph("coauthor_cs")
    local = np.arange(graph.num_nodes // 4)
    is_remote = np.arange(graph.num_nodes) >= local.size

    def remote_rows(seed: int, count: int) -> list[np.ndarray]:
        sampler, rng = Sampler(graph, fanout, seed=seed), np.random.default_rng(seed)
        drawn = [sampler.sample(rng.choice(local, 256, replace=False), batch=b).n_id for b in range(count)]
        return [nodes[is_remote[nodes]] for nodes in drawn]

    trace = pack(remote_rows(0, 60))
    counted = presample(remote_rows(1, 32), graph.num_nodes)
    told = inclusion_probability(graph, fanout, local, 256) * is_remote
    degrees = degree(graph) * is_remote
    rows = np.count_nonzero(trace.counts())
    for share in (0.05, 0.1, 0.25, 0.5, 0.75, 1.0):
        capacity = int(share * rows)
        best = simulate(trace, capacity, "belady").remote_rows
        assert simulate(trace, capacity, "lookahead").remote_rows <= 1.03 * best
        rates = [
            simulate(trace, capacity, p, scores=s).hit_rate
            for p, s in (("presample", counted), ("vip", told))
        ]
        assert abs(rates[0] - rates[1]) < 0.03
        auto = simulate(trace, capacity, "auto").remote_rows
        for delta in (16, 32):
            rival = simulate(trace, capacity, "massivegnn", scores=degrees, gamma=0.95, delta=delta)
            assert auto < rival.remote_rows


def test_rows_held_elsewhere_push_nobody_out() -> None:
    rule = LookAhead(2, 10, 4)
    for batch in ([1, 2], [3], [3], [1, 2]):
        rule.reveal(np.array(batch))
    rule.step(np.array([1, 2]))
    assert rule.step(np.array([3]), np.array([True])).places.size == 0
    assert rule.step(np.array([3]), np.array([False])).places.size == 0  # not needed again
    assert rule.step(np.array([1, 2])).hits == 2
    rule = LookAhead(2, 10, 4)
    for batch in ([1, 2], [3], [3], [1, 2]):
        rule.reveal(np.array(batch))
    rule.step(np.array([1, 2]))
    assert rule.step(np.array([3]), np.array([False])).places.size == 1
