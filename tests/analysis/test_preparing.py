"""analysis/preparing.py: threads beside training cost it what cores are short of, and else nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.analysis.analysis import Options, analyse
from plait.analysis.models import layers_by_name
from plait.analysis.network import Network
from plait.analysis.preparing import Crew
from plait.analysis.statistics import Statistics
from plait.cost.machine import default_profile
from tests.analysis.test_growth import random_graph
from tests.analysis.test_strategies import WIDTHS, by_name, cluster, workload

NAME = "mini-batch, dependent"
BUSY = Network("n", 1e9, 1e-4, 2e-4, busy=3e-4)


def shared_out(threads: int, cores: int, training: float, beside: float) -> float:
    """Seconds until training is over, slice by slice; a thread beside it runs first, as one that wakes up."""
    left, passed, slice_ = [training] * min(threads, cores), 0.0, 1e-4
    while max(left) > 1e-9:
        room = cores * slice_
        used = min(beside, slice_)  # one thread
        beside -= used
        for k in sorted(range(len(left)), key=lambda k: -left[k]):
            took = min(left[k], slice_, room - used)
            left[k], used = left[k] - took, used + took
        passed += slice_
    return passed


@pytest.mark.parametrize(("threads", "cores"), [(1, 1), (2, 2), (1, 2), (2, 4), (4, 4)])
def test_training_loses_what_the_cores_are_short_of(threads: int, cores: int) -> None:
    for beside in (0.0, 0.01, 0.05):
        waited = shared_out(threads, cores, 0.1, beside) - 0.1
        assert Crew(threads, cores).lost(0.1, beside) == pytest.approx(waited, abs=3e-4)


def test_with_a_core_to_spare_nothing_is_lost_and_with_one_core_everything() -> None:
    assert Crew(1, 2).lost(1.0, 0.9) == 0.0
    assert Crew(1, 1).lost(1.0, 0.9) == pytest.approx(0.9)
    assert Crew(2, 2).lost(1.0, 0.9) == pytest.approx(0.45)
    assert Crew(1, 1).lost(1.0, 0.0) == 0.0


def test_a_worker_without_a_spare_core_pays_for_the_rounds_of_the_others() -> None:
    """Each other worker rings, sends counts and ids and is sent rows, in every step of its own."""
    graph = random_graph(800, 6000)
    for workers in (2, 4):
        machines = replace(cluster(graph, np.arange(800) % workers), network=BUSY)
        work = workload(
            "gcn", Statistics.of(graph), looked_up_row_seconds=1e-7, timed_batch_seconds=(1.0, 0.0)
        )
        spare, short = (by_name(work, replace(machines, cores=cores))[NAME] for cores in (2.0, 1.0))
        fetch = machines.fetch
        answered = 4 * BUSY.busy * fetch.steps * (workers - 1) + max(fetch.sent) * 1e-7
        assert short.lost_seconds == pytest.approx(answered)
        assert short.compute_seconds - spare.compute_seconds == pytest.approx(answered)
        assert short.seconds_per_epoch - spare.seconds_per_epoch == pytest.approx(answered)
        assert spare.lost_seconds == 0.0


def test_preparing_is_drawing_collecting_and_handling_every_batch() -> None:
    graph = random_graph(800, 6000)
    machines = cluster(graph, np.arange(800) % 2)
    bare = workload("gcn", Statistics.of(graph))
    work = replace(bare, sampled_edge_seconds=1e-7, looked_up_row_seconds=1e-6, batch_seconds=1e-3)
    found, free = by_name(work, machines)[NAME], by_name(bare, machines)[NAME]
    assert found.preparing is not None
    batches = machines.fetch.nodes / machines.growth.nodes[-1]
    assert found.preparing.drawing == pytest.approx(batches * sum(machines.growth.edges) * 1e-7)
    assert found.preparing.collecting == pytest.approx(machines.fetch.nodes * 1e-6)
    assert found.preparing.handling == pytest.approx(machines.fetch.steps * 1e-3)
    assert found.compute_seconds - free.compute_seconds == pytest.approx(found.preparing.own)


def test_cores_are_those_given_or_the_machines_shared_where_workers_share_it() -> None:
    graph = random_graph(800, 6000)
    statistics, machine = Statistics.of(graph), replace(default_profile(), threads=4)
    layers = layers_by_name("gcn", WIDTHS, statistics, machine)
    part = {4: np.arange(800) % 4}
    timed = (1.0, 0.0)
    base = Options((4,), BUSY, batch_size=16, partitions=part, threads=1, timed_batch_seconds=timed)
    lost = {}
    for name, options in {
        "own machines": base, "one machine": replace(base, sharing=1.2), "given": replace(base, cores=1.0)
    }.items():  # fmt: skip
        found = {s.name: s for s in analyse("gcn", layers, statistics, machine, options).strategies}
        lost[name] = found[NAME].lost_seconds
    assert lost["own machines"] == 0.0
    assert lost["given"] > 0
    assert lost["one machine"] == pytest.approx(lost["given"])


def test_the_table_says_what_preparing_takes_and_what_training_loses() -> None:
    graph = random_graph(800, 6000)
    statistics, machine = Statistics.of(graph), default_profile()
    layers = layers_by_name("gcn", WIDTHS, statistics, machine)
    options = Options((2,), BUSY, batch_size=16, partitions={2: np.arange(800) % 2}, threads=1, cores=1.0)
    found = analyse("gcn", layers, statistics, machine, options)
    text = " ".join(str(found).split())
    assert "300 µs of processor time per message" in text
    assert "a worker prepares its batches in" in text
    assert "which training loses" in text
    assert "1 thread on 1 core" in text
    said = found.to_dict()["strategies"][NAME]
    assert said["prepare_seconds"] > 0
    assert said["lost_seconds"] == pytest.approx(said["answer_seconds"])
    assert found.to_dict()["strategies"]["edge cut"]["lost_seconds"] == 0.0
