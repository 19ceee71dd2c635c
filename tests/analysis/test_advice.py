"""analysis/advice.py: the break-even is where two strategies really take equally long."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from plait.analysis.advice import advise, bandwidth_at_par, tied
from plait.analysis.network import Network, network_of
from plait.analysis.statistics import Statistics
from plait.analysis.strategies import Cluster, Strategy, price
from tests.analysis.test_growth import random_graph
from tests.analysis.test_strategies import cluster, workload


def test_at_par_both_take_equally_long() -> None:
    graph = random_graph(400, 4000)
    work, machines = workload("gcn", Statistics.of(graph)), cluster(graph, np.arange(400) % 4)
    found = price(work, machines)
    pairs = [(a, b) for a in found for b in found if a is not b]
    met = 0
    for one, other in pairs:
        value = bandwidth_at_par(one, other, Network("n", 1.0, 1e-6))
        if value is not None:
            network = Network("n", value, 1e-6)
            assert one.seconds_at(network) == pytest.approx(other.seconds_at(network), rel=1e-9)
            met += 1
    assert met


def test_at_par_both_take_equally_long_where_meetings_cost_too() -> None:
    graph = random_graph(400, 4000)
    work, machines = workload("gcn", Statistics.of(graph)), cluster(graph, np.arange(400) % 4)
    found = {strategy.name: strategy for strategy in price(work, machines)}
    one, other = found["edge cut"], found["feature partition"]
    one = replace(one, compute_seconds=other.compute_seconds + 1.0 if _sends_less(one, other) else 0.0)
    value = bandwidth_at_par(one, other, Network("n", 1.0, 1e-6, 1e-3))
    assert value is not None
    network = Network("n", value, 1e-6, 1e-3)
    assert one.seconds_at(network) == pytest.approx(other.seconds_at(network), rel=1e-9)


def _sends_less(one: Strategy, other: Strategy) -> bool:
    return one.traffic.busiest < other.traffic.busiest


def test_prices_that_are_too_near_to_tell_are_a_tie() -> None:
    graph = random_graph(400, 4000)
    work, machines = workload("gcn", Statistics.of(graph)), cluster(graph, np.arange(400) % 4)
    best = price(work, machines)[0]
    others = [
        replace(best, name=name, seconds_per_epoch=best.seconds_per_epoch * times)
        for name, times in (("near", 1.09), ("far", 1.11))
    ]
    assert tied(best, [best, *others]) == ("near",)


@functools.cache
def _advice(memory: float = 1e12, bandwidth: float = 1e9, model: str = "gin") -> object:
    graph = random_graph(2000, 40_000)
    work = workload(model, Statistics.of(graph), (64, 64, 16))

    def of(workers: int) -> Cluster:
        base = cluster(graph, np.arange(2000) % workers)
        return replace(base, network=Network("n", bandwidth, 1e-7))

    machines = of(4)
    return advise(work, machines, price(work, machines), memory, of)


def test_the_winner_is_the_fastest_that_computes_the_same_numbers() -> None:
    found = _advice(bandwidth=1e12)
    assert found.winner in ("edge cut", "vertex cut", "feature partition", "hybrid")
    assert "as fast as" in found.because


def test_a_slow_network_leaves_one_worker_and_says_from_which_bandwidth_on_it_loses() -> None:
    found = _advice(bandwidth=1e3)
    assert found.winner == "one worker"
    (limit,) = [b for b in found.break_even if b.what == "bandwidth"]
    assert limit.side == "from"
    assert limit.value > 1e3


def test_what_does_not_fit_is_not_advised_while_something_fits() -> None:
    whole = _advice(bandwidth=1e3)
    assert whole.winner == "one worker"
    small = _advice(memory=1.2e6, bandwidth=1e3)
    assert small.winner != "one worker"
    assert "one worker would need" in small.because


def test_what_of_plait_runs_the_winner_is_said_or_which_form_it_runs_instead() -> None:
    """GIN's fastest form is a cut; where it is one plait does not run, the fastest that it does is named."""
    found = _advice(bandwidth=1e12)
    runs = {"edge cut": "plait.shard runs it", "feature partition": "plait.shard runs it"}
    assert runs.get(found.winner, "plait cannot run it: the fastest strategy it runs is") in found.because


def test_limits_name_no_form_where_nothing_fits() -> None:
    """With fewer workers each has to hold more: at some number nothing fits, and no form is the best."""
    fitting = _advice(memory=1.2e6, bandwidth=1e9)
    assert not [b for b in fitting.break_even if b.what == "workers" and b.value < 4]


def test_where_nothing_fits_it_is_said() -> None:
    assert "no strategy fits" in _advice(memory=10.0).because


def test_an_analysis_as_plain_values() -> None:
    told = _advice(bandwidth=1e3).to_dict()
    assert told["winner"] == "one worker"
    assert {"what", "side", "value", "instead"} == set(told["break_even"][0])


def test_names_of_networks_price_like_their_figures() -> None:
    assert network_of("10gbit").bytes_per_s == 1.25e9
