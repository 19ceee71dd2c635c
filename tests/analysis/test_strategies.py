"""analysis/strategies.py: bytes against exchanges carried out row by row, and laws every strategy obeys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.analysis.cut import edge_cut, expected_edge_cut, expected_vertex_cut, vertex_cut
from plait.analysis.fetch import drawn, expected
from plait.analysis.growth import grow
from plait.analysis.models import layers_by_name
from plait.analysis.network import Network, network_of
from plait.analysis.pipeline import MODES, schedule
from plait.analysis.statistics import Statistics
from plait.analysis.strategies import Cluster, Strategy, price, stage_times
from plait.analysis.workload import Workload, workload_of
from plait.cost.machine import default_profile
from plait.graph import Graph
from tests.analysis.test_growth import random_graph

WIDTHS = (24, 16, 8)


def workload(model: str, statistics: Statistics, widths: tuple[int, ...] = WIDTHS, **more: Any) -> Workload:
    layers = layers_by_name(model, widths, statistics, default_profile())
    return workload_of(layers, statistics.nodes, statistics.edges, widths[0], **more)


def cluster(graph: Graph, part: Any, network: str = "10gbit") -> Cluster:
    found = Statistics.of(graph)
    growth = grow(found, 16, (4, 4))
    parts = int(part.max()) + 1
    seeds = np.arange(graph.num_nodes)
    fetch = drawn(graph, part, seeds, 16, (4, 4), np.random.default_rng(0))
    cuts = edge_cut(graph, part), vertex_cut(graph, part)
    return Cluster(parts, network_of(network), *cuts, growth, fetch)


def by_name(work: Workload, machines: Cluster) -> dict[str, Strategy]:
    return {strategy.name: strategy for strategy in price(work, machines)}


def exchanged(graph: Graph, part: Any, work: Workload) -> int:
    """Bytes of an epoch of an edge cut, row by row: rows ahead of a product, their gradients behind one."""
    total = 0
    for load in work.loads:
        for columns in load.gathers:
            sent = set()
            for target, source in zip(graph.edge_rows().tolist(), graph.indices.tolist(), strict=True):
                if part[target] != part[source] and (part[target], source) not in sent:
                    sent.add((part[target], source))
                    total += columns * 4
    weights = agreed(work)
    parts = int(part.max()) + 1
    return total + 2 * (parts - 1) * weights


def agreed(work: Workload) -> int:
    """Bytes all workers add up in a step: gradients, and how many rows the loss is a mean of."""
    return sum(load.parameters for load in work.loads) * 4 + 8


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "sgc"])
@pytest.mark.parametrize("parts", [2, 4])
def test_an_edge_cut_sends_what_an_exchange_row_by_row_does(model: str, parts: int) -> None:
    graph = random_graph(80, 300)
    part = np.random.default_rng(0).integers(0, parts, 80)
    work = workload(model, Statistics.of(graph))
    found = by_name(work, cluster(graph, part))["edge cut"]
    assert found.traffic.total == exchanged(graph, part, work)


def test_a_vertex_cut_sends_sums_to_masters_and_rows_to_copies() -> None:
    graph = random_graph(80, 300)
    part = np.random.default_rng(1).integers(0, 3, 80)  # parts own unequal numbers of nodes
    work = workload("gcn", Statistics.of(graph))
    degree = graph.degrees + graph.out_degrees
    copies = set()
    for target, source in zip(graph.edge_rows().tolist(), graph.indices.tolist(), strict=True):
        owner = part[target] if degree[target] < degree[source] else part[source]
        copies |= {(owner, v) for v in (target, source) if part[v] != owner}
    sent = sum(2 * len(copies) * columns * 4 for load in work.loads for columns in load.gathers)
    weights = agreed(work)
    found = by_name(work, cluster(graph, part))["vertex cut"]
    assert found.traffic.total == sent + 2 * 2 * weights


def test_a_feature_partition_sends_every_block_that_changes_its_owner() -> None:
    graph, parts = random_graph(80, 300), 4
    work = workload("gcn", Statistics.of(graph))
    found = by_name(work, cluster(graph, np.arange(80) % parts))["feature partition"]
    moved = 0.0
    for load in work.loads:
        for gathers in (load.ahead, load.behind):
            for columns in (gathers[0], gathers[-1]) if gathers else ():
                for row_owner in range(parts):
                    for column_owner in range(parts):
                        if row_owner != column_owner:
                            moved += 80 / parts * columns / parts * 4
    weights = agreed(work)
    assert found.traffic.total == pytest.approx(moved + 2 * (parts - 1) * weights)


def test_a_first_layer_summed_once_is_never_exchanged() -> None:
    graph = random_graph(80, 300)
    work = workload("gcn", Statistics.of(graph), (4, 64, 8))
    assert work.loads[0].gathers == ()
    found = by_name(work, cluster(graph, np.arange(80) % 2))["edge cut"]
    assert found.traffic_per_layer[0].total == 0
    assert found.traffic_per_layer[1].total > 0


@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "sage-pool", "agnn"])
def test_laws_of_every_strategy(model: str) -> None:
    graph = random_graph(200, 1500)
    work = workload(model, Statistics.of(graph))
    machines = cluster(graph, np.arange(200) % 4)
    found = price(work, machines)
    assert [s.seconds_per_epoch for s in found] == sorted(s.seconds_per_epoch for s in found)
    names = [s.name for s in found]
    assert len(set(names)) == len(names)
    for s in found:
        assert s.seconds_per_epoch >= s.compute_seconds > 0
        assert s.traffic.busiest <= s.traffic.total
        assert s.memory_per_worker > s.fixed_memory > 0
        assert s.seconds_at(machines.network) == pytest.approx(s.seconds_per_epoch)
        slower = s.seconds_at(Network("slow", 1e6, 1e-3))
        assert slower >= s.seconds_per_epoch
        assert (s.traffic.total == 0) == (s.workers == 1)
        assert s.largest_nodes(200, s.memory_per_worker) == pytest.approx(200)
        assert s.largest_nodes(200, 2 * s.memory_per_worker) > 390


def test_what_a_meeting_costs_is_paid_wherever_workers_wait_for_each_other() -> None:
    graph = random_graph(200, 1500)
    work, machines = workload("gcn", Statistics.of(graph)), cluster(graph, np.arange(200) % 4)
    dear = replace(machines, network=replace(machines.network, meeting=1.0))
    before, after = by_name(work, machines), by_name(work, dear)
    for name, found in after.items():
        paid = found.seconds_per_epoch - before[name].seconds_per_epoch
        assert paid == pytest.approx(found.traffic.meetings)
        assert found.compute_seconds == before[name].compute_seconds
    products = sum(len(load.gathers) for load in work.loads)
    # the gradients' sum, and the number of rows that the loss is a mean of
    assert after["edge cut"].traffic.meetings == products + 2
    assert after["vertex cut"].traffic.meetings == 2 * products + 2
    assert after["mini-batch, dependent"].traffic.meetings == 4 * machines.fetch.steps
    assert after["one worker"].traffic.meetings == 0


def test_one_worker_is_all_there_is_for_one_worker() -> None:
    graph = random_graph(50, 100)
    machines = cluster(graph, np.zeros(50, int))
    (only,) = price(workload("gcn", Statistics.of(graph)), machines)
    assert (only.name, only.synchronisations, only.traffic.total) == ("one worker", 0, 0.0)


def test_separate_graphs_share_nothing_but_weights() -> None:
    graph = random_graph(80, 300)
    machines = cluster(graph, np.arange(80) % 4)
    work = workload("gcn", Statistics.of(graph))
    assert "mini-batch, independent" not in by_name(work, machines)
    several = replace(work, graphs=10)
    found = by_name(several, machines)["mini-batch, independent"]
    assert found.compute_seconds == pytest.approx(work.seconds * 3 / 10)  # 10 graphs: 3 for the fullest
    weights = agreed(work)
    assert found.traffic.total == 2 * 3 * weights


def test_mini_batches_send_the_rows_that_were_drawn_and_agree_on_weights_at_every_step() -> None:
    graph = random_graph(800, 6000)
    machines = cluster(graph, np.arange(800) % 2)
    work = workload("gcn", Statistics.of(graph))
    found = by_name(work, machines)["mini-batch, dependent"]
    steps = 400 // 16
    assert machines.fetch.steps == steps
    rows = machines.fetch.total * (WIDTHS[0] * 4 + 8)  # features come, a number goes out
    headers = 2 * steps * 2 * 3 * 8  # every batch of both parts lacks rows, and each asks in its own round
    weights = 2 * sum(load.parameters for load in work.loads) * 4 * steps
    assert found.traffic.total == pytest.approx(rows + headers + weights)
    assert not found.same_numbers


def test_timed_steps_take_the_place_of_prices_and_a_short_batch_takes_its_share() -> None:
    graph = random_graph(800, 6000)
    machines = cluster(graph, np.arange(800) % 2)
    work = workload("gcn", Statistics.of(graph), timed_batch_seconds=(0.25, 1.5))
    batches = machines.fetch.nodes / machines.growth.nodes[-1]
    found = by_name(work, machines)["mini-batch, dependent"]
    assert found.compute_seconds == pytest.approx(machines.fetch.steps * 0.25 + batches * 1.5)


def test_workers_that_share_a_machine_compute_longer() -> None:
    graph = random_graph(200, 1500)
    work, machines = workload("gcn", Statistics.of(graph)), cluster(graph, np.arange(200) % 2)
    alone, shared = by_name(work, machines), by_name(work, replace(machines, sharing=1.5))
    assert shared["one worker"].seconds_per_epoch == alone["one worker"].seconds_per_epoch
    for name in ("edge cut", "feature partition"):
        busy = alone[name].compute_seconds / alone[name].seconds_per_epoch  # who waits slows nobody down
        assert busy < 1.0
        assert shared[name].compute_seconds == pytest.approx(alone[name].compute_seconds * (1 + 0.5 * busy))


def test_columns_narrower_than_a_cache_line_gain_nothing() -> None:
    work = workload("gcn", Statistics(20_000, 400_000), (64, 64, 8))
    narrow, wide = work.loads[1], workload("gcn", Statistics(20_000, 400_000), (64, 128, 128)).loads[1]
    assert narrow.narrow_seconds(2) == pytest.approx(sum(narrow.graph_seconds))
    assert wide.narrow_seconds(4) == pytest.approx(sum(wide.graph_seconds) / 4)


def test_attention_sends_the_rows_it_is_given_and_features_only_once() -> None:
    work = workload("gat", Statistics(2_000, 30_000), (24, 16, 8))
    assert (work.loads[0].gathers, work.loads[1].gathers) == ((), (16, 16))
    assert all(load.takes_halo for load in work.loads)


def test_a_hybrid_takes_the_cheaper_split_of_each_layer_and_is_never_slower() -> None:
    """Ten products in a row pay for one change to columns, a single one is cheaper by its halo."""
    statistics = Statistics(20_000, 400_000)
    layers = layers_by_name("gcn", (8, 128, 128), statistics, default_profile())[1:]
    layers += layers_by_name("ppnp", (128, 128), statistics, default_profile())[1:]
    work = workload_of(layers, 20_000, 400_000, 8)
    halos = expected_edge_cut(statistics, 8).with_halo(0.9)
    copies, growth = expected_vertex_cut(statistics, 8), grow(statistics, 64, (5, 5))
    fetch = expected(growth, 20_000, 8)
    named = by_name(work, Cluster(8, Network("n", 1e9, 1e-6), halos, copies, growth, fetch))
    assert named["hybrid"].note == "by layer: edge cut, features"
    singles = [named[n].seconds_per_epoch for n in ("edge cut", "vertex cut", "feature partition")]
    assert named["hybrid"].seconds_per_epoch < min(singles)


def test_where_all_layers_agree_there_is_no_hybrid() -> None:
    graph = random_graph(200, 1500)
    work = workload("gcn", Statistics.of(graph))
    assert "hybrid" not in by_name(work, cluster(graph, np.arange(200) % 4))


def test_pipelines_take_what_their_schedule_takes() -> None:
    graph = random_graph(200, 1500)
    work = workload("gin", Statistics.of(graph))
    found = by_name(work, cluster(graph, np.arange(200) % 8))
    for mode in MODES:
        spans = sum(schedule(stage_times(work, 8, way), mode).makespan for way in (0, 1))
        strategy = found[f"pipeline, {mode.name}"]
        assert strategy.compute_seconds == pytest.approx(spans)
        assert strategy.bubble is not None
        assert 0 <= strategy.bubble < 1
        assert strategy.same_numbers == (mode is MODES[0])


def test_stages_share_workers_where_there_are_few() -> None:
    graph = random_graph(200, 1500)
    work = workload("gin", Statistics.of(graph))
    found = by_name(work, cluster(graph, np.arange(200) % 2))
    strategy = found["pipeline, async micro, async macro"]
    assert strategy.compute_seconds >= work.seconds / 2 * 0.99


def test_wider_layers_cost_more_in_every_way() -> None:
    work = workload("gcn", Statistics.of(random_graph(80, 300)))
    wide = work.widened(2.0)
    assert wide.loads[1].gathers == tuple(2 * c for c in work.loads[1].gathers)
    assert sum(wide.loads[1].dense_seconds) == pytest.approx(4 * sum(work.loads[1].dense_seconds))
    assert wide.weight_bytes == pytest.approx(4 * work.weight_bytes, rel=0.01)
