"""GIN: nn(A @ X + (1 + eps) * R), with the linear maps and ReLUs nn begins with inside the expression."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import GINConv, Linear
from torch_geometric.nn.models import MLP

from plait.ir import Dense, Expr, Map, Scalar, Scale, total
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    bias,
    features,
    has_hooks,
    is_plain_linear,
    linear_values,
    neighbours,
    rule,
    weight,
)
from plait.pyg.layers.neighbourhood import ignores_weights, operator, reduction

__all__: list[str] = []


@cache
def _gin_forms(
    reduce: str, call: Call, has_weight: bool, has_bias: bool, tail: tuple[str, ...], own: float | None
) -> tuple[Expr, ...]:
    """`own` is what a node's own features count, 1 + eps; None where it is learned."""
    summed = neighbours(reduce, call)
    if not call.is_bipartite or call.has_root:
        root = Dense("R", "N", "K1") if call.is_bipartite else features()
        factor = Scalar("e", None, "learnable") if own is None else Scalar("e", own)
        summed = total(summed, root if own == 1.0 else Scale(factor, root))
    if has_weight:
        summed = summed @ weight()
    h = total(summed, bias()) if has_bias else summed
    width = "K2"
    for k, kind in enumerate(tail):
        if kind == "relu":
            h = Map("relu", h)
            continue
        h = h @ Dense(f"W{k}", width, f"H{k}", "learnable")
        width = f"H{k}"
        h = total(h, Dense(f"b{k}", 1, width, "learnable")) if kind == "linear, bias" else h
    return (h,)


@rule(GINConv)
def _gin(module: Any, call: Call) -> Lowered | NotLowered:
    reduce = reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    stop = ignores_weights(module, call)
    if stop:
        return stop
    return Lowered(operator(reduce), partial(_run_gin, reduce, call))


def _run_gin(reduce: str, call: Call, module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x}
    if call.is_bipartite and call.has_root:
        values["R"] = root
    # a number that nothing learns is part of the expression: sums of constant features are then constant
    own = None if isinstance(module.eps, nn.Parameter) else 1.0 + float(module.eps)
    if own is None and (not call.is_bipartite or call.has_root):
        values["e"] = 1 + module.eps
    first = _first_linear(module.nn)
    if first is not None:
        values.update(linear_values(first))
    tail = _tail(module.nn, first)
    for k, layer in enumerate(tail):
        if isinstance(layer, nn.Linear | Linear):
            values[f"W{k}"] = layer.weight.t()
            values[f"b{k}"] = layer.bias
    kinds = tuple(map(_kind, tail))
    forms = _gin_forms(reduce, call, first is not None, "b" in values, kinds, own)
    return _after_first(module.nn, first, len(tail), apply(forms, values))


def _first_linear(network: Any) -> Any | None:
    """The linear map `network` begins with, when nothing can tell that it is computed elsewhere."""
    if is_plain_linear(network):
        return network
    forward = getattr(type(network), "forward", None)
    if forward is nn.Sequential.forward:
        layers: Any = network
    elif forward is MLP.forward:
        layers = network.lins
    else:
        return None
    if "forward" in vars(network) or has_hooks(network) or len(layers) == 0:
        return None
    return layers[0] if is_plain_linear(layers[0]) else None


def _tail(network: Any, first: Any | None) -> list[Any]:
    """The ReLUs and linear maps, in turn, that follow the first linear map of a Sequential."""
    if first is None or not isinstance(network, nn.Sequential):
        return []
    found: list[Any] = []
    for layer in list(network)[1:]:
        wants_relu = len(found) % 2 == 0
        is_relu = type(layer) is nn.ReLU and not has_hooks(layer)
        if not (is_relu if wants_relu else is_plain_linear(layer)):
            break
        found.append(layer)
    return found


def _kind(layer: Any) -> str:
    if isinstance(layer, nn.ReLU):
        return "relu"
    return "linear" if layer.bias is None else "linear, bias"


def _after_first(network: Any, first: Any | None, done: int, h: Tensor) -> Tensor:
    """What `network` makes of the output of its first linear map and the `done` layers after it."""
    if network is first:
        return h
    if first is None:
        result: Tensor = network(h)
        return result
    if isinstance(network, nn.Sequential):
        for layer in list(network)[1 + done :]:
            h = layer(h)
        return h
    rest: Tensor = MLP.forward(_WithoutFirst(network), h)
    return rest


class _WithoutFirst:
    """An MLP whose first linear map does nothing, so that PyG's own forward does the rest."""

    def __init__(self, network: MLP) -> None:
        self.network = network
        self.lins = [nn.Identity(), *list(network.lins)[1:]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)
