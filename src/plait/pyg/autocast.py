"""Layers under torch.autocast: computed in the parameters' own precision, returned in PyG's result type.

Autocast rounds the operands of products to 16 bits. A planned layer reads its inputs in float32, computes in
float32 and rounds once, at its end: its results are closer to those without autocast than PyG's, and of the
same type. The type depends on the layer, its options and its arguments; it is found by running PyG on two
nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from plait.pyg.active import active
from plait.runtime.deferred import whole

__all__ = ["CACHED_FEATURES", "is_on", "run"]

_PLAIN = (bool, int, float, str, type(None))
_types: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
_MOST_KNOWN = 16  # ways to call one layer
CACHED_FEATURES = ("_cached_x", "_cached_h")  # what SGConv and SSGConv keep with cached=True

is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device."""


def run(
    forward: Callable[..., Any],
    layer: type[nn.Module],
    original: Callable[..., Any],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """forward(layer, original, module, ...) with autocast off, its results in the types of PyG's.

    None where PyG has to run. Where the call turns out to be one that is not planned, autocast is on for PyG.
    """
    x = args[0] if args else kwargs.get("x")
    first = x[0] if isinstance(x, tuple | list) and x else x
    if not isinstance(first, Tensor):
        return None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):  # autocast of another device: it does not affect this layer
        with torch.autocast("cuda" if kind == "cpu" else "cpu", enabled=False):
            return forward(layer, original, module, *args, **kwargs)
    kept = (vars(module).get(name) for name in CACHED_FEATURES)
    read = (*module.parameters(), *module.buffers(), *(h for h in kept if isinstance(h, Tensor)))
    if any(value.dtype != torch.float32 for value in read if value.is_floating_point()):
        return None
    low = torch.get_autocast_dtype(kind)
    types = _known_types(original, module, args, kwargs, low)
    if types is None:
        return None

    def in_pyg(*given: Any, **named: Any) -> Any:
        with torch.autocast(kind, dtype=low):
            return original(*given, **named)

    with torch.autocast(kind, enabled=False):
        made = forward(layer, in_pyg, module, *_widened(args), **_widened(kwargs))
    return _rounded(whole(made), types)


def _known_types(
    original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype
) -> Any:
    """The types of PyG's results for such a call, found once; None where they cannot be found."""
    options = tuple((name, value) for name, value in vars(module).items() if type(value) in _PLAIN)
    key = (low, options, _outline(args), tuple(sorted((k, _outline(v)) for k, v in kwargs.items())))
    found = _types.setdefault(module, {})
    if key not in found:
        while len(found) >= _MOST_KNOWN:
            found.pop(next(iter(found)))
        found[key] = _asked(original, module, args, kwargs)
    return found[key]


def _outline(value: Any) -> Any:
    """The properties of an argument that the types of results may depend on."""
    if isinstance(value, tuple | list):
        return tuple(map(_outline, value))
    if isinstance(value, Tensor):
        return (value.dtype, value.dim(), value.layout)
    return value if type(value) in _PLAIN else type(value)


def _asked(original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The types of PyG's results, from running a copy of the layer on two nodes; None where that fails."""
    names = _names(original, args)
    if names is None:
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    seats, active.seats = active.seats, None
    devices = [p.device for p in module.parameters() if p.is_cuda][:1]
    try:
        small = {name: _small(name, value) for name, value in given.items()}
        with torch.no_grad(), torch.random.fork_rng(devices):
            return _types_in(original(copy.deepcopy(module), **small))
    except Exception:  # if a layer fails on two nodes for any reason, it runs in PyG on the user's graph
        return None
    finally:
        active.seats = seats


def _names(original: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...] | None:
    code: Any = original.__code__
    names = tuple(code.co_varnames[1 : code.co_argcount])
    return names if len(args) <= len(names) else None


def _small(name: str, value: Any) -> Any:
    """An argument of a call on two nodes and the two edges between them."""
    if isinstance(value, tuple | list):
        return (2,) * len(value) if name == "size" else tuple(_small(name, part) for part in value)
    if not isinstance(value, Tensor):
        return value
    if value.layout != torch.strided:
        raise ValueError(name)
    if value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point():
        return torch.tensor([[0, 1], [1, 0]], dtype=value.dtype, device=value.device)
    if value.dim() == 0:
        return value
    return torch.zeros((2, *value.shape[1:]), dtype=value.dtype, device=value.device)


def _types_in(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(map(_types_in, result))
    return result.dtype if isinstance(result, Tensor) and result.is_floating_point() else None


def _widened(value: Any) -> Any:
    """Numbers of any kind of float in float32, under autograd."""
    if isinstance(value, tuple | list):
        return tuple(map(_widened, value))
    if isinstance(value, dict):
        return {name: _widened(part) for name, part in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.float()
    return value


def _rounded(result: Any, types: Any) -> Any:
    if isinstance(types, tuple):
        return type(result)(_rounded(part, kind) for part, kind in zip(result, types, strict=True))
    return result if types is None else result.to(types)
