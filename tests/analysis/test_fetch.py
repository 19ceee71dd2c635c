"""analysis/fetch.py: remote rows of an epoch against batches drawn one by one."""

from __future__ import annotations

import numpy as np
import pytest

from plait.analysis.fetch import drawn, expected
from plait.analysis.growth import grow
from plait.analysis.statistics import Statistics
from plait.graph import Graph
from tests.analysis.test_growth import random_graph


def test_all_neighbours_within_a_hop_are_counted_exactly() -> None:
    """Seeds 0 and 1 of part 0 read 2 and 3 of part 1, which read nobody; 2 is read twice and fetched once."""
    graph = Graph.from_edge_index(np.array([2, 3, 2]), np.array([0, 0, 1]), num_nodes=4)
    part = np.array([0, 0, 1, 1])
    found = drawn(graph, part, np.arange(4), 2, (None,), np.random.default_rng(0))
    assert (found.steps, found.rows, found.sent) == (1, (2.0, 0.0), (0.0, 2.0))
    assert found.rounds == 1.0  # part 1 reads no row of part 0 and never asks
    single = drawn(graph, part, np.arange(4), 1, (None,), np.random.default_rng(0))
    assert (single.steps, single.rows) == (2, (3.0, 0.0))
    assert (found.nodes, single.nodes) == (4.0, 5.0)  # of part 0's batches: {0, 1, 2, 3}; {0, 2, 3}, {1, 2}


def test_a_short_last_batch_has_fewer_nodes() -> None:
    graph = random_graph(4000, 20_000)
    statistics, part = Statistics.of(graph), np.arange(4000) % 2
    growth = grow(statistics, 1000, (3,))
    found = drawn(graph, part, np.arange(2040), 1000, (3,), np.random.default_rng(0))
    assert found.steps == 2
    assert found.nodes == pytest.approx(growth.nodes[-1], rel=0.1)
    assert expected(growth, 2040, 2).nodes == pytest.approx(found.nodes, rel=0.1)


def test_a_part_without_seeds_lends_a_hand() -> None:
    graph = random_graph(40, 200)
    found = drawn(graph, np.arange(40) % 2, np.arange(0, 40, 2), 8, (None,), np.random.default_rng(0))
    assert found.steps == 3
    assert all(rows > 0 for rows in found.rows)


def test_expected_rows_are_those_of_a_random_partition() -> None:
    graph = random_graph(4000, 40_000)
    statistics, rng = Statistics.of(graph), np.random.default_rng(1)
    real = drawn(graph, rng.integers(0, 4, 4000), np.arange(4000), 100, (5, 5), rng)
    guess = expected(grow(statistics, 100, (5, 5)), 4000, 4)
    assert guess.steps == pytest.approx(real.steps, rel=0.1)  # parts of unequal size are padded
    assert guess.total == pytest.approx(real.total, rel=0.1)
