"""schedule.py: the reference run of every schedule equals plain aggregation."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import InputError
from plait.graph import Graph
from plait.graph.hag import Hag, search
from plait.graph.hag.reference import aggregate, run
from plait.graph.hag.schedule import Schedule, tile_schedule
from plait.graph.hag.tiles import cluster_tiles, node_tiles

from .graphs import ODD_GRAPHS, graph_of, random_graph, real_graph


def schedules(hag: Hag) -> list[Schedule]:
    return [
        tile_schedule(hag),
        tile_schedule(hag, 3),
        tile_schedule(hag, 1),
        tile_schedule(hag, tiles=node_tiles(hag.num_nodes, 2)),
        tile_schedule(hag, tiles=cluster_tiles(hag, 8)),
    ]


def assert_computes(graph: Graph, schedule: Schedule, reduce: str, width: int = 3) -> None:
    x = np.random.default_rng(1).integers(-50, 50, (graph.num_sources, width)).astype(np.float64)
    assert np.array_equal(run(schedule, x, reduce), aggregate(graph, x, reduce))  # integers, so exactly


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
@pytest.mark.parametrize("name", ODD_GRAPHS)
def test_schedules_of_odd_graphs_compute_the_aggregation(name: str, reduce: str) -> None:
    graph = ODD_GRAPHS[name]
    for schedule in schedules(search(graph, min_count=2)):
        assert_computes(graph, schedule, reduce, width=1)


@pytest.mark.parametrize("seed", range(40))
def test_schedules_of_random_graphs_compute_the_aggregation_and_its_transpose(seed: int) -> None:
    graph = random_graph(np.random.default_rng(seed), repeats=seed % 2 == 0)
    hag = search(graph, min_count=2, inline=seed % 3 != 0)
    back = hag.transpose(graph)
    assert back.check(graph.transpose)
    for schedule in schedules(hag):
        assert_computes(graph, schedule, "sum")
    for schedule in schedules(back):
        assert_computes(graph.transpose, schedule, "sum")


def assert_tiles_are_independent(schedule: Schedule) -> None:
    """A tile reads shared rows of earlier phases and those it wrote itself."""
    phase_of = np.full(schedule.num_sources + schedule.num_shared, -1)
    tile_of = np.full(phase_of.size, -1)
    for phase in range(schedule.num_phases):
        for tile in range(schedule.phases[phase], schedule.phases[phase + 1]):
            for step in range(schedule.tiles[tile], schedule.tiles[tile + 1]):
                read = schedule.operands[schedule.start[step] : schedule.start[step + 1]]
                read = read[read < phase_of.size]
                assert ((phase_of[read] < phase) | (tile_of[read] == tile)).all()
                if 0 <= schedule.buffer[step] < phase_of.size:
                    phase_of[schedule.buffer[step]], tile_of[schedule.buffer[step]] = phase, tile
    assert (phase_of[schedule.num_sources :] >= 0).all()


def test_tiles_of_a_phase_are_independent() -> None:
    hag = search(real_graph("cora"))
    for schedule in (tile_schedule(hag, 64), tile_schedule(hag, 1)):
        assert schedule.num_shared > 0
        assert_tiles_are_independent(schedule)


def test_a_slot_is_used_again_once_its_last_reader_is_done() -> None:
    one = [[u for u in range(6) if u != v] for v in range(6)]
    many = [[6 * k + u for u in row] for k in range(20) for row in one]
    slots = [tile_schedule(search(graph_of(rows), min_count=2), 512).num_slots for rows in (one, many)]
    assert slots[0] == slots[1] > 0


def test_no_step_writes_a_row_that_it_reads() -> None:
    schedule = tile_schedule(search(real_graph("cora"), min_count=2))
    for step in range(schedule.num_steps):
        read = schedule.operands[schedule.start[step] : schedule.start[step + 1]]
        assert schedule.buffer[step] not in read


def test_a_union_of_small_graphs_shares_nothing_between_tiles() -> None:
    schedule = tile_schedule(search(real_graph("tu_proteins")), 1024)
    assert (schedule.num_shared, schedule.num_phases) == (0, 1)


def test_an_empty_tile_size_is_refused() -> None:
    with pytest.raises(InputError, match="tile_nodes"):
        tile_schedule(search(ODD_GRAPHS["clique"]), 0)
