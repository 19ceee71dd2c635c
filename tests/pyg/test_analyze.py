"""plait.analyze on PyG models: the plan's own programs, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    APPNP,
    AGNNConv,
    CGConv,
    EdgeConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GMMConv,
    LGConv,
    MessagePassing,
    MFConv,
    PNAConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    SuperGATConv,
    TransformerConv,
)

import plait
from plait.analysis import Statistics
from plait.analysis.network import Network, network_path
from plait.errors import InputError


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def data(nodes: int = 40, edges: int = 150) -> Data:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, nodes, (2, edges), generator=generator)
    return Data(x=torch.randn(nodes, 12, generator=generator), edge_index=edge_index.unique(dim=1))


MODELS = {
    "gcn": lambda: Two(GCNConv(12, 8), GCNConv(8, 4)),
    "sage": lambda: Two(SAGEConv(12, 8), SAGEConv(8, 4)),
    "gin": lambda: Two(
        GINConv(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8))), GINConv(nn.Linear(8, 4))
    ),
    "gat": lambda: Two(GATConv(12, 4, heads=2), GATConv(8, 4)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_are_analysed_as_they_are_planned(name: str) -> None:
    found = plait.analyze(MODELS[name](), data(), workers=4, network="10gbit")
    told = found.to_dict()
    assert len(told["layers"]) == 2
    assert told["layers"][0]["width_in"] == 12
    assert told["layers"][1]["width_out"] == 4
    assert told["layers"][1]["backward"]["flops"] > told["layers"][1]["forward"]["flops"]
    assert "edge cut" in told["strategies"]
    assert all(layer["is_exact"] for layer in told["layers"])


@pytest.mark.parametrize("make", [lambda: APPNP(3, 0.1), LGConv, lambda: SGConv(12, 4, K=2)])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_single_layer_is_a_model(make: Any, mode: str) -> None:
    """Of APPNP and LGConv nothing is learned: there is no gradient, and in training one plan without."""
    model = make()
    found = plait.analyze(model, data(), workers=2, mode=mode)
    assert [layer.name for layer in found.layers] == [f"model {type(model).__name__}"]
    assert not any("no plan" in note for note in found.notes)
    (layer,) = found.layers
    assert sum(phase.flops for phase in layer.phases.values()) > 0
    assert ("backward" in layer.phases) == (mode == "training" and bool(list(model.parameters())))
    assert len(plait.explain(model, data(), mode=mode).layers) == 1


def test_parameters_are_counted() -> None:
    model = MODELS["gcn"]()
    found = plait.analyze(model, data(), workers=1)
    assert sum(layer.parameters for layer in found.layers) == sum(p.numel() for p in model.parameters())


class Odd(MessagePassing):
    """A layer of one's own, for which there is no rule."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Any) -> Any:
        return x_j.sin()


def test_a_layer_without_a_rule_is_a_black_box() -> None:
    found = plait.analyze(Two(GCNConv(12, 8), Odd()), data())
    known, odd = found.layers
    assert not known.is_black_box
    assert odd.is_black_box
    assert any("black boxes" in note and "second" in note for note in found.notes)
    assert found.to_dict()["layers"][1]["is_black_box"]


class One(nn.Module):
    """A layer, with features of edges where it takes them."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(x, edge_index)


class OfEdges(One):
    def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> Any:  # type: ignore[override]
        return self.conv(x, edge_index, edge_attr)


def _map(inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, 8), nn.ReLU(), nn.Linear(8, 8))


WITH_PASSES: dict[str, Any] = {
    "EdgeConv, one layer": lambda: One(EdgeConv(nn.Sequential(nn.Linear(24, 8), nn.ReLU()), aggr="sum")),
    "EdgeConv, max": lambda: One(EdgeConv(_map(24))),
    "EdgeConv, linear": lambda: One(EdgeConv(nn.Linear(24, 8))),
    "SuperGAT": lambda: One(SuperGATConv(12, 4, heads=2)),
    "AGNN": lambda: One(AGNNConv()),
    "FiLM": lambda: One(FiLMConv(12, 8)),
    "CGConv": lambda: One(CGConv(12)),
    "GENConv": lambda: One(GENConv(12, 8)),
    "PNA": lambda: One(PNAConv(12, 8, ["mean", "max", "std"], ["identity"], torch.ones(9, dtype=torch.long))),
    "Transformer": lambda: One(TransformerConv(12, 4, heads=2)),
    "ResGated": lambda: One(ResGatedGraphConv(12, 8)),
    "GMM": lambda: OfEdges(GMMConv(12, 8, dim=3, kernel_size=2)),
    "GAT of edges": lambda: OfEdges(GATConv(12, 4, edge_dim=3)),
    "GATv2 of edges": lambda: OfEdges(GATv2Conv(12, 4, edge_dim=3)),
}


@pytest.mark.parametrize("name", list(WITH_PASSES))
@pytest.mark.parametrize("workers", [1, 4])
def test_layers_with_passes_of_their_own_are_counted_and_shared_out(name: str, workers: int) -> None:
    given = data()
    given.edge_attr = torch.rand(given.num_edges, 3)
    found = plait.analyze(WITH_PASSES[name](), given, workers)
    assert all(layer.forward.flops > 0 and layer.forward.depth > 0 for layer in found.layers)
    assert any(layer.forward.gathers for layer in found.layers)
    assert str(found)
    assert found.to_dict()["strategies"]["one worker"]["seconds_per_epoch"] > 0


@pytest.mark.parametrize("workers", [1, 4])
def test_a_model_of_black_boxes_alone_is_marked_so(workers: int) -> None:
    found = plait.analyze(One(MFConv(12, 4)), data(), workers)
    assert [layer.is_black_box for layer in found.layers] == [True]
    assert found.advice is None
    assert "black boxes, in no count below: conv MFConv" in str(found)
    assert "one worker" not in str(found)


def test_a_name_and_statistics_need_no_graph() -> None:
    found = plait.analyze("gat", Statistics(10_000, 200_000), workers=(1, 2), widths=(16, 8, 4))
    assert found.workers == 2
    assert str(found)


def test_a_name_on_data_takes_its_widths_from_it() -> None:
    found = plait.analyze("gcn", data())
    assert found.layers[0].width_in == 12
    assert not any("assumed" in note for note in found.notes)


def test_widths_that_nobody_gave_are_assumed_and_that_is_said() -> None:
    found = plait.analyze("gcn", Statistics(10_000, 200_000))
    assert [layer.width_in for layer in found.layers] == [64, 64]
    assert "layers 64 -> 64 -> 64 columns wide are assumed; widths= gives others" in found.notes


def test_a_partition_may_be_given_and_batches_are_separate_graphs() -> None:
    one = plait.analyze(MODELS["gcn"](), data(), workers=2, partition=torch.arange(40) % 2)
    assert any(s.note.startswith("given") for s in one.strategies)
    many = plait.analyze(MODELS["gcn"](), Batch.from_data_list([data(), data(), data()]), workers=2)
    assert "mini-batch, independent" in many.to_dict()["strategies"]


def test_the_model_and_its_gradients_are_left_alone() -> None:
    model, given = MODELS["gcn"](), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plait.analyze(model, given)
    assert type(model) is Two
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers: 0"),
        ({"workers": 41}, "41 workers for 40 nodes"),
        ({"network": "-1gbit"}, "network"),
        ({"network": (-5.0, 0.0)}, "bandwidth"),
        ({"mode": "guess"}, "mode"),
        ({"halo": -1.0}, "halo"),
        ({"memory": "none"}, "memory"),
        ({"partition": torch.zeros(3, dtype=torch.long)}, "partition"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plait.analyze(MODELS["gcn"](), data(), **options)


def test_bad_models_and_data_are_refused() -> None:
    with pytest.raises(InputError, match="known are gcn"):
        plait.analyze("graphormer", data())
    with pytest.raises(InputError, match="no edge_index"):
        plait.analyze("gcn", 7)
    with pytest.raises(InputError, match="name the model"):
        plait.analyze(MODELS["gcn"](), Statistics(10, 20))


def test_analysis_and_ranks_go_by_the_network_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    kept = Network("measured", 1.9e9, 4e-4, 5e-4, 3e-4)
    kept.save(network_path(tmp_path))
    assert plait.analyze("gcn", data(), workers=2).options.network == kept
    link = plait.shard(MODELS["gcn"](), data()).plan.link
    assert (link.bytes_per_s, link.latency, link.meeting) == (1.9e9, 4e-4, 5e-4)
    assert plait.analyze("gcn", data(), workers=2, network="10gbit").options.network.name == "10gbit"
