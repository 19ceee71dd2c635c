"""Graphs that come once: the same results as PyG, without sorting; those that come back are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    MixHopConv,
    SAGEConv,
    SGConv,
    TAGConv,
)

import plait
from plait.pyg import once

NODES, WIDTH = 30, 6
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(WIDTH, 4),
    "gcn, wider": lambda: GCNConv(WIDTH, 9),
    "gcn, improved": lambda: GCNConv(WIDTH, 4, improved=True),
    "gcn, own loops": lambda: GCNConv(WIDTH, 4, add_self_loops=False),
    "gcn, plain": lambda: GCNConv(WIDTH, 4, normalize=False, bias=False),
    "sage": lambda: SAGEConv(WIDTH, 4),
    "sage, sum": lambda: SAGEConv(WIDTH, 4, aggr="sum", root_weight=False),
    "sage, max": lambda: SAGEConv(WIDTH, 4, aggr="max"),
    "sage, backwards": lambda: SAGEConv(WIDTH, 4, flow="target_to_source"),
    "graph conv": lambda: GraphConv(WIDTH, 4),
    "gin": lambda: GINConv(nn.Linear(WIDTH, 4)),
    "gin, eps": lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 3)), eps=0.3),
    "gin, learned eps": lambda: GINConv(nn.Linear(WIDTH, 4), train_eps=True),
    "sg": lambda: SGConv(WIDTH, 4, K=2),
    "lg": lambda: LGConv(),
    "appnp": lambda: APPNP(K=3, alpha=0.2),
    "tag": lambda: TAGConv(WIDTH, 4, K=2),
    "mixhop": lambda: MixHopConv(WIDTH, 4),
}
WEIGHTED = ("gcn", "gcn, improved", "gcn, own loops", "graph conv", "sg", "lg", "appnp")


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_ASIDE", "0")


def session_of(model: Any) -> Any:
    return model._plait_plan_session


def graph(seed: int, edges: int = 80) -> Tensor:
    """Random edges with loops and repeats among them."""
    made = torch.randint(0, NODES, (2, edges), generator=torch.Generator().manual_seed(seed))
    return torch.cat([made, made[:, :5], torch.arange(4).repeat(2, 1)], dim=1)


def settled(model: nn.Module, *rest: Tensor) -> nn.Module:
    """The compiled model after so many graphs that each new one is taken to come once."""
    compiled: nn.Module = plait.compile(model)
    for seed in range(6):
        edges = graph(seed)
        compiled(torch.randn(NODES, WIDTH), edges, *(one[: edges.shape[1]] for one in rest))
    return compiled


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_pygs(
    name: str, wants: bool, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_wide:  # as many columns as entries are grouped by row for
        monkeypatch.setattr(once, "_LEAST_GROUPED", 1)
    model = LAYERS[name]()
    compiled = settled(model)
    edges, x = graph(100), torch.randn(NODES, WIDTH)
    found = []
    for way in (model, compiled):
        own = x.clone().requires_grad_(wants)
        model.zero_grad()
        out = way(own, edges)
        if out.requires_grad:
            out.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([out.detach(), *gradients, *([own.grad] if wants else [])])
    assert len(found[0]) == len(found[1])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_read_in_the_callers_order(
    name: str, is_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_wide:
        monkeypatch.setattr(once, "_LEAST_GROUPED", 1)
    model = LAYERS[name]()
    weight = torch.rand(graph(0).shape[1]) + 0.1
    compiled = settled(model, weight)
    edges, x = graph(100), torch.randn(NODES, WIDTH)
    built = session_of(compiled)._met
    torch.testing.assert_close(compiled(x, edges, weight), model(x, edges, weight), rtol=1e-4, atol=1e-5)
    assert session_of(compiled)._met == built


def test_nothing_is_sorted_for_a_graph_that_comes_once() -> None:
    compiled = settled(nn.ModuleList([GCNConv(WIDTH, 4)])[0])
    built = session_of(compiled)._met
    for seed in range(100, 110):
        compiled(torch.randn(NODES, WIDTH), graph(seed))
    assert session_of(compiled)._met == built
    assert "seen only once" in str(compiled.plan)


def test_a_graph_that_comes_back_is_planned() -> None:
    compiled = settled(GCNConv(WIDTH, 4))
    built, edges, x = session_of(compiled)._met, graph(100), torch.randn(NODES, WIDTH)
    outputs = [compiled(x, edges) for _ in range(4)]
    assert session_of(compiled)._met == built + 1
    for out in outputs:
        torch.testing.assert_close(out, outputs[0])


def test_a_layer_that_is_called_twice_in_one_call_reads_the_same_list() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, WIDTH)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for _ in range(5):
                x = self.conv(x, edge_index)
            return x

    model = Twice()
    compiled = settled(model)
    built, edges, x = session_of(compiled)._met, graph(100), torch.randn(NODES, WIDTH)
    torch.testing.assert_close(compiled(x, edges), model(x, edges))
    assert session_of(compiled)._met == built


def test_edges_changed_in_place_are_seen() -> None:
    model = GCNConv(WIDTH, 4)
    compiled, x = settled(model), torch.randn(NODES, WIDTH)
    edges = graph(100)
    for _ in range(6):
        torch.testing.assert_close(compiled(x, edges), model(x, edges))
        edges[1, 3] = (edges[1, 3] + 1) % NODES
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, edges), model(x, edges))
        edges[0, 7] = (edges[0, 7] + 1) % NODES
        torch.testing.assert_close(compiled(x, edges), model(x, edges))


def test_edges_out_of_range_are_refused_as_before() -> None:
    compiled = settled(GCNConv(WIDTH, 4))
    edges = graph(100)
    edges[0, 3] = NODES
    with pytest.raises(Exception, match=str(NODES)):
        compiled(torch.randn(NODES, WIDTH), edges)


@pytest.mark.parametrize("width", [1, 33])
def test_odd_graphs(width: int) -> None:
    model = GCNConv(width, 3)
    compiled = plait.compile(model)
    for seed in range(6):
        compiled(torch.randn(NODES, width), graph(seed))
    hub = torch.stack([torch.arange(NODES), torch.zeros(NODES, dtype=torch.long)])
    for edges in (torch.empty((2, 0), dtype=torch.long), hub, hub.flip(0), torch.zeros((2, 9)).long()):
        x = torch.randn(NODES, width, requires_grad=True)
        ours, theirs = compiled(x, edges), model(x, edges)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        by = [x, *model.parameters()]
        for one, other in zip(
            torch.autograd.grad(ours.sum(), by), torch.autograd.grad(theirs.sum(), by), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_second_derivatives_and_batched_gradients(name: str) -> None:
    model = LAYERS[name]()
    compiled = settled(model)
    edges, x = graph(100), torch.randn(NODES, WIDTH, requires_grad=True)
    found = []
    for way in (model, compiled):
        out = way(x, edges)
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        out = way(x, edges)
        (batched,) = torch.autograd.grad(
            out, x, torch.eye(4).unsqueeze(1).expand(4, NODES, 4), is_grads_batched=True
        )
        found.append((second, batched))
    for theirs, ours in zip(*found, strict=True):
        # cubes reach 10^5, and elements near 0 are differences of such numbers
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6 * float(theirs.abs().max()) + 1e-4)


def test_double_precision_and_half() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = GCNConv(WIDTH, 4).to(dtype)
        compiled = plait.compile(model)
        for seed in range(8):
            x = torch.randn(NODES, WIDTH).to(dtype)
            ours, theirs = compiled(x, graph(seed)), model(x, graph(seed))
            torch.testing.assert_close(
                ours, theirs, rtol=5e-2 if dtype == torch.bfloat16 else 1e-9, atol=5e-2
            )


def test_weights_that_keep_changing_are_not_planned_for() -> None:
    model = GCNConv(WIDTH, 4)
    compiled: Any = plait.compile(model)
    edges, x = graph(0), torch.randn(NODES, WIDTH)
    for k in range(20):
        weight = torch.rand(edges.shape[1]) + 0.1
        found = []
        for way in (model, compiled):
            model.zero_grad()
            own = x.clone().requires_grad_(k % 2 == 1)
            out = way(own, edges, weight)
            out.square().sum().backward()
            found.append([out.detach(), own.grad, *(p.grad.clone() for p in model.parameters())])
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (known,) = session_of(compiled).edges.values()
    assert known.num_weights == 8
    for _ in range(3):  # these come back
        compiled(x, edges, weight)
    assert known.num_weights == 9


def test_weights_that_come_once_may_come_with_two_graphs() -> None:
    model = GCNConv(WIDTH, 4)
    compiled: Any = plait.compile(model)
    graphs, x = [graph(0), graph(1)], torch.randn(NODES, WIDTH)
    for k in range(24):
        weight = torch.rand(graphs[0].shape[1]) + 0.1
        for edges in graphs[:: 1 if k % 2 else -1]:
            torch.testing.assert_close(
                compiled(x, edges, weight), model(x, edges, weight), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("seed", range(6))
def test_graphs_and_weights_that_come_go_change_and_come_back(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=draw))

    name = WEIGHTED[pick(len(WEIGHTED))]
    model = LAYERS[name]()
    compiled, known = plait.compile(model), [(graph(0), torch.rand(graph(0).shape[1]) + 0.1)]
    for step in range(40):
        if pick(3):
            edges = graph(100 * seed + step, 20 + pick(60))
            known.append((edges, torch.rand(edges.shape[1]) + 0.1))
        edges, weight = known[-1 - pick(min(3, len(known)))]
        change = pick(4)
        if change == 0:
            edges[pick(2), pick(20)] = pick(NODES)
        elif change == 1:
            weight.mul_(1.5)
        rest = () if pick(2) else (weight.clone().requires_grad_(True) if pick(2) else weight,)
        x, found = torch.randn(NODES, WIDTH, generator=draw), []
        wants, records = bool(pick(2)), bool(pick(4))
        for way in (model, compiled):
            own = x.clone().requires_grad_(wants)
            model.zero_grad()
            with torch.set_grad_enabled(records):
                out = way(own, edges, *rest)
            leaves = [value for value in (own, *rest, *model.parameters()) if value.requires_grad]
            if out.requires_grad:
                found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
            else:
                found.append([out])
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
