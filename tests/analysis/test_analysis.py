"""analysis/analysis.py and text.py: one value that holds, prints and hands out everything."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.analysis import Analysis, Options, Statistics, analyse
from plait.analysis.analysis import Roof, check_workers, memory_of
from plait.analysis.layers import layers_of
from plait.analysis.models import layers_by_name
from plait.analysis.network import network_of
from plait.cost.machine import default_profile
from plait.errors import InputError
from plait.plan.plan import NotPlanned, Plan
from tests.analysis.test_growth import random_graph

MACHINE = default_profile()


def analysis(statistics: Statistics, model: str = "gcn", **options: Any) -> Analysis:
    layers = layers_by_name(model, (32, 16, 8), statistics, MACHINE)
    return analyse(model, layers, statistics, MACHINE, Options(**options))


@pytest.mark.parametrize("model", ["gcn", "gat", "gin", "agnn", "ppnp", "sage-pool"])
def test_text_fits_a_terminal_and_values_are_plain(model: str) -> None:
    found = analysis(Statistics.of(random_graph(300, 2000)), model, workers=(1, 2, 4))
    assert all(len(line) <= 100 for line in str(found).splitlines())
    told = json.loads(json.dumps(found.to_dict()))
    for layer in told["layers"]:
        for way in ("forward", "backward"):
            assert {"flops", "bytes", "work", "depth"} <= set(layer[way])
    for strategy in told["strategies"].values():
        asked = {"bytes_per_epoch", "memory_per_worker", "synchronisations", "seconds_per_epoch"}
        assert asked <= set(strategy)
    assert told["advice"]["winner"] in told["strategies"]
    assert set(told["pipelines"]) == {run.mode.name for run in found.pipelines}


def test_a_network_says_what_meetings_cost_and_the_best_with_whom_it_ties() -> None:
    asked = {"workers": (2,), "network": network_of("10gbit,30us,500us")}
    found = analysis(Statistics.of(random_graph(300, 2000)), **asked)
    lines = str(found).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "500 µs wherever workers wait for each other" in " ".join(str(found).split())
    assert found.to_dict()["network"]["meeting"] == 5e-4
    assert found.advice is not None
    near = replace(found.advice, tied=("edge cut", "vertex cut"))
    assert "a tie (predicted times within 10%) with: edge cut, vertex cut" in str(replace(found, advice=near))
    assert near.to_dict()["tied"] == ["edge cut", "vertex cut"]


def test_the_papers_row_stands_beside_the_count() -> None:
    found = analysis(Statistics.of(random_graph(300, 2000)), "gat")
    (row,) = found.to_dict()["published"]
    assert row["model"] == "GAT"
    assert row["work_value"] > row["executed_value"]
    assert "every edge" in " ".join(str(found).split())


def test_a_given_partition_is_counted_and_others_are_scaled_from_it() -> None:
    graph = random_graph(300, 2000)
    near = np.arange(300) * 2 // 300
    found = analysis(Statistics.of(graph), workers=(2,), partitions={2: near})
    notes = {s.name: s.note for s in found.strategies}
    assert notes["edge cut"].startswith("given: ")
    assert any("as at the partition given" in s.note for s in found.scaling[4])


def test_a_halo_may_be_given_for_statistics() -> None:
    bare = analysis(Statistics(10_000, 100_000))
    known = analysis(Statistics(10_000, 100_000), halo=0.1)
    sent = [next(s for s in a.strategies if s.name == "edge cut").traffic.total for a in (bare, known)]
    assert sent[1] < sent[0]
    assert "random" in " ".join(bare.notes)


def test_papers100m_as_a_whole() -> None:
    statistics = Statistics(111_059_956, 1_615_685_872)
    layers = layers_by_name("gcn", (128, 256, 172), statistics, MACHINE)
    found = analyse("gcn", layers, statistics, MACHINE, Options((8,), network_of("100gbit"), 80e9))
    text = str(found)
    assert "mini-batch, dependent" in text
    assert found.advice is not None
    assert found.advice.winner == "mini-batch, dependent"  # the only one that fits 80 GB
    assert "no other strategy fits" in found.advice.because


@pytest.mark.parametrize("nodes", [0, 1, 2])
def test_tiny_and_empty_graphs_are_graphs(nodes: int) -> None:
    found = analysis(Statistics(nodes, 0), workers=(max(1, nodes),))
    assert json.dumps(found.to_dict(), allow_nan=False)
    assert found.to_dict()["graph"]["edges"] == 0
    assert str(found)


def test_black_boxes_are_marked_and_left_out() -> None:
    statistics = Statistics.of(random_graph(30, 90))
    boxes = layers_of(Plan((), (NotPlanned("conv", "no rule"),)))
    alone = analyse("odd", boxes, statistics, MACHINE, Options((2,)))
    assert "black box" in str(alone)
    assert alone.advice is None
    mixed = analyse(
        "odd", layers_by_name("gcn", (4, 4), statistics, MACHINE) + boxes, statistics, MACHINE, Options()
    )
    assert any("black boxes" in note for note in mixed.notes)


def test_the_roof_has_a_ridge() -> None:
    roof = Roof(100.0, 10.0)
    assert roof.ridge == 10.0
    assert (roof.bound(9.0), roof.bound(11.0)) == ("memory", "arithmetic")


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (0, "workers: 0"),
        (-2, "workers: -2"),
        (1.5, "workers: 1.5"),
        (True, "workers: True"),
        ([], "none given"),
        (11, "11 workers for 10 nodes"),
        ((1, 0), "workers: 0"),
    ],
)
def test_bad_workers_are_refused(workers: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_workers(workers, 10)


def test_workers_are_sorted_and_told_apart() -> None:
    assert check_workers([4, 1, 4, 2], 10) == (1, 2, 4)


@pytest.mark.parametrize(("given", "value"), [("16GB", 16e9), ("2GiB", 2 * 2**30), (5, 5.0), ("1e3", 1e3)])
def test_memory_in_words(given: Any, value: float) -> None:
    assert memory_of(given) == value


@pytest.mark.parametrize("given", ["much", 0, -1, None, "nanGB", True])
def test_bad_memory_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="memory"):
        memory_of(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": {2: np.zeros(300, int)}, "workers": (2,)}, "1 parts for 2 workers"),
        ({"partitions": {2: np.full(300, 5)}, "workers": (2,)}, "part 5 of 2"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        analysis(Statistics.of(random_graph(300, 2000)), **options)
