"""runtime/session.py: graphs are recognised, plans are kept for them, and everything is dropped in time."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv, GCNConv
from torch_geometric.nn.aggr import MeanAggregation

import plait
from plait.runtime import session as sessions
from plait.runtime.session import Options, Session


def random_edges(seed: int, nodes: int = 30, edges: int = 90) -> Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    return GCNConv(5, 4)


def session_of(model: nn.Module) -> Session:
    found: Session = model._plait_plan_session  # type: ignore[assignment]
    return found


def same(model: nn.Module, layer: nn.Module, x: Tensor, edge_index: Tensor) -> None:
    torch.testing.assert_close(model(x, edge_index), layer(x, edge_index), rtol=1e-5, atol=1e-6)


def test_another_edge_index_is_another_graph(layer: nn.Module) -> None:
    model, x = plait.compile(layer), torch.randn(30, 5)
    for seed in (1, 2, 1):
        same(model, layer, x, random_edges(seed))


def test_a_graph_changed_in_place_is_noticed(layer: nn.Module) -> None:
    model, x, edge_index = plait.compile(layer), torch.randn(30, 5), random_edges(1)
    same(model, layer, x, edge_index)
    edge_index[1, :10] = 7
    same(model, layer, x, edge_index)
    edge_index.copy_(random_edges(2))
    same(model, layer, x, edge_index)


def test_features_changed_in_place_are_noticed(layer: nn.Module) -> None:
    data = plait_data(torch.randn(30, 5), random_edges(1))
    model = plait.compile(layer, data)
    for _ in range(3):
        same(model, layer, data.x, data.edge_index)
        data.x.mul_(1.5)
    data.x[3, 2] = 100.0
    same(model, layer, data.x, data.edge_index)


def test_weights_changed_in_place_are_noticed(layer: nn.Module) -> None:
    model, x, edge_index, weight = plait.compile(layer), torch.randn(30, 5), random_edges(1), torch.rand(90)
    for _ in range(2):
        torch.testing.assert_close(
            model(x, edge_index, weight), layer(x, edge_index, weight), rtol=1e-5, atol=1e-6
        )
        weight.mul_(3.0)
        weight[5] = 0.25


def plait_data(x: Tensor, edge_index: Tensor) -> Any:

    return Data(x=x, edge_index=edge_index)


def test_an_address_used_again_is_not_the_same_graph(layer: nn.Module) -> None:
    """The allocator hands the memory of a dropped tensor to the next one; the graph must not follow it."""
    model, x = plait.compile(layer), torch.randn(30, 5)
    for seed in range(25):
        edge_index = random_edges(seed)
        same(model, layer, x, edge_index)
        del edge_index


def test_only_the_latest_graphs_are_kept(layer: nn.Module) -> None:
    model, x = plait.compile(layer), torch.randn(30, 5)
    graphs = [random_edges(seed) for seed in range(sessions._MOST_GRAPHS + 5)]
    for edge_index in graphs:
        same(model, layer, x, edge_index)
    assert len(session_of(model).edges) <= sessions._MOST_GRAPHS
    same(model, layer, x, graphs[0])


def test_a_sequence_of_mini_batches(layer: nn.Module) -> None:
    model = plait.compile(layer)
    for seed in range(40):
        nodes = 5 + seed % 7
        same(model, layer, torch.randn(nodes, 5), random_edges(seed, nodes, 3 * nodes))
    assert len(session_of(model).edges) <= sessions._MOST_GRAPHS
    assert len(session_of(model).watched) <= 70


def test_features_are_not_kept_alive_by_being_watched(layer: nn.Module) -> None:
    model, edge_index = plait.compile(layer), random_edges(1)
    x = torch.randn(30, 5)
    model(x, edge_index)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


def test_a_graph_is_freed_with_its_model(layer: nn.Module) -> None:
    model = plait.compile(layer)
    model(torch.randn(30, 5), random_edges(1))
    (edges,) = session_of(model).edges.values()
    graph = weakref.ref(edges.graph)
    del edges, model
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copy_has_parameters_and_graphs_of_its_own(layer: nn.Module, how: Any) -> None:
    model, x, edge_index = plait.compile(layer, epochs=7), torch.randn(30, 5), random_edges(1)
    expected = model(x, edge_index)
    other = how(model)
    assert session_of(other) is not session_of(model)
    assert session_of(other).options.calls == 7
    assert not session_of(other).edges
    torch.testing.assert_close(other(x, edge_index), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(x, edge_index), expected)


def test_options_are_values() -> None:
    assert Options() == Options()
    assert Session().options == Options()


def test_pieces_of_a_layer_that_runs_in_pyg_now_are_no_longer_shown() -> None:
    layer, x, edge_index = GATv2Conv(4, 4, edge_dim=3), torch.randn(30, 4), random_edges(1)
    model = plait.compile(layer)
    model(x, edge_index, torch.randn(90, 3))
    assert len(session_of(model).plans) == 3
    layer.aggr_module = MeanAggregation()
    model(x, edge_index, torch.randn(90, 3))
    assert not session_of(model).plans
