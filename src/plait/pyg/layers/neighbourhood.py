"""Layers that aggregate neighbours and treat the node itself separately: SAGE, GraphConv, ClusterGCN, LE."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import ClusterGCNConv, GraphConv, LEConv, SAGEConv

from plait.ir import Dense, Diagonal, Expr, total
from plait.ir.build import propagation
from plait.pyg.layers.base import (
    Apply,
    Call,
    Lowered,
    NotLowered,
    aggregation,
    bias,
    features,
    is_renamed,
    linear_values,
    neighbours,
    not_plain,
    not_summed,
    rule,
    weight,
    with_bias,
)
from plait.pyg.operators import Operator

__all__ = ["ignores_weights", "operator", "reduction"]


def operator(reduce: str) -> Operator:
    return Operator(normalise="mean") if reduce == "mean" else Operator()


def reduction(module: Any, call: Call) -> str | NotLowered:
    """How the layer aggregates, or why that is not lowered."""
    name = type(module).__name__
    reduce = aggregation(module)
    if reduce is None and is_renamed(module):
        return NotLowered(
            f"{name}(aggr={module.aggr!r}): set after the layer was made, which PyG follows on sparse "
            f"matrices alone; on edge lists it still aggregates by {type(module.aggr_module).__name__}"
        )
    if reduce is None:
        return NotLowered(f"{name}(aggr={module.aggr!r}): only sum, mean, max and min are planned")
    if reduce in ("max", "min") and call.is_weighted:
        return NotLowered(f"{name}(aggr={reduce!r}): a {reduce} over weighted messages is not planned")
    if call.is_bipartite and module.flow != "source_to_target":
        return NotLowered(
            f"{name}(flow={module.flow!r}): pairs of features are planned source_to_target only"
        )
    return reduce


def ignores_weights(module: Any, call: Call) -> NotLowered | None:
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
    reduce = reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    stop = ignores_weights(module, call) or not_plain(module, "lin_l", *["lin_r"] * module.root_weight)
    if stop:
        return stop
    # only the sources are projected, so the root is no longer the same matrix
    root = _root_leaf(call, is_own=module.project) if module.root_weight else None
    forms = _root_forms(reduce, call, root, module.lin_l.bias is not None)
    return Lowered(operator(reduce), partial(_run_sage, forms, root), is_steady=True)


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
    reduce = reduction(module, call)
    if isinstance(reduce, NotLowered):
        return reduce
    stop = not_plain(module, "lin_rel", "lin_root")
    if stop:
        return stop
    root = _root_leaf(call, is_own=False)
    forms = _root_forms(reduce, call, root, module.lin_rel.bias is not None)
    return Lowered(operator(reduce), partial(_run_graph_conv, forms, root), is_steady=True)


def _run_graph_conv(
    forms: tuple[Expr, ...], leaf: str | None, module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x, **linear_values(module.lin_rel)}
    if leaf is not None:
        values["V"] = module.lin_root.weight.t()
    if leaf == "R":
        values["R"] = root
    return apply(forms, values)


# ClusterGCN: S @ X @ W + X @ V + b, S = D^-1 (A + loops + lambda I) -----------------------------------------


@cache
def _cluster_forms(by: str, has_bias: bool) -> tuple[Expr, ...]:
    spread = (propagation(left=by == "target", loops=True, right=by == "source") @ features()) @ weight()
    return with_bias((total(spread, features() @ weight("V")),), has_bias)


@rule(ClusterGCNConv)
def _cluster(module: Any, call: Call) -> Lowered | NotLowered:
    stop = not_summed(module, call) or not_plain(module, "lin_out", "lin_root")
    if stop:
        return stop
    if call.is_weighted and not call.is_sparse:
        return NotLowered("ClusterGCNConv: the layer takes no edge weights")
    # PyG counts edge_index[1] whatever the flow
    by = "target" if module.flow == "source_to_target" else "source"
    operator = Operator(
        "replace" if module.add_self_loops else "none",
        normalise="clustergcn",
        options=(
            ("diag_lambda", float(module.diag_lambda)),
            ("by", by),
            ("counts", torch.get_default_dtype()),
        ),
    )
    forms = _cluster_forms(by, module.lin_out.bias is not None)
    return Lowered(operator, partial(_run_cluster, forms))


def _run_cluster(
    forms: tuple[Expr, ...], module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values = {"X": x, "V": module.lin_root.weight.t(), **linear_values(module.lin_out)}
    return apply(forms, values)


# LE: sum over edges of weight * (x_j @ W + c - r_i @ V), + R @ U + b ----------------------------------------


@cache
def _le_forms(call: Call, has_bias: bool) -> tuple[Expr, ...]:
    """With d = -(weighted degree): A @ X @ W + d @ (R @ V - c) + R @ U + b; C is -c in every row."""
    root = Dense("R", "N", "Kr") if call.is_bipartite else features()
    width = "Kr" if call.is_bipartite else "K1"
    own = root @ weight("V", width)
    if has_bias:
        own = total(own, Dense("C", "N", "K2"))
    spread = neighbours("sum", call) @ weight()
    return with_bias((total(spread, Diagonal("d", "N") @ own, root @ weight("U", width)),), has_bias)


@rule(LEConv)
def _le(module: Any, call: Call) -> Lowered | NotLowered:
    if aggregation(module) != "sum":
        return NotLowered(f"LEConv(aggr={module.aggr!r}): only sums are planned")
    if not call.has_root:
        return NotLowered("LEConv: x[1] is None; the layer needs the features of the targets")
    stop = not_plain(module, "lin1", "lin2", "lin3")
    if stop:
        return stop
    has_bias = module.lin1.bias is not None
    return Lowered(Operator(normalise="degree"), partial(_run_le, _le_forms(call, has_bias), call))


def _run_le(
    forms: tuple[Expr, ...], call: Call, module: Any, apply: Apply, x: Tensor, root: Tensor | None
) -> Tensor:
    values: dict[str, Tensor | None] = {"X": x, "W": module.lin1.weight.t()}
    own = x
    if call.is_bipartite:
        assert root is not None
        values["R"] = own = root
    values["V"], values["U"] = module.lin2.weight.t(), module.lin3.weight.t()
    if module.lin1.bias is not None:
        values["C"] = (-module.lin1.bias).expand(own.size(0), -1)
        values["b"] = module.lin3.bias
    return apply(forms, values)
