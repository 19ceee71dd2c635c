"""stats.py: miss rates against a cache that is really simulated, whether measured or from the footprint."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.graph import Graph, generate, stats

from .reference import edge_lists, footprint, random_graph


@functools.cache
def by_footprint(graph, first=2**stats.FIRST_WINDOW_BITS):
    """The statistics of a graph whose misses were not measured, as on a GPU."""
    return replace(graph.stats, miss_curve=(), footprint=footprint(graph.indices, first))


def simulated_miss_rate(reads, cache_rows):
    """A least-recently-used cache, read by read."""
    cache, misses = OrderedDict(), 0
    for v in reads:
        if v in cache:
            cache.move_to_end(v)
        else:
            misses += 1
            cache[v] = None
            if len(cache) > cache_rows:
                cache.popitem(last=False)
    return misses / len(reads)


GRAPHS = {
    "random": random_graph(0, 300, 4000),
    "grid": generate.grid(40, 40),
    "power law": generate.rmat(9, 4000, 1),
    "cliques": generate.cliques(20, 12),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cache_rows", [16, 32, 64, 128, 256, 512])
def test_the_miss_rate_is_that_of_a_simulated_cache(name, cache_rows):
    graph = GRAPHS[name]
    truth = simulated_miss_rate(graph.indices.tolist(), cache_rows)
    assert graph.stats.miss_rate(cache_rows) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("cache_rows", [32, 64, 128, 256])
def test_sampled_sources_give_the_curve_within_a_few_percent(monkeypatch, name, cache_rows):
    graph = GRAPHS[name]
    monkeypatch.setattr(stats, "SAMPLED_EDGES", graph.num_edges // 3)
    sampled = stats.measure(graph.indptr, graph.indices, graph.num_sources)
    truth = simulated_miss_rate(graph.indices.tolist(), cache_rows)
    assert sampled.miss_rate(cache_rows) == pytest.approx(truth, abs=0.08)


@pytest.mark.parametrize("name", ["random", "power law"])
@pytest.mark.parametrize("cache_rows", [50, 100, 200])
def test_the_footprint_alone_estimates_the_miss_rate_where_all_stretches_are_alike(name, cache_rows):
    graph = GRAPHS[name]
    truth = simulated_miss_rate(graph.indices.tolist(), cache_rows)
    assert by_footprint(graph).miss_rate(cache_rows) == pytest.approx(truth, abs=0.05)


@settings(max_examples=100, deadline=None)
@given(case=edge_lists(square=False), measured=st.booleans())
def test_the_miss_rate_never_rises_and_ends_at_the_compulsory_misses(case, measured):
    src, dst, rows, columns = case
    graph = Graph.from_edge_index(src, dst, rows, columns)
    facts = graph.stats if measured else by_footprint(graph, 2)
    rates = [facts.miss_rate(size) for size in range(columns + 3)]
    assert all(0.0 <= after <= before <= 1.0 for before, after in pairwise(rates))
    distinct = len(set(src.tolist()))
    assert facts.distinct_sources == distinct
    assert rates[-1] == (distinct / src.size if src.size else 0.0)
    assert min(rates) == rates[-1]


@pytest.mark.parametrize("measured", [True, False])
def test_miss_rates_of_larger_graphs_never_rise(measured):
    for graph in GRAPHS.values():
        facts = graph.stats if measured else by_footprint(graph)
        rates = [facts.miss_rate(size) for size in range(0, 2000, 7)]
        assert all(after <= before for before, after in pairwise(rates))


def test_a_grid_fits_a_small_cache_and_a_random_graph_does_not():
    grid, erdos = generate.grid(100, 100), generate.erdos(10_000, 40_000, 0)
    # three grid rows hold all neighbours: only the first of the four reads of a node misses
    assert grid.stats.miss_rate(512) < 0.27
    assert erdos.stats.miss_rate(512) > 0.9


def test_degrees_are_described():
    graph = Graph.from_edge_index([0, 1, 2, 3, 3], [0, 0, 0, 0, 1], 5)
    facts = graph.stats
    assert (facts.num_nodes, facts.num_sources, facts.num_edges) == (5, 5, 5)
    assert (facts.degree_mean, facts.degree_max, facts.num_empty_rows) == (1.0, 4, 3)
    assert facts.degree_quantiles == pytest.approx(tuple(np.quantile([4, 1, 0, 0, 0], (0.5, 0.9, 0.99))))
    assert facts.skew == pytest.approx(np.std([4, 1, 0, 0, 0]))
    assert facts.footprint == ((5, 4.0),)


def test_a_regular_graph_has_no_skew_and_a_hub_has_much():
    assert generate.regular(100, 7, 0).stats.skew == 0.0
    assert generate.star(100).stats.skew > 4


def test_a_graph_without_edges_misses_nothing():
    facts = Graph.from_edge_index([], [], 4).stats
    assert facts.footprint == facts.miss_curve == ()
    assert (facts.miss_rate(10), facts.distinct_sources, facts.skew, facts.degree_max) == (0.0, 0, 0.0, 0)
