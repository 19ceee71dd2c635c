"""Whole calls of layers that are replayed, with a stand-in for CUDA graphs on a CPU; on a GPU with these."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, TAGConv, TransformerConv

import plait
from plait.pyg import recorded
from plait.pyg.recorded import Recorder
from plait.runtime import executor
from plait.runtime.replayed import Captured

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REPLAYS: list[object] = []


def _at(value: Tensor) -> Tensor:
    """A tensor of the same memory that does not hold it."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    raw = (ctypes.c_char * (value.element_size() * (last + 1))).from_address(value.data_ptr())
    return torch.frombuffer(raw, dtype=value.dtype).as_strided(value.shape, value.stride())


def _capture(body: Callable[[], Sequence[Tensor | None]], stream: Any) -> tuple[Captured, list[Any]]:
    """Computes now, and again into the same memory when replayed."""
    ran: list[Any] = []
    ordinary = executor.Run.forward

    def noting(self: executor.Run, env: Any) -> None:
        ran.append(self)
        ordinary(self, env)

    executor.Run.forward = noting  # type: ignore[method-assign]
    try:
        results = body()
    finally:
        executor.Run.forward = ordinary  # type: ignore[method-assign]
    places = [None if value is None else _at(value) for value in results]

    def replay(kept: Any = results) -> None:  # what a capture made stays; here `body` makes it again
        REPLAYS.append(body)
        with torch.no_grad():
            for place, value in zip(places, body_again(), strict=True):
                if place is not None and value is not None:
                    place.copy_(value)

    def body_again() -> Sequence[Tensor | None]:
        with torch.set_grad_enabled(is_training):
            return body()

    is_training = torch.is_grad_enabled()
    return Captured(results, replay), ran


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was replayed; on a CPU calls go the way of those of a GPU."""
    REPLAYS.clear()
    if ON_GPU:
        original = recorded._Recording.forward
        monkeypatch.setattr(
            recorded._Recording, "forward", lambda self: (REPLAYS.append(self), original(self))[1]
        )
    else:
        monkeypatch.setattr(recorded, "is_on_gpu", lambda x: True)
        monkeypatch.setattr(recorded, "_settings", lambda x: ())
        monkeypatch.setattr(recorded, "_is_capturing", lambda: False)
        monkeypatch.setattr(Recorder, "capture", staticmethod(_capture))
        monkeypatch.setattr(Recorder, "stream", staticmethod(lambda device: None))
        monkeypatch.setattr(Recorder, "at", staticmethod(_at))
    return REPLAYS


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: GCNConv(16, 12),
    "sage": lambda: SAGEConv(16, 12),
    "max": lambda: SAGEConv(16, 12, aggr="max"),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 12)), train_eps=True),
    "tag": lambda: TAGConv(16, 12),
    "gat": lambda: GATConv(16, 6, heads=2),
    "gatv2": lambda: GATv2Conv(16, 6, heads=2),
    "transformer": lambda: TransformerConv(16, 6, heads=2),
}
LOOPS = (
    "step", "held", "accumulated", "in place", "twice", "no backward", "kept graph", "no gradient of x",
    "loss held", "gradient elsewhere", "derivative of the gradient", "x changes",
)  # fmt: skip


def _trained(net: nn.Module, loop: str, edge_index: Tensor, given: Tensor, steps: int = 16) -> list[Tensor]:
    """Outputs and gradients of a training loop, whatever of it is held meanwhile."""
    x = given.clone().requires_grad_(loop not in ("no gradient of x", "x changes"))
    grads = [torch.randn(given.shape[0], 12, device=DEVICE) for _ in range(4)]
    held: list[Tensor] = []
    graphs: list[Any] = []
    for k in range(steps):
        grad = grads[k % 4] if loop == "gradient elsewhere" else grads[0]
        with torch.no_grad():
            grad *= -1
            if loop in ("x changes", "step"):
                x += 0.01
        if loop != "accumulated":
            net.zero_grad()
            x.grad = None
        out = net(x, edge_index)
        if loop == "in place":
            out = out.mul_(2)
        if loop == "held" or k > 12:
            held.append(out.detach())
        if loop == "no backward" and k % 2:
            continue
        if loop == "twice":
            out = out + net(x, edge_index)
        if loop == "derivative of the gradient" and k == 9:
            (slope,) = torch.autograd.grad(out, x, grad, create_graph=True)
            slope.square().sum().backward()
        else:
            out.backward(grad, retain_graph=loop == "kept graph")
        if loop == "kept graph":
            graphs.append(out)
            out.backward(grad)
        if loop == "loss held":
            graphs = [out.sum()]
        wanted = [p for p in (x, *net.parameters()) if p.requires_grad and k > 3]
        held += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in wanted]
    return held


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", LAYERS)
def test_replayed_calls_give_what_calls_give(kind: str, loop: str, replays: list[object]) -> None:
    if loop == "derivative of the gradient" and kind == "max":
        pytest.skip("piecewise linear: its second derivatives are zero")
    torch.manual_seed(0)
    edge_index, given = torch.randint(0, 60, (2, 400), device=DEVICE), torch.randn(60, 16, device=DEVICE)
    layer = LAYERS[kind]().to(DEVICE)
    twin, compiled = copy.deepcopy(layer), plait.compile(layer, forms=["csr"])
    seen = []
    for net in (twin, compiled):
        torch.manual_seed(1)
        seen.append(_trained(net, loop, edge_index, given))
    assert len(seen[0]) == len(seen[1])
    for mine, other in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * max(1.0, float(other.abs().max())))
    if loop == "step":
        assert len(replays) >= 8, "it was replayed at all"


def _steps(net: Any, x: Tensor, edge_index: Tensor, count: int) -> None:
    for _ in range(count):
        net.zero_grad()
        net(x, edge_index).sum().backward()


@pytest.fixture
def gcn() -> tuple[Any, Any, Tensor, Tensor]:
    """(a layer, its compiled view, features, edges), replayed already."""
    torch.manual_seed(0)
    layer = GCNConv(8, 8).to(DEVICE)
    edge_index, x = torch.randint(0, 30, (2, 100), device=DEVICE), torch.randn(30, 8, device=DEVICE)
    x.requires_grad_()
    compiled = plait.compile(layer, forms=["csr"])
    _steps(compiled, x, edge_index, 8)
    assert REPLAYS
    REPLAYS.clear()
    return layer, compiled, x, edge_index


def test_another_state_of_the_layer_is_not_replayed(gcn: tuple[Any, Any, Tensor, Tensor]) -> None:
    layer, compiled, x, edge_index = gcn
    layer.lin.weight.data = torch.randn(8, 8, device=DEVICE)
    with torch.no_grad():
        layer.bias.fill_(3.0)
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    assert not REPLAYS
    layer.normalize = False
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    seen: list[Tensor] = []
    layer.lin.register_forward_hook(lambda module, args, out: seen.append(out))
    compiled(x, edge_index)
    assert seen
    assert not REPLAYS


def test_other_edges_are_not_replayed_and_forgotten_ones_take_their_recordings(
    gcn: tuple[Any, Any, Tensor, Tensor],
) -> None:
    layer, compiled, x, edge_index = gcn
    other = edge_index.flip(0).contiguous()
    torch.testing.assert_close(compiled(x, other), layer(x, other))
    edge_index[0, 0] += 1 - 2 * int(edge_index[0, 0] > 0)
    torch.testing.assert_close(compiled(x, edge_index), layer(x, edge_index))
    assert not REPLAYS
    session = compiled._plait_plan_session
    assert sum(key[0] == "recorded" for key in session._calls) == 0


def test_what_has_to_be_seen_step_by_step_runs(gcn: tuple[Any, Any, Tensor, Tensor]) -> None:
    _, compiled, x, edge_index = gcn
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        compiled(x, edge_index).sum().backward()
    with torch.autograd.detect_anomaly(check_nan=False):
        compiled(x, edge_index).sum().backward()
    assert not REPLAYS
    _steps(compiled, x, edge_index, 1)
    assert REPLAYS


def test_an_input_written_to_before_the_backward_pass_is_an_error(
    gcn: tuple[Any, Any, Tensor, Tensor],
) -> None:
    _, compiled, x, edge_index = gcn
    out = compiled(x, edge_index)
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    out = compiled(x, edge_index)
    with torch.no_grad():
        compiled.bias += 1  # no gradient depends on it
    out.sum().backward()


def test_dropout_and_unknown_parts_are_never_recorded() -> None:
    edge_index, x = torch.randint(0, 30, (2, 100), device=DEVICE), torch.randn(30, 8, device=DEVICE)
    x.requires_grad_()
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    for layer in (GATConv(8, 4, heads=2, dropout=0.5), GINConv(inner)):
        _steps(plait.compile(layer.to(DEVICE), forms=["csr"]), x, edge_index, 8)
    assert not REPLAYS


def test_inference_is_replayed_and_what_is_held_stays() -> None:
    torch.manual_seed(0)
    layer = GATConv(8, 4, heads=2, dropout=0.5).to(DEVICE).eval()
    edge_index, x = torch.randint(0, 30, (2, 100), device=DEVICE), torch.randn(30, 8, device=DEVICE)
    compiled = plait.compile(layer, forms=["csr"])
    with torch.no_grad():
        wanted = layer(x, edge_index)
        held = [compiled(x, edge_index) for _ in range(10)]
    assert REPLAYS
    for out in held:
        torch.testing.assert_close(out, wanted)
    assert len({out.data_ptr() for out in held}) == 10


def test_what_cannot_be_recorded_is_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_BYTES", 8)
    tried: list[Any] = []
    original = recorded.Recorder.record
    monkeypatch.setattr(recorded.Recorder, "record", lambda *args: (tried.append(args), original(*args))[1])
    edge_index, x = torch.randint(0, 30, (2, 100), device=DEVICE), torch.randn(30, 8, device=DEVICE)
    _steps(plait.compile(GCNConv(8, 8).to(DEVICE)), x.requires_grad_(), edge_index, 40)
    assert not REPLAYS
    assert len(tried) == 2


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_REPLAY", "0")
    edge_index, x = torch.randint(0, 30, (2, 100), device=DEVICE), torch.randn(30, 8, device=DEVICE)
    _steps(plait.compile(GCNConv(8, 8).to(DEVICE)), x.requires_grad_(), edge_index, 8)
    assert not REPLAYS


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_weights_made_by_another_network_are_not_recorded(kind: str, is_buffer: bool) -> None:
    layer: Any = LAYERS[kind]().to(DEVICE)
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    weight = layer.lin._parameters.pop("weight").detach() * scale
    (layer.lin._buffers if is_buffer else vars(layer.lin))["weight"] = weight
    x, edge_index = torch.randn(40, 16, device=DEVICE), torch.randint(0, 40, (2, 160), device=DEVICE)
    net = plait.compile(layer)
    for _ in range(9):
        found = (torch.autograd.grad(m(x, edge_index).sum(), scale, retain_graph=True) for m in (net, layer))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_buffer_with_another_tensor_is_not_replayed(replays: list[object]) -> None:
    layer = GINConv(nn.Linear(16, 12), eps=0.1).to(DEVICE)
    x, edge_index = torch.randn(40, 16, device=DEVICE), torch.randint(0, 40, (2, 160), device=DEVICE)
    net = plait.compile(layer)
    with torch.no_grad():
        for eps in (0.5, 0.7):
            for _ in range(9):
                torch.testing.assert_close(net(x, edge_index), layer(x, edge_index), rtol=1e-4, atol=1e-4)
            assert replays
            replays.clear()
            layer.eps = torch.tensor([eps], device=DEVICE)
            torch.testing.assert_close(net(x, edge_index), layer(x, edge_index), rtol=1e-4, atol=1e-4)
            assert not replays
