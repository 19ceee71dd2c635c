"""A call seen before is answered without looking again, until something about it has changed."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)

import plait
from plait.pyg import prepared

EDGES = torch.tensor([[0, 1, 2, 3, 4, 1], [1, 0, 3, 4, 2, 1]])


def x_of(width: int = 4, nodes: int = 5) -> torch.Tensor:
    return torch.randn(nodes, width, generator=torch.Generator().manual_seed(1))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """How often a layer is lowered."""
    lowered: list[Any] = []
    real = prepared.lower

    def lower(module: Any, call: Any) -> Any:
        lowered.append(module)
        return real(module, call)

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "lower", lower)
        yield lowered


@pytest.mark.parametrize(
    "layer", [GCNConv(4, 3), SGConv(4, 3, K=2), SAGEConv(4, 3), GraphConv(4, 3), GINConv(nn.Linear(4, 3))]
)
def test_a_layer_is_lowered_once_for_calls_that_are_alike(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = plait.compile(layer), x_of()
    with counted(monkeypatch) as lowered:
        for _ in range(4):
            torch.testing.assert_close(model(x + 0, EDGES), layer(x, EDGES))
        assert len(lowered) == 1
        model.eval()
        model(x, EDGES)
        model.train()
        model(x, EDGES)
        model.eval()
        model(x, EDGES)
        assert len(lowered) == 2


def _other_option(layer: Any) -> None:
    layer.K = 3


def _other_aggregation(layer: Any) -> None:
    layer.aggr_module = SGConv(1, 1, aggr="max").aggr_module


def _other_map(layer: Any) -> None:
    layer.lin = nn.Linear(4, 3)


def _other_parameter(layer: Any) -> None:
    layer.lin.weight = nn.Parameter(torch.ones(3, 4))


def _no_bias(layer: Any) -> None:
    layer.lin.bias = None


def _hook_on_map(layer: Any) -> None:
    layer.lin.register_forward_hook(lambda module, given, out: out * 2)


def _hook_on_messages(layer: Any) -> None:
    layer.register_message_forward_hook(lambda module, given, out: out * 2)


def _other_message(layer: Any) -> None:
    layer.message = lambda x_j, edge_weight: x_j


@pytest.mark.parametrize(
    "change",
    [
        _other_option,
        _other_aggregation,
        _other_map,
        _other_parameter,
        _no_bias,
        _hook_on_map,
        _hook_on_messages,
    ],
)
def test_a_layer_that_has_changed_is_looked_at_again(change: Callable[[Any], None]) -> None:
    torch.manual_seed(3)
    layer = SGConv(4, 3, K=2)
    model, x = plait.compile(layer), x_of()
    before = model(x, EDGES)
    torch.manual_seed(4)
    change(model)
    torch.manual_seed(4)
    change(layer)
    after = model(x, EDGES)
    torch.testing.assert_close(after, layer(x, EDGES))
    assert not torch.allclose(after, before)


def _hook_inside(network: nn.Sequential) -> None:
    network[2].register_forward_hook(lambda module, given, out: out * 2)


def _other_inside(network: nn.Sequential) -> None:
    network[1] = nn.Tanh()


def _longer(network: nn.Sequential) -> None:
    network.append(nn.Linear(3, 3))


@pytest.mark.parametrize("change", [_hook_inside, _other_inside, _longer])
def test_a_network_that_has_changed_inside_a_layer_is_looked_at_again(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(3)
    layer = GINConv(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    model: Any = plait.compile(layer)
    x = x_of()
    before = model(x, EDGES)
    for network in (model.nn, layer.nn):
        torch.manual_seed(4)
        change(network)
    after = model(x, EDGES)
    expected = layer(x, EDGES)
    torch.testing.assert_close(after, expected)
    assert not torch.allclose(after, before)


def test_a_message_of_the_users_own_is_noticed() -> None:
    model, x = plait.compile(SGConv(4, 3)), x_of()
    model(x, EDGES)
    _other_message(model)
    model(x, EDGES)
    assert "message" in next(iter(model.plan.not_planned)).reason


class _Own(GCNConv):
    pass


def test_a_patched_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _Own(4, 3)
    model, x = plait.compile(layer), x_of()
    model(x, EDGES)
    monkeypatch.setattr(_Own, "message", lambda self, x_j, edge_weight: 2 * x_j)
    torch.testing.assert_close(model(x, EDGES), layer(x, EDGES))


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (GCNConv, "message"),
        (GCNConv, "propagate"),
        (GATConv, "edge_update"),
        (partial(ChebConv, K=2), "__norm__"),
    ],
)
def test_a_patched_class_of_pyg_is_noticed(
    make: Callable[..., Any], name: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(4, 3), x_of()
    model, kept = plait.compile(layer), getattr(type(layer), name)
    before = layer(x, EDGES)
    if is_known:
        torch.testing.assert_close(model(x, EDGES), before)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = kept(*args, **kwargs)
        return (out[0], 2 * out[1]) if isinstance(out, tuple) else 2 * out

    with monkeypatch.context() as patch:
        patch.setattr(type(layer), name, doubled)
        expected = layer(x, EDGES)
        assert not torch.allclose(expected, before)
        for _ in range(2):
            torch.testing.assert_close(model(x, EDGES), expected)
    torch.testing.assert_close(model(x, EDGES), before)
    assert model.plan.layers


def test_dropout_of_edges_depends_on_training() -> None:
    layer = APPNP(2, 0.1, dropout=0.5)
    model, x = plait.compile(layer), x_of()
    for is_training in (False, True, False):
        model.train(is_training)
        model(x, EDGES)
        assert bool(model.plan.not_planned) == is_training


def test_edges_changed_in_place_are_noticed() -> None:
    layer, edges, x = GCNConv(4, 3), EDGES.clone(), x_of()
    model = plait.compile(layer)
    for _ in range(2):
        model(x, edges)
    edges[0, 0] = 4
    torch.testing.assert_close(model(x, edges), layer(x, edges))
    edges.data = edges.data[:, :3]
    torch.testing.assert_close(model(x, edges), layer(x, edges))


def test_weights_made_anew_for_every_call_are_never_those_of_an_earlier_one() -> None:
    layer = GCNConv(4, 3)
    model, x = plait.compile(layer), x_of()
    for k in range(80):
        # of one size and freed at once: the next one often lies where the last one lay
        weight = torch.full((EDGES.shape[1],), 1.0 + k)
        weight[0] = 0.5
        torch.testing.assert_close(model(x, EDGES, weight), layer(x, EDGES, weight), rtol=1e-4, atol=1e-5)
        del weight


def test_more_graphs_than_are_remembered_are_all_answered_right() -> None:
    layer = SAGEConv(4, 3)
    model = plait.compile(layer)
    graphs = [torch.randint(0, 5, (2, 4 + k)) for k in range(40)]
    for _ in range(2):
        for edges in graphs:
            torch.testing.assert_close(model(x_of(), edges), layer(x_of(), edges))
    assert len(model._plait_plan_session.edges) <= 16
    assert len(model._plait_plan_session._calls) <= 16


def test_pairs_of_features_and_sizes() -> None:
    layer = SAGEConv(4, 3)
    model, far, near = plait.compile(layer), x_of(nodes=5), x_of(nodes=6)
    for _ in range(2):
        torch.testing.assert_close(model((far, near), EDGES), layer((far, near), EDGES))
        torch.testing.assert_close(model((far, near[:5]), EDGES), layer((far, near[:5]), EDGES))
        torch.testing.assert_close(
            model((far, None), EDGES, size=(5, 7)), layer((far, None), EDGES, size=(5, 7))
        )
        torch.testing.assert_close(model(far, EDGES), layer(far, EDGES))


def test_copies_and_pickles_go_without_what_was_seen() -> None:
    model, x = plait.compile(GCNConv(4, 3)), x_of()
    expected = model(x, EDGES)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), plait.compile(model)):
        torch.testing.assert_close(other(x, EDGES), expected)
        torch.testing.assert_close(other(x, EDGES), expected)
    torch.testing.assert_close(model(x, EDGES), expected)


def compared(layer: nn.Module, model: nn.Module, x: torch.Tensor, edges: torch.Tensor = EDGES) -> None:
    """Outputs and gradients of both agree; parameters that want none get none."""
    found: dict[str, list[Any]] = {}
    for name, run in (("pyg", layer), ("plait", model)):
        layer.zero_grad()
        out = run(x, edges)
        if out.requires_grad:
            out.square().sum().backward()
        found[name] = [
            out.detach(),
            *(None if p.grad is None else p.grad.clone() for p in layer.parameters()),
        ]
    torch.testing.assert_close(found["plait"], found["pyg"])


LAYERS = [
    lambda: GCNConv(4, 3), lambda: SAGEConv(4, 3), lambda: SAGEConv(4, 3, aggr="max"),
    lambda: GraphConv(4, 3),
    lambda: SGConv(4, 3, K=2), lambda: GCNConv(4, 1), lambda: GCNConv(1, 3), lambda: TAGConv(4, 3, K=2),
    lambda: ARMAConv(4, 3, num_stacks=2), lambda: SAGEConv(4, 3, project=True, normalize=True),
    lambda: GINConv(nn.Linear(4, 3), train_eps=True),
]  # fmt: skip


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("are_new", [False, True], ids=["one graph", "new graphs"])
def test_parameters_are_read_as_they_are_at_every_call(make: Callable[[], Any], are_new: bool) -> None:
    torch.manual_seed(3)
    layer = make()
    model, x = plait.compile(layer), x_of(getattr(layer, "in_channels", 4))

    def look() -> None:
        for _ in range(3):
            compared(layer, model, x + 0, EDGES.clone() if are_new else EDGES)

    for _ in range(3):
        look()
    some = [*layer.parameters()][-1]
    for change in (
        lambda: some.requires_grad_(False),
        lambda: layer.requires_grad_(False),
        lambda: layer.requires_grad_(True),
        lambda: some.data.mul_(2.0),
        lambda: setattr(some, "data", torch.randn_like(some)),
        lambda: layer.double().float(),
    ):
        change()
        look()
        with torch.no_grad():
            torch.testing.assert_close(model(x, EDGES), layer(x, EDGES))
    x.requires_grad_()
    look()


@pytest.mark.parametrize("are_new", [False, True], ids=["one graph", "new graphs"])
def test_numbers_in_buffers_are_read_at_every_call(are_new: bool) -> None:
    """A GIN layer with eps = 0 has an expression of its own."""
    layer = GINConv(nn.Linear(4, 3))
    model, x = plait.compile(layer), x_of()
    for eps in (0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.25):
        layer.eps.fill_(eps)
        compared(layer, model, x + 0, EDGES.clone() if are_new else EDGES)


@pytest.mark.parametrize("layer", [APPNP(3, 0.1), SSGConv(4, 3, 0.1, K=2)])
@pytest.mark.parametrize("are_new", [False, True], ids=["one graph", "new graphs"])
def test_a_scheduled_number_is_the_same_layer(
    layer: Any, are_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = plait.compile(layer), x_of()
    with counted(monkeypatch) as lowered:
        for alpha in (0.1, 0.2, 0.2, 0.3, 1, 0, 0.4, 0.5):
            layer.alpha = alpha
            compared(layer, model, x + 0, EDGES.clone() if are_new else EDGES)
        assert len(lowered) == (2 if are_new else 1)
        layer.K = 1
        compared(layer, model, x + 0, EDGES)
        layer.alpha = torch.tensor(0.5)  # is no number: it may be changed in place
        compared(layer, model, x + 0, EDGES)
        assert model.plan.not_planned
        layer.alpha = 0.25
        compared(layer, model, x + 0, EDGES)
        assert not model.plan.not_planned


def test_an_option_that_is_no_schedule_is_another_layer() -> None:
    layer = APPNP(3, 0.1)
    model, x = plait.compile(layer), x_of()
    for alpha, exponent in ((0.1, 3), (0.2, 3), (0.3, 2), (0.3, 4), (0.4, 4)):
        layer.alpha, layer.K = alpha, exponent
        compared(layer, model, x + 0, EDGES)
    # at each other's place among the options, and what is at the first place is the same object
    for options in ({"alpha": 3, "K": 5}, {"K": 3, "alpha": 2}):
        for name in options:
            delattr(layer, name)
        for name, value in options.items():
            setattr(layer, name, value)
        for _ in range(2):
            compared(layer, model, x + 0, EDGES)


def test_a_weight_that_is_given_another_shape_is_planned_for_anew() -> None:
    layer = GCNConv(4, 3, bias=False)
    model, x = plait.compile(layer), x_of()
    for _ in range(4):
        compared(layer, model, x + 0)
    layer.lin.weight.data = torch.randn(2, 4)
    layer.zero_grad()
    for _ in range(4):
        compared(layer, model, x + 0)


def test_graphs_that_come_once_are_freed_when_they_go() -> None:
    """Not when the collector runs: what a step computes would lie in memory that no cache holds."""
    for layer in (SAGEConv(4, 3, aggr="max"), GATConv(4, 3)):
        model, x = plait.compile(layer), x_of(nodes=50)
        for _ in range(6):
            model(x, torch.randint(0, 50, (2, 300))).sum().backward()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for _ in range(20):
                model(x, torch.randint(0, 50, (2, 300))).sum().backward()
            assert len(gc.get_objects()) - before < 100
        finally:
            gc.enable()
