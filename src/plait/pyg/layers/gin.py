"""GIN: nn(A @ X + (1 + eps) * R), with the linear maps and ReLUs nn begins with inside the expression."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv
from torch_geometric.nn.models import MLP

from plait.ir import Dense, Expr, Map, Scalar, Scale, total
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    Numbers,
    bias,
    features,
    has_hooks,
    is_plain_linear,
    linear_values,
    neighbours,
    number_in,
    rule,
    scalar,
    scalar_value,
    weight,
)
from plait.pyg.layers.neighbourhood import ignores_weights, operator, reduction

__all__: list[str] = []


@cache
def _gin_forms(
    reduce: str, call: Call, has_weight: bool, has_bias: bool, tail: tuple[str, ...], own: str
) -> tuple[Expr, ...]:
    """`own`: a node's own features count "one", a "number" of the call, one "learned", or ("") nothing."""
    summed = neighbours(reduce, call)
    if own and (not call.is_bipartite or call.has_root):
        root = Dense("R", "N", "K1") if call.is_bipartite else features()
        factor = Scalar("e", None, "learnable") if own == "learned" else scalar("e")
        summed = total(summed, root if own == "one" else Scale(factor, root))
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
    numbers = partial(_numbers, not call.is_bipartite or call.has_root)
    run = partial(_run_gin, reduce, call, _kinds(module.nn))
    return Lowered(operator(reduce), run, is_steady=True, numbers=numbers)


def _numbers(has_own: bool, module: Any, x: Tensor) -> Numbers | None:
    """What a node's own features count, where that is a number in a buffer."""
    eps = module.eps
    if isinstance(eps, nn.Parameter) or eps.requires_grad or _is_wider(eps, x):
        return None
    number = number_in(eps)
    return ("number", {"e": scalar_value(1.0 + number, x)}) if number != 0.0 and has_own else ("one", {})


def _is_wider(eps: Tensor, x: Tensor) -> bool:
    """Whether 1 + eps times x has a wider type than x."""
    return eps.dtype is not x.dtype and torch.result_type(x, eps) is not x.dtype


def _run_gin(
    reduce: str, call: Call, kinds: tuple[str, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x}
    eps = module.eps
    if _is_wider(eps, x) and call.has_root:
        # 1 + eps of a wider type makes PyG's sum as wide, and the network's input
        summed = apply(_gin_forms(reduce, call, False, False, (), ""), values)
        wide: Tensor = module.nn(summed + (1 + eps) * (root if call.is_bipartite else x))
        return wide
    if call.is_bipartite and call.has_root:
        values["R"] = root
    own = (
        "learned"
        if isinstance(eps, nn.Parameter) or eps.requires_grad
        else "one"
        if number_in(eps) == 0.0
        else "number"
    )
    if own != "one" and (not call.is_bipartite or call.has_root):
        values["e"] = 1 + eps if own == "learned" else scalar_value(1.0 + number_in(eps), x)
    layers = _layers(module.nn)
    if kinds:
        values.update(linear_values(layers[0]))
    for k, kind in enumerate(kinds[1:]):
        if kind != "relu":
            values[f"W{k}"] = layers[k + 1].weight.t()
            values[f"b{k}"] = layers[k + 1].bias
    forms = _gin_forms(reduce, call, bool(kinds), "b" in values, kinds[1:], own)
    return _after(module.nn, layers, len(kinds), apply(forms, values))


def _layers(network: Any) -> list[Any]:
    """What `network` applies one after the other; an MLP's linear maps, between which it does more."""
    children = network.lins if isinstance(network, MLP) else network
    return list(children) if isinstance(children, nn.Sequential | nn.ModuleList) else [network]


def _kinds(network: Any) -> tuple[str, ...]:
    """The linear map `network` begins with and the ReLUs and linear maps that follow it in a Sequential.

    Nothing where a hook or subclass could notice that they are computed elsewhere.
    """
    forward = getattr(type(network), "forward", None)
    is_known = is_plain_linear(network) or forward in (nn.Sequential.forward, MLP.forward)
    if not is_known or "forward" in vars(network) or has_hooks(network):
        return ()
    found: list[str] = []
    for layer in _layers(network)[: 1 if forward is MLP.forward else None]:
        wants_relu = len(found) % 2 == 1
        is_relu = type(layer) is nn.ReLU and not has_hooks(layer)
        if not (is_relu if wants_relu else is_plain_linear(layer)):
            break
        found.append("relu" if wants_relu else "linear" if layer.bias is None else "linear, bias")
    return tuple(found)


def _after(network: Any, layers: list[Any], done: int, h: Tensor) -> Tensor:
    """What `network` makes of the output of the first `done` of its layers."""
    if done == 0:
        result: Tensor = network(h)
        return result
    if not isinstance(network, MLP):
        for layer in layers[done:]:
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
