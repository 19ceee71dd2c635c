"""pyg/quiet.py: runs that leave no trace in modes, buffers, inputs, gradients and random states."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SuperGATConv

import plait
from plait.pyg.call import Call
from plait.pyg.quiet import gradients, quietly, recorded
from tests.pyg.test_compile import graph, model_of


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Writing(nn.Module):
    """Draws numbers, counts its calls in a buffer, keeps a normalised graph, and writes to its input."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.norm, self.conv = nn.BatchNorm1d(6), GCNConv(6, 3, cached=True)
        self.hidden = [nn.Dropout(0.5)]  # in no tree of children

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1 + random.random() + float(np.random.rand())
        out: Tensor = self.conv(self.hidden[0](self.norm(x)), edge_index)
        x.zero_()
        return out


def test_a_quiet_run_restores_all_that_it_changed() -> None:
    data, model = graph(), Writing().eval()
    model.hidden[0].eval()
    x, state = data.x.clone(), copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    call = Call((data.x, data.edge_index))
    with quietly(model, call, is_training=True):
        assert model.norm.training
        call(model)
        assert model.hidden[0].training  # found when it was called
        assert not data.x.any()
    assert torch.equal(data.x, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert not any(module.training for module in (*model.modules(), model.hidden[0]))
    assert model.conv._cached_edge_index is None
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[union-attr]


def test_a_module_that_runs_as_its_compiled_view_too_keeps_its_mode() -> None:
    data, layer = graph(), GCNConv(6, 3)
    model = nn.ModuleList([plait.compile(layer)])
    for is_training in (True, False):
        layer.train(not is_training)
        model.training = not is_training
        with quietly(model, Call((data.x, data.edge_index)), is_training):
            layer(data.x, data.edge_index)  # as a method or a list that holds the layer itself reaches it
            assert layer.training == is_training
        assert layer.training == (not is_training)


def test_what_is_inside_a_layer_is_recorded_as_the_layer() -> None:
    model, data = model_of(), graph()
    with recorded(ran := []):
        model(data.x, data.edge_index)
    assert [type(module).__name__ for module in ran if isinstance(module, GCNConv | nn.Linear)] == [
        "GCNConv"
    ] * 2


def test_gradients_are_returned_and_added_to_none() -> None:
    model, data = model_of(), graph()
    data.x.requires_grad_()
    call = Call((data.x, data.edge_index))
    found = gradients(model, call, call(model))
    assert len(found) == len([*model.parameters()]) + 1
    assert all(tensor.grad is None for tensor in (data.x, *model.parameters()))
    call(model).sum().backward()
    for tensor, grad in zip((*model.parameters(), data.x), found, strict=True):
        torch.testing.assert_close(grad, tensor.grad)


def test_looking_ahead_leaves_random_numbers_gradients_and_modes_alone() -> None:
    data, model = graph(), model_of().train()
    state = torch.get_rng_state()
    compiled = plait.compile(model, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert compiled.training
    assert all(p.grad is None for p in compiled.parameters())


def test_looking_ahead_leaves_no_attention_behind_and_the_model_can_be_copied() -> None:
    # what SuperGATConv keeps of a training step has a graph behind it, which nobody can copy
    data = Data(x=torch.randn(9, 4), edge_index=torch.randint(0, 9, (2, 30)))
    model = SuperGATConv(4, 2)
    compiled = plait.compile(model, data)
    assert model.att_x is None
    assert model.att_y is None
    copy.deepcopy(compiled)


@pytest.mark.parametrize("look", ["gradients", "trace"])
def test_the_graph_of_weights_that_were_computed_is_not_freed(look: str, tmp_path: Path) -> None:
    model, data = GCNConv(6, 3), Data(x=torch.randn(5, 6), edge_index=torch.randint(0, 5, (2, 9)))
    scale = nn.Parameter(torch.tensor(0.5))
    del model._parameters["bias"]
    model.bias = torch.ones(3) * scale  # as a network that makes weights leaves it
    model.scale = scale
    if look == "trace":
        plait.trace(model, data, tmp_path / "trace.json")
    else:
        call = Call((data.x, data.edge_index), {})
        gradients(model, call, model(data.x, data.edge_index))
    model(data.x, data.edge_index).sum().backward()
    assert scale.grad is not None
