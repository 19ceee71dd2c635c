"""runtime/trace: the profiler is seen where it runs; every step is timed where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import plait
from plait.runtime.trace import is_profiling


def test_a_profiler_is_seen_while_it_runs() -> None:
    assert not is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_profiling()
    assert not is_profiling()


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


def test_analyze_measures_every_piece_of_a_layer_with_features_of_edges() -> None:
    x = torch.randn(30, 8, requires_grad=True)
    args = (x, torch.randint(0, 30, (2, 90)), torch.randn(90, 5))
    for layer in (GATv2Conv(8, 4, heads=3, edge_dim=5), TransformerConv(8, 4, heads=2, edge_dim=5)):
        plan = plait.explain(layer, args=args, analyze=True, mode="training")
        steps = [step for piece in plan.to_dict()["layers"] for step in piece["steps"]]
        assert {"edge_sums", "edge_softmax"} <= {step["op"] for step in steps}
        assert all(step["measured_seconds"] is not None for step in steps)
        assert all(step["reads"] for step in steps)
        lines = [line for piece in plan.layers for line in piece.lines()]
        assert max(map(len, [*str(plan).splitlines(), *lines])) <= 110
        assert "1 planned layer" in str(plan)
