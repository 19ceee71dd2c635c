"""A world runs a script line by line; everything a user could look at in it, by name."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize, prune  # noqa: F401  scripts say nn.utils.prune
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex

from tests.fuzz import loops, parts

__all__ = [
    "CALL",
    "UNTOUCHED",
    "dense",
    "execute",
    "gradients",
    "has_nan",
    "largest",
    "leaves",
    "modes",
    "seen",
    "state",
    "world_of",
]

# PyG writes a class's propagate for the first layer of it that is made. Where that one has an aggregation
# that cannot be fused (std, lstm), every later SAGEConv of the process refuses sparse matrices.
torch_geometric.nn.SAGEConv(1, 1)

CALL = re.compile(r"(with .*: )?out =")  # a line after which worlds are compared
# In the world of PyG `plait.compile` returns the model it is given.
UNTOUCHED = SimpleNamespace(compile=lambda model, *_, **__: model, explain=lambda *_, **__: None)
INPUTS = ("x", "edge_index", "edge_weight", "edge_attr")
_SHARED = {
    **{name: value for name, value in vars(torch_geometric.nn).items() if isinstance(value, type)},
    **{name: getattr(parts, name) for name in parts.__all__},
    **{name: getattr(loops, name) for name in loops.__all__},
    "global_mean_pool": torch_geometric.nn.global_mean_pool,
    "EdgeIndex": EdgeIndex,
    "F": nn.functional,
    "checkpoint": checkpoint,
    "copy": copy,
    "nn": nn,
    "parametrizations": parametrizations,
    "parametrize": parametrize,
    "pickle": pickle,
    "torch": torch,
}


def world_of(compiler: Any) -> dict[str, Any]:
    """The names a script starts with; nothing of one world is in the other."""
    return _SHARED | {"plait": compiler, "hook": SimpleNamespace(remove=lambda: None)}


@functools.lru_cache(maxsize=4096)
def _code(line: str) -> Any:
    return compile(line, "<script>", "exec")


def execute(line: str, number: int, world: dict[str, Any]) -> str:
    """The error the line raised, or nothing."""
    torch.manual_seed(number)
    try:
        with mock.patch.multiple(Tensor, uniform_=_draws(Tensor.uniform_), normal_=_draws(Tensor.normal_)):
            exec(_code(line), world)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _draws(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same random numbers for tensors of any type: torch draws others for each."""

    def drawn(value: Tensor, *bounds: Any, **named: Any) -> Tensor:
        with torch.no_grad():
            return value.copy_(method(torch.empty(value.shape, dtype=torch.float64), *bounds, **named))

    return drawn


def seen(world: dict[str, Any]) -> dict[str, Any]:
    """Every number a user can look at after a call, by the name it has in a message."""
    found = {"out": world.get("out"), **{name: world.get(name) for name in INPUTS}}
    found |= {f"gradient of {name}": value for name, value in gradients(world).items()}
    found["state"] = state(world)
    return {name: value for key, part in found.items() for name, value in leaves(key, part)}


def gradients(world: dict[str, Any]) -> dict[str, Tensor | None]:
    """What backward passes left on parameters and inputs."""
    inputs = [(name, world.get(name)) for name in ("x", "edge_weight", "edge_attr")]
    model = world.get("model", nn.Module())  # none was made where its options do not go together
    held = [*model.named_parameters(), *((n, v) for n, v in inputs if isinstance(v, Tensor))]
    return {name: value.grad for name, value in held if value.is_leaf}


def state(world: dict[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of the model."""
    try:
        # PyG's Linear reads its weight for this: looking must not make spectral_norm go a step on
        before = [(buffer, buffer.detach().clone()) for buffer in world["model"].buffers()]
        held = world["model"].state_dict()
        for buffer, value in before:
            buffer.data.copy_(value)
    except Exception as error:  # no model was made, or a parametrization of its weights does not work
        return {"error": type(error).__name__}
    # a lazy layer that has not run holds no numbers
    return {k: None if is_lazy(v) else v for k, v in held.items()}


def modes(world: dict[str, Any]) -> dict[str, bool]:
    """Which modules are in training mode."""
    return {name: module.training for name, module in world["model"].named_modules()}


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of nested containers, each by the keys that lead to it."""
    if isinstance(value, (dict, tuple, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{name} {key}", part)
    else:
        yield name, value


def dense(value: Tensor) -> Tensor:
    """The same numbers as a dense tensor without a graph."""
    if value.layout == torch.strided:
        return value.detach()
    with torch.inference_mode():  # which takes sparse tensors made there, too
        return value.to_dense()


def largest(value: Any) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return float(torch.nan_to_num(dense(value).double(), 0.0, 0.0, 0.0).abs().max())


def has_nan(value: Any) -> bool:
    """Whether a tensor in there holds NaN."""
    parts = (part for _, part in leaves("", value) if isinstance(part, Tensor) and not is_lazy(part))
    return any(p.is_floating_point() and bool(p.isnan().any()) for p in parts)
