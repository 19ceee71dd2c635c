"""pyg/learned.py: edge weights that want a gradient get PyG's, through the normalisation too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    GCNConv,
    GraphConv,
    LEConv,
    LGConv,
    MixHopConv,
    SGConv,
    SSGConv,
    TAGConv,
)

import plait

WIDTH = 5
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(WIDTH, 4),
    "GCN wider": lambda: GCNConv(WIDTH, 9),
    "GCN plain": lambda: GCNConv(WIDTH, 4, normalize=False),
    "GCN without loops": lambda: GCNConv(WIDTH, 4, add_self_loops=False),
    "GCN improved": lambda: GCNConv(WIDTH, 4, improved=True),
    "GraphConv": lambda: GraphConv(WIDTH, 4),
    "GraphConv mean": lambda: GraphConv(WIDTH, 4, aggr="mean"),
    "SG": lambda: SGConv(WIDTH, 4, K=2),
    "SSG": lambda: SSGConv(WIDTH, 4, 0.2, K=2),
    "LG": LGConv,
    "APPNP": lambda: APPNP(3, 0.2),
    "TAG": lambda: TAGConv(WIDTH, 4, K=2),
    "MixHop": lambda: MixHopConv(WIDTH, 4),
    "ARMA": lambda: ARMAConv(WIDTH, 4, num_stacks=2, num_layers=2),
    "Cheb": lambda: ChebConv(WIDTH, 4, K=3),
    "LE": lambda: LEConv(WIDTH, 4),
}
GRAPHS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "usual": (6, [(0, 1), (1, 2), (2, 0), (3, 1), (4, 5), (5, 4), (0, 4)]),
    "loops and repeats": (4, [(0, 0), (0, 1), (0, 1), (2, 2), (2, 2), (1, 0), (3, 1)]),
    "hub and isolated": (7, [(1, 0), (2, 0), (3, 0), (4, 0), (0, 1)]),
    "no edges": (3, []),
    "one node": (1, [(0, 0)]),
}


def gradients(layer: nn.Module, x: Tensor, edge_index: Tensor, weight: Tensor) -> list[Tensor | None]:
    wanted = [x, weight, *layer.parameters()]
    out = layer(x, edge_index, weight)
    seeds = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, wanted, seeds, allow_unused=True)]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_edge_weights_are_those_of_pyg(name: str, graph: str) -> None:
    torch.manual_seed(0)
    layer, (nodes, pairs) = LAYERS[name]().double(), GRAPHS[graph]
    edge_index = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t().contiguous()
    x = torch.randn(nodes, WIDTH, dtype=torch.double, requires_grad=True)
    weight = (0.5 + torch.rand(len(pairs), dtype=torch.double)).requires_grad_()
    model = plait.compile(layer)
    for _ in range(2):
        made, expected = gradients(model, x, edge_index, weight), gradients(layer, x, edge_index, weight)
        for one, other in zip(made, expected, strict=True):
            none = torch.zeros(())
            torch.testing.assert_close(
                none if one is None or one.numel() == 0 else one,
                none if other is None or other.numel() == 0 else other,
                rtol=1e-8, atol=1e-10, equal_nan=True, check_dtype=False,
            )  # fmt: skip
    if name in ("GCN", "GraphConv", "APPNP"):
        assert model.plan.layers, model.plan


def test_weights_may_themselves_be_computed() -> None:
    torch.manual_seed(0)
    layer = GCNConv(WIDTH, 4).double()
    model, edge_index = plait.compile(layer), torch.randint(0, 9, (2, 30))
    x, theta = (
        torch.randn(9, WIDTH, dtype=torch.double),
        torch.randn(30, dtype=torch.double, requires_grad=True),
    )
    grads = [
        torch.autograd.grad(net(x, edge_index, theta.sigmoid()).square().sum(), theta)
        for net in (model, layer)
    ]
    torch.testing.assert_close(*grads)


def test_second_derivatives_are_those_of_pyg() -> None:
    torch.manual_seed(0)
    layer = GCNConv(3, 2).double()
    model, edge_index = plait.compile(layer), torch.randint(0, 5, (2, 9))
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    weight = (0.5 + torch.rand(9, dtype=torch.double)).requires_grad_()
    found = []
    for net in (model, layer):
        (first,) = torch.autograd.grad(net(x, edge_index, weight).square().sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_without_gradients_the_weights_are_a_constant_of_the_call() -> None:
    torch.manual_seed(0)
    layer = GCNConv(WIDTH, 4)
    model, edge_index = plait.compile(layer), torch.randint(0, 9, (2, 30))
    x, weight = torch.randn(9, WIDTH), torch.rand(30, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x, edge_index, weight), layer(x, edge_index, weight))
            weight.mul_(1.5)


def test_the_backward_pass_has_its_graph_after_the_model_dropped_it() -> None:
    torch.manual_seed(0)
    layer = LGConv(normalize=False)
    model = plait.compile(layer)
    x, weight = torch.randn(9, WIDTH, requires_grad=True), torch.rand(30, requires_grad=True)
    edge_index = torch.randint(0, 9, (2, 30))
    expected = torch.autograd.grad(layer(x, edge_index, weight).square().sum(), [x, weight])
    loss = model(x, edge_index, weight).square().sum()
    del edge_index
    model(x, torch.randint(0, 9, (2, 30)), weight)
    for one, other in zip(torch.autograd.grad(loss, [x, weight]), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["GCN", "APPNP", "LG"])
def test_gradients_of_several_directions_at_once(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    model, edge_index = plait.compile(layer), torch.randint(0, 9, (2, 30))
    x = torch.randn(9, WIDTH, dtype=torch.double, requires_grad=True)
    weight = torch.rand(30, dtype=torch.double, requires_grad=True)
    found = []
    for net in (model, layer):
        out = net(x, edge_index, weight)
        directions = torch.stack([torch.ones_like(out), 2 * out.detach()])
        found.append(torch.autograd.grad(out, [x, weight], directions, is_grads_batched=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_layers_that_share_their_weights_are_differentiated_one_by_one() -> None:
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([GCNConv(WIDTH, 4), GCNConv(WIDTH, 3)])

        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> list[Tensor]:
            return [layer(x, edge_index, weight) for layer in self.layers]

    layer = Both().double()
    model, edge_index = plait.compile(layer), torch.randint(0, 9, (2, 30))
    x = torch.randn(9, WIDTH, dtype=torch.double)
    weight = (0.5 + torch.rand(30, dtype=torch.double)).requires_grad_()
    found = []
    for net in (model, layer):
        outs = net(x, edge_index, weight)
        found.append([torch.autograd.grad(out.square().sum(), weight)[0] for out in outs])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_that_was_changed_between_calls_is_looked_at_again() -> None:
    torch.manual_seed(0)
    layer = GCNConv(WIDTH, 4).double()
    model, edge_index = plait.compile(layer), torch.randint(0, 9, (2, 30))
    x = torch.randn(9, WIDTH, dtype=torch.double)
    weight = (0.5 + torch.rand(30, dtype=torch.double)).requires_grad_()
    for change in (
        lambda: None,
        lambda: setattr(layer, "improved", True),
        lambda: setattr(layer, "bias", None),
    ):
        change()
        for _ in range(3):
            torch.testing.assert_close(model(x, edge_index, weight), layer(x, edge_index, weight))
