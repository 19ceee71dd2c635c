"""pyg/listening.py: hooks on every module; modes and classes of tensors told of torch's functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import plait
from plait.pyg.listening import in_this_thread, is_followed, is_listened_to

LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: GCNConv(8, 4), lambda: SAGEConv(8, 4, aggr="max"), lambda: GATConv(8, 4),
)  # fmt: skip


def _graph() -> Data:
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 30, (2, 120), generator=draw)
    return Data(x=torch.randn(30, 8, generator=draw), edge_index=edges)


def _double(module: nn.Module, args: Any, out: Any) -> Any:
    return 2 * out if isinstance(out, Tensor) else None


@pytest.mark.parametrize("make", LAYERS)
def test_a_hook_on_all_modules_changes_what_is_inside_a_layer(make: Callable[[], nn.Module]) -> None:
    layer, data = make(), _graph()
    model, given = plait.compile(layer), (data.x, data.edge_index)
    before = layer(*given)
    for _ in range(2):
        torch.testing.assert_close(model(*given), before)
    handle = everywhere.register_module_forward_hook(_double)
    try:
        expected = layer(*given)
        torch.testing.assert_close(model(*given), expected)
        assert "hook on all modules" in str(model.plan)
    finally:
        handle.remove()
    assert not torch.allclose(expected, 2 * before)  # the modules inside were doubled too
    torch.testing.assert_close(model(*given), before)
    assert model.plan.layers


def test_plaits_own_hooks_leave_the_layers_planned() -> None:
    assert not is_listened_to()
    handle = everywhere.register_module_forward_hook(in_this_thread(lambda *_: None))
    assert not is_listened_to()
    other = everywhere.register_module_forward_pre_hook(lambda *_: None)
    assert is_listened_to()
    handle.remove()
    other.remove()


def test_a_hook_of_a_thread_is_called_there_alone() -> None:
    seen: list[int] = []
    hook = in_this_thread(seen.append)
    hook(1)
    thread = threading.Thread(target=hook, args=(2,))
    thread.start()
    thread.join()
    assert seen == [1]


_PRODUCTS = (torch.matmul, nn.functional.linear, Tensor.__matmul__, Tensor.index_select)


class Doubling(TorchFunctionMode):
    """Products and gathered rows are twice what they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func in _PRODUCTS else out


class Marked(Tensor):
    """Results are of this class too, and products twice what they are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func in _PRODUCTS else out


@pytest.mark.parametrize("make", LAYERS)
def test_a_mode_of_torch_functions_sees_those_inside_a_layer(make: Callable[[], nn.Module]) -> None:
    layer, data = make(), _graph()
    model, given = plait.compile(layer), (data.x, data.edge_index)
    before = layer(*given)
    for _ in range(2):
        torch.testing.assert_close(model(*given), before)
    with Doubling():
        expected = layer(*given)
        torch.testing.assert_close(model(*given), expected)
    assert not torch.allclose(expected, before)
    with torch.device("cpu"):
        torch.testing.assert_close(model(*given), before)
        assert not is_followed(*given)
    assert model.plan.layers


@pytest.mark.parametrize("make", LAYERS)
def test_a_default_device_without_the_features_leaves_layers_to_pyg(make: Callable[[], nn.Module]) -> None:
    layer, data = make(), _graph()
    model, given = plait.compile(layer), (data.x, data.edge_index)
    for device, is_planned in (("meta", False), ("cpu", True)):
        with torch.device(device):  # what torch.set_default_device("cuda") is to a model on the CPU
            out = model(*given)
            torch.testing.assert_close(out, layer(*given))
            out.sum().backward()
        assert bool(model.plan.layers) == is_planned


@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("make", LAYERS)
def test_tensors_of_a_class_of_their_own_are_followed(
    make: Callable[[], nn.Module], of_weights: bool
) -> None:
    layer, data = make(), _graph()
    model, x = plait.compile(layer), data.x
    for _ in range(2):
        torch.testing.assert_close(model(x, data.edge_index), layer(x, data.edge_index))
    if of_weights:
        for part in layer.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(parameter.detach().as_subclass(Marked))
    else:
        x = x.as_subclass(Marked)
    for _ in range(2):
        out, expected = model(x, data.edge_index), layer(x, data.edge_index)
        assert type(out) is type(expected) is Marked
        torch.testing.assert_close(out.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert not is_followed(nn.Parameter(x.as_subclass(Tensor)), None, (data.x, None))
