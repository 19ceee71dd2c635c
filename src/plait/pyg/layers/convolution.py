"""Layers that multiply by powers of one normalised matrix before one linear map: GCN, SG, SSG, LG, APPNP."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor
from torch_geometric.nn import APPNP, GCNConv, LGConv, SGConv, SSGConv

from plait.ir import Expr, MatMul, Scale, total
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    Numbers,
    features,
    linear_values,
    not_plain,
    not_summed,
    rule,
    scalar,
    scalar_value,
    weight,
    with_bias,
)
from plait.pyg.layers.matrix import gcn_operator, symmetric
from plait.pyg.operators import Operator

__all__: list[str] = []

_SCHEDULED = frozenset({"alpha"})  # of APPNP and SSG: a number of the call, in no expression


def _power(matrix: Expr, x: Expr, exponent: int) -> Expr:
    """matrix @ (matrix @ ... x), `exponent` times."""
    for _ in range(exponent):
        x = MatMul(matrix, x)
    return x


def _run_linear(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    return apply(forms, {"X": x, **linear_values(module.lin)})


# GCN: S @ X @ W + b ---------------------------------------------------------------------------------------


@cache
def _gcn_forms(operator: Operator, is_weighted: bool, has_bias: bool) -> tuple[Expr, ...]:
    return with_bias(((symmetric(operator, is_weighted) @ features()) @ weight(),), has_bias)


@rule(GCNConv)
def _gcn(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call) or not_plain(module, "lin")
    if stop:
        return stop
    operator = gcn_operator(call, module.add_self_loops, module.improved) if module.normalize else Operator()
    forms = _gcn_forms(operator, call.is_weighted, module.bias is not None)
    keeps_graph = module.cached and module.normalize
    return Lowered(operator, partial(_run_gcn, forms), keeps_graph, is_steady=True)


def _run_gcn(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x, "W": module.lin.weight.t()}
    bias = module.bias
    if bias is not None:
        values["b"] = bias
    return apply(forms, values)


# SG: S^K @ X @ W + b --------------------------------------------------------------------------------------


@cache
def _sg_forms(operator: Operator, is_weighted: bool, exponent: int, has_bias: bool) -> tuple[Expr, ...]:
    s, x, w = symmetric(operator, is_weighted), features(), weight()
    forms = (MatMul(_power(s, x, exponent), w), _power(s, MatMul(x, w), exponent))
    return with_bias(forms[: 2 if exponent else 1], has_bias)


@cache
def _sg_power(operator: Operator, is_weighted: bool, exponent: int) -> tuple[Expr, ...]:
    return (_power(symmetric(operator, is_weighted), features(), exponent),)


@rule(SGConv)
def _sg(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    operator = gcn_operator(call, module.add_self_loops)
    if module.cached and module.K > 0:
        forms = _sg_power(operator, call.is_weighted, module.K)
        return Lowered(operator, partial(_run_kept, forms, "_cached_x"))
    stop = not_plain(module, "lin")
    if stop:
        return stop
    forms = _sg_forms(operator, call.is_weighted, module.K, module.lin.bias is not None)
    return Lowered(operator, partial(_run_linear, forms), is_steady=True)


def _run_kept(
    forms: tuple[Expr, ...], kept: str, module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    """cached=True: the propagated features of the first call answer every later one, as in PyG."""
    h = getattr(module, kept)
    if h is None:
        shares = _shares(module, x)[1] if isinstance(module, SSGConv) else {}
        h = apply(forms, {"X": x, **shares})
        setattr(module, kept, h)
    else:
        h = h.detach()
    result: Tensor = module.lin(h)
    return result


# SSG: (alpha X + (1 - alpha) / K * sum over k of S^k @ X) @ W + b -------------------------------------------


@cache
def _ssg_sums(operator: Operator, is_weighted: bool, exponent: int, x: Expr) -> tuple[Expr, ...]:
    """The weighted sum of powers: each power formed and added, and by Horner's rule."""
    own = Scale(scalar("alpha"), x)
    if exponent == 0:
        return (own,)
    s, share = symmetric(operator, is_weighted), scalar("share")
    powers = (Scale(share, _power(s, x, k)) for k in range(1, exponent + 1))
    inner = x
    for _ in range(exponent - 1):
        inner = total(x, MatMul(s, inner))
    return total(own, *powers), total(own, Scale(share, MatMul(s, inner)))


@cache
def _ssg_forms(operator: Operator, is_weighted: bool, exponent: int, has_bias: bool) -> tuple[Expr, ...]:
    x, w = features(), weight()
    first = [MatMul(form, w) for form in _ssg_sums(operator, is_weighted, exponent, x)]
    last = _ssg_sums(operator, is_weighted, exponent, MatMul(x, w))
    return with_bias((*first, *last), has_bias)


@rule(SSGConv)
def _ssg(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call) or _not_a_number(module)
    if stop:
        return stop
    operator = gcn_operator(call, module.add_self_loops)
    options = (operator, call.is_weighted, module.K)
    if module.cached:
        return Lowered(operator, partial(_run_kept, _ssg_sums(*options, features()), "_cached_h"))
    stop = not_plain(module, "lin")
    if stop:
        return stop
    run = partial(_run_ssg, _ssg_forms(*options, module.lin.bias is not None))
    return Lowered(operator, run, is_steady=True, numbers=_shares, scheduled=_SCHEDULED)


def _run_ssg(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    return apply(forms, {"X": x, **linear_values(module.lin), **_shares(module, x)[1]})


def _shares(module: Any, x: Tensor) -> Numbers:
    """What the features and each of their powers count in SSG."""
    own = {"alpha": scalar_value(module.alpha, x)}
    return "", own if module.K == 0 else {**own, "share": scalar_value((1 - module.alpha) / module.K, x)}


def _not_a_number(module: Any) -> NotLowered | None:
    if isinstance(module.alpha, int | float):
        return None
    return NotLowered(f"{type(module).__name__}: alpha is a {type(module.alpha).__name__}, not a number")


# LG: S @ X ------------------------------------------------------------------------------------------------


@rule(LGConv)
def _lg(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call)
    if stop:
        return stop
    operator = gcn_operator(call, add_self_loops=False) if module.normalize else Operator()
    return Lowered(operator, partial(_run_features, _sg_power(operator, call.is_weighted, 1)))


def _run_features(
    forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    return apply(forms, {"X": x})


# APPNP: Z <- (1 - alpha) S @ Z + alpha X, K times -----------------------------------------------------------


@cache
def _appnp_forms(operator: Operator, is_weighted: bool, exponent: int) -> tuple[Expr, ...]:
    s, x = symmetric(operator, is_weighted), features()
    z: Expr = x
    for _ in range(exponent):
        z = total(Scale(scalar("beta"), MatMul(s, z)), Scale(scalar("alpha"), x))
    return (z,)


@rule(APPNP)
def _appnp(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call) or _not_a_number(module)
    if stop:
        return stop
    if module.dropout > 0 and module.training:
        return NotLowered(f"APPNP(dropout={module.dropout}): edges are dropped at random while training")
    operator = gcn_operator(call, module.add_self_loops) if module.normalize else Operator()
    keeps_graph = module.cached and module.normalize
    if module.K == 0:
        return Lowered(operator, _run_nothing, keeps_graph)
    forms = _appnp_forms(operator, call.is_weighted, module.K)
    return Lowered(operator, partial(_run_appnp, forms), keeps_graph, True, _teleport, _SCHEDULED)


def _run_appnp(forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    return apply(forms, {"X": x, **_teleport(module, x)[1]})


def _teleport(module: Any, x: Tensor) -> Numbers:
    """What the features and their neighbours count in APPNP."""
    alpha = module.alpha
    return "", {"alpha": scalar_value(alpha, x), "beta": scalar_value(1 - alpha, x)}


def _run_nothing(module: Any, apply: Apply, x: Tensor, root: Tensor | None) -> Tensor:
    return x
