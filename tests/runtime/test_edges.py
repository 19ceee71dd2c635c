"""runtime/edges.py: constants and runs of a graph are dropped with their weights, the oldest first."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.graph import Graph
from plait.runtime import edges as module
from plait.runtime.constants import Constants
from plait.runtime.edges import Edges


@pytest.fixture
def edges() -> Edges:
    ends = torch.randint(0, 9, (2, 30), generator=torch.Generator().manual_seed(1)).numpy()
    return Edges(Graph.from_edge_index(ends[0], ends[1], 9), ())


def constants(edges: Edges, weight: Tensor | None = None) -> Constants:
    return Constants(edges.graph, weight, {}, torch.float32)


def run(of: Any, is_program: bool = False) -> Any:
    return SimpleNamespace(constants=of, plan=SimpleNamespace(expr=None if is_program else "X"))


def test_constants_go_with_their_weights_and_runs_and_calls_with_them(edges: Edges) -> None:
    weight = torch.rand(30)
    own = constants(edges, weight)
    edges.keep_constants(("gcn", 1, torch.float32), own, weight)
    edges.remember("run", run(own))
    edges.calls["call"], edges.remembered["call"] = SimpleNamespace(constants=own), edges
    own = None  # type: ignore[assignment]
    edges.constants[("gcn", 1, torch.float32)].weight = None  # type: ignore[misc]
    del weight
    gc.collect()
    edges.keep_constants(("gcn", 2, torch.float32), constants(edges), None)
    assert list(edges.constants) == [("gcn", 2, torch.float32)]
    assert not edges.runs
    assert not edges.calls
    assert not edges.remembered


def test_weights_changed_in_place_replace_their_constants(edges: Edges) -> None:
    weight = torch.rand(30)
    for version in range(3):
        edges.keep_constants(("gcn", version, torch.float32), constants(edges, weight), weight)
    assert list(edges.constants) == [("gcn", 2, torch.float32)]
    assert edges.num_weights == 3
    assert not edges.meets_many_weights


def test_the_oldest_runs_go_expressions_and_programs_apart(edges: Edges) -> None:
    edges.remember("program", run(None, is_program=True))
    for k in range(module._MOST_RUNS + 3):
        edges.remember(k, run(None))
    assert len(edges.runs) == module._MOST_RUNS + 1
    assert "program" in edges.runs
    assert 0 not in edges.runs


def test_the_latest_constants_and_run_stay(edges: Edges) -> None:
    for k in range(3):
        edges.keep_constants(("gcn", k, torch.float32), constants(edges), None)
        edges.remember(k, run(None))
    while edges.drop_oldest():
        pass
    assert list(edges.constants) == [("gcn", 2, torch.float32)]
    assert list(edges.runs) == [2]
