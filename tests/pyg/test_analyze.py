"""plait.analyze on PyG models: the plan's own programs, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv

import plait
from plait.analysis import Statistics
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


def test_a_name_and_statistics_need_no_graph() -> None:
    found = plait.analyze("gat", Statistics(10_000, 200_000), workers=(1, 2), widths=(16, 8, 4))
    assert found.workers == 2
    assert str(found)


def test_a_name_on_data_takes_its_widths_from_it() -> None:
    found = plait.analyze("gcn", data())
    assert found.layers[0].width_in == 12


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
    with pytest.raises(InputError, match="widths"):
        plait.analyze("gcn", Statistics(10, 20))
