"""Layers that multiply by a power of one normalised matrix: GCN, SG, TAG."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor
from torch_geometric.nn import GCNConv, SGConv, TAGConv

from plait.ir import Expr, MatMul, total
from plait.ir.build import polynomial, propagation
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    aggregation,
    bias,
    features,
    is_plain_linear,
    linear_values,
    rule,
    weight,
)
from plait.pyg.operators import Operator

__all__ = ["gcn_operator", "not_summed", "power", "symmetric"]


def gcn_operator(call: Call, add_self_loops: bool, improved: bool = False) -> Operator:
    """gcn_norm: D^-1/2 (A + loops) D^-1/2.

    On an edge list a missing loop gets the fill and an old one keeps its weight; without edge weights PyG
    fills with ones even where `improved` asks for 2. On a sparse adj_t the fill is added to what is there.
    """
    if not add_self_loops:
        return Operator(normalise="symmetric")
    if call.is_sparse:
        return Operator("add", 2.0 if improved else 1.0, "symmetric")
    return Operator("remaining", 2.0 if improved and call.is_weighted else 1.0, "symmetric")


@cache
def symmetric(operator: Operator, is_weighted: bool) -> Expr:
    """The expression of an operator that is plain or symmetric."""
    is_scaled = operator.normalise == "symmetric"
    return propagation(
        is_weighted=is_weighted, left=is_scaled, loops=operator.loops != "none", right=is_scaled
    )


def power(matrix: Expr, x: Expr, exponent: int) -> Expr:
    """matrix @ (matrix @ ... x), `exponent` times."""
    for _ in range(exponent):
        x = MatMul(matrix, x)
    return x


def not_summed(module: Any, call: Call) -> NotLowered | None:
    """The reason against a layer of one node set that must aggregate by sums, if there is one."""
    name = type(module).__name__
    if call.is_bipartite:
        return NotLowered(f"{name}: x is a pair; the layer takes one feature matrix")
    if aggregation(module) != "sum":
        return NotLowered(f"{name}(aggr={module.aggr!r}): only sums of normalised messages are lowered")
    return None


def _with_bias(forms: tuple[Expr, ...], has_bias: bool) -> tuple[Expr, ...]:
    return tuple(total(form, bias()) for form in forms) if has_bias else forms


# GCN ------------------------------------------------------------------------------------------------------


@cache
def _gcn_forms(operator: Operator, is_weighted: bool, has_bias: bool) -> tuple[Expr, ...]:
    return _with_bias(((symmetric(operator, is_weighted) @ features()) @ weight(),), has_bias)


@rule(GCNConv)
def _gcn(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    if not is_plain_linear(module.lin):
        return NotLowered(
            "GCNConv: lin is watched by hooks or was replaced, so its weight is not the whole of it"
        )
    if module.cached and (module._cached_edge_index is not None or module._cached_adj_t is not None):
        return NotLowered(
            "GCNConv(cached=True): PyG already holds a normalised graph; reset_parameters() drops it"
        )
    operator = gcn_operator(call, module.add_self_loops, module.improved) if module.normalize else Operator()
    forms = _gcn_forms(operator, call.is_weighted, module.bias is not None)
    return Lowered(operator, partial(_run_gcn, forms), keeps_graph=module.cached and module.normalize)


def _run_gcn(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x, "W": module.lin.weight.t()}
    if module.bias is not None:
        values["b"] = module.bias
    return apply(forms, values)


# SG -------------------------------------------------------------------------------------------------------


@cache
def _sg_forms(operator: Operator, is_weighted: bool, exponent: int, has_bias: bool) -> tuple[Expr, ...]:
    s, x, w = symmetric(operator, is_weighted), features(), weight()
    forms = (MatMul(power(s, x, exponent), w), power(s, MatMul(x, w), exponent))
    return _with_bias(forms[: 2 if exponent else 1], has_bias)


@cache
def _sg_power(operator: Operator, is_weighted: bool, exponent: int) -> tuple[Expr, ...]:
    return (power(symmetric(operator, is_weighted), features(), exponent),)


@rule(SGConv)
def _sg(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    operator = gcn_operator(call, module.add_self_loops)
    if module.cached and module.K > 0:
        # the linear map stays in torch: PyG keeps S^K X of the first call and answers later ones from it
        return Lowered(operator, partial(_run_cached_sg, _sg_power(operator, call.is_weighted, module.K)))
    if not is_plain_linear(module.lin):
        return NotLowered(
            "SGConv: lin is watched by hooks or was replaced, so its weight is not the whole of it"
        )
    forms = _sg_forms(operator, call.is_weighted, module.K, module.lin.bias is not None)
    return Lowered(operator, partial(_run_linear, forms))


def _run_linear(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    return apply(forms, {"X": x, **linear_values(module.lin)})


def _run_cached_sg(
    forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    if module._cached_x is None:
        module._cached_x = h = apply(forms, {"X": x})
    else:
        h = module._cached_x.detach()
    result: Tensor = module.lin(h)
    return result


# TAG ------------------------------------------------------------------------------------------------------


@cache
def _tag_forms(operator: Operator, is_weighted: bool, count: int, has_bias: bool) -> tuple[Expr, ...]:
    weights = [weight(f"W{k}") for k in range(count)]
    return _with_bias(polynomial(symmetric(operator, is_weighted), features(), weights), has_bias)


@rule(TAGConv)
def _tag(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    if not all(map(is_plain_linear, module.lins)):
        return NotLowered("TAGConv: one of lins is watched by hooks or was replaced")
    operator = Operator(normalise="symmetric") if module.normalize else Operator()
    forms = _tag_forms(operator, call.is_weighted, len(module.lins), module.bias is not None)
    return Lowered(operator, partial(_run_polynomial, forms))


def _run_polynomial(
    forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x}
    values.update((f"W{k}", lin.weight.t()) for k, lin in enumerate(module.lins))
    if module.bias is not None:
        values["b"] = module.bias
    return apply(forms, values)
