"""Layers that are more than a matrix expression, one small case for each option that is planned on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import (
    AGNNConv,
    CGConv,
    EdgeConv,
    FAConv,
    FiLMConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GENConv,
    GMMConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SuperGATConv,
    TransformerConv,
)

__all__ = ["FAMILIES", "WIDTH", "Family"]

WIDTH = 6
HISTOGRAM = torch.tensor([2, 3, 5, 8, 6, 4, 2, 1, 1])


@dataclass(frozen=True)
class Family:
    """A layer and what it takes beside x and the edges: columns of features of edges, how many relations."""

    make: Callable[[], Any]
    edge_width: int | None = None
    relations: int = 0
    takes_first: bool = False  # FAConv: x_0


def pna(*names: str, scalers: tuple[str, ...] = ("identity", "attenuation"), **options: Any) -> PNAConv:
    layer = PNAConv(WIDTH, 4, list(names), list(scalers), HISTOGRAM, **options)
    layer.aggr_module.reset_parameters()
    return layer


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


FAMILIES: dict[str, Family] = {
    "PNAConv": Family(lambda: pna("mean", "min", "max", "std")),
    "PNAConv all": Family(
        lambda: pna("mean", "sum", "var", "std", "max", "min", scalers=("linear", "amplification"))
    ),
    "PNAConv towers": Family(lambda: pna("max", "std", towers=2, divide_input=True)),
    "PNAConv edges": Family(lambda: pna("mean", "max", "std", edge_dim=3), edge_width=3),
    "PNAConv layers": Family(lambda: pna("sum", "min", pre_layers=2)),
    "RGCNConv": Family(lambda: RGCNConv(WIDTH, 5, 3), relations=3),
    "RGCNConv bases": Family(lambda: RGCNConv(WIDTH, 5, 4, num_bases=2), relations=4),
    "RGCNConv blocks": Family(lambda: RGCNConv(WIDTH, 4, 3, num_blocks=2, aggr="add"), relations=3),
    "EdgeConv linear": Family(lambda: EdgeConv(nn.Linear(2 * WIDTH, 5), aggr="max")),
    "EdgeConv rectified": Family(
        lambda: EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 7), nn.ReLU(), nn.Linear(7, 5)), aggr="mean")
    ),
    "EdgeConv max": Family(lambda: EdgeConv(mlp(2 * WIDTH, 7, 5), aggr="max")),
    "EdgeConv sum": Family(lambda: EdgeConv(mlp(2 * WIDTH, 7, 9, 5), aggr="sum")),
    "GENConv": Family(lambda: GENConv(WIDTH, 5, norm="layer", learn_t=True)),
    "GENConv edges": Family(lambda: GENConv(WIDTH, 5, norm="layer", edge_dim=3), edge_width=3),
    "GENConv power": Family(lambda: GENConv(WIDTH, WIDTH, norm="layer", aggr="powermean", p=2.0)),
    "FiLMConv": Family(lambda: FiLMConv(WIDTH, 5)),
    "FiLMConv relations": Family(lambda: FiLMConv(WIDTH, 5, num_relations=3), relations=3),
    "FiLMConv linear": Family(lambda: FiLMConv(WIDTH, 5, act=None)),
    "CGConv": Family(lambda: CGConv(WIDTH)),
    "CGConv edges": Family(lambda: CGConv(WIDTH, dim=3, aggr="mean"), edge_width=3),
    "GatedGraphConv": Family(lambda: GatedGraphConv(WIDTH + 1, 2)),
    "ResGatedGraphConv edges": Family(lambda: ResGatedGraphConv(WIDTH, 5, edge_dim=3), edge_width=3),
    "ResGatedGraphConv": Family(lambda: ResGatedGraphConv(WIDTH, 5)),
    "GATConv": Family(lambda: GATConv(WIDTH, 5, heads=3)),
    "GATConv edges": Family(lambda: GATConv(WIDTH, 5, heads=3, edge_dim=2), edge_width=2),
    "GATConv many heads": Family(lambda: GATConv(WIDTH, 2, heads=17)),
    "GATv2Conv": Family(lambda: GATv2Conv(WIDTH, 5, heads=3)),
    "GATv2Conv edges": Family(lambda: GATv2Conv(WIDTH, 5, heads=3, edge_dim=2), edge_width=2),
    "TransformerConv edges": Family(lambda: TransformerConv(WIDTH, 5, heads=3, edge_dim=2), edge_width=2),
    "AGNNConv": Family(lambda: AGNNConv()),
    "SuperGATConv": Family(lambda: SuperGATConv(WIDTH, 5, heads=3).eval()),
    "SuperGATConv SD": Family(lambda: SuperGATConv(WIDTH, 5, heads=2, attention_type="SD").eval()),
    "FAConv": Family(lambda: FAConv(WIDTH), takes_first=True),
    "GMMConv": Family(lambda: GMMConv(WIDTH, 5, dim=3, kernel_size=2), edge_width=3),
}  # fmt: skip
