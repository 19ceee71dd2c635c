"""kernels/partial/rounds: launches of short rows compute what the schedule computes, in a legal order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from plait.graph import Graph, generate
from plait.graph.hag import Schedule, search, tile_schedule
from plait.kernels.partial.rounds import Rounds, rounds
from tests.graph.hag.graphs import ODD_GRAPHS, random_graph

LIMITS = [{}, {"most": 2, "large": 3, "group": 1}, {"most": 3, "large": 0}, {"most": 2, "group": 7}]


def rounds_of(schedule: Schedule, **limits: int) -> Rounds:
    return rounds(
        schedule.start, schedule.operands, schedule.node, schedule.buffer, schedule.num_sources,
        schedule.num_rows, **limits,
    )  # fmt: skip


def summed(made: Rounds, x: np.ndarray, num_nodes: int) -> np.ndarray:
    """Launches by plain loops; a row that is read before it is written would bring its NaN along."""
    rows = np.concatenate((x, np.full((made.num_buffer, x.shape[1]), np.nan)))
    out = np.full((num_nodes, x.shape[1]), np.nan)
    for launch in made.launches:
        if launch.is_grouped:
            bounds = [
                made.starts[made.groups[g] : made.groups[g + 1] + 1] for g in range(launch.first, launch.last)
            ]
        else:
            bounds = [np.array([launch.first, launch.last])]
        before = rows.copy()
        for cuts in bounds:
            own = before.copy()  # a group sees what was there before the launch and what it wrote itself
            for first, last in itertools.pairwise(cuts):
                seen = own.copy()
                for r in range(first, last):
                    operands = made.operands[made.begin[r] : made.begin[r] + made.length[r]]
                    total, to = seen[operands].sum(axis=0), made.to[r]
                    if to >= 0:
                        assert np.isnan(out[to]).all()
                        out[to] = total
                    else:
                        own[made.num_sources - 1 - to] = rows[made.num_sources - 1 - to] = total
    return out


def assert_equal(graph: Graph, schedule: Schedule, **limits: int) -> None:
    made = rounds_of(schedule, **limits)
    assert made.length.max(initial=0) <= limits.get("most", 64)
    x = np.random.default_rng(0).standard_normal((graph.num_sources, 3))
    expected = np.zeros((graph.num_nodes, 3))
    np.add.at(expected, np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr)), x[graph.indices])
    np.testing.assert_allclose(summed(made, x, graph.num_nodes), expected, atol=1e-12)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_odd_graphs_are_summed_whatever_the_limits(name: str, limits: dict[str, int]) -> None:
    found = search(ODD_GRAPHS[name], min_count=2)
    for schedule in (tile_schedule(found), tile_schedule(found, 2), tile_schedule(found, 1)):
        assert_equal(ODD_GRAPHS[name], schedule, **limits)


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_are_summed(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    found = search(graph, min_count=2)
    for limits in LIMITS:
        assert_equal(graph, tile_schedule(found, 3), **limits)


def test_a_hub_is_cut_into_pieces_of_pieces() -> None:
    graph = generate.star(50)
    schedule = tile_schedule(search(graph))
    made = rounds_of(schedule, most=4)
    assert len(made.launches) == 3  # 49 operands: 13 pieces, 4 of those, their sum
    assert_equal(graph, schedule, most=4)


def test_small_components_share_one_launch_and_none_is_split() -> None:
    graph = generate.cliques(30, 8)
    found = search(graph, min_count=2)
    assert found.num_aggregation_nodes > 0
    made = rounds_of(tile_schedule(found), group=1)
    grouped = [launch for launch in made.launches if launch.is_grouped]
    assert len(grouped) == 1
    assert grouped[0].last - grouped[0].first >= 30


def test_large_components_are_spread_over_the_device() -> None:
    found = search(generate.cliques(1, 24), min_count=2)
    assert not any(launch.is_grouped for launch in rounds_of(tile_schedule(found), large=4).launches)
