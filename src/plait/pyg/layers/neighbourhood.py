"""Layers that aggregate neighbours and treat the node itself apart: SAGE, GraphConv, GIN."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GINConv, GraphConv, SAGEConv
from torch_geometric.nn.models import MLP

from plait.ir import Dense, Expr, Scalar, Scale, total
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    aggregation,
    bias,
    features,
    has_hooks,
    is_plain_linear,
    linear_values,
    neighbours,
    rule,
    weight,
)
from plait.pyg.operators import Operator

__all__: list[str] = []


def _operator(reduce: str) -> Operator:
    return Operator(normalise="mean") if reduce == "mean" else Operator()


def _reduction(module: Any, call: Call) -> str | NotLowered:
    """How the layer aggregates, or why that is not lowered."""
    name = type(module).__name__
    reduce = aggregation(module)
    if reduce is None:
        return NotLowered(f"{name}(aggr={module.aggr!r}): only sum, mean, max and min are lowered")
    if reduce in ("max", "min") and call.is_weighted:
        return NotLowered(f"{name}(aggr={reduce!r}): a {reduce} over weighted messages is not lowered")
    if call.is_bipartite and module.flow != "source_to_target":
        return NotLowered(
            f"{name}(flow={module.flow!r}): pairs of features are lowered source_to_target only"
        )
    return reduce


def _ignores_weights(module: Any, call: Call) -> NotLowered | None:
    """SAGE and GIN read the values of a sparse adj_t only where PyG multiplies by it directly."""
    if call.is_weighted and not (call.is_sparse and module.fuse):
        return NotLowered(f"{type(module).__name__}: the layer takes no edge weights")
    return None


# SAGE and GraphConv: reduce(A, X) @ W + R @ V + b ---------------------------------------------------------


@cache
def _root_forms(reduce: str, call: Call, root: str | None, has_bias: bool) -> tuple[Expr, ...]:
    """root: the leaf the node's own term reads, X where it is the source features; None for no such term."""
    terms = [neighbours(reduce, call) @ weight()]
    if root == "X":
        terms.append(features() @ weight("V"))
    elif root == "R":
        terms.append(Dense("R", "N", "Kr") @ weight("V", "Kr"))
    if has_bias:
        terms.append(bias())
    return (total(*terms),)


def _root_leaf(call: Call, is_own: bool) -> str | None:
    """R where root and sources differ, X where they are one, None where the call gives no root."""
    if call.is_bipartite:
        return "R" if call.has_root else None
    return "R" if is_own else "X"


@rule(SAGEConv)
def _sage(module: Any, call: Call) -> Lowered | NotLowered:
    reduce = _reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    stop = _ignores_weights(module, call)
    if stop:
        return stop
    if not (is_plain_linear(module.lin_l) and (not module.root_weight or is_plain_linear(module.lin_r))):
        return NotLowered("SAGEConv: lin_l or lin_r is watched by hooks or was replaced")
    # only the sources are projected, so the root is no longer the same matrix
    root = _root_leaf(call, is_own=module.project) if module.root_weight else None
    forms = _root_forms(reduce, call, root, module.lin_l.bias is not None)
    return Lowered(_operator(reduce), partial(_run_sage, forms, root))


def _run_sage(
    forms: tuple[Expr, ...], leaf: str | None, module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    own = x if root is None else root
    if module.project and hasattr(module, "lin"):
        x = module.lin(x).relu()
    values: dict[str, Tensor | None] = {"X": x, **linear_values(module.lin_l)}
    if leaf is not None:
        values["V"] = module.lin_r.weight.t()
    if leaf == "R":
        values["R"] = own
    out = apply(forms, values)
    return functional.normalize(out, p=2.0, dim=-1) if module.normalize else out


@rule(GraphConv)
def _graph_conv(module: Any, call: Call) -> Lowered | NotLowered:
    reduce = _reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    if not (is_plain_linear(module.lin_rel) and is_plain_linear(module.lin_root)):
        return NotLowered("GraphConv: lin_rel or lin_root is watched by hooks or was replaced")
    root = _root_leaf(call, is_own=False)
    forms = _root_forms(reduce, call, root, module.lin_rel.bias is not None)
    return Lowered(_operator(reduce), partial(_run_graph_conv, forms, root))


def _run_graph_conv(
    forms: tuple[Expr, ...], leaf: str | None, module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x, **linear_values(module.lin_rel)}
    if leaf is not None:
        values["V"] = module.lin_root.weight.t()
    if leaf == "R":
        values["R"] = root
    return apply(forms, values)


# GIN: nn(A @ X + (1 + eps) * R), with the first linear map of nn inside the expression ----------------------


@cache
def _gin_forms(reduce: str, call: Call, has_weight: bool, has_bias: bool) -> tuple[Expr, ...]:
    eps = Scalar("e", None, "learnable")
    summed = neighbours(reduce, call)
    if not call.is_bipartite:
        summed = total(summed, Scale(eps, features()))
    elif call.has_root:
        summed = total(summed, Scale(eps, Dense("R", "N", "K1")))
    if has_weight:
        summed = summed @ weight()
    return (total(summed, bias()) if has_bias else summed,)


@rule(GINConv)
def _gin(module: Any, call: Call) -> Lowered | NotLowered:
    reduce = _reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    stop = _ignores_weights(module, call)
    if stop:
        return stop
    return Lowered(_operator(reduce), partial(_run_gin, reduce, call))


def _run_gin(reduce: str, call: Call, module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x}
    if call.is_bipartite and call.has_root:
        values["R"] = root
    if not call.is_bipartite or call.has_root:
        values["e"] = 1 + module.eps
    first = _first_linear(module.nn)
    if first is not None:
        values.update(linear_values(first))
    forms = _gin_forms(reduce, call, first is not None, "b" in values)
    return _after_first(module.nn, first, apply(forms, values))


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


def _after_first(network: Any, first: Any | None, h: Tensor) -> Tensor:
    """What `network` makes of the output of its first linear map, or of its input where `first` is None."""
    if network is first:
        return h
    if first is None:
        result: Tensor = network(h)
        return result
    if isinstance(network, nn.Sequential):
        for layer in list(network)[1:]:
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
