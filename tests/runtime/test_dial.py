"""runtime/dial.py: a compiled model within its memory limit; its predicted peak beside what is allocated."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, ResGatedGraphConv, SAGEConv, TransformerConv

import plait
from plait.errors import PlanError
from plait.measure.memory import _tensor_bytes
from plait.plan.plan import Plan
from plait.runtime.budget import _arrays
from plait.runtime.identity import storage_bytes
from tests.parity.harness import close, largest

NODES, EDGES, WIDTH = 2000, 30_000, 64
LAYERS: dict[str, Callable[[], Any]] = {
    "gcn": lambda: GCNConv(WIDTH, WIDTH),
    "sage": lambda: SAGEConv(WIDTH, WIDTH),
    "gat": lambda: GATConv(WIDTH, WIDTH // 4, heads=4),
    "gatv2": lambda: GATv2Conv(WIDTH, WIDTH // 4, heads=4),
    "transformer": lambda: TransformerConv(WIDTH, WIDTH // 4, heads=4),
    "gated": lambda: ResGatedGraphConv(WIDTH, WIDTH),
}


class Stack(torch.nn.Module):
    """Layers with relu between them."""

    def __init__(self, make: Callable[[], Any], depth: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([make() for _ in range(depth)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if k else x, edge_index)
        return x


def drawn_data() -> Data:
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    return Data(x=torch.randn(NODES, WIDTH, generator=generator), edge_index=edge_index)


def least(model: torch.nn.Module, data: Data) -> int:
    """The smallest limit that the refusal of a smaller one names."""
    with pytest.raises(PlanError, match=r"needs \d+ bytes") as refusal:
        plait.compile(model, data, memory_limit=1)
    return int(str(refusal.value).partition("needs ")[2].split()[0])


def choices(compiled: Any) -> list[str]:
    return [layer.choice for layer in compiled.plan.layers]


def measured(name: str, limit: int | None) -> tuple[Any, int]:
    """A compiled model, and the bytes alive at the peak of a step: all tensors, and the graph's arrays."""
    made: list[Any] = []

    def prepare() -> None:
        torch.manual_seed(0)
        data, model = drawn_data(), Stack(LAYERS[name])
        rows = torch.arange(0, NODES, 20)
        compiled = plait.compile(model, data, memory_limit=limit)

        def step() -> None:
            model.zero_grad()
            out = compiled(data.x, data.edge_index)
            cross_entropy(out[rows], rows % WIDTH).backward()

        for _ in range(3):
            step()
        gc.collect()
        made.extend((compiled, step, data))

    _, alive = _tensor_bytes(prepare)
    peak, _ = _tensor_bytes(made[1])
    compiled = made[0]
    kept = list(compiled._plait_plan_session.edges.values())
    arrays = storage_bytes(array for array in _arrays(kept) if isinstance(array, np.ndarray))
    return compiled, alive + peak + arrays


@functools.cache
def unlimited(name: str) -> tuple[Plan, int]:
    """The plan of a model without a limit, and the bytes alive at the peak of its step."""
    compiled, peak = measured(name, None)
    return compiled.plan, peak


@functools.cache
def leanest(name: str) -> int:
    """The smallest limit of two layers."""
    return least(Stack(LAYERS[name]), drawn_data())


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_predicted_peak_is_near_what_is_allocated(name: str) -> None:
    plan, peak = unlimited(name)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.12)


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "gated"])
def test_a_limit_makes_layers_lean_and_is_kept(name: str) -> None:
    (free, peak), limit = unlimited(name), leanest(name)
    assert limit < free.peak_bytes
    bound, held = measured(name, int(1.01 * limit))
    assert choices(bound) != [layer.choice for layer in free.layers]
    assert bound.plan.seconds >= free.seconds
    assert bound.plan.peak_bytes <= 1.01 * limit
    assert held < peak
    assert held <= 1.05 * limit  # the loss is not counted


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_limited_model_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    data, model = drawn_data(), Stack(LAYERS[name])
    compiled = plait.compile(model, data, memory_limit=leanest(name))
    x = data.x.clone().requires_grad_()
    results = []
    for called in (model, compiled):
        model.zero_grad()
        x.grad = None
        out = called(x, data.edge_index)
        out.square().mean().backward()
        results.append((out.detach(), x.grad, *[p.grad for p in model.parameters()]))
    for mine, theirs in zip(results[1], results[0], strict=True):
        # a gradient may be 0 but for rounding, as that of a key's bias is
        close(mine, theirs, 1e-3, name, scale=largest(*results[0][1:]))


def test_only_as_many_layers_are_lean_as_need_be() -> None:
    data, model = drawn_data(), Stack(LAYERS["gated"], depth=4)
    lean = []
    low, high = least(model, data), plait.compile(model, data).plan.peak_bytes
    for share in (0.0, 0.4, 0.7, 1.1):
        compiled = plait.compile(model, data, memory_limit=int(low + share * (high - low)) + 1)
        assert compiled.plan.peak_bytes <= compiled.plan.memory_limit
        lean.append(choices(compiled).count("gate again"))
    assert lean == sorted(lean, reverse=True)
    assert lean[0] > lean[1] > lean[-1] == 0


def test_a_limit_below_the_leanest_is_refused_and_the_one_named_is_met() -> None:
    data, model = drawn_data(), Stack(LAYERS["gat"])
    limit = leanest("gat")
    with pytest.raises(PlanError, match="mini-batches"):
        plait.compile(model, data, memory_limit=limit // 2)
    assert plait.compile(model, data, memory_limit=limit).plan.peak_bytes <= limit


def test_without_data_the_first_calls_settle_it() -> None:
    data, model = drawn_data(), Stack(LAYERS["gated"])
    compiled = plait.compile(model, memory_limit="10 GB")
    for _ in range(3):
        compiled(data.x, data.edge_index).sum().backward()
    assert choices(compiled) == ["keep", "keep"]
    refused = plait.compile(model, memory_limit="1 MB")
    with pytest.raises(PlanError, match=r"memory_limit: 1\.00 MB is too small"):
        refused(data.x, data.edge_index)


def test_inference_holds_one_layer_at_a_time() -> None:
    data, model = drawn_data(), Stack(LAYERS["gcn"], depth=4).eval()
    compiled = plait.compile(model, data, memory_limit="1GB")
    with torch.no_grad():
        compiled(data.x, data.edge_index)
    deep, flat = compiled.plan, plait.compile(Stack(LAYERS["gcn"]).eval(), data, memory_limit="1GB").plan
    assert deep.mode == flat.mode == "inference"
    assert deep.peak_bytes < 1.05 * flat.peak_bytes


def test_the_plan_says_what_is_held_and_what_is_allowed() -> None:
    data = drawn_data()
    plan = plait.compile(Stack(LAYERS["gcn"]), data, memory_limit="8GB").plan
    assert " of 8.00 GB allowed, at the peak of a step" in str(plan)
    assert plan.to_dict()["peak_bytes"] == plan.peak_bytes > data.x.nbytes
    assert plan.to_dict()["memory_limit"] == 8 * 10**9


def test_a_layer_called_twice_keeps_twice() -> None:
    layer = LAYERS["gated"]()
    data = drawn_data()
    one, two = Stack(lambda: layer, 1), Stack(lambda: layer, 2)
    once, twice = (plait.compile(model, data).plan for model in (one, two))
    assert twice.peak_bytes - once.peak_bytes >= once.layers[0].kept_bytes


def test_graphs_that_grow_are_planned_within_the_limit() -> None:
    model = Stack(LAYERS["gated"])
    compiled = plait.compile(model, memory_limit="200 MB")
    for nodes in (200, 1000, 3000, 500, 3000, 3000, 3000):
        generator = torch.Generator().manual_seed(nodes)
        edge_index = torch.randint(0, nodes, (2, 10 * nodes), generator=generator)
        x = torch.randn(nodes, WIDTH, generator=generator)
        out = compiled(x, edge_index)
        close(out, model(x, edge_index), 1e-4, f"{nodes} nodes")
        out.sum().backward()
    assert choices(compiled) == ["keep", "keep"]


def test_an_edge_index_that_wraps_a_tensor_is_passed_over() -> None:
    data = Data(x=torch.randn(7, 4), edge_index=EdgeIndex(torch.randint(0, 7, (2, 20)), sparse_size=(7, 7)))
    compiled = plait.compile(GCNConv(4, 3), data, memory_limit="1 GB")
    assert compiled(data.x, data.edge_index).shape == (7, 3)


def test_a_limited_model_under_vmap_has_no_memory_to_count() -> None:
    compiled = plait.compile(GCNConv(4, 3), memory_limit="1 GB")
    edge_index = torch.randint(0, 7, (2, 20))
    out = torch.func.vmap(lambda x: compiled(x, edge_index))(torch.randn(2, 7, 4))
    assert out.shape == (2, 7, 3)
