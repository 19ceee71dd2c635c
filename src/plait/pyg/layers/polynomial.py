"""Layers with one weight per power of a matrix: TAG, MixHop, Cheb."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from torch import Tensor
from torch_geometric.nn import ChebConv, MixHopConv, TAGConv

from plait.ir import Concat, Dense, Expr, MatMul, total
from plait.ir.build import chebyshev, polynomial
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    bias,
    features,
    is_plain_linear,
    not_summed,
    rule,
    weight,
    with_bias,
)
from plait.pyg.layers.matrix import gcn_operator, laplacian, laplacian_operator, symmetric
from plait.pyg.operators import Operator

__all__: list[str] = []


def _weights(count: int) -> list[Dense]:
    return [weight(f"W{k}") for k in range(count)]


def _watched(module: Any, lins: Any) -> NotLowered | None:
    if all(map(is_plain_linear, lins)):
        return None
    return NotLowered(f"{type(module).__name__}: one of lins has hooks or was replaced")


def _run_polynomial(
    forms: tuple[Expr, ...],
    powers: tuple[int, ...],
    module: Any,
    apply: Apply,
    x: Tensor,
    root: Tensor | None,
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x}
    lins = list(module.lins)  # indexing a ModuleList takes longer than a small product
    values.update((f"W{k}", lins[k].weight.t()) for k in powers)
    if module.bias is not None:
        values["b"] = module.bias
    return apply(forms, values)


# TAG: sum over k of S^k @ X @ W_k + b ---------------------------------------------------------------------


@cache
def _tag_forms(operator: Operator, is_weighted: bool, count: int, has_bias: bool) -> tuple[Expr, ...]:
    return with_bias(polynomial(symmetric(operator, is_weighted), features(), _weights(count)), has_bias)


@rule(TAGConv)
def _tag(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call) or _watched(module, module.lins)
    if stop:
        return stop
    operator = gcn_operator(call, add_self_loops=False) if module.normalize else Operator()
    forms = _tag_forms(operator, call.is_weighted, len(module.lins), module.bias is not None)
    return Lowered(operator, partial(_run_polynomial, forms, tuple(range(len(module.lins)))))


# Cheb: sum over k of T_k(2 L / lambda_max - I) @ X @ W_k + b ------------------------------------------------


@cache
def _cheb_forms(operator: Operator, is_weighted: bool, count: int, has_bias: bool) -> tuple[Expr, ...]:
    return with_bias(chebyshev(laplacian(operator, is_weighted), features(), _weights(count)), has_bias)


@rule(ChebConv)
def _cheb(module: Any, call: Call) -> Lowered | NotLowered:
    """For calls without lambda_max: a call that gives one runs in PyG, where it may differ per graph."""
    stop = not_summed(module, call) or _watched(module, module.lins)
    if stop:
        return stop
    if call.is_sparse:
        return NotLowered("ChebConv: PyG builds a Laplacian from edge lists only")
    operator = laplacian_operator(module.normalization, module.flow)
    forms = _cheb_forms(operator, call.is_weighted, len(module.lins), module.bias is not None)
    return Lowered(operator, partial(_run_polynomial, forms, tuple(range(len(module.lins)))))


# MixHop: hcat over the powers of S^p @ X @ W_p, + b ---------------------------------------------------------


@cache
def _mixhop_forms(
    operator: Operator, is_weighted: bool, powers: tuple[int, ...], has_bias: bool
) -> tuple[Expr, ...]:
    """Powers first; weights first; weights first with the columns of higher powers travelling together."""
    s, x, weights = symmetric(operator, is_weighted), features(), _weights(max(powers) + 1)
    hops: list[Expr] = [x]
    for _ in range(max(powers)):
        hops.append(MatMul(s, hops[-1]))
    late: list[Expr] = [MatMul(hops[p], weights[p]) for p in powers]
    early: list[Expr] = []
    for p in powers:
        column: Expr = MatMul(x, weights[p])
        for _ in range(p):
            column = MatMul(s, column)
        early.append(column)
    forms = [_beside(late), _beside(early)]
    if list(powers) == sorted(set(powers)):
        forms.append(_travelling(s, x, weights, frozenset(powers)))
    unique = tuple(dict.fromkeys(forms))
    row = bias("+".join(["K2"] * len(powers)))
    return tuple(total(form, row) for form in unique) if has_bias else unique


def _beside(parts: list[Expr]) -> Expr:
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), 1)


def _travelling(s: Expr, x: Expr, weights: list[Dense], powers: frozenset[int]) -> Expr:
    columns: Expr | None = None
    for p in range(len(weights) - 1, -1, -1):
        parts = [MatMul(x, weights[p])] if p in powers else []
        if columns is not None:
            parts.append(MatMul(s, columns))
        columns = _beside(list(parts))
    assert columns is not None
    return columns


@rule(MixHopConv)
def _mixhop(module: Any, call: Call) -> Lowered | NotLowered:
    powers = tuple(module.powers)
    stop = not_summed(module, call) or _watched(module, [module.lins[p] for p in powers])
    if stop:
        return stop
    operator = gcn_operator(call, module.add_self_loops)
    forms = _mixhop_forms(operator, call.is_weighted, powers, module.bias is not None)
    return Lowered(operator, partial(_run_polynomial, forms, powers))
