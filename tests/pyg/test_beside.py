"""Operations beside layers, noted while a model is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_geometric.nn import GAT, GCN, GCNConv

from plait.pyg.beside import beside
from plait.pyg.call import Call


def called(model: nn.Module, mode: str = "training") -> Any:
    torch.manual_seed(0)
    x, edges = torch.randn(50, 12), torch.randint(0, 50, (2, 200))
    return beside(model, Call((x, edges)), mode)


class Headed(nn.Module):
    """A dense layer behind a layer of the graph, and views between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = GCNConv(12, 16), nn.Linear(8, 4)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.head(self.conv(x, edge_index)[:, :8].relu())


def test_activations_between_layers_are_noted_after_the_first() -> None:
    found = called(GCN(12, 8, 2, 4))
    assert found.layers == ("convs.0 GCNConv", "convs.1 GCNConv")
    (only,) = found.after["convs.0 GCNConv"]
    assert (only.bytes_in, only.bytes_out, only.product) == (50 * 8 * 4, 50 * 8 * 4, None)
    assert "convs.1 GCNConv" not in found.after
    assert found.width == 4
    assert found.plan_seconds > 0


def test_views_cost_nothing_and_products_are_known() -> None:
    found = called(Headed())
    relu, linear = found.after["conv GCNConv"]
    assert relu.product is None
    assert relu.name == "relu"
    assert linear.product == (50, 4, 8)
    assert found.width == 4


def test_the_mean_over_heads_follows_its_layer() -> None:
    found = called(GAT(12, 8, 2, 4, heads=2))
    assert found.width == 4
    assert found.after["convs.1 GATConv"]


def test_without_gradients_nothing_inside_layers_is_noted() -> None:
    found = called(GCN(12, 8, 2, 4).eval(), "inference")
    assert list(found.after) == ["convs.0 GCNConv"]
    assert not found.after["convs.0 GCNConv"][0].has_gradient
