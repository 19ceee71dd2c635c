"""runtime/trace: steps are timed under their names where a trace is taken, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import plait
from plait.runtime.trace import Clock, clock, start, timed


def test_steps_of_one_name_are_added_up() -> None:
    trace: Any = []
    own = Clock("layer", trace)
    for _ in range(3):
        with timed(own, "fwd attend"):
            pass
    assert [name for name, _ in trace] == ["layer\0fwd attend"]
    assert trace[0][1].seconds > 0.0


def test_steps_of_one_pass_share_its_seconds() -> None:
    trace: Any = []
    with timed(Clock("layer", trace), "bwd input gradient", "bwd weight gradient"):
        pass
    assert [name for name, _ in trace] == ["layer\0bwd input gradient", "layer\0bwd weight gradient"]
    assert trace[0][1].seconds == trace[1][1].seconds > 0.0


def test_without_a_trace_there_is_no_clock() -> None:
    start("layer", [])
    assert clock() is not None
    start("layer", None)
    assert clock() is None


@pytest.mark.parametrize(
    "layer",
    [GATConv(8, 4, heads=3), GATConv(4, 32, heads=3), GATv2Conv(8, 4, heads=3), TransformerConv(8, 4)],
)
def test_analyze_measures_every_step_of_an_attention_plan(layer: Any) -> None:
    x = torch.randn(30, layer.in_channels, requires_grad=True)
    data = Data(x=x, edge_index=torch.randint(0, 30, (2, 90)))
    plan = plait.explain(layer, data, analyze=True, mode="training")
    steps = plan.to_dict()["layers"][0]["steps"]
    assert {step["op"] for step in steps if step["measured_seconds"] is None} == set()
    assert "measured" in str(plan)
    assert max(map(len, str(plan).splitlines())) <= 110
