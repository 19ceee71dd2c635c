"""What ranks will choose, found in one process; that they do so is checked by tests/analysis/test_sent.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GATConv, GatedGraphConv, GCNConv, GINConv, GraphSAGE, SAGEConv

from plait.cost.machine import default_profile
from plait.errors import InputError
from plait.plan.exchange import Link
from plait.pyg.call import call_of
from plait.pyg.foresee import foresee
from plait.runtime.machine import using_machine


def data(nodes: int = 60, edges: int = 300, width: int = 12) -> Data:
    rng = np.random.default_rng(0)
    return Data(
        x=torch.from_numpy(rng.standard_normal((nodes, width)).astype(np.float32)),
        edge_index=torch.from_numpy(rng.integers(0, nodes, (2, edges))),
    )


def foreseen(model: nn.Module, given: Data, ranks: int = 3, mode: str = "training") -> Any:
    part = np.arange(given.num_nodes) % ranks
    call = call_of(model, given)
    assert call is not None
    found = foresee(model, call, given, part, Link(1e9, 1e-5, ranks - 1), ("nodes", "features"), mode)
    source, target = given.edge_index.numpy()
    remote = {(int(s), int(part[t])) for s, t in zip(source, target, strict=True) if part[s] != part[t]}
    return found, len(remote)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = SAGEConv(12, 12), nn.BatchNorm1d(12)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.conv(self.norm(self.conv(x, edge_index)).relu(), edge_index)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GATConv(12, 4, heads=2), GCNConv(8, 8)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("make", [lambda: GCN(12, 8, 3, 8), lambda: GraphSAGE(12, 8, 2, 8), Twice, Attending])
def test_rows_of_halos_travel_as_wide_as_said(make: Any) -> None:
    """Every exchange of a layer sends each halo once: rows times the width it says."""
    given = data()
    found, halo = foreseen(make(), given)
    for choices in found["nodes"]:
        assert len({choice.travels for choice in choices}) == 1  # ranks agree
        said = [int(part.split(" x ")[1]) for part in choices[0].travels.split(", ") if "once" not in part]
        sent = np.sum([choice.bytes_each for choice in choices], axis=0)
        assert sent.tolist() == [4 * halo * width for width in said]


def test_two_figures_of_one_network_choose_the_same_bytes_where_either_order_may_be_cheaper() -> None:
    given, model = data(400, 1600, 64), GraphSAGE(64, 64, 2, 8)
    call = call_of(model, given)
    assert call is not None
    cheapest, sent = set(), set()
    with using_machine(default_profile()):
        for link in (Link(5e9, 2e-4, 1, 1e-4), Link(1e9, 3e-4, 1, 1e-3)):
            last = foresee(model, call, given, np.arange(400) // 200, link, ("nodes",), "training")["nodes"][
                -1
            ]
            cheapest.add(min(last[0].seconds, key=lambda travels: last[0].seconds[travels]))
            sent.add(tuple(choice.bytes_each for choice in last))
    assert len(cheapest) == 2
    assert len(sent) == 1


def test_the_second_call_of_a_layer_counts_again() -> None:
    found, _ = foreseen(Twice(), data())
    assert [len(layers) for layers in found.values()] == [2, 2]
    assert found["nodes"][0][0].travels.startswith("once halo")
    assert "bwd" in found["nodes"][1][0].travels


def test_features_travel_by_columns_where_a_layer_can() -> None:
    found, _ = foreseen(Attending(), data())
    assert "halo" in found["features"][0][0].travels
    assert "columns" in found["features"][1][0].travels
    assert "halo" not in found["features"][1][0].travels


def test_inference_sends_no_gradients() -> None:
    found, _ = foreseen(GCN(12, 8, 3, 8).eval(), data(), mode="inference")
    assert all("bwd" not in choices[0].travels for choices in found["nodes"])


def test_the_model_is_left_as_it_was() -> None:
    model, given = Twice(), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    foreseen(model, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("edges", [0, 1])
def test_hardly_any_edges(edges: int) -> None:
    found, halo = foreseen(GCN(12, 8, 2, 8), data(edges=edges))
    sent = sum(sum(choice.bytes_each) for choices in found["nodes"] for choice in choices)
    assert (sent == 0) == (halo == 0)


def test_a_model_that_is_not_spread_is_refused() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINConv(nn.Linear(12, 8))
            self.conv.flow = "target_to_source"

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.conv(x, edge_index)

    with pytest.raises(InputError, match="turn the edges round"):
        foreseen(Inside(), data())


def test_several_hops_inside_one_layer_each_travel() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GatedGraphConv(12, 2)

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.conv(x, edge_index)

    found, _ = foreseen(Gated(), data())
    assert len(found["nodes"]) == 2
