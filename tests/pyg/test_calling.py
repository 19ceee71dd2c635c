"""pyg/calling.py: the clock around planned layers and their nodes of torch's graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINConv

import plait
from plait.plan.plan import Measured
from plait.pyg.calling import timed_calls


def _graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 30, (2, 120), generator=generator)
    return Data(x=torch.randn(30, 8, generator=generator), edge_index=edges)


class Two(nn.Module):
    """Two planned layers with code of the model's own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 8), GATConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def test_every_layer_is_called_once_forwards_and_once_backwards() -> None:
    data = _graph()
    compiled = plait.compile(Two(), data)
    ticks = itertools.count()
    with timed_calls(compiled._plait_seats, clock=lambda: float(next(ticks))) as calls:
        compiled(data.x, data.edge_index).sum().backward()
    layers = ["first GCNConv", "second GATConv"]
    assert dict(calls.forward) == dict.fromkeys(layers, 1.0)
    assert dict(calls.backward) == dict.fromkeys(layers, 1.0)


def test_after_it_nothing_listens() -> None:
    data = _graph()
    compiled = plait.compile(Two(), data)
    with timed_calls(compiled._plait_seats) as calls:
        pass
    compiled(data.x, data.edge_index).sum().backward()
    assert not calls.forward
    assert not calls.backward


def test_beside_is_what_the_steps_leave_of_a_call() -> None:
    data = _graph()
    compiled = plait.compile(GCNConv(8, 8), data)
    with timed_calls(compiled._plait_seats) as calls:
        compiled(data.x, data.edge_index).sum().backward()
    ((name, plan),) = compiled._plait_plan_session.plans.items()
    calls.forward[name], calls.backward[name] = 5.0, 7.0
    steps = [(f"{name}\0{one.step.out}", Measured(1.0)) for one in plan.steps]
    back = len(plan.steps) - plan.num_forward
    assert calls.beside({name: plan}, steps) == {name: {"fwd": 5.0 - plan.num_forward, "bwd": 7.0 - back}}


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_an_analysed_plan_says_what_calling_a_layer_takes(mode: str) -> None:
    model = GINConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    plan = plait.explain(model, _graph(), mode=mode, analyze=True)
    phases = {"forward", "backward"} if mode == "training" else {"forward"}
    (layer,) = plan.to_dict()["layers"]
    assert set(layer["calling"]) == phases
    assert all(seconds > 0.0 for seconds in layer["calling"].values())
    for text in (str(plan), plan.formulas(), plan._repr_html_()):
        assert text.count("calling: Python and autograd around the steps") == len(phases)
    assert "in calling them" in str(plan)
    assert "calling" not in str(plait.explain(model, _graph(), mode=mode))
