"""pyg/repeated.py: a call like the last one is not looked at in full, one that differs in anything is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    SAGEConv,
    TAGConv,
    TransformerConv,
)

import plait
from plait.pyg import planned, repeated

pytestmark = pytest.mark.usefixtures("never_aside")

NODES, WIDTH = 9, 4
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(WIDTH, 3),
    "sage": lambda: SAGEConv(WIDTH, 3),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, 3))),
    "gat": lambda: GATConv(WIDTH, 3, heads=2),
    "gatv2": lambda: GATv2Conv(WIDTH, 3, heads=2),
    "transformer": lambda: TransformerConv(WIDTH, 3, heads=2),
}


@pytest.fixture
def never_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_ASIDE", "0")


def edges() -> Tensor:
    return torch.randint(0, NODES, (2, 30), generator=torch.Generator().manual_seed(0))


def features(seed: int = 1, width: int = WIDTH, nodes: int = NODES) -> Tensor:
    return torch.randn(nodes, width, generator=torch.Generator().manual_seed(seed))


class Counted:
    """How many calls of layers were looked at in full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, real = 0, planned._here

        def here(*args: Any) -> Any:
            self.count += 1
            return real(*args)

        monkeypatch.setattr(planned, "_here", here)


def run(model: Any, x: Tensor, edge_index: Tensor, with_grad: bool) -> tuple[Tensor, ...]:
    """The output and the gradients of a call."""
    if not with_grad:
        with torch.no_grad():
            return (model(x, edge_index),)
    for parameter in model.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    out = model(x, edge_index)
    out.backward(torch.ones_like(out))
    return (out.detach(), x.grad, *(p.grad for p in model.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_call_like_the_last_one_is_not_looked_at_in_full(
    kind: str, with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, edge_index = LAYERS[kind](), edges()
    model = plait.compile(copy.deepcopy(layer))
    for seed in range(6):
        run(model, features(seed), edge_index, with_grad)
    counted = Counted(monkeypatch)
    for seed in range(6, 12):
        found = run(model, features(seed), edge_index, with_grad)
        torch.testing.assert_close(found, run(layer, features(seed), edge_index, with_grad))
    assert counted.count == 0


def test_a_layer_that_must_be_looked_at_in_full_is_not_compared_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, edge_index = plait.compile(TAGConv(WIDTH, 3)), edges()
    for seed in range(6):
        run(model, features(seed), edge_index, False)
    counted, compared = Counted(monkeypatch), []
    monkeypatch.setattr(repeated, "is_identical", lambda *_: compared.append(1) or True)
    run(model, features(7), edge_index, False)
    assert counted.count == 0 or not compared


def _other_parameter(model: Any, edge_index: Tensor) -> None:
    name, old = next(iter(model.named_parameters()))
    owner = model.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Parameter(old.detach() * 2))


def _hook(model: Any, edge_index: Tensor) -> None:
    last = [*model.modules()][-1]
    last.register_forward_hook(lambda module, args, out: 2 * out if isinstance(out, Tensor) else out)


def _frozen(model: Any, edge_index: Tensor) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "another parameter": _other_parameter,
    "a weight written in place": lambda model, edge_index: next(model.parameters()).data.mul_(2),
    "a hook": _hook,
    "frozen parameters": _frozen,
    "an edge written in place": lambda model, edge_index: edge_index[0, 3].fill_(0),
    "an edge written where nobody counts": lambda model, edge_index: edge_index.data[0].fill_(2),
    "other edges in the same tensor": lambda model, edge_index: edge_index.set_(edges()[:, :20].contiguous()),
    "another flow": lambda model, edge_index: setattr(model, "flow", "target_to_source"),
    "a removed bias": lambda model, edge_index: [
        setattr(part, "bias", None) for part in model.modules() if getattr(part, "bias", None) is not None
    ],
}


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_calls_counts(
    change: Callable[[Any, Tensor], object], kind: str, with_grad: bool
) -> None:
    layer, edge_index = LAYERS[kind](), edges()
    model = plait.compile(copy.deepcopy(layer))
    for seed in range(6):
        run(model, features(seed), edge_index, with_grad)
    change(model, edge_index)
    change(layer, edge_index)
    for seed in range(6, 9):
        got, wanted = (
            run(model, features(seed), edge_index, with_grad),
            run(layer, features(seed), edge_index, with_grad),
        )
        assert [value is None for value in got] == [value is None for value in wanted]
        for one, other in zip(got, wanted, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_modes_outside_the_layer_count(kind: str) -> None:
    layer, edge_index = LAYERS[kind](), edges()
    model = plait.compile(copy.deepcopy(layer))
    for seed in range(6):
        run(model, features(seed), edge_index, False)
    x = features(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x, edge_index).dtype == layer(x, edge_index).dtype
    with torch.inference_mode():
        torch.testing.assert_close(model(x, edge_index), layer(x, edge_index))
    tangent = torch.func.jvp(lambda value: model(value, edge_index), (x,), (x,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(lambda value: layer(value, edge_index), (x,), (x,))[1])
    for model_or_layer in (model, layer):
        model_or_layer.double()
    torch.testing.assert_close(model(x.double(), edge_index), layer(x.double(), edge_index))


def test_edge_weights_are_told_apart() -> None:
    layer, edge_index = GCNConv(WIDTH, 3), edges()
    model = plait.compile(copy.deepcopy(layer))
    weights = [torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(k)) for k in range(2)]
    for seed in range(12):
        x, weight = features(seed), weights[seed // 3 % 2]
        torch.testing.assert_close(model(x, edge_index, weight), layer(x, edge_index, weight))
        torch.testing.assert_close(model(x, edge_index, edge_weight=weight), layer(x, edge_index, weight))
        torch.testing.assert_close(model(x, edge_index), layer(x, edge_index))
        weight.mul_(1.5)
        torch.testing.assert_close(model(x, edge_index, weight), layer(x, edge_index, weight))


@pytest.mark.parametrize("kind", LAYERS)
def test_other_features_and_other_graphs_are_looked_at(kind: str) -> None:
    layer, graphs = LAYERS[kind](), [edges(), edges().flip(0).contiguous()]
    model = plait.compile(copy.deepcopy(layer))
    for seed in range(16):
        nodes, edge_index = NODES + seed % 3, graphs[seed // 4 % 2]
        x = features(seed, nodes=nodes)
        x = x.t().contiguous().t() if seed % 5 == 4 else x
        for one, other in zip(
            run(model, x, edge_index, seed % 2 == 0), run(layer, x, edge_index, seed % 2 == 0), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_neither_graphs_nor_features_are_kept_alive(kind: str) -> None:
    model = plait.compile(LAYERS[kind]())
    edge_index, x = edges(), features()
    for _ in range(6):
        run(model, x, edge_index, False)
    held = weakref.ref(edge_index), weakref.ref(x)
    del edge_index, x
    gc.collect()
    assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_an_input_that_is_written_to_after_the_call_is_copied_again(kind: str) -> None:
    layer, edge_index = LAYERS[kind](), edges()
    model = plait.compile(copy.deepcopy(layer))

    def step(one: Any, is_written: bool) -> tuple[Tensor, ...]:
        one.zero_grad()
        leaf = features().requires_grad_()
        x = leaf * 1.0
        out = one(x, edge_index)
        if is_written:
            x.mul_(3)
        out.sum().backward()
        return (leaf.grad, *(p.grad.clone() for p in one.parameters()))  # type: ignore[return-value]

    for _ in range(6):
        step(model, False)
    torch.testing.assert_close(step(model, False), step(layer, False))
    with pytest.raises(RuntimeError, match="inplace"):
        step(layer, True)
    with pytest.raises(RuntimeError, match="inplace"):
        step(model, True)
