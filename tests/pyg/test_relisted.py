"""pyg/relisted.py: a call on a new graph like the last one is not looked at in full, one that differs is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import plait
from plait.pyg import planned

NODES, WIDTH = 30, 6
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(WIDTH, 4),
    "sage": lambda: SAGEConv(WIDTH, 4),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 3)), eps=0.3),
    "gat": lambda: GATConv(WIDTH, 4),  # has no list of edges
}


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_ASIDE", "0")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of layers that were looked at in full."""
    seen, real = [0], planned._here

    def here(*args: Any) -> Any:
        seen[0] += 1
        return real(*args)

    monkeypatch.setattr(planned, "_here", here)
    return seen


def graph(seed: int, edges: int = 80) -> Tensor:
    return torch.randint(0, NODES, (2, edges), generator=torch.Generator().manual_seed(seed))


def features(seed: int) -> Tensor:
    return torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: Any, x: Tensor, *rest: Tensor) -> list[Tensor]:
    """The output and all gradients of a call."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x, *rest)
    out.backward(torch.ones_like(out))
    made = [x.grad, *(p.grad for p in model.parameters())]
    return [out.detach(), *(grad for grad in made if grad is not None)]


def settled(model: nn.Module) -> Any:
    """The compiled model after so many graphs that a new one is assumed to come once."""
    compiled = plait.compile(model)
    for seed in range(8):
        gradients(compiled, features(seed), graph(seed))
        with torch.no_grad():
            compiled(features(seed), graph(seed + 100))
    return compiled


def check(model: nn.Module, compiled: Any, seed: int, edges: int = 80) -> None:
    """Results of the next call are PyG's."""
    x, edge_index = features(seed), graph(seed, edges)
    torch.testing.assert_close(gradients(compiled, x, edge_index), gradients(model, x, edge_index.clone()))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index.clone()))


@pytest.mark.parametrize("name", LAYERS)
def test_new_graphs_of_any_size_are_not_looked_at_in_full(name: str, count: list[int]) -> None:
    model = LAYERS[name]()
    compiled, before = settled(model), count[0]
    for seed, edges in enumerate((80, 3, 81, 200, 0), 20):
        check(model, compiled, seed, edges)
    assert (count[0] == before) is (name != "gat")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another weight": lambda layer: setattr(layer, "lin", type(layer.lin)(WIDTH, 4, bias=False)),
    "a hook": lambda layer: layer.register_forward_hook(lambda *given: given[-1] * 2),
    "a hook inside": lambda layer: layer.lin.register_forward_hook(lambda *given: given[-1] * 2),
    "an option": lambda layer: setattr(layer, "add_self_loops", False),
    "a method": lambda layer: setattr(layer, "message", lambda x_j, edge_weight: 2 * x_j),
    "the type": lambda layer: layer.double(),
    "values in place": lambda layer: layer.lin.weight.data.mul_(2),
    "the weight's size": lambda layer: setattr(layer.lin.weight, "data", torch.randn(4, WIDTH)),
    "frozen": lambda layer: layer.requires_grad_(False),
    "evaluation": lambda layer: layer.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_the_layer_is_seen(name: str) -> None:
    layer = GCNConv(WIDTH, 4)
    compiled = settled(layer)
    CHANGES[name](layer)
    for seed in (20, 21):
        x, edge_index = features(seed).to(layer.lin.weight.dtype), graph(seed)
        torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index.clone()))


def test_edges_that_change_in_place_or_do_not_fit_are_seen() -> None:
    model = SAGEConv(WIDTH, 4)
    compiled, edge_index, x = settled(model), graph(20), features(20)
    for row in range(4):
        edge_index[:, row] = row
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index.clone()))
    wrong = graph(21)
    wrong[0, 3] = NODES
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        compiled(x, wrong)


def test_other_arguments_are_looked_at_in_full(count: list[int]) -> None:
    model = GCNConv(WIDTH, 4)
    compiled = settled(model)
    for seed in range(20, 24):
        x, edge_index, weight = features(seed), graph(seed), torch.rand(80)
        before = count[0]
        torch.testing.assert_close(compiled(x, edge_index, weight), model(x, edge_index, weight))
        assert count[0] == before + 1


def test_a_watched_call_runs_in_pyg() -> None:
    model = GCNConv(WIDTH, 4)
    compiled, calls = settled(model), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: calls.append(given[0]))
    try:
        compiled(features(20), graph(20))
    finally:
        handle.remove()
    assert model.lin in calls


def test_an_input_that_is_written_to_before_the_backward_pass_is_copied() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, WIDTH).requires_grad_(False)  # PyG's keeps nothing of h then

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = x * 1.0
            h += self.conv(h, edge_index)
            return h

    model = Added()
    compiled = settled(model)
    for seed in (20, 21):
        check(model, compiled, seed)
