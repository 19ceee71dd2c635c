"""pyg/ahead.py: a run before the first call plans the model as it will be run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import DeepGCNLayer, GCNConv, Sequential

import plait
from plait.pyg.ahead import is_for_inference
from plait.pyg.call import Call
from tests.pyg.test_compile import graph, model_of


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_tensor_of_inference_mode_makes_the_plan_one_for_inference() -> None:
    model, data = model_of(), graph()
    assert not is_for_inference(model, None)
    assert not is_for_inference(model, Call((data.x, data.edge_index)))
    with torch.inference_mode():
        data.x = data.x.clone()
    assert is_for_inference(model, Call((data.x, data.edge_index)))
    assert "planned for inference" in str(plait.explain(model, data))


def test_arguments_that_data_does_not_have_are_planned_at_the_first_call() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(6, 3)

        def forward(self, rows: Tensor, links: Tensor) -> Tensor:
            out: Tensor = self.conv(rows, links)
            return out

    data, model = graph(), Other()
    compiled = plait.compile(model, data)
    torch.testing.assert_close(compiled(data.x, data.edge_index), model(data.x, data.edge_index))


def test_rows_are_not_used_where_something_mixes_them_afterwards() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = GCNConv(6, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.norm(self.conv(x, edge_index))
            return out

    data, model = graph(), Mixed()
    compiled = plait.compile(model, data, rows=torch.arange(5))
    assert any("rows= is not used" in note for note in compiled.plan.notes)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(compiled(data.x, data.edge_index), model(data.x, data.edge_index))


def test_a_model_without_layers_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    compiled = plait.compile(model, graph())
    assert "nothing to plan" in str(compiled.plan)
    torch.testing.assert_close(compiled(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_a_reentrant_checkpoint_inside_is_planned_and_leaves_no_gradients() -> None:
    data = Data(x=torch.randn(9, 4), edge_index=torch.randint(0, 9, (2, 30)))
    inside = DeepGCNLayer(GCNConv(4, 4), nn.LayerNorm(4), nn.ReLU(), ckpt_grad=True)
    parts = [(GCNConv(4, 4), "x, edge_index -> x"), (inside, "x, edge_index -> x")]
    model = Sequential("x, edge_index", parts)
    plait.compile(model, data, forms=["twins"])
    assert all(p.grad is None for p in model.parameters())
    # what lies behind the checkpoint saves tensors, too, which are freed once
    model = Sequential("x, edge_index", [*parts, (nn.Tanh(), "x -> x")])
    plait.compile(model, data, memory_limit="50 MB", mode="training")
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_behind_a_reentrant_checkpoint_is_planned_and_analyzed() -> None:
    data = Data(x=torch.randn(9, 4), edge_index=torch.randint(0, 9, (2, 30)))
    inside = DeepGCNLayer(GCNConv(4, 4), nn.LayerNorm(4), nn.ReLU(), ckpt_grad=True)
    layers = [GCNConv(4, 4), inside, GCNConv(4, 4)]
    model = Sequential("x, edge_index", [(layer, "x, edge_index -> x") for layer in layers])
    plan = plait.explain(plait.compile(model, data, memory_limit="50 MB"), data, analyze=True)
    assert len(plan.layers) == 3
    assert all(p.grad is None for p in model.parameters())


def test_rows_are_not_used_where_features_are_several_matrices() -> None:
    x, edge_index = torch.randn(2, 6, 4), torch.randint(0, 6, (2, 12))
    layer = GCNConv(4, 3)
    compiled = plait.compile(layer, Data(x=x, edge_index=edge_index), rows=torch.tensor([0]), mode="training")
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    assert any("rows= is not used" in note for note in compiled.plan.notes)  # type: ignore[union-attr, operator]
