"""analysis/growth.py: growth against a search by hand, and the estimate against the measurement."""

from __future__ import annotations

import numpy as np
import pytest

from plait.analysis.growth import _some_of, estimate, grow, measure
from plait.analysis.statistics import Statistics
from plait.errors import InputError
from plait.graph import Graph


def random_graph(nodes: int, edges: int, seed: int = 0) -> Graph:
    rng = np.random.default_rng(seed)
    return Graph.from_edge_index(
        rng.integers(0, nodes, edges), rng.integers(0, nodes, edges), num_nodes=nodes
    )


def test_all_neighbours_of_all_hops_are_those_of_a_plain_search() -> None:
    graph = random_graph(60, 150)
    sources = {v: set(graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist()) for v in range(60)}
    seeds = np.random.default_rng(7).choice(60, 5, False)
    found = measure(graph, 5, (None, None, None), np.random.default_rng(7), batches=1)
    reached, fresh = set(seeds.tolist()), set(seeds.tolist())
    for hop in range(3):
        assert found.edges[hop] == sum(graph.indptr[v + 1] - graph.indptr[v] for v in fresh)
        fresh = set().union(*(sources[v] for v in fresh)) - reached
        reached |= fresh
        assert found.nodes[hop + 1] == len(reached)


def test_a_fan_out_reads_no_edge_twice_and_never_more_than_asked() -> None:
    graph = random_graph(200, 4000)
    found = measure(graph, 200, (3,), np.random.default_rng(0))
    assert found.edges[0] == np.minimum(graph.degrees, 3).sum()
    whole = measure(graph, 200, (None,), np.random.default_rng(0))
    assert whole.edges[0] == graph.num_edges


@pytest.mark.parametrize("fanouts", [(None, None), (10, 10), (5, 5, 5)])
@pytest.mark.parametrize("batch", [8, 256])
def test_the_estimate_is_near_the_measurement_on_random_graphs(
    fanouts: tuple[int | None, ...], batch: int
) -> None:
    graph = random_graph(5000, 60_000)
    found = measure(graph, batch, fanouts, np.random.default_rng(1), batches=12)
    told = estimate(Statistics.of(graph), batch, fanouts)
    np.testing.assert_allclose(told.nodes, found.nodes, rtol=0.12)
    np.testing.assert_allclose(told.edges, found.edges, rtol=0.12)


def test_layers_read_the_hops_around_what_they_compute() -> None:
    found = estimate(Statistics(10_000, 80_000, "regular"), 10, (None, None))
    assert found.rows(1, 2) == 10
    assert found.rows(0, 2) == found.nodes[1]
    assert found.edges_of(1, 2) == found.edges[0]
    assert found.edges_of(0, 2) == sum(found.edges)


def test_growth_never_exceeds_the_graph() -> None:
    found = grow(Statistics(1000, 10**6), 5000, (None,) * 6)
    assert found.batch == 1000
    assert found.nodes[-1] <= 1000 * 1.0001
    assert not found.is_measured
    assert grow(Statistics.of(random_graph(30, 60)), 5, (2,)).is_measured


def test_graphs_without_edges_do_not_grow() -> None:
    graph = Graph.from_edge_index(np.array([], int), np.array([], int), num_nodes=9)
    assert grow(Statistics.of(graph), 4, (None, 3)).nodes == (4, 4, 4)


def test_bad_batches_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        grow(Statistics(10, 10), 0, (3,))
    with pytest.raises(InputError, match="at least 1"):
        grow(Statistics(10, 10), 2, (0,))
    for batch, fanouts in ((2.5, (3,)), (2, 3), (2, "3,3")):
        with pytest.raises(InputError, match=r"batch_size=.*, fanouts=.*: give a whole number"):
            grow(Statistics(10, 10), batch, fanouts)  # type: ignore[arg-type]


def test_every_choice_of_neighbours_is_as_likely() -> None:
    """Two of four: six pairs, each drawn one time in six; none has a neighbour twice."""
    drawn = _some_of(np.full(60_000, 4), 2, np.random.default_rng(0))
    pairs, counts = np.unique(np.sort(drawn, axis=1), axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    assert np.abs(counts / 10_000 - 1).max() < 0.05
    assert np.sort(_some_of(np.array([3, 3]), 2, np.random.default_rng(1))).max() == 2
