"""Loops of users around a model, called by the lines of a script: optimisers, averages, errors, hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.overrides import TorchFunctionMode

from tests.fuzz.parts import inner, layer, wanted

__all__ = [
    "LowRank",
    "adapted",
    "after_error",
    "averaged",
    "beside_copy",
    "default_dtype",
    "freed",
    "hidden",
    "later",
    "linear",
    "on_fewer_nodes",
    "passed_on",
    "penalised",
    "replaced",
    "stepping_inside",
    "swapped",
]


class _Stop(Exception):  # noqa: N818  what stops a call, and no error of it
    pass


def _tensors(out: Any) -> list[Tensor]:
    """The tensors with a gradient to come, in whatever a model returns."""
    if isinstance(out, (tuple, list, dict)):
        parts = out.values() if isinstance(out, dict) else out
        return [tensor for part in parts for tensor in _tensors(part)]
    return [out] if isinstance(out, Tensor) and out.requires_grad else []


def freed(out: Any) -> None:
    """The gradients of the sum of `out`, where there are any; its graph is freed, as in most loops."""
    found = _tensors(out)
    if found:
        torch.stack([value.sum() for value in found]).sum().backward()


def adapted(model: nn.Module, *arguments: Any, steps: int = 3, **options: bool) -> list[Any]:
    """The outputs of some steps of Adam.

    Its eps is large: a gradient that vanishes is rounding in PyG and perhaps 0 in a plan, and must not be
    divided by its own size.
    """
    optimiser, found = torch.optim.Adam(model.parameters(), lr=0.01, eps=1.0, **options), []
    for _ in range(steps):
        optimiser.zero_grad()
        out = model(*arguments)
        freed(out)
        optimiser.step()
        found.append(out)
    return found


def stepping_inside(model: nn.Module, *arguments: Any) -> list[Any]:
    """The outputs of some steps in which every weight changes while gradients of others are to come."""

    def step(weight: Tensor) -> None:
        weight.data.sub_(0.01 * weight.grad.clamp(-1, 1))  # further steps end in infinities
        weight.grad = None

    hooks = [p.register_post_accumulate_grad_hook(step) for p in wanted(model)]
    found = []
    try:
        for _ in range(3):
            found.append(model(*arguments))
            freed(found[-1])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def averaged(model: nn.Module, *arguments: Any) -> list[Any]:
    """The outputs of the exponential average of two states of the model, and its own."""
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    found = [average(*arguments)]
    for weight in model.parameters():
        weight.data.mul_(0.5)
    average.update_parameters(model)
    return [*found, average(*arguments), model(*arguments)]


def penalised(model: nn.Module, x: Tensor, *edges: Any) -> Any:
    """The output; the gradient of x is part of the loss."""
    x = x.detach().requires_grad_()
    out = model(x, *edges)
    (slope,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
    (out.sum() + slope.square().sum()).backward()
    return out


def later(model: nn.Module, x: Tensor, *edges: Any) -> list[Any]:
    """Two outputs; the backward pass of the second comes first."""
    found = [model(x, *edges), model(2 * x, *edges)]
    for out in reversed(found):
        freed(out)
    return found


def beside_copy(model: nn.Module, *arguments: Any) -> list[Any]:
    """The outputs of the model and of a copy, called in turn."""
    other, found = copy.deepcopy(model), []
    for _ in range(3):
        found += [model(*arguments), other(*arguments)]
        freed(found[-1])
        freed(found[-2])
    return found


def on_fewer_nodes(model: nn.Module, x: Tensor, edge_index: Tensor, *_: Any) -> list[Any]:
    """The outputs on the first nodes alone, and on all of them before and after."""
    found = []
    for count in (x.shape[0], max(x.shape[0] - 2, 0), x.shape[0]):
        found.append(model(x[:count], edge_index[:, (edge_index < count).all(dim=0)]))
        freed(found[-1])
    return found


def after_error(model: nn.Module, x: Any, *edges: Any, where: str = "layer") -> Any:
    """The output after a call, or its backward pass, that an error ended."""

    def stop(*_: Any) -> None:
        raise _Stop

    def stopped(given: Any) -> None:
        hook: Any = contextlib.nullcontext()
        if where == "backward" and (weights := wanted(model)):
            hook = weights[0].register_hook(stop)
        elif where != "backward":
            hook = (layer if where == "layer" else inner)(model, 1).register_forward_hook(stop)
        with hook, contextlib.suppress(_Stop):
            freed(model(given, *edges))

    stopped(x.detach())
    model.zero_grad()  # what came before the error is nobody's promise
    for given in edges:
        if isinstance(given, Tensor):
            given.grad = None
    out = model(x, *edges)
    freed(out)
    return out


def hidden(model: nn.Module, *arguments: Any) -> list[Any]:
    """The gradient of a layer's result inside the model; attention weights beside it are another result."""
    kept: list[Tensor] = []
    with layer(model).register_forward_hook(lambda module, given, out: kept.extend(_tensors(out)[:1])):
        out = model(*arguments)
    for value in kept:
        value.retain_grad()
    freed(out)
    return [value.grad for value in kept]


def passed_on(model: nn.Module, *arguments: Any) -> Any:
    """The output under a mode that sees every function of torch."""

    class PassesOn(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with PassesOn():
        return model(*arguments)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors are of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class LowRank(nn.Module):
    """A linear map and a learned change of low rank."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of
        height, width = of.weight.shape
        full = functools.partial(torch.full, dtype=of.weight.dtype)
        self.down, self.up = nn.Parameter(full((1, width), 0.25)), nn.Parameter(full((height, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x) + x @ (self.up @ self.down).t()


def linear(of: Any) -> nn.Linear:
    """torch's own linear map with the weights of one of PyG's."""
    made = nn.Linear(of.weight.shape[1], of.weight.shape[0], bias=of.bias is not None).to(of.weight.dtype)
    made.load_state_dict(of.state_dict())
    return made


def replaced(conv: nn.Module, make: Any) -> None:
    """The first linear map inside a layer gives way to what is made of it."""
    for owner in conv.modules():
        for name, child in owner.named_children():
            if getattr(getattr(child, "weight", None), "ndim", 0) == 2:
                setattr(owner, name, make(child))
                return


def swapped(edge_index: Tensor) -> None:
    """The first and the last edge change places."""
    edge_index[:, [0, -1]] = edge_index[:, [-1, 0]].clone()
