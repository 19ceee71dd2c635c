"""PyG layers as matrix expressions: one rule per layer, or the reason why it keeps running in PyG."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch_geometric.nn import MessagePassing

from plait.pyg.layers import (
    arma,
    attention,
    convolution,
    edgewise,
    gated,
    gin,
    lstm,
    messages,
    neighbourhood,
    pna,
    polynomial,
    relational,
    scored,
)
from plait.pyg.layers.base import (
    RULES,
    Apply,
    Call,
    Lowered,
    NotLowered,
    Rule,
    has_hooks,
    is_lazy,
    is_plain_linear,
    is_resized,
)
from plait.pyg.layers.fused import FUSED
from plait.pyg.listening import sees_functions

__all__ = [
    "APART", "EXPLAINED", "FOLLOWED", "LISTENED", "Apply", "Call", "Lowered", "NotLowered", "as_in_pyg",
    "lower", "not_as_written", "supported",
]  # fmt: skip

# imported because they register layers
_PARTS_OF_RULES = (
    convolution,
    polynomial,
    neighbourhood,
    gin,
    arma,
    attention,
    lstm,
    gated,
    relational,
    pna,
    edgewise,
    messages,
    scored,
)

# methods of a subclass that change nothing in what a layer computes; not `forward`: a subclass that calls
# super().forward asks for exactly what the rule states
_HARMLESS = frozenset((
    "__init__", "__repr__", "__setstate__", "reset_parameters", "extra_repr", "jittable", "forward",
    "propagate", "collect", "edge_updater",  # these three PyG writes for every class from a template
))  # fmt: skip
APART = ": its parameters are not on the device of x, or of another type"
EXPLAINED = ": an explainer masks its messages"
FOLLOWED = ": a mode or a class of tensors intercepts torch's functions, or x is not on the default device"
LISTENED = ": a hook on all modules must see those inside the layer"
_HOOKS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


def supported() -> tuple[str, ...]:
    """Names of the layer classes that have a rule."""
    return tuple(sorted({layer.__name__ for layer in (*RULES, *FUSED)}))


def lower(module: nn.Module, call: Call) -> Lowered | NotLowered:
    """What the layer computes in such a call, or why that is not lowered.

    With flow="target_to_source" the caller hands edges over swapped, so that row 0 names the node a message
    leaves; rules whose normalisation looks at one end of the edge take that into account. The result is valid
    while the module's options, hooks and training flag are unchanged.
    """
    found = _rule_of(module)
    if found is None:
        return NotLowered(f"{type(module).__name__}: plait has no rule for this layer")
    layer, apply_rule = found
    reason = _unusual(module, call) or _changed(module, layer)
    return NotLowered(f"{type(module).__name__}{reason}") if reason else apply_rule(module, call)


def not_as_written(module: nn.Module, layer: type[nn.Module]) -> str | None:
    """Why a layer that is not a matrix expression differs from its class, if it does."""
    reason = _watched(module) or _changed(module, layer)
    if reason is None and is_lazy(module):
        reason = ": in_channels is not known yet; the layer runs once in PyG first"
    reason = reason or _resized(module)
    if reason is None and ("edge_update" in vars(module) or _other_update(module, layer)):
        reason = f": edge_update is not that of {layer.__name__}, so the rule does not hold"
    return reason


def _other_update(module: Any, layer: Any) -> bool:
    return bool(module.__class__.edge_update is not layer.edge_update)


def _rule_of(module: nn.Module) -> tuple[type[nn.Module], Rule] | None:
    for layer in type(module).__mro__:
        if layer in RULES:
            return layer, RULES[layer]
    return None


def _changed(module: Any, layer: type[Any]) -> str | None:
    """Why the module differs from PyG's layer, if it does."""
    cls, own = module.__class__, vars(module)  # of a compiled root: the class of the model it is a view of
    for name, method in as_in_pyg(layer).items():
        if name in own or getattr(cls, name, None) is not method:
            return f": {name} is not that of {layer.__name__}, so the rule does not hold"
    # PyG writes `propagate` from a template, per class, and puts it on a module whose explainer is done;
    # one of the user's own keeps its Python module
    found = own.get("propagate", cls.propagate)
    found = getattr(found, "__func__", found)
    if found is not MessagePassing.propagate and not found.__module__.endswith("_propagate"):
        return f": propagate is not that of {layer.__name__}, so the rule does not hold"
    return None


def _find_methods(layer: type[Any]) -> Mapping[str, Any]:
    """All that a layer's forward may call of its own class and of PyG's base class, by name.

    As they are when this is first asked: a program that patches PyG's class later has another layer.
    """
    found: dict[str, None] = {}
    for cls in layer.__mro__:
        if issubclass(cls, MessagePassing):
            # PyG writes further functions on classes, from templates: they come from modules of their own
            own = (
                n for n, f in vars(cls).items() if inspect.isfunction(f) and f.__module__ == cls.__module__
            )
            found.update(dict.fromkeys(own))
    names = (name for name in found if name not in _HARMLESS and not name.startswith("register_"))
    return {name: getattr(layer, name) for name in names}


# typed by hand: mypy takes a class of modules for unhashable
as_in_pyg = cast("Callable[[type[Any]], Mapping[str, Any]]", functools.cache(_find_methods))


def _unusual(module: Any, call: Call) -> str | None:
    """An option or state of MessagePassing that no rule covers, if there is one."""
    watched = _watched(module)
    if watched:
        return watched
    if module.node_dim != -2:
        return f"(node_dim={module.node_dim}): nodes must be the rows of x"
    if call.is_sparse and module.flow != "source_to_target":
        return f"(flow={module.flow!r}): PyG does not take a sparse adj_t this way round"
    if is_lazy(module):
        return ": in_channels is not known yet; the layer runs once in PyG first"
    return _resized(module)


def _resized(module: nn.Module) -> str | None:
    """Why PyG has to multiply by the weights of a layer; its kernels would read what they expect of them."""
    for name, part in module.named_modules():
        if is_plain_linear(part) and is_resized(part):
            return f": the weight or bias of {name} was replaced by one of another size"
    return None


def _watched(module: Any) -> str | None:
    """Why the messages have to be formed one by one, in PyG; None where they need not."""
    for name in _HOOKS:
        if getattr(module, f"_{name}_forward_pre_hooks") or getattr(module, f"_{name}_forward_hooks"):
            return f": a hook on {name} must see the messages"
    if has_hooks(module.aggr_module):
        return ": a hook on aggr_module must see the messages"
    if module.explain:
        return EXPLAINED
    if any(sees_functions(type(parameter)) for parameter in module.parameters()):
        return FOLLOWED
    if module.decomposed_layers > 1:
        return f"(decomposed_layers={module.decomposed_layers}): PyG splits the features itself"
    return None
