"""pyg/autocast.py: layers under torch.autocast are planned, with PyG's types and its answers to 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GCN,
    AGNNConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GENConv,
    GINConv,
    GraphConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TransformerConv,
)

import plait

N, WIDTH = 40, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = [torch.bfloat16] if DEVICE == "cpu" else [torch.bfloat16, torch.float16]


def network(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inner, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outer))


def pna() -> PNAConv:
    return PNAConv(WIDTH, 6, ["mean", "max"], ["identity"], torch.tensor([2, 3, 5, 8]))


class Attended(nn.Module):
    """A layer that is asked for its attention weights; they add to what is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATv2Conv(WIDTH, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out, (_, attention) = self.conv(x, edge_index, return_attention_weights=True)
        return out + attention.square().sum()  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: GCNConv(WIDTH, 6),
    "SAGEConv": lambda: SAGEConv(WIDTH, 6),
    "SAGEConv max": lambda: SAGEConv(WIDTH, 6, aggr="max"),
    "GraphConv": lambda: GraphConv(WIDTH, 6),
    "GINConv": lambda: GINConv(network(WIDTH, 6)),
    "GATConv": lambda: GATConv(WIDTH, 6, heads=2),
    "GATv2Conv": lambda: GATv2Conv(WIDTH, 6, heads=2),
    "attention weights": Attended,
    "AGNNConv": lambda: AGNNConv(),
    "TransformerConv": lambda: TransformerConv(WIDTH, 6, heads=2),
    "PNAConv": pna,
    "PNAConv with networks": lambda: PNAConv(
        WIDTH, 6, ["max", "std"], ["identity"], torch.tensor([2, 3, 5, 8]), pre_layers=2
    ),
    "EdgeConv": lambda: EdgeConv(
        nn.Sequential(nn.Linear(2 * WIDTH, 6), nn.ReLU(), nn.Linear(6, 5)), aggr="mean"
    ),
    "GENConv": lambda: GENConv(WIDTH, 6, norm="layer"),
    "two layers": lambda: GCN(WIDTH, 6, 2, 4),
}


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDTH, generator=generator)
    return x.to(DEVICE), torch.randint(0, N, (2, 6 * N), generator=generator).to(DEVICE)


def near(mine: Tensor, other: Tensor, exact: Tensor, dtype: torch.dtype, what: str) -> None:
    """As near to PyG's answer as that is to the exact one, or as 16 bits are."""
    assert mine.dtype == other.dtype, what
    mine, other, exact = mine.detach(), other.detach(), exact.detach()
    scale = float(exact.abs().max()) + 1e-3
    apart = float((mine.float() - other.float()).abs().max())
    assert apart <= 2 * float((other.float() - exact).abs().max()) + NEAR[dtype] * scale, (what, apart, scale)


def answers(
    net: Any, x: Tensor, *more: Any, dtype: torch.dtype | None, is_backward_inside: bool = False
) -> list[Tensor | None]:
    torch.manual_seed(0)
    net.zero_grad()
    given = x.clone().requires_grad_()
    with torch.autocast(DEVICE, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = net(given, *more)
        if is_backward_inside:
            out.float().square().mean().backward()
    if not is_backward_inside:
        out.float().square().mean().backward()
    return [out, given.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("is_backward_inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_planned_and_answer_like_pyg(
    name: str, dtype: torch.dtype, is_backward_inside: bool
) -> None:
    x, edge_index = graph()
    torch.manual_seed(1)
    module = LAYERS[name]().to(DEVICE)
    twin, plain, compiled = copy.deepcopy(module), copy.deepcopy(module), plait.compile(module)
    for given in (x, x.to(dtype).float()):
        exact = answers(plain, given, edge_index, dtype=None)
        theirs, ours = (
            answers(net, given, edge_index, dtype=dtype, is_backward_inside=is_backward_inside)
            for net in (twin, compiled)
        )
        for k, (mine, other, best) in enumerate(zip(ours, theirs, exact, strict=True)):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None and best is not None:
                near(mine, other, best, dtype, f"answer {k}")
    plan: Any = compiled.plan
    assert not plan.not_planned, plan.not_planned
    # asking PyG for types leaves no trace
    for one, two in zip(compiled.buffers(), twin.buffers(), strict=True):
        near(one, two, two.float(), dtype, "buffer")


def test_relations_and_weights_of_edges() -> None:
    x, edge_index = graph()
    kind = torch.arange(edge_index.shape[1], device=DEVICE) % 3
    weight = torch.rand(edge_index.shape[1], device=DEVICE)
    for module, more in ((RGCNConv(WIDTH, 6, 3), kind), (GCNConv(WIDTH, 6), weight)):
        module = module.to(DEVICE)
        compiled: Any = plait.compile(copy.deepcopy(module))
        exact = answers(copy.deepcopy(module), x, edge_index, more, dtype=None)
        theirs = answers(module, x, edge_index, more, dtype=torch.bfloat16)
        ours = answers(compiled, x, edge_index, more, dtype=torch.bfloat16)
        for k, (mine, other, best) in enumerate(zip(ours, theirs, exact, strict=True)):
            assert mine is not None
            assert other is not None
            assert best is not None
            near(mine, other, best, torch.bfloat16, f"answer {k}")
        assert not compiled.plan.not_planned


def test_a_layer_that_is_not_planned_follows_autocast_in_pyg() -> None:
    x, edge_index = graph()
    module = SAGEConv(WIDTH, 6, aggr=["mean", "max"]).to(DEVICE)
    compiled: Any = plait.compile(copy.deepcopy(module))
    theirs, ours = (answers(net, x, edge_index, dtype=torch.bfloat16) for net in (module, compiled))
    assert compiled.plan.not_planned
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)  # PyG adds by atomics on a GPU


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU draws other numbers for another type")
def test_dropout_and_later_calls_draw_what_they_would_without_the_question() -> None:
    x, edge_index = graph()
    module = GINConv(nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.5), nn.Linear(6, 5))).to(DEVICE)
    compiled = plait.compile(copy.deepcopy(module))
    theirs, ours = (answers(net, x, edge_index, dtype=torch.bfloat16) for net in (module, compiled))
    assert torch.equal(theirs[0] == 0, ours[0] == 0)  # type: ignore[arg-type]
    near(ours[0], theirs[0], theirs[0].float(), torch.bfloat16, "output")  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("name", ["GCNConv", "attention weights", "PNAConv with networks", "AGNNConv"])
def test_a_backward_pass_under_autocast_of_a_call_without_it_keeps_the_precision(name: str) -> None:
    x, edge_index = graph()
    module = LAYERS[name]().to(DEVICE)
    compiled: Any = plait.compile(copy.deepcopy(module))
    exact = answers(module, x, edge_index, dtype=None)
    given = x.clone().requires_grad_()
    loss = compiled(given, edge_index).square().mean()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss.backward()
    for mine, best in zip([given.grad, *(p.grad for p in compiled.parameters())], exact[1:], strict=True):
        assert mine is not None
        assert best is not None
        # what lies outside the layers follows autocast
        near(mine, best, best, torch.bfloat16, "gradient")


@pytest.mark.skipif(DEVICE != "cpu", reason="rows are computed later on a CPU only")
def test_rows_computed_later_under_autocast_are_of_the_type_of_those_computed_before() -> None:
    x, edge_index = graph()
    wanted = torch.arange(N) % 2 == 1
    module = GCN(WIDTH, 6, 2, 4)
    compiled: Any = plait.compile(copy.deepcopy(module), Data(x=x, edge_index=edge_index), rows=wanted)
    lin = nn.Linear(4, 3)
    expected = lin(module(x, edge_index))
    for out in (lin(compiled(x, edge_index)), lin(compiled(x, edge_index))):
        assert out[wanted].dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine, loss = out + 0, out.sum()
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
        compiled.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        assert all(p.grad is not None for p in compiled.parameters())


@pytest.mark.parametrize("layer", [SGConv, SSGConv])
def test_what_a_layer_keeps_of_a_call_in_16_bits_is_read_as_pyg_reads_it(layer: Callable[..., Any]) -> None:
    x, edge_index = graph()
    more = {"alpha": 0.1} if layer is SSGConv else {}
    module = layer(WIDTH, 6, cached=True, **more).bfloat16().to(DEVICE)
    compiled: Any = plait.compile(copy.deepcopy(module))
    outs = []
    for net in (module, compiled):
        net(x.bfloat16(), edge_index)
        net.float()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            outs.append(net(x, edge_index))
    near(outs[1], outs[0], outs[0].float(), torch.bfloat16, "output")


@pytest.mark.skipif(DEVICE != "cpu", reason="norms are taken in float32 on a GPU")
def test_a_layer_in_16_bits_without_parameters_runs_in_pyg() -> None:
    x, edge_index = graph()
    x[:5] = 0  # PyG's norm of such a row is 0 / 0 in float16
    module = AGNNConv(requires_grad=False).half()
    compiled: Any = plait.compile(copy.deepcopy(module))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        theirs, ours = (net(x.half(), edge_index) for net in (module, compiled))
    torch.testing.assert_close(ours, theirs, equal_nan=True)
