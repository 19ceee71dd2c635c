"""A planned layer under torch.compile: one operator, so that tracing continues without a graph break.

The operator's gradient runs the layer once more and differentiates that: a traced graph has no place for what
a planned forward pass keeps. Layers whose second run would differ from the first (dropout, batch statistics)
and layers whose output width is not known beforehand are traced as PyG's code instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from plait.pyg.active import Seats, entered
from plait.runtime.deferred import whole

__all__ = ["call", "offer"]

_models: weakref.WeakValueDictionary[int, Seats] = weakref.WeakValueDictionary()
# (layer, output width; 0: that of x, number of parameters) by id
_layers: dict[int, tuple[weakref.ref[nn.Module], int, int]] = {}
_RECORDING = ("AutogradCPU", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView")
_MAPS = (nn.Linear, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Identity, nn.Sequential)


def offer(seats: Seats, model: nn.Module) -> None:
    """Let calls of this model's layers be traced as operators; before there is anything to trace."""
    _models[seats.number] = seats
    for module in model.modules() if "_modules" in vars(model) else ():  # a copy may be half made
        width = _output_width(module) if isinstance(module, MessagePassing) else None
        if width is not None:
            key = id(module)
            held = weakref.ref(module, lambda _, key=key: _layers.pop(key, None))  # type: ignore[misc]
            _layers[key] = held, width, len([*module.parameters()])


def _output_width(layer: Any) -> int | None:
    """Columns of the layer's result; 0 for those of its input, None where a second run may differ.

    None, too, where it has weights that are no parameters: the operator's gradients go to parameters.
    """
    others = (v for part in layer.modules() for d in (part._buffers, vars(part)) for v in d.values())
    if any(isinstance(value, Tensor) and value.requires_grad for value in others):
        return None
    if getattr(layer, "dropout", 0) or getattr(layer, "cached", False):
        return None
    network = getattr(layer, "nn", None)
    if network is not None:
        parts = [*network.modules()]
        linear = [part for part in parts if isinstance(part, nn.Linear)]
        return linear[-1].out_features if linear and all(type(part) in _MAPS for part in parts) else None
    width = getattr(layer, "out_channels", 0)
    return width * getattr(layer, "heads", 1) if getattr(layer, "concat", False) is True else width


def call(seats: Seats, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """The layer's answer in a traced call that came in through a compiled model."""
    module = getattr(module, "_plait_model", module)  # a compiled root layer stands for the layer
    given, names = [], ""
    for k, value in enumerate(args):
        if isinstance(value, Tensor):
            given.append(value)
            names += f"{k},"
        elif value is not None:
            return original(module, *args, **kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            given.append(value)
            names += f"{name},"
        elif value is not None:
            return original(module, *args, **kwargs)
    if id(module) not in _layers or not given or given[0].dim() != 2:
        return original(module, *args, **kwargs)
    parameters = list(module.parameters())
    if len(parameters) < _layers[id(module)][2]:  # one of them has become a tensor with a history of its own
        return original(module, *args, **kwargs)
    return torch.ops.plait.layer(seats.number, id(module), names, given, parameters)


def _ran(number: int, layer: int, names: str, given: list[Tensor], parameters: list[Tensor]) -> Tensor:
    """The planned layer's result, on these parameters."""
    module: Any = _layers[layer][0]()
    args = [value for name, value in zip(names.split(","), given, strict=False) if name.isdigit()]
    kwargs = {n: value for n, value in zip(names.split(","), given, strict=False) if not n.isdigit()}
    own = dict(module.named_parameters())
    are_own = all(a.data_ptr() == b.data_ptr() for a, b in zip(own.values(), parameters, strict=True))
    with entered(_models[number]):
        if are_own:
            return whole(module.forward(*args, **kwargs))  # type: ignore[no-any-return]
        other = dict(zip(own, parameters, strict=True))
        return whole(torch.func.functional_call(module, other, tuple(args), kwargs))  # type: ignore[no-any-return]


@torch.library.custom_op("plait::layer", mutates_args=())
def _layer(number: int, layer: int, names: str, given: list[Tensor], parameters: list[Tensor]) -> Tensor:
    with torch.no_grad():
        out = _ran(number, layer, names, given, parameters)
    is_input = any(out.untyped_storage()._cdata == value.untyped_storage()._cdata for value in given)
    return out.clone() if is_input else out


@_layer.register_fake
def _(number: int, layer: int, names: str, given: list[Tensor], parameters: list[Tensor]) -> Tensor:
    return given[0].new_empty((given[0].shape[0], _layers[layer][1] or given[0].shape[1]))


@contextmanager
def _recorded() -> Iterator[None]:
    """Operations inside are recorded for autograd, which torch leaves out below an operator's own kernel."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in _RECORDING:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


@torch.library.custom_op("plait::layer_backward", mutates_args=())
def _layer_backward(
    number: int,
    layer: int,
    names: str,
    given: list[Tensor],
    parameters: list[Tensor],
    wanted: list[bool],
    grad: Tensor,
) -> list[Tensor]:
    module: Any = _layers[layer][0]()
    own = [*module.parameters()]
    are_own = all(a.data_ptr() == b.data_ptr() for a, b in zip(own, parameters, strict=True))
    given = [value.detach().requires_grad_(asked) for value, asked in zip(given, wanted, strict=False)]
    asked = wanted[len(given) :]
    if not are_own or any(a and not p.requires_grad for a, p in zip(asked, own, strict=True)):
        own = [p.detach().requires_grad_(a) for p, a in zip(parameters, asked, strict=True)]
    with _recorded():
        out = _ran(number, layer, names, given, own)
        inputs = [value for value, is_wanted in zip((*given, *own), wanted, strict=True) if is_wanted]
        is_used = out.requires_grad
        found = torch.autograd.grad(out, inputs, grad, allow_unused=True) if is_used else [None] * len(inputs)
    return [torch.zeros_like(v) if g is None else g.clone() for v, g in zip(inputs, found, strict=True)]


@_layer_backward.register_fake
def _(
    number: int,
    layer: int,
    names: str,
    given: list[Tensor],
    parameters: list[Tensor],
    wanted: list[bool],
    grad: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(v) for v, asked in zip((*given, *parameters), wanted, strict=True) if asked]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *ctx.static, given, parameters = inputs
    ctx.count = len(given)
    ctx.save_for_backward(*given, *parameters)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = [*ctx.saved_tensors]
    flags = [*ctx.needs_input_grad[3], *ctx.needs_input_grad[4]]
    given, parameters = saved[: ctx.count], saved[ctx.count :]
    made = iter(torch.ops.plait.layer_backward(*ctx.static, given, parameters, flags, grad))
    grads = [next(made) if asked else None for asked in flags]
    return None, None, None, grads[: ctx.count], grads[ctx.count :]


_layer.register_autograd(_differentiate, setup_context=_keep)
