"""pyg/checkpoints.py: a checkpoint runs its function twice, and the second time plait decides as before.

torch compares what the two runs save, and raises CheckpointError where plait changed its mind in between.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GCNConv,
    MixHopConv,
    SAGEConv,
    Sequential,
    SGConv,
    SSGConv,
    TAGConv,
)

import plait

NODES, WIDTH = 30, 16
EDGES = torch.randint(0, NODES, (2, 90), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: GCNConv(WIDTH, 2),
    "SAGEConv": lambda: SAGEConv(WIDTH, 2),
    "SGConv": lambda: SGConv(WIDTH, 2),
    "TAGConv": lambda: TAGConv(WIDTH, 2),
    "SSGConv": lambda: SSGConv(WIDTH, 2, alpha=0.1),
}
Run = Callable[[Any], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def agrees(model: nn.Module, compiled: nn.Module, run: Run) -> None:
    """The gradients of what `run` makes of the compiled model are those of PyG's."""
    plain = copy.deepcopy(model)
    compiled.zero_grad()
    for net in (plain, compiled):
        run(net).square().sum().backward()
    for (name, mine), other in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


def twice(*arguments: Any) -> Run:
    return lambda net: checkpoint(net, *arguments, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_is_found_to_stay_the_same_between_the_runs(name: str) -> None:
    model, x = LAYERS[name](), X.clone()
    compiled = plait.compile(model, Data(x=x, edge_index=EDGES))
    compiled(x, EDGES)
    for _ in range(2):  # it keeps changing, and has to come back often before it is trusted again
        x.mul_(0.5)
        compiled(x, EDGES)
    for _ in range(6):
        agrees(model, compiled, twice(x, EDGES))


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_comes_back_between_the_runs(name: str) -> None:
    model = LAYERS[name]()
    compiled = plait.compile(model, Data(x=X, edge_index=EDGES))
    for _ in range(6):  # from some number of graphs on each is planned for as one that comes once
        agrees(model, compiled, twice(X, EDGES.clone()))


@pytest.mark.parametrize("name", [*LAYERS, "GATConv"])
def test_graphs_are_forgotten_between_the_runs(name: str) -> None:
    model = GATConv(WIDTH, 2, heads=2) if name == "GATConv" else LAYERS[name]()
    compiled = plait.compile(model, Data(x=X, edge_index=EDGES))
    graphs = [torch.randint(0, NODES, (2, 2**k)) for k in range(5)] + [EDGES.clone() for _ in range(20)]
    agrees(model, compiled, lambda net: torch.cat([twice(X, edges)(net) for edges in graphs]))


def test_plans_are_dropped_between_the_runs() -> None:
    layers = [(GCNConv(WIDTH, 8), "x, e -> x"), (GATConv(8, 4), "x, e -> x")]
    model = Sequential("x, e", layers)
    compiled: Any = plait.compile(model)

    def run(net: Any) -> Tensor:
        out = twice(X, EDGES)(net)
        session = compiled._plait_plan_session
        for layer in [*session.plans]:
            session.forget(layer)
        return out

    agrees(model, compiled, run)


def test_rows_stop_paying_between_the_runs() -> None:
    model = GCNConv(WIDTH, 4)
    rows = torch.arange(NODES) % 2 == 1
    compiled = plait.compile(model, Data(x=X, edge_index=EDGES), rows=rows, mode="training")
    for _ in range(6):
        agrees(
            model,
            compiled,
            lambda net: twice(X, EDGES)(lambda *given: net(*given).softmax(0) * rows[:, None]),
        )


def test_constants_of_a_cached_layer_are_dropped_by_another_one() -> None:
    """Weights that changed in place: the layer behind makes its constants anew, and drops the old ones."""
    model = Sequential("x, e, w", [
        (APPNP(2, 0.1, cached=True, add_self_loops=False), "x, e, w -> x"),
        (MixHopConv(WIDTH, 4, powers=[0, 1], add_self_loops=False), "x, e, w -> x"),
    ])  # fmt: skip
    compiled: nn.Module = plait.compile(model)
    x, weight = X.clone().requires_grad_(), torch.rand(EDGES.shape[1])
    compiled(x, EDGES, weight)
    compiled(x, EDGES, weight)
    weight.mul_(0.5)
    agrees(model, compiled, twice(x, EDGES, weight))


def test_a_layer_called_twice_follows_its_own_notes() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GCNConv(WIDTH, WIDTH, cached=True)  # made in PyG, then planned

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.layer(self.layer(x, edge_index).tanh(), edge_index)
            return out

    model = Twice()
    agrees(model, plait.compile(copy.deepcopy(model)), twice(X, EDGES))


def test_checkpoints_in_checkpoints_and_in_hooks_of_others() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (GCNConv(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.first(x, edge_index).tanh()
            x = checkpoint(self.second, x, edge_index, use_reentrant=False).tanh()
            with torch.autograd.graph.save_on_cpu():
                x = self.second(x, edge_index).tanh()
            out: Tensor = self.third(x, edge_index)
            return out

    model = Nested()
    compiled = plait.compile(model)
    for _ in range(3):
        agrees(model, compiled, twice(X, EDGES.clone()))
    agrees(model, compiled, lambda net: net(X, EDGES))
