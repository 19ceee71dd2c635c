"""pyg/view.py: the compiled model is the model, whoever holds its parts and however it is called."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    GAE,
    GAT,
    GCN,
    ARMAConv,
    EdgeConv,
    GATConv,
    GCNConv,
    GINConv,
    MixHopConv,
    SAGEConv,
    SGConv,
    to_hetero,
)

import plait

NODES, WIDTH = 30, 6
EDGES = torch.randint(0, NODES, (2, 90), generator=torch.Generator().manual_seed(0))
X = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def is_planned(model: Any) -> bool:
    return bool(model.plan.layers) and not model.plan.not_planned


class Hidden(nn.Module):
    """Layers, dropout and normalisation that no tree of children leads to."""

    def __init__(self, keep: Callable[[nn.Module], Any], reach: Callable[[Any], nn.Module]):
        super().__init__()
        self.first = GCNConv(WIDTH, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.kept = [keep(self.first), keep(self.norm), keep(self.drop)]
        self._reach = reach

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        first, norm, drop = map(self._reach, self.kept)
        return drop(norm(first(x, edge_index)))


HOLDERS = {
    "list": (lambda m: m, lambda m: m),
    "dict": (lambda m: {"m": m}, lambda d: d["m"]),
    "partial": (lambda m: functools.partial(m), lambda p: p),
    "lambda": (lambda m: lambda *args: m(*args), lambda f: f),
    "bound method": (lambda m: m.forward, lambda f: f),
    "bound call": (lambda m: m.__call__, lambda f: f),
}


@pytest.mark.parametrize("kind", [name for name in HOLDERS if name != "bound method"])
def test_parts_reached_by_other_ways_are_planned_and_follow_eval(kind: str) -> None:
    model = Hidden(*HOLDERS[kind])
    compiled = plait.compile(model, Data(x=X, edge_index=EDGES))
    assert compiled.training
    assert is_planned(compiled)
    compiled.eval()
    assert not model.drop.training
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    assert is_planned(compiled)


def test_a_bound_forward_taken_before_compiling_runs_in_pyg_and_is_right() -> None:
    model = Hidden(*HOLDERS["bound method"]).eval()
    compiled = plait.compile(model)
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))


def test_looking_ahead_leaves_running_statistics_in_a_plain_list_alone() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [GCNConv(WIDTH, 8), nn.BatchNorm1d(8)]

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.parts[1](self.parts[0](x, edge_index))
            return out

    model = Listed()
    compiled = plait.compile(model, Data(x=X, edge_index=EDGES))
    assert not model.parts[1].running_mean.any()
    assert model.parts[1].training
    assert is_planned(compiled)
    assert "unlisted" in compiled.plan.layers[0].layer


class Parent(nn.Module):
    """A child that calls back to its parent, and methods beside forward."""

    class Child(nn.Module):
        def __init__(self, parent: nn.Module):
            super().__init__()
            self.parent = [parent]

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.parent[0].conv(x, edge_index)
            return out if self.parent[0].training else 2 * out

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 4)
        self.child = self.Child(self)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.child(x, edge_index)
        return out

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.forward(x, edge_index).relu()

    @property
    def answer(self) -> Tensor:
        return self.encode(X, EDGES)


def test_parent_pointers_see_one_state() -> None:
    model = Parent()
    compiled = plait.compile(model)
    assert compiled.child.parent[0].training
    compiled.eval()
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    assert is_planned(compiled)


@pytest.mark.parametrize(
    "ask", [lambda m: m.encode(X, EDGES), lambda m: m.answer, lambda m: m.forward(X, edge_index=EDGES)]
)
def test_layers_are_planned_by_any_method(ask: Callable[[Any], Tensor]) -> None:
    model = Parent()
    compiled = plait.compile(model)
    torch.testing.assert_close(ask(compiled), ask(model))
    assert is_planned(compiled)


def test_the_original_runs_in_pyg() -> None:
    model = Parent()
    compiled = plait.compile(model)
    seen = []
    hook = model.conv.register_message_forward_hook(lambda *args: seen.append(args))
    hook.remove()
    model(X, EDGES)
    assert not compiled.plan.layers
    compiled(X, EDGES)
    assert compiled.plan.layers


def test_both_views_have_one_state() -> None:
    model = Parent()
    compiled: Any = plait.compile(model)
    assert vars(compiled) is vars(model)
    assert compiled.conv is model.conv
    assert compiled.__class__ is Parent
    assert isinstance(compiled, Parent)
    compiled.extra = 3
    assert model.extra == 3
    compiled.conv = GCNConv(WIDTH, 2)
    assert model(X, EDGES).shape == compiled(X, EDGES).shape == (NODES, 2)
    assert list(compiled.state_dict()) == list(Parent().state_dict())
    assert type(type(compiled)()) is Parent


def test_gae_and_its_methods() -> None:
    model = GAE(Parent())
    compiled: Any = plait.compile(model)
    z = compiled.encode(X, EDGES)
    torch.testing.assert_close(z, model.encode(X, EDGES))
    assert is_planned(compiled)
    assert torch.isfinite(compiled.recon_loss(z, EDGES))


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("by", ["compiled", "original"])
def test_parametrizing_a_root_layer_is_seen_by_both_views(by: str) -> None:
    layer = GCNConv(WIDTH, 3)
    nn.init.ones_(layer.bias)
    compiled: Any = plait.compile(layer)
    before = compiled(X, EDGES)
    chosen = compiled if by == "compiled" else layer
    parametrize.register_parametrization(chosen, "bias", Twice())
    torch.testing.assert_close(compiled.bias, layer.bias)
    torch.testing.assert_close(compiled(X, EDGES), before + 1)
    torch.testing.assert_close(layer(X, EDGES), before + 1)
    parametrize.remove_parametrizations(chosen, "bias")
    torch.testing.assert_close(compiled(X, EDGES), layer(X, EDGES))
    assert type(layer) is GCNConv


def test_methods_taken_before_a_root_layer_is_parametrized_are_still_its_own() -> None:
    layer = SAGEConv(WIDTH, 4)
    layer.register_parameter("scale", nn.Parameter(torch.ones(1)))
    compiled = plait.compile(layer)
    taken, message = compiled.forward, compiled.message
    parametrize.register_parametrization(compiled, "scale", Twice())
    torch.testing.assert_close(taken(X, EDGES), layer(X, EDGES))
    assert message(X) is X


def test_parametrizing_a_child_is_seen_by_both_views() -> None:
    model = Parent()
    compiled: Any = plait.compile(model)
    compiled(X, EDGES)
    nn.utils.parametrizations.weight_norm(compiled.conv.lin)
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    with torch.no_grad():
        compiled.conv.lin.parametrizations.weight.original0.mul_(3)
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))


def test_hooks_get_the_layer_itself() -> None:
    model = Parent()
    compiled = plait.compile(model)
    seen: list[nn.Module] = []
    model.conv.register_forward_hook(lambda module, args, out: seen.append(module))
    compiled(X, EDGES)
    assert seen[0] is model.conv
    assert is_planned(compiled)


@pytest.mark.parametrize("make", [SAGEConv, GINConv], ids=lambda make: make.__name__)
def test_a_hook_on_the_aggregation_is_obeyed(make: Any) -> None:
    model = make((nn.Linear(WIDTH, 3)) if make is GINConv else WIDTH, *(() if make is GINConv else (3,)))
    compiled = plait.compile(model)
    compiled(X, EDGES)
    model.aggr_module.register_forward_hook(lambda module, args, out: 0 * out)
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    assert "aggr_module" in compiled.plan.not_planned[0].reason


def test_an_option_list_changed_in_place_is_noticed() -> None:
    model = MixHopConv(WIDTH, 3, powers=[0, 1, 2], bias=False)
    compiled = plait.compile(model)
    compiled(X, EDGES)
    model.powers.pop()
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))


class Doubled(GCNConv):
    """A subclass that calls the layer it comes from."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = super().forward(x, edge_index)
        return 2 * out


def test_super_forward_of_a_subclass_is_planned() -> None:
    model = Doubled(WIDTH, 3)
    for net in (model, nn.ModuleList([model])[0]):
        compiled = plait.compile(net)
        torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
        assert is_planned(compiled)


class Unusual(nn.Module):
    """A class that is not made like others, with a slot beside its dictionary."""

    __slots__ = ("scale",)

    def __new__(cls, width: int) -> Unusual:
        assert width > 0
        return super().__new__(cls)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.scale = GCNConv(width, 3), 2.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.scale * self.conv(x, edge_index)
        return out


def test_classes_with_a_new_and_slots_of_their_own() -> None:
    model = Unusual(WIDTH)
    compiled: Any = plait.compile(model)
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    compiled.scale = 3.0
    assert model.scale == 3.0
    torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))


def test_a_model_with_a_plan_of_its_own_keeps_it() -> None:
    class Planner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plan = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.plan(x)
            return out

    model = Planner()
    compiled = plait.compile(model)
    torch.testing.assert_close(compiled(X), model(X))


# Copies and files -----------------------------------------------------------------------------------------

CACHED = [
    lambda: GCNConv(WIDTH, 3, cached=True),
    lambda: SGConv(WIDTH, 3, K=2, cached=True),
    lambda: APPNP(2, 0.1, cached=True),
]


@pytest.mark.parametrize("make", CACHED)
def test_cached_root_layers_are_copied_and_saved_as_they_are(make: Any) -> None:
    compiled = plait.compile(make())
    before = [compiled(X, EDGES) for _ in range(3)][-1].detach()
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    others = (
        copy.deepcopy(compiled),
        pickle.loads(pickle.dumps(compiled)),
        torch.load(file, weights_only=False),
    )
    for other in others:
        assert isinstance(other, type(compiled))
        torch.testing.assert_close(other(X, EDGES.flip(0)), before)  # the cache came along


@pytest.mark.parametrize("make", CACHED)
def test_a_cache_belongs_to_the_model_whichever_view_fills_it(make: Any) -> None:
    for first, second in ((0, 1), (1, 0)):
        model = make()
        expected = copy.deepcopy(model)
        views = (model, plait.compile(model))
        answers = [views[first](X, EDGES), views[second](X, EDGES.flip(0)), views[first](X, EDGES.flip(0))]
        for answer, edges in zip(answers, (EDGES, EDGES.flip(0), EDGES.flip(0)), strict=True):
            torch.testing.assert_close(answer, expected(X, edges), rtol=1e-4, atol=1e-5)
        views[second].reset_parameters() if hasattr(model, "reset_parameters") else None


def test_a_cached_layer_is_planned_from_its_second_call() -> None:
    model = GCNConv(WIDTH, 3, cached=True)
    compiled = plait.compile(model)
    expected = compiled(X, EDGES)
    torch.testing.assert_close(compiled(X, EDGES.flip(0)), expected)
    assert is_planned(compiled)


def _replica(module: Any) -> Any:
    """The module as torch.nn.parallel.replicate copies it to a device: parameters are plain tensors."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        places = made._parameters if parameter is None else vars(made)
        places[name] = None if parameter is None else parameter.clone()
    return made


def test_replicas_of_data_parallel_answer_and_have_gradients() -> None:
    model = GCNConv(WIDTH, 3)
    expected, out = (called(X, EDGES) for called in (model, _replica(plait.compile(model))))
    torch.testing.assert_close(out, expected)
    found = [torch.autograd.grad(value.square().sum(), model.lin.weight)[0] for value in (out, expected)]
    torch.testing.assert_close(*found)


def test_copies_are_models_of_their_own() -> None:
    compiled: Any = plait.compile(Parent())
    compiled(X, EDGES)
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert other.conv is not compiled.conv
        torch.testing.assert_close(other(X, EDGES), compiled(X, EDGES))
        assert is_planned(other)
        assert other.child.parent[0].conv is other.conv


# Whoever traces -------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(WIDTH, 8), SAGEConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def other_graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(NODES, WIDTH, generator=generator), torch.randint(
        0, NODES, (2, 90), generator=generator
    )


@pytest.mark.parametrize("how", ["script", "trace", "make_fx", "export"])
def test_tracers_get_pyg(how: str) -> None:
    model = Plain().eval()
    compiled = plait.compile(model)
    compiled(X, EDGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "script":
            made: Any = torch.jit.script(compiled)
        elif how == "trace":
            made = torch.jit.trace(compiled, (X, EDGES))
        elif how == "make_fx":
            from torch.fx.experimental.proxy_tensor import make_fx

            made = make_fx(compiled)(X, EDGES)
        else:
            made = torch.export.export(compiled, (X, EDGES)).module()
    x, edges = other_graph()
    torch.testing.assert_close(made(x, edges), model(x, edges))


def traced() -> fx.GraphModule:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = Plain()
    return fx.GraphModule(model, Tracer().trace(model))


@pytest.mark.parametrize("is_seen_first", [True, False])
def test_a_graph_of_fx_may_be_edited_through_either_view(is_seen_first: bool) -> None:
    model = traced()
    compiled: Any = plait.compile(model)
    if is_seen_first:
        torch.testing.assert_close(compiled(X, EDGES), model(X, EDGES))
    for view, other in ((compiled, torch.tanh), (model, torch.sigmoid), (compiled, torch.relu)):
        before = model(X, EDGES)
        for node in view.graph.nodes:
            if node.name == "relu":
                node.op, node.target, node.args = "call_function", other, node.args[:1]
        view.recompile()
        expected = model(X, EDGES)
        assert not torch.allclose(expected, before) or other is torch.relu
        for _ in range(2):
            torch.testing.assert_close(compiled(X, EDGES), expected)
        assert is_planned(compiled)
    again = copy.deepcopy(compiled)
    torch.testing.assert_close(again(X, EDGES), expected)


@pytest.mark.parametrize("is_from_view", [True, False])
def test_a_copy_that_gets_its_state_last_shares_it_with_the_view_it_holds(is_from_view: bool) -> None:
    model = ARMAConv(WIDTH, 3)
    compiled: Any = plait.compile(model)
    parametrize.register_parametrization(compiled, "weight", nn.Tanh())  # whose __deepcopy__ is torch's
    compiled.again = compiled.message  # a method bound to the view
    copied: Any = copy.deepcopy(compiled if is_from_view else model)
    held = copied.again.__self__
    torch.testing.assert_close(held(X, EDGES), compiled(X, EDGES))
    held.eval()
    assert not copied.training
    assert compiled.training


def test_torch_package_takes_the_plain_model_along(tmp_path: Any) -> None:
    from torch import package

    compiled = plait.compile(SAGEConv(WIDTH, 3))
    expected = compiled(X, EDGES)
    path = str(tmp_path / "model.pt")
    with package.PackageExporter(path) as exporter:
        exporter.extern(["torch", "torch.**", "torch_geometric", "torch_geometric.**", "collections.**"])
        exporter.save_pickle("models", "layer.pkl", compiled)
    loaded = package.PackageImporter(path).load_pickle("models", "layer.pkl")
    torch.testing.assert_close(loaded(X, EDGES), expected)
    assert type(loaded) is SAGEConv


def test_to_hetero_of_a_compiled_model_and_inside_one() -> None:
    kinds = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])
    x = {"a": X, "b": X[:20].clone()}
    edges = {("a", "to", "b"): EDGES % 20, ("b", "to", "a"): EDGES % 20}
    model = to_hetero(Plain(), kinds)
    compiled = plait.compile(model)
    expected, found = model(x, edges), compiled(x, edges)
    for kind in x:
        torch.testing.assert_close(found[kind], expected[kind])
    assert is_planned(compiled)
    from_compiled = to_hetero(plait.compile(Plain()), kinds)
    assert from_compiled(x, edges)["a"].shape == (NODES, 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_a_compiled_model(use_reentrant: bool) -> None:
    class Saving(Plain):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = checkpoint(self.first, x, edge_index, use_reentrant=use_reentrant)
            out: Tensor = self.second(h.relu(), edge_index)
            return out

    model = Saving()
    compiled = plait.compile(model)
    grads = []
    for net in (model, compiled):
        x = X.clone().requires_grad_()
        first = model(x, EDGES)  # both views at once: each recomputes as it ran
        loss = net(x, EDGES).square().sum() + 0 * first.sum()
        grads.append(torch.autograd.grad(loss, [x, *model.parameters()]) if not use_reentrant else None)
        if use_reentrant:
            model.zero_grad()
            loss.backward()
            grads[-1] = [x.grad, *(p.grad.clone() for p in model.parameters())]
    for mine, other in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert is_planned(compiled)


def test_a_checkpoint_does_not_rest_in_pyg_the_first_time_only() -> None:
    compiled: Any = plait.compile(GCNConv(WIDTH, 4).half())
    x = X.half()
    compiled(x, EDGES)
    aside = compiled._plait_plan_session.aside
    aside.notes[True, EDGES.shape[1].bit_length(), False] = "PyG is quicker"
    again = EDGES.clone()
    for edges in (*(EDGES.clone() for _ in range(31)), again):
        compiled(x, edges)  # left to PyG, and seen from then on
    checkpoint(compiled, x, again, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_memory_limit_is_not_divided_anew_before_a_checkpoint_ran_again(is_inside: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GATConv(WIDTH, 2, heads=2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.layer, x, edge_index, use_reentrant=False)
            return out

    compiled: Any = plait.compile(Saving() if is_inside else GATConv(WIDTH, 2, heads=2), memory_limit="50 MB")
    chosen = []
    for _ in range(3):
        out = compiled(X, EDGES) if is_inside else checkpoint(compiled, X, EDGES, use_reentrant=False)
        out.sum().backward()
        chosen.append(compiled.plan.layers[0].choice)
    assert chosen[0] != chosen[1] == chosen[2]  # the leanest, until the whole model is known


@pytest.mark.parametrize("what", ["model", "x"])
def test_other_devices_go_to_pyg(what: str) -> None:
    model = Plain()
    compiled = plait.compile(model)
    compiled(X, EDGES)
    if what == "model":
        model.to("meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            compiled(X, EDGES)
        assert compiled(X.to("meta"), EDGES.to("meta")).device.type == "meta"
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            compiled(X.to("meta"), EDGES)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(WIDTH, 8), SAGEConv(8, 8, aggr="max")
        self.third = GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        out: Tensor = self.third(self.second(x, edge_index).tanh(), edge_index)
        return out


def test_torch_compile_goes_through_planned_layers_without_a_break() -> None:
    model = Mixed()
    compiled = plait.compile(model)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(compiled)(X, EDGES)
    assert explained.graph_break_count == 0
    torch._dynamo.reset()
    fast = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for edges in (EDGES, EDGES.flip(0).clone()):
        x = X.clone().requires_grad_()
        ours, theirs = fast(x, edges), model(x, edges)
        torch.testing.assert_close(ours, theirs)
        wanted = [x, *model.parameters()]
        slopes = [torch.autograd.grad(out.square().sum(), wanted) for out in (ours, theirs)]
        for mine, other in zip(*slopes, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert {plan.layer.split()[1] for plan in compiled.plan.layers} == {"GCNConv", "SAGEConv", "GINConv"}


class Nested(nn.Module):
    """A model of PyG's inside, whose forward has defaults, and another method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = GCNConv(WIDTH, 8), GCN(8, 8, 2), SAGEConv(8, 3)

    def encode(self, x: Tensor, edge_index: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.inner(self.first(x, edge_index).relu(), edge_index) * scale
        return out

    def forward(self, x: Tensor, edge_index: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.last(self.encode(x, edge_index, scale), edge_index)
        return out


def _torch_compiled(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def _child_by_torch(model: Nested) -> Any:
    model.inner = _torch_compiled(model.inner)
    return plait.compile(model)


def _child_in_place(model: Nested) -> Any:
    model.inner.compile(backend="aot_eager")
    return plait.compile(model)


def _layer_by_torch(model: Nested) -> Any:
    model.first = _torch_compiled(model.first)
    return plait.compile(model)


def _root_in_place(model: Nested) -> Any:
    model.compile(backend="aot_eager")
    return plait.compile(model)


def _compiled_in_place(model: Nested) -> Any:
    compiled = plait.compile(model)
    compiled.compile(backend="aot_eager")
    return compiled


WITH_TORCH_COMPILE = {
    "outside": lambda model: _torch_compiled(plait.compile(model)),
    "outside its forward": lambda model: _torch_compiled(plait.compile(model).forward),
    "outside, in place": _compiled_in_place,
    "a child": _child_by_torch,
    "a child, in place": _child_in_place,
    "a layer": _layer_by_torch,
    "the model": lambda model: plait.compile(_torch_compiled(model)),
    "the model, in place": _root_in_place,
}


@pytest.mark.parametrize("where", WITH_TORCH_COMPILE)
def test_torch_compile_outside_and_inside_gives_pygs_answers(where: str) -> None:
    torch._dynamo.reset()
    model = Nested()
    theirs, wanted = copy.deepcopy(model), [*model.parameters()]
    ours = WITH_TORCH_COMPILE[where](model)
    for scale in (1.0, 1.0, 2.0):
        out, expected = ours(X, EDGES, scale=scale), theirs(X, EDGES, scale=scale)
        torch.testing.assert_close(out, expected)
        slopes = torch.autograd.grad(out.square().sum(), wanted)
        for mine, other in zip(
            slopes, torch.autograd.grad(expected.square().sum(), [*theirs.parameters()]), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [lambda: GCN(WIDTH, 8, 2, 3), lambda: GAT(WIDTH, 8, 2, 4, heads=2)])
def test_torch_compile_takes_pygs_own_models_without_a_break(make: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    model = make()
    compiled = plait.compile(model)
    fast = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(X, EDGES), model(X, EDGES))
    assert len(compiled.plan.layers) == 2


def test_torch_compile_of_what_a_second_run_would_change_is_right() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU()))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.conv(x, edge_index)
            return out

    model = Dropping()
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    fast = torch.compile(plait.compile(model), backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(fast(X, EDGES), other(X, EDGES))
    torch.testing.assert_close(model.conv.nn[1].running_mean, other.conv.nn[1].running_mean)


def test_a_layer_with_passes_of_its_own_stays_planned() -> None:
    compiled = plait.compile(GATConv(WIDTH, 4, heads=2))
    for _ in range(3):
        compiled(X, EDGES)
        assert is_planned(compiled)


@pytest.mark.parametrize(
    "conv",
    [
        lambda: GATConv(WIDTH, 4),
        lambda: SAGEConv(WIDTH, 4, normalize=True),
        lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))),
        lambda: EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 4), nn.ReLU())),
    ],
    ids=["gat", "sage", "gin", "edge"],
)
def test_gradients_of_a_layer_that_is_one_operator_are_those_of_pyg(conv: Callable[[], nn.Module]) -> None:
    model = conv()
    x = X.clone().requires_grad_()
    wanted = [x, *model.parameters()]
    torch._dynamo.reset()
    fast = torch.compile(plait.compile(model), backend="aot_eager")
    slopes = [torch.autograd.grad(out.square().sum(), wanted) for out in (fast(x, EDGES), model(x, EDGES))]
    for mine, other in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_made_before", [False, True])
def test_torch_compile_keeps_the_history_of_weights_that_are_no_parameters(is_made_before: bool) -> None:
    model, scale = GCNConv(WIDTH, 4), torch.ones((), requires_grad=True)
    weight = model.lin.weight.detach() * scale
    compiled = plait.compile(model)
    del model.lin._parameters["weight"]
    vars(model.lin)["weight"] = weight
    if is_made_before:
        compiled = plait.compile(model)
    torch._dynamo.reset()
    outs = torch.compile(compiled, backend="aot_eager")(X, EDGES), model(X, EDGES)
    found = [torch.autograd.grad(out.square().sum(), scale, retain_graph=True)[0] for out in outs]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
