"""SAGE with aggr="lstm" against PyG: outputs and gradients, options, what runs in PyG and why."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import plait
from plait.cost import price
from plait.graph import Graph
from plait.runtime.lstm import Prefixes

from .harness import agree

# PyG writes `propagate` for a class's first module; where that one has an LSTM, no later one takes a matrix
SAGEConv(2, 2)

LENGTHS = price._LENGTHS


@pytest.fixture(autouse=True)
def _prefixes_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs small enough for a test are cheaper in PyG."""
    monkeypatch.setattr(price, "_LENGTHS", LENGTHS | {"sequence": 0.0, "sequence_back": 0.0})


def dense_edges(nodes: int, share: float, seed: int = 0) -> Tensor:
    """Most pairs of nodes joined, sorted by target, every list ascending; two nodes without neighbours."""
    rng = np.random.default_rng(seed)
    target, source = np.nonzero(rng.random((nodes, nodes)) < share)
    kept = target < nodes - 2
    return torch.from_numpy(np.stack([source[kept], target[kept]]))


def features(nodes: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(nodes, width, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"root_weight": False},
        {"normalize": True, "bias": False},
        {"project": True},
        {"aggr_kwargs": {"bias": False}},
        {"flow": "target_to_source"},
    ],
)
def test_options_agree_with_pyg(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    layer = SAGEConv(6, 5, aggr="lstm", **copy.deepcopy(options)).double()
    edges = dense_edges(40, 0.9)
    if options.get("flow") == "target_to_source":
        edges = edges.flip(0)
    compiled = agree(layer, features(40, 6), edges, calls=2)
    assert compiled.plan.layers[0].choice == "prefixes"


def test_single_precision_agrees_with_pyg() -> None:
    torch.manual_seed(0)
    agree(SAGEConv(8, 4, aggr="lstm"), features(50, 8, torch.float32), dense_edges(50, 0.8))


def test_pairs_of_features_agree_with_pyg() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(3)
    target, source = np.nonzero(rng.random((30, 12)) < 0.9)
    edges = torch.from_numpy(np.stack([source, target]))
    layer = SAGEConv((6, 3), 5, aggr="lstm").double()
    agree(layer, (features(12, 6), features(30, 3)), edges)


def test_a_dense_graph_with_sorted_neighbours_takes_far_fewer_steps() -> None:
    edges = dense_edges(60, 0.95).numpy()
    levels = Prefixes(Graph.from_edge_index(edges[0], edges[1], 60, 60)).levels
    assert levels.plain_steps >= 1.5 * levels.num_steps


def test_the_plan_says_how_many_steps_are_saved() -> None:
    plan = plait.explain(SAGEConv(6, 5, aggr="lstm"), Data(features(60, 6).float(), dense_edges(60, 0.95)))
    assert "fewer steps" in str(plan)
    assert plan.layers[0].rejected[0].candidate.endswith("(PyG)")


def test_small_graphs_run_in_pyg_and_the_plan_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "_LENGTHS", LENGTHS)
    assert "priced lower" in reason(SAGEConv(6, 5, aggr="lstm"), dense_edges(40, 0.9))


def reason(layer: nn.Module, edges: Tensor) -> str:
    compiled = plait.compile(layer)
    compiled(features(40, 6).float(), edges)
    return str(compiled.plan.not_planned[0].reason)


def test_other_lstms_run_in_pyg_and_the_plan_says_why() -> None:
    edges = dense_edges(40, 0.9)
    layered = SAGEConv(6, 5, aggr="lstm", aggr_kwargs={"num_layers": 2})
    assert "one layer" in reason(layered, edges)
    watched = SAGEConv(6, 5, aggr="lstm")
    watched.aggr_module.register_forward_hook(lambda *_: None)
    assert "hook" in reason(watched, edges)


def test_edges_that_are_not_sorted_are_refused_by_pyg_itself() -> None:
    compiled = plait.compile(SAGEConv(6, 5, aggr="lstm"))
    with pytest.raises(ValueError, match="not sorted"):
        compiled(features(40, 6).float(), dense_edges(40, 0.9).flip(1))


def test_a_parametrized_weight_is_read_as_often_as_in_pyg_where_padding_is_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(price, "_LENGTHS", LENGTHS)
    reads: list[Tensor] = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            reads.append(weight)
            return weight.square()  # which a checkpoint sees saved

    layer = SAGEConv(4, 3, aggr="lstm").double()
    parametrize.register_parametrization(layer.lin_l, "weight", Counted())
    x, edges = features(8, 4), dense_edges(8, 0.5)
    model = plait.compile(layer)
    counts = []
    for called in (layer, model, model):
        reads.clear()
        called(x, edges)
        counts.append(len(reads))
    assert counts == [1, 1, 1]
    checkpoint(model, x, edges, use_reentrant=False).sum().backward()
