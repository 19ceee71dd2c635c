"""Layers that are more than a matrix expression by the kernels of a GPU: there, else interpreted."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import typing
from torch_geometric.nn import DynamicEdgeConv, EdgeConv, GATConv, GCNConv, SAGEConv

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton", reason="triton is not installed; it comes with CUDA builds of torch")

import plait
from plait.bench.gpu import families
from plait.cost.machine import gpu_profile
from plait.pyg.edges import attach_starts
from plait.pyg.layers.fused import FUSED
from plait.pyg.lower import supported
from plait.runtime import cuda_messages, cuda_orders
from plait.runtime.machine import using_machine
from plait.runtime.nearest import nearest
from plait.runtime.placed import PlacedGraph
from tests.parity.families import FAMILIES, WIDTH, Family
from tests.parity.harness import as_on_a_gpu, close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUT, GRADIENT = {torch.float32: 2e-5, torch.float64: 1e-10}, {torch.float32: 5e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        yield
        return
    as_on_a_gpu(monkeypatch)
    with using_machine(gpu_profile("NVIDIA H200", (9, 0))):
        yield


def drawn_edges(shape: str, nodes: int) -> Tensor:
    """Edges with loops, repeats, nodes without any, or a hub of all of them."""
    generator = torch.Generator().manual_seed(nodes)
    if shape == "none":
        return torch.empty((2, 0), dtype=torch.int64)
    given = torch.randint(0, nodes - 1, (2, 3 * nodes), generator=generator)
    if shape == "hub":
        spokes = torch.stack([torch.arange(70) % nodes, torch.zeros(70, dtype=torch.int64)])
        given = torch.cat([given[:, :20], spokes], 1)
    return torch.cat([given, given[:, :4], torch.tensor([[1, 1], [1, 1]])], 1)


def inputs(family: Family, edge_index: Tensor, nodes: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """(x, what the layer takes after it) on the device."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(nodes, WIDTH, generator=generator).to(DEVICE, dtype)
    count, more = edge_index.shape[1], [edge_index.to(DEVICE)]
    if family.takes_first:
        more.insert(0, x.flip(0))
    if family.edge_width is not None:
        more.append(torch.rand(count, family.edge_width, generator=generator).to(DEVICE, dtype))
    if family.relations:
        more.append(torch.randint(0, family.relations, (count,), generator=generator).to(DEVICE))
    return x, more


def answers(net: Any, x: Tensor, more: list[Tensor]) -> list[Tensor | None]:
    """Output and all gradients, those of the edges' features included."""
    torch.manual_seed(0)
    net.zero_grad()
    given = x.clone().requires_grad_()
    others = [m.clone().requires_grad_() if m.is_floating_point() else m for m in more]
    out = net(given, *others)
    out.square().sum().backward()
    floats = [m.grad for m in others if m.is_floating_point()]
    return [out, given.grad, *floats, *(p.grad for p in net.parameters())]


def agree(
    family: Family,
    edge_index: Tensor,
    nodes: int,
    dtype: torch.dtype,
    is_listed: bool = False,
    calls: int = 2,
) -> Any:
    """The compiled layer after it answered like PyG; is_listed: the edges carry where targets begin."""
    torch.manual_seed(0)
    module = family.make().to(DEVICE, dtype)
    x, more = inputs(family, edge_index, nodes, dtype)
    if is_listed:
        edges = more[int(family.takes_first)]
        ends = torch.arange(nodes + 1, device=DEVICE)
        attach_starts(edges, torch.searchsorted(edges[1].contiguous(), ends, out_int32=True))
    twin, compiled = copy.deepcopy(module), plait.compile(module)
    theirs = answers(twin, x, more)
    for _ in range(calls):
        ours = answers(compiled, x, more)
        for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if other is None or mine is None:
                assert mine is None or not mine.any(), f"answer {k}"
            else:
                close(mine, other, (OUTPUT if k == 0 else GRADIENT)[dtype], f"answer {k}", scale=0.05)
    return compiled


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_like_pyg(name: str) -> None:
    family = FAMILIES[name]
    dtypes = [torch.float64] if DEVICE == "cpu" else [torch.float64, torch.float32]
    for dtype in dtypes:
        compiled = agree(family, drawn_edges("random", 11), 11, dtype)
        assert not compiled.plan.not_planned, compiled.plan.not_planned
        agree(family, drawn_edges("hub", 9), 9, dtype, calls=1)


LINEAR = {
    "GCNConv": Family(lambda: GCNConv(WIDTH, 4)),
    "SAGEConv": Family(lambda: SAGEConv(WIDTH, 4)),
    "SAGEConv max": Family(lambda: SAGEConv(WIDTH, 4, aggr="max")),
    "GATConv": Family(lambda: GATConv(WIDTH, 4, heads=2)),
}


@pytest.mark.parametrize("name", [*LINEAR, *FAMILIES])
def test_edges_of_a_sampler_need_no_sort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed target by target, sources in any order, the last nodes without edges."""
    made: list[int] = []
    listed = PlacedGraph.listed
    monkeypatch.setattr(PlacedGraph, "listed", lambda *given: made.append(1) or listed(*given))
    edge_index = drawn_edges("random", 9)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    compiled = agree((LINEAR | FAMILIES)[name], edge_index, 12, torch.float64, is_listed=True)
    assert made or not (LINEAR.get(name)), "the graph was made by a sort"
    assert not compiled.plan.not_planned, compiled.plan.not_planned


def test_nearest_neighbours_are_edges_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG finds them with a library of its own, which may not be there: EdgeConv is given the same ones."""
    monkeypatch.setattr(typing, "WITH_KNN", True)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2 * WIDTH, 7), nn.Tanh(), nn.Linear(7, 5))
    dynamic = DynamicEdgeConv(network, k=3).to(DEVICE, torch.float64)
    twin = EdgeConv(copy.deepcopy(network))
    twin.load_state_dict(dynamic.state_dict())
    x = torch.randn(11, WIDTH, dtype=torch.float64, device=DEVICE)
    batch = torch.arange(11, device=DEVICE) // 6
    edge_index = torch.stack(nearest(x, x, 3, batch, batch))
    compiled: Any = plait.compile(dynamic)
    theirs = answers(twin.to(DEVICE, torch.float64), x, [edge_index])
    for mine, other in zip(answers(compiled, x, [batch]), theirs, strict=True):
        assert mine is not None
        assert other is not None
        close(mine, other, 1e-9, "answer")
    assert not compiled.plan.not_planned


@pytest.mark.parametrize(
    "name", ["PNAConv", "RGCNConv", "RGCNConv bases", "EdgeConv sum", "GENConv", "GATv2Conv edges", "CGConv"]
)
def test_derivatives_of_derivatives(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    module = family.make().to(DEVICE, torch.float64)
    x, more = inputs(family, drawn_edges("random", 11), 11, torch.float64)
    found = []
    for net in (module, plait.compile(copy.deepcopy(module))):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(given, *more).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), given)[0])
    close(found[1], found[0], 1e-8, "second derivative", scale=0.05)


@pytest.mark.parametrize(
    "name", ["PNAConv edges", "EdgeConv max", "GATv2Conv edges", "CGConv edges", "GENConv"]
)
def test_blocks_of_edges_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_orders, "_BLOCK_BYTES", 512)
    monkeypatch.setattr(cuda_messages, "_EDGE_ROWS_BYTES", 512)
    agree(FAMILIES[name], drawn_edges("random", 11), 11, torch.float64)


@pytest.mark.parametrize("name", ["PNAConv", "RGCNConv", "EdgeConv max", "FiLMConv", "AGNNConv", "CGConv"])
def test_graphs_without_edges(name: str) -> None:
    agree(FAMILIES[name], drawn_edges("none", 4), 4, torch.float64)


def test_the_benchmark_runs_every_layer_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "milliseconds", lambda call, **_: 1.0)
    if DEVICE == "cpu":  # one for each kind of input: the interpreter takes its time
        few = {name: families.LAYERS[name] for name in ("RGCN", "GAT, edges", "FA", "AGNN")}
        monkeypatch.setattr(families, "LAYERS", few)
    edges = drawn_edges("random", 11).to(DEVICE)
    for record in families.measure("random", edges, 11):
        assert record["is_planned"], record
        assert record["error"] < 1e-4, record


def test_the_coverage_page_says_of_every_layer_what_a_gpu_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
    table = page.split("## On a CUDA device")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    said = {name.strip(): row[2].strip() for row in rows for name in row[1].split(",")}
    assert set(said) == set(supported())
    assert all(what.startswith("planned") for what in said.values())
    tried = {name.split()[0] for name in FAMILIES}
    assert {layer.__name__ for layer in FUSED} - {"SAGEConv", "DynamicEdgeConv"} <= tried
