"""Layers planned on a CUDA device give PyG's results there; needs one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GCN,
    GIN,
    GATConv,
    GATv2Conv,
    GraphSAGE,
    ResGatedGraphConv,
    TransformerConv,
)

import plait
from tests.parity.harness import close, parts
from tests.pyg.cases import CASES, Case, random_edges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUTPUT = {torch.float32: 2e-5, torch.float64: 1e-10}
GRADIENT = {torch.float32: 2e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


def agree(module: nn.Module, x: Any, *rest: Any, must_plan: bool = True) -> Any:
    """The compiled module after it answered like PyG on the device, forward and backward, twice."""
    twin, compiled = copy.deepcopy(module), plait.compile(module)
    for _ in range(2 + bool(getattr(module, "cached", False))):
        outs = []
        for net in (twin, compiled):
            torch.manual_seed(0)  # networks inside may drop out
            net.zero_grad()
            mine = tuple(p.clone().requires_grad_() for p in parts(x))
            out = net(mine if isinstance(x, tuple) else mine[0], *rest)
            if out.requires_grad:
                out.square().sum().backward()
            outs.append((out, [p.grad for p in mine], [p.grad for p in net.parameters()]))
        (theirs, *their_grads), (ours, *our_grads) = outs
        assert ours.device == theirs.device
        close(ours, theirs, OUTPUT[theirs.dtype], "output")
        ours_all, theirs_all = ([*grads[0], *grads[1]] for grads in (our_grads, their_grads))
        for mine, other in zip(ours_all, theirs_all, strict=True):
            assert (mine is None) == (other is None)
            if other is not None:
                # a bias of keys has a gradient of zero but for rounding
                close(mine, other, GRADIENT[theirs.dtype], "gradient", scale=0.05)
    if must_plan:
        assert not compiled.plan.not_planned, compiled.plan.not_planned
    return compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_linear_layer(case: Case, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for shape, nodes in (("random", 20), ("hub", 20), ("no edges", 5), ("loops", 3), ("repeated", 9)):
        module = case.make().to(dtype).cuda()
        x = torch.randn(nodes, 5, dtype=dtype, device="cuda")
        edge_index = random_edges(rng, shape, nodes, nodes).cuda()
        agree(module, x, edge_index, must_plan=False)


def big(nodes: int = 3000, edges: int = 40_000, width: int = 64) -> Data:
    hub = torch.stack([torch.arange(nodes), torch.zeros(nodes, dtype=torch.long)])
    edge_index = torch.cat([torch.randint(0, nodes, (2, edges)), hub], 1)
    data = Data(x=torch.randn(nodes, width), edge_index=edge_index, y=torch.randint(0, 7, (nodes,)))
    return data.to("cuda")


@pytest.mark.parametrize("make", [GCN, GraphSAGE, GIN], ids=lambda make: make.__name__)
def test_training_follows_the_same_losses(make: Any) -> None:
    data, losses = big(), []
    model = make(64, 32, 2, 7).cuda()
    for net in (copy.deepcopy(model), plait.compile(copy.deepcopy(model), data)):
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        seen = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(data.x, data.edge_index), data.y)
            loss.backward()
            optimiser.step()
            seen.append(loss.item())
        losses.append(seen)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loop", ["step", "held", "accumulated", "in place", "twice", "no backward"])
@pytest.mark.parametrize("make", [GCN, GraphSAGE, GIN], ids=lambda make: make.__name__)
def test_replayed_programs_never_write_to_what_is_held(make: Any, loop: str) -> None:
    """A dozen steps, so that programs are captured and replayed, with results kept in all the usual ways."""
    data, model = big(500, 4000, 16), make(16, 12, 2, 7).cuda()
    twin, compiled = copy.deepcopy(model), plait.compile(model, data)
    x = data.x.clone().requires_grad_()
    seen: dict[Any, list[Tensor]] = {twin: [], compiled: []}
    for net, held in seen.items():
        x.grad = None
        for k in range(14):
            with torch.no_grad():
                x += 0.01
            if loop != "accumulated":
                net.zero_grad()
                x.grad = None
            out = net(x, data.edge_index)
            if loop == "in place":
                out = out.relu_()
            if loop == "held" or k > 10:
                held.append(out.detach())
            if loop == "no backward" and k % 2:
                continue
            loss = out.square().sum() + (net(x, data.edge_index).sum() if loop == "twice" else 0)
            loss.backward()
            held += [p.grad.clone() for p in (x, *net.parameters()) if k > 8]
        with torch.no_grad():
            x -= 0.14
    for mine, other in zip(seen[compiled], seen[twin], strict=True):
        close(mine, other, 5e-4, loop, scale=0.01)


ATTENTION: dict[str, Any] = {
    "gat": lambda: GATConv(12, 5, heads=3),
    "gat averaged": lambda: GATConv(12, 7, heads=4, concat=False, residual=True),
    "gat residual": lambda: GATConv(12, 8, heads=4, residual=True, add_self_loops=False),
    "gatv2": lambda: GATv2Conv(12, 5, heads=3),
    "gatv2 shared": lambda: GATv2Conv(12, 8, heads=4, share_weights=True, residual=True),
    "transformer": lambda: TransformerConv(12, 5, heads=3),
    "transformer beta": lambda: TransformerConv(12, 8, heads=2, beta=True, concat=False),
    "gates": lambda: ResGatedGraphConv(12, 9),
    "gates without a skip": lambda: ResGatedGraphConv(12, 33, root_weight=False, bias=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_and_gates(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    for shape, nodes in (("random", 20), ("hub", 600), ("no edges", 5), ("loops", 3), ("repeated", 9)):
        module = ATTENTION[name]().to(dtype).cuda()
        x = torch.randn(nodes, 12, dtype=dtype, device="cuda")
        agree(module, x, random_edges(rng, shape, nodes, nodes).cuda())


@pytest.mark.parametrize("make", [GATConv, GATv2Conv, TransformerConv, ResGatedGraphConv])
def test_attention_and_gates_between_two_sets_of_nodes(make: Any) -> None:
    options = {"add_self_loops": False} if make in (GATConv, GATv2Conv) else {}
    given = torch.stack([torch.randint(0, 30, (200,)), torch.randint(0, 20, (200,))]).cuda()
    x = torch.randn(30, 12, device="cuda"), torch.randn(20, 7, device="cuda")
    agree(make((12, 7), 8, **options).cuda(), x, given)


@pytest.mark.parametrize("make", [GATConv, GATv2Conv, TransformerConv])
def test_attention_dropout_is_a_mask_over_edges_and_derivatives_of_derivatives(make: Any) -> None:
    data = big(400, 3000, 16)
    module = make(16, 8, heads=2, dropout=0.5).cuda()
    compiled: Any = plait.compile(module)
    x = data.x.clone().requires_grad_()
    first, second = compiled(x, data.edge_index), compiled(x, data.edge_index)
    assert not torch.equal(first, second)
    module.eval()
    close(compiled(x, data.edge_index), module(x, data.edge_index), 2e-5, "evaluated")
    for net in (module, compiled):
        (grad,) = torch.autograd.grad(net(x, data.edge_index).square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        if net is module:
            wanted = again
    close(again, wanted, 2e-3, "second derivative", scale=0.01)


@pytest.mark.parametrize("make", [GATConv, GATv2Conv, TransformerConv])
def test_a_cuda_graph_draws_attention_dropout_anew_at_every_replay(make: Any) -> None:
    data = big(200, 1500, 16)
    module = make(16, 8, heads=2, dropout=0.5).cuda()
    compiled: Any = plait.compile(module)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            compiled(data.x, data.edge_index)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = compiled(data.x, data.edge_index)
    assert not compiled.plan.not_planned
    drawn = []
    for _ in range(400):
        graph.replay()
        drawn.append(out.clone())
    assert len({float(each.sum()) for each in drawn}) == len(drawn)
    module.eval()
    with torch.no_grad():
        mean, expected = torch.stack(drawn).mean(0), module(data.x, data.edge_index)
    assert float((mean - expected).abs().mean()) < 0.1 * float((drawn[0] - expected).abs().mean())


def test_the_plan_names_the_device_and_its_kernels() -> None:
    data = big()
    compiled: Any = plait.compile(GraphSAGE(64, 32, 2, 7, aggr="max").cuda(), data)
    assert not compiled.plan.not_planned
    assert torch.cuda.get_device_name() in str(compiled.plan)
    plan = plait.explain(compiled, data, analyze=True)
    for layer in plan.layers:
        assert {step.step.out for step in layer.steps} <= set(layer.measured)


def test_moving_a_model_between_devices() -> None:
    data, model = big(), GCN(64, 16, 2, 7)
    compiled: Any = plait.compile(model)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        compiled.to(device)
        here = data.to(device)
        close(compiled(here.x, here.edge_index), model(here.x, here.edge_index), 1e-4, device)


def test_fused_layers_and_mixed_devices_go_to_pyg() -> None:
    from torch_geometric.nn import GAT

    data = big()
    agree(GAT(64, 8, 2, 7).cuda(), data.x, data.edge_index, must_plan=False)
    with pytest.raises((RuntimeError, ValueError)):
        plait.compile(GCN(64, 8, 2, 7).cuda())(data.x.cpu(), data.edge_index)


def test_second_derivatives() -> None:
    data, model = big(200, 900, 8), GCN(8, 4, 2, 3).double().cuda()
    slopes: list[Tensor] = []
    for net in (model, plait.compile(model)):
        x = data.x.double().requires_grad_()
        (slope,) = torch.autograd.grad(net(x, data.edge_index).tanh().sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), x)[0])
    close(slopes[1], slopes[0], 1e-8, "second derivative")
