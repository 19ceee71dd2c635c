"""The normalised matrices of PyG: gcn_norm and the scaled Laplacian, as operators and expressions."""

from __future__ import annotations

from functools import cache

from plait.ir import Expr
from plait.ir.build import propagation
from plait.pyg.layers.base import Call
from plait.pyg.operators import Operator

__all__ = ["gcn_operator", "laplacian", "laplacian_operator", "symmetric"]


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
    """The matrix of an operator that is plain or symmetric."""
    is_scaled = operator.normalise == "symmetric"
    return propagation(
        is_weighted=is_weighted, left=is_scaled, loops=operator.loops != "none", right=is_scaled
    )


def laplacian_operator(kind: str | None, flow: str) -> Operator:
    """2 L / lambda_max - I, where lambda_max is PyG's bound: twice the largest entry of L.

    PyG sums degrees over edge_index[0] whatever the flow: the sources of messages, or their targets when
    the flow is target_to_source.
    """
    by = "source" if flow == "source_to_target" else "target"
    return Operator("replace", normalise="laplacian", options=(("kind", kind), ("by", by)))


@cache
def laplacian(operator: Operator, is_weighted: bool) -> Expr:
    """The matrix of a laplacian operator.

    Without edge weights the largest entry of a normalised Laplacian is the 1 on its diagonal, so
    lambda_max = 2 and the diagonal of 2 L / lambda_max - I is 0: what is left is a scaled A.
    """
    kind, by = operator.option("kind"), operator.option("by")
    if is_weighted:
        return propagation(is_weighted=True, loops=True)
    if kind is None:
        return propagation(left=True, loops=True)
    return propagation(left=kind == "sym" or by == "target", right=kind == "sym" or by == "source")
