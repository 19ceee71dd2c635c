"""plait.explain and what a look ahead leaves behind: the plan that trains, both modes, any arguments."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import BatchNorm, DeepGCNLayer, GATConv, GCNConv, GraphSAGE, to_hetero

import plait
from plait.errors import InputError
from plait.measure.environment import BusyElsewhere


def graph(num_nodes: int = 200, width: int = 64) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(num_nodes, width, generator=generator) < 0.1).float()
    return Data(x=x, edge_index=torch.randint(0, num_nodes, (2, 6 * num_nodes), generator=generator))


class Dropped(nn.Module):
    """The GCN of PyG's tutorials: dropout in front of every layer."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(64, 16), GCNConv(16, 4)])
        self.norm = BatchNorm(16)
        self.p, self.inplace = p, inplace

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = functional.dropout(x, self.p, training=self.training, inplace=self.inplace)
        h = self.norm(self.convs[0](x, edge_index)).relu()
        out: Tensor = self.convs[1](functional.dropout(h, self.p, training=self.training), edge_index)
        return out


def trained(model: Any, data: Data, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data.x, data.edge_index).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_plan_made_ahead_is_the_one_that_trains(p: float) -> None:
    data = graph()
    compiled: Any = plait.compile(Dropped(p), data)
    ahead = [layer.describe() for layer in compiled.plan.layers]
    trained(compiled, data)
    assert [layer.describe() for layer in compiled.plan.layers] == ahead
    is_hoisted = bool(compiled.plan.layers[0].hoisted_steps or compiled.plan.layers[0].sparse_values)
    assert is_hoisted == (p == 0.0)


def test_looking_ahead_in_training_mode_leaves_everything_as_it_was() -> None:
    data, model = graph(), Dropped()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, states = data.x.clone(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    plait.explain(model, data, analyze=True)
    assert model.training
    assert not model.norm.training
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert torch.equal(data.x, x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_input_that_training_changes_in_place_is_put_back() -> None:
    data = graph()
    x = data.x.clone()
    plait.compile(Dropped(inplace=True), data)
    assert torch.equal(data.x, x)


class Writing(nn.Module):
    """Keeps its result in what it is given, as models that take a whole Data do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(64, 3)

    def forward(self, data: Any) -> Tensor:
        data.x = data.z = self.conv(data.x, data.edge_index)
        return data.x.relu()


class WritingDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(64, 3)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        x_dict["node"] = self.conv(x_dict["node"], edge_index_dict.pop(("node", "to", "node")))
        return x_dict["node"]


def test_a_model_that_writes_to_its_data_finds_it_as_it_was() -> None:
    data = graph()
    x, keys = data.x, set(data.keys())
    compiled = plait.compile(Writing(), data)
    plait.explain(compiled, data, analyze=True)
    assert data.x is x
    assert set(data.keys()) == keys
    assert len(compiled.plan.layers) == 1
    compiled(data)
    assert "z" in data  # the user's own call writes where it says


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(64, 3)

    def forward(self, **given: Tensor) -> Tensor:
        return self.conv(given["x"], given["edge_index"])


class ByNameOnly(ByName):
    def forward(self, *, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return self.conv(x, edge_index)


@pytest.mark.parametrize("kind", [ByName, ByNameOnly])
def test_a_model_that_takes_its_arguments_by_name_is_planned(kind: type[nn.Module]) -> None:
    data = graph()
    assert len(plait.compile(kind(), data).plan.layers) == 1


def test_a_model_made_by_to_hetero_is_planned_for_heterogeneous_data() -> None:
    plain, data = graph(), HeteroData()
    data["a"].x, data["b"].x = plain.x, plain.x[:30]
    data["a", "to", "b"].edge_index = plain.edge_index % 30
    data["b", "to", "a"].edge_index = plain.edge_index % 30
    model = to_hetero(GraphSAGE(64, 8, 2, 3), data.metadata())
    compiled = plait.compile(model, data)
    assert len(compiled.plan.layers) == 4
    expected = model(data.x_dict, data.edge_index_dict)
    found = compiled(data.x_dict, data.edge_index_dict)
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_model_that_writes_to_dictionaries_is_planned() -> None:
    plain, data = graph(), HeteroData()
    data["node"].x, data["node", "to", "node"].edge_index = plain.x, plain.edge_index
    assert len(plait.explain(WritingDicts(), data, analyze=True).layers) == 1
    given = {"x_dict": data.x_dict, "edge_index_dict": data.edge_index_dict}
    plait.explain(WritingDicts(), kwargs=given, analyze=True)
    assert given["x_dict"]["node"] is plain.x
    assert given["edge_index_dict"]


def test_an_input_that_wants_a_gradient_gets_none_from_analyze() -> None:
    data = graph()
    data.x.requires_grad_()
    plait.explain(Dropped(), data, analyze=True)
    assert data.x.grad is None


def test_a_model_that_cannot_run_in_training_mode_is_planned_without_it() -> None:
    data = Data(x=torch.ones(1, 64), edge_index=torch.zeros(2, 1, dtype=torch.long))
    compiled: Any = plait.compile(Dropped(), data)  # its normalisation wants more than one row
    assert len(compiled.plan.layers) == 2


def test_after_eval_the_training_plan_is_still_there() -> None:
    data = graph()
    compiled: Any = plait.compile(Dropped(), data)
    assert compiled.plan.mode == "training"
    assert compiled.plan.inference is None
    compiled.eval()
    with torch.no_grad():
        compiled(data.x, data.edge_index)
    assert compiled.plan.mode == "inference"
    assert compiled.plan.training.mode == "training"
    assert [layer.mode for layer in compiled.plan.training.layers] == ["training"] * 2
    assert "plan.training" in str(compiled.plan)
    compiled.train()
    compiled(data.x, data.edge_index)
    assert compiled.plan.mode == "training"
    assert compiled.plan.inference.mode == "inference"


def test_a_frozen_layer_takes_part_in_the_training_plan() -> None:
    data, model = graph(), Dropped(0.0)
    model.convs[0].requires_grad_(False)
    model.norm.requires_grad_(False)
    compiled: Any = plait.compile(model, data)
    assert [layer.layer for layer in compiled.plan.layers] == ["convs.0 GCNConv", "convs.1 GCNConv"]


def test_explain_of_a_compiled_model_plans_the_mode_asked_for() -> None:
    data = graph()
    compiled = plait.compile(Dropped(), data)
    assert plait.explain(compiled, data, mode="inference").mode == "inference"
    assert plait.explain(compiled, data, mode="training").mode == "training"


# Arguments however they are named ---------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(64, 4)

    def forward(self, features: Tensor, adj: Tensor) -> Tensor:
        out: Tensor = self.conv(features, adj)
        return out


class Oddly(Named):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return super().forward(first, second)


class Swapped(Named):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return super().forward(second, first)


class Whole(Named):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index)


@pytest.mark.parametrize("model", [Named, Oddly, Whole])
def test_data_serves_forwards_with_other_names(model: type[Named]) -> None:
    assert len(plait.explain(model(), graph()).layers) == 1


def test_arguments_that_were_guessed_wrong_are_no_error() -> None:
    plan = plait.explain(Swapped(), graph())
    assert not plan.layers
    assert "planned at the first call" in str(plan)


def test_arguments_may_be_given_themselves() -> None:
    data = graph()
    by_position = plait.explain(Swapped(), args=(data.edge_index, data.x))
    by_name = plait.explain(Swapped(), kwargs={"second": data.x, "first": data.edge_index}, analyze=True)
    assert len(by_position.layers) == len(by_name.layers) == 1
    assert by_name.layers[0].measured
    assert by_position.layers[0].describe() == plait.explain(Named(), data).layers[0].describe()


@pytest.mark.parametrize(("share", "warns"), [(0.4, True), (0.05, False), (None, False)])
def test_analyze_says_when_the_machine_was_busy(
    share: float | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(self: BusyElsewhere, *exception: object) -> None:
        self.share = share

    monkeypatch.setattr(BusyElsewhere, "__exit__", leave)
    plan = plait.explain(GATConv(64, 4), graph(), analyze=True)
    assert any("other processes used 40%" in text for text in plan.warnings) == warns
    assert str(plan).startswith("warning: other processes") == warns


# Wrong data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("cora.npz", "'cora.npz' is a str"),
        ((graph().x, graph().edge_index), "a tuple of 2"),
        ([graph()], "a list of 1"),
        ({"x": graph().x}, "Data(**data)"),
        (DataLoader([graph()]), "DataLoader is a loader; pass one of its batches"),
        (HeteroData(), "HeteroData, but GCNConv.forward takes x, edge_index"),
        (Data(edge_index=graph().edge_index), "has no x, which GCNConv.forward takes"),
        (Data(x=graph().x), "has no edge_index, which GCNConv.forward takes"),
        (graph().x, "data: Tensor"),
        (3, "data: int"),
    ],
)
@pytest.mark.parametrize("call", [plait.compile, plait.explain])
def test_wrong_data_is_refused_at_once(call: Any, data: Any, says: str) -> None:
    with pytest.raises(InputError) as error:
        call(GCNConv(64, 4), data)
    assert says in str(error.value)
    assert ";" in str(error.value)  # the next step


def test_explain_wants_data_or_arguments() -> None:
    with pytest.raises(InputError, match="data: missing"):
        plait.explain(GCNConv(64, 4))


class Written(nn.Module):
    """A model that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(64, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x.relu_(), edge_index)
        return out


@pytest.mark.parametrize("takes_data", [False, True])
@pytest.mark.parametrize("ask", [plait.compile, plait.explain])
def test_computed_features_keep_their_history(ask: Any, takes_data: bool) -> None:
    data = graph()
    leaf = data.x.clone().requires_grad_()
    data.x = leaf * 2 - 1
    history, value, version = data.x.grad_fn, data.x.detach().clone(), data.x._version
    model: Any = Written()
    if takes_data:
        model = _OfData(model)
    with torch.set_grad_enabled(not takes_data):
        ask(model, data)
    assert data.x.grad_fn is history
    assert data.x._version == version
    torch.testing.assert_close(data.x.detach(), value)
    model(data) if takes_data else model(data.x, data.edge_index).sum().backward()


def test_computed_features_take_several_backward_passes_through_reentrant_checkpoints() -> None:
    layer = DeepGCNLayer(GCNConv(4, 4), nn.LayerNorm(4), nn.ReLU(), ckpt_grad=True)
    features = torch.randn(5, 4, requires_grad=True) * 2
    data = Data(x=features, edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    model = plait.compile(layer.train(), data, memory_limit="50 MB")
    model(data.x, data.edge_index).sum().backward()
    assert layer.conv.lin.weight.grad is not None


class _OfData(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: Data) -> Tensor:
        out: Tensor = self.model(data.x, data.edge_index)
        return out


class Keeping(nn.Module):
    """A model that keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden = GCNConv(64, 4), None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.hidden = self.out = self.conv(x, edge_index)
        return self.out


@pytest.mark.parametrize("is_called_before", [False, True])
def test_computed_attributes_are_put_back(is_called_before: bool) -> None:
    data, model = graph(), Keeping()
    torch.nn.utils.weight_norm(model.conv.lin)
    if is_called_before:
        with torch.no_grad():
            model(data.x, data.edge_index)
    weight, hidden = model.conv.lin.weight, model.hidden
    model.conv.lin.weight = weight.detach()
    compiled: Any = plait.compile(model, data)
    assert not model.conv.lin.weight.requires_grad
    assert model.hidden is hidden
    assert hasattr(model, "out") == is_called_before
    torch.testing.assert_close(
        copy.deepcopy(compiled)(data.x, data.edge_index), model(data.x, data.edge_index)
    )
