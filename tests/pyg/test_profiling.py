"""Ranges for profilers, Chrome traces and log messages."""

import json
import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GATConv, GCNConv, HypergraphConv

import plait
from plait.errors import InputError


@pytest.fixture
def data():
    torch.manual_seed(0)
    return Data(x=torch.randn(60, 12), edge_index=torch.randint(0, 60, (2, 300)))


def _names(seen):
    return [event.key for event in seen.key_averages() if event.key.startswith("plait")]


def test_layers_and_steps_are_ranges_of_the_profiler(data):
    model = plait.compile(GCN(12, 16, 2, 4), data)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(data.x, data.edge_index).sum().backward()
    names = _names(seen)
    assert "plait layer convs.0 GCNConv" in names
    assert any(name.startswith("plait convs.1 GCNConv: fwd ") for name in names)
    assert any(name.startswith("plait convs.1 GCNConv: bwd ") for name in names)


def test_passes_of_attention_are_ranges(data):
    model = plait.compile(GAT(12, 16, 2, 4), data)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(data.x, data.edge_index).sum().backward()
    names = _names(seen)
    assert any(name.startswith("plait convs.0 GATConv: fwd attend") for name in names)
    assert any(name.startswith("plait convs.0 GATConv: bwd attend") for name in names)


def test_profiled_results_are_the_same(data):
    model = plait.compile(GCN(12, 16, 2, 4), data)
    plain = model(data.x, data.edge_index)
    with profile(activities=[ProfilerActivity.CPU]):
        profiled = model(data.x, data.edge_index)
    assert torch.equal(plain, profiled)


def test_trace_writes_a_file_and_leaves_gradients_and_randomness(data, tmp_path):
    model = GCN(12, 16, 2, 4, dropout=0.5)
    path = tmp_path / "plan.json"
    before = torch.get_rng_state()
    seen = plait.trace(model, data, path)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any(name.startswith("plait convs.0 GCNConv: bwd") for name in names)
    assert _names(seen)


def test_trace_of_inference_has_no_backward_pass(data, tmp_path):
    seen = plait.trace(GCN(12, 16, 2, 4), data, tmp_path / "plan.json", mode="inference")
    assert not any(": bwd" in name for name in _names(seen))


def test_trace_refuses_an_unknown_mode(data, tmp_path):
    with pytest.raises(InputError, match="mode: 'fast'"):
        plait.trace(GCN(12, 16, 2, 4), data, tmp_path / "plan.json", mode="fast")


def test_plans_and_layers_left_to_pyg_are_logged(data, caplog):
    with caplog.at_level(logging.DEBUG, logger="plait"):
        plait.compile(GCN(12, 16, 2, 4), data)
    assert any("convs.0 GCNConv planned" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="plait"):
        plait.compile(GATConv(12, 16), data)
    assert any("GATConv planned" in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="plait"):
        plait.compile(HypergraphConv(12, 16), data)
    assert any("HypergraphConv runs in PyG: " in message for message in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="plait"):
        plait.compile(GCNConv(12, 16).to(torch.complex64))(data.x.to(torch.complex64), data.edge_index)
    assert any("runs in PyG" in message for message in caplog.messages)


def test_nothing_is_printed_without_a_handler(data, capfd):
    plait.compile(GCN(12, 16, 2, 4), data)
    assert capfd.readouterr() == ("", "")
