"""A layer refuses an x of another width before any kernel reads it, in the caller's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    CGConv,
    EdgeConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GMMConv,
    GraphConv,
    MixHopConv,
    PNAConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    SuperGATConv,
    TAGConv,
    TransformerConv,
)

import plait
from plait.errors import InputError
from plait.kernels.gemm import gemm

EDGES = torch.tensor([[0, 1, 2, 5], [1, 2, 9, 4]])
LAYERS = [
    GATConv(8, 2, heads=2),
    GATv2Conv(8, 2, heads=2),
    TransformerConv(8, 2, heads=2),
    TransformerConv(8, 64, heads=2),
    ResGatedGraphConv(8, 4),
    PNAConv(8, 4, ["mean", "max"], ["identity"], torch.ones(4)),
    EdgeConv(nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))),
    GCNConv(8, 4),
    SAGEConv(8, 4),
    GINConv(nn.Linear(8, 4)),
    GraphConv(8, 4),
    TAGConv(8, 4),
]


@pytest.mark.parametrize("width", [4, 12])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_another_width_is_an_error_that_names_both(layer: nn.Module, width: int) -> None:
    with pytest.raises(InputError, match=f"x has {width} columns, the layer takes 8"):
        plait.compile(layer, None)(torch.randn(10, width), EDGES)


def test_relations_and_pairs_are_checked_too() -> None:
    with pytest.raises(InputError, match="x has 4 columns"):
        plait.compile(RGCNConv(8, 4, 2), None)(torch.randn(10, 4), EDGES, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(InputError, match="x of the targets has 5 columns, the layer takes 6"):
        plait.compile(SAGEConv((8, 6), 4), None)((torch.randn(10, 8), torch.randn(10, 5)), EDGES)
    with pytest.raises(InputError, match="x has 5 columns, the layer takes 6"):
        plait.compile(GATv2Conv((8, 6), 2), None)((torch.randn(10, 8), torch.randn(10, 5)), EDGES)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize(
    "layer",
    [
        GENConv(8, 8, edge_dim=2),
        CGConv(8, 2),
        TransformerConv(8, 2, heads=2, edge_dim=2),
        ResGatedGraphConv(8, 4, edge_dim=2),
        PNAConv(8, 4, ["mean", "max"], ["identity"], torch.ones(4), edge_dim=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_edge_has_its_row_of_features(layer: nn.Module, rows: int, is_sorted: bool) -> None:
    edges = EDGES[:, EDGES[1].argsort()] if is_sorted else EDGES
    with pytest.raises(InputError, match=f"edge_attr: {rows} rows for 4 edges"):
        plait.compile(layer, None)(torch.randn(10, 8), edges, torch.randn(rows, 2))


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize(
    "layer",
    [
        GMMConv(8, 4, dim=2, kernel_size=2),
        PNAConv(8, 4, ["mean", "max"], ["identity"], torch.ones(4), edge_dim=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_edge_features_of_another_width_are_pygs_to_refuse(layer: nn.Module, width: int) -> None:
    given = torch.randn(10, 8), EDGES, torch.randn(4, width)
    assert isinstance(answered(layer, *given), str)
    assert answered(plait.compile(layer, None), *given) == answered(layer, *given)


def test_edge_features_of_another_width_are_pygs_to_refuse_without_edges_too() -> None:
    given = torch.randn(10, 8), EDGES[:, :0], torch.randn(0, 1)
    assert isinstance(answered(CGConv(8, 2), *given), str)
    assert isinstance(answered(plait.compile(CGConv(8, 2), None), *given), str)


def answered(model: nn.Module, *given: Tensor) -> Tensor | str:
    try:
        out: Tensor = model(*given)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return out


MADE_WIDER: list[tuple[Any, str]] = [
    (lambda: SuperGATConv(8, 2, heads=2, bias=False, attention_type="SD"), "lin"),
    (lambda: GATConv(8, 2, heads=2, bias=False), "lin"),
    (lambda: GATv2Conv(8, 2, heads=2, bias=False), "lin_l"),
    (lambda: GATv2Conv(8, 2, heads=2, bias=False), "lin_r"),
    (lambda: TransformerConv(8, 2, heads=2, root_weight=False, bias=False), "lin_query"),
    (lambda: TransformerConv(8, 2, heads=2), "lin_skip"),
    (lambda: TransformerConv(8, 2, heads=2, concat=False), "lin_skip"),
    (lambda: ResGatedGraphConv(8, 4), "lin_key"),
    (lambda: ResGatedGraphConv(8, 4), "lin_skip"),
    (lambda: FiLMConv(8, 4, 2), "lins.1"),
]


@pytest.mark.parametrize("what", ["weight", "module"])
@pytest.mark.parametrize(("make", "name"), MADE_WIDER, ids=lambda value: value if type(value) is str else "")
def test_a_linear_map_inside_that_makes_wider_rows_is_pygs_to_apply(make: Any, name: str, what: str) -> None:
    # some layers cut such rows into more rows, and answer for another number of nodes
    layer = make().eval()
    linear = layer.get_submodule(name)
    wider = nn.Linear(8, 2 * linear.weight.shape[0], bias=linear.bias is not None)
    if what == "weight":
        linear.weight, linear.bias = wider.weight, wider.bias
    else:
        layer.set_submodule(name, wider)
    given = torch.randn(10, 8), EDGES, *([torch.tensor([0, 1, 0, 1])] * (name == "lins.1"))
    expected, found = answered(layer, *given), answered(plait.compile(layer), *given)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("make", "name", "rows"), [(SAGEConv, "lin_l", 1), (MixHopConv, "lins.0", 8)])
def test_a_weight_of_another_size_inside_is_pygs_to_apply(make: Any, name: str, rows: int) -> None:
    layer = make(8, 4, bias=False)
    layer.get_submodule(name).weight = nn.Parameter(torch.randn(rows, 8))
    x = torch.randn(10, 8)
    torch.testing.assert_close(plait.compile(layer)(x, EDGES), layer(x, EDGES))


def test_a_dense_product_reads_nothing_beyond_its_operands() -> None:
    with pytest.raises(InputError, match="x has 3 columns, w 4 rows"):
        gemm(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2, 5))


@pytest.mark.parametrize("layer", [GCNConv(8, 4), GATConv(8, 4), GINConv(nn.Linear(8, 4))])
def test_arguments_that_forward_does_not_take_are_refused_as_in_pyg(layer: nn.Module) -> None:
    x, compiled = torch.randn(10, 8), plait.compile(layer, None)
    for _ in range(2):  # before the layer's call is known, and after
        for args, named in (((x, EDGES), {"edge_wieght": torch.ones(4)}), ((x, EDGES), {"x": x}),
                            ((x, EDGES, None, None, None, None), {})):  # fmt: skip
            for model in (layer, compiled):
                with pytest.raises(TypeError):
                    model(*args, **named)
        compiled(x, EDGES)
