"""Layers whose edge_weight needs a gradient or keeps changing: an input of the expression, not a constant."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.graph import Graph
from plait.ir import Expr
from plait.kernels.normalised import Places
from plait.plan.plan import LayerPlan
from plait.plan.ways import unpriced
from plait.pyg.layers.base import Lowered, aggregation
from plait.pyg.operators import Operator, propagate
from plait.runtime.buffers import Buffers
from plait.runtime.deferred import whole
from plait.runtime.edges import Edges
from plait.runtime.entries import Normalising
from plait.runtime.learned import Learned, Products, Weighted
from plait.runtime.listed import program_of
from plait.runtime.machine import machine_in_use
from plait.runtime.session import Session

__all__ = ["say_input", "with_learned_weights"]


def with_learned_weights(
    module: Any,
    session: Session,
    name: str,
    lowered: Lowered,
    edges: Edges,
    weight: Tensor,
    x: Tensor,
    root: Tensor | None,
    is_sparse: bool,
) -> Callable[[], Tensor] | str:
    """The layer with edge_weight as an input, with its gradient if needed; or the reason why PyG runs it."""
    if is_sparse or lowered.keeps_graph or aggregation(module) not in ("sum", "mean"):
        return "edge_weight needs a gradient, which for this layer takes the messages one by one"
    dtype = x.dtype if x.dtype.itemsize > 2 else torch.float32
    operator, graph = lowered.operator, edges.graph

    def apply(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
        given = {leaf: value.to(dtype) for leaf, value in whole(dict(inputs)).items() if value is not None}
        program = program_of(forms)
        if program is not None and program.parts == operator.diagonals:
            # layers of one call share the matrix: its backward pass may run once for each of them
            key = (id(weight), weight._version, id(graph), operator, dtype)
            if key not in session.shared:
                session.shared[key] = (
                    weight,
                    _weighted(operator, edges, session.buffers, weight.reshape(-1).to(dtype)),
                )
            return program(given, session.shared[key][1]).to(x.dtype)
        return _learned(operator, edges, session.buffers, weight, given, dtype).value(forms[0]).to(x.dtype)

    def run() -> Tensor:
        say_input(session, name, graph, weight)
        return lowered.run(module, apply, x, root)

    return run


def say_input(session: Session, name: str, graph: Graph, weight: Tensor) -> None:
    """Note in the plan that a layer's edge_weight is an input."""
    mode = "training" if torch.is_grad_enabled() else "inference"
    if not _is_learned(session.plans.get(name), graph, mode):
        session.plans[name] = _plan(name, graph, mode, weight.requires_grad)


def _learned(
    operator: Operator,
    edges: Edges,
    buffers: Buffers,
    weight: Tensor,
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Learned:
    """Expressions of the operator's matrix by torch, differentiated through the degrees as PyG's gcn_norm."""
    made = propagate(operator, edges.graph, weight.reshape(-1), dtype)
    values = made.edge_weight
    if values is None:  # an operator that does not read the weights
        values = torch.ones(made.graph.num_edges, dtype=dtype)
    diagonals = {leaf: value for leaf in "plq" if (value := getattr(made, leaf)) is not None}
    return Learned(inputs, _products(edges, buffers, made.graph), values, {**diagonals, **made.extra})


# The same by one pass over the entries and one over their gradients --------------------------------------


def _weighted(operator: Operator, edges: Edges, buffers: Buffers, weight: Tensor) -> Weighted:
    """The operator's matrix p @ (A + l) @ q, its values and its diagonal differentiable in the weights."""
    graph, has_own = edges.graph, operator.loops != "none"
    products = _products(edges, buffers, graph.without_self_loops() if has_own else graph)
    how = Normalising(_places(graph, has_own), operator.loops, operator.fill, operator.normalise)
    return Weighted(products, products.normalised(how, weight), has_own)


def _products(edges: Edges, buffers: Buffers, graph: Graph) -> Products:
    """Products with matrices of a graph's pattern; `graph`: that of `edges`, or it without its loops."""
    found = edges.products.get(graph)
    if found is None:
        found = edges.products[graph] = Products(graph, buffers)
    return found


_PLACES: weakref.WeakKeyDictionary[Graph, dict[bool, Places]] = weakref.WeakKeyDictionary()


def _places(graph: Graph, are_loops_apart: bool) -> Places:
    """Where weights in the caller's order go, found out once for a graph."""
    known = _PLACES.setdefault(graph, {})
    if are_loops_apart not in known:
        bare = graph.without_self_loops() if are_loops_apart else graph
        rows = graph.edge_rows()
        loops = np.flatnonzero(rows == graph.indices) if bare is not graph else np.empty(0, np.int64)
        known[are_loops_apart] = Places(
            _listed(bare), bare.edge_rows(), bare.indices, _listed(graph)[loops], rows[loops], bare.num_nodes
        )
    return known[are_loops_apart]


def _listed(graph: Graph) -> Any:
    """The caller's number of every edge."""
    dtype = graph.indices.dtype
    return np.arange(graph.num_edges, dtype=dtype) if graph.order is None else graph.order.astype(dtype)


def _is_learned(plan: LayerPlan | None, graph: Graph, mode: str) -> bool:
    """Whether a plan is the one below, for a graph of this size."""
    is_mine = plan is not None and plan.choice == _CHOICE and plan.mode == mode
    return is_mine and plan is not None and plan.sizes["E"] == graph.num_edges


_CHOICE = "edge weights as an input"


def _plan(name: str, graph: Graph, mode: str, wants_weight: bool) -> LayerPlan:
    """Its entry in EXPLAIN; there is no choice, so nothing is priced."""
    text, why = (
        ("S(w) @ X with a gradient of w: one product of rows on every edge",
         "edge_weight needs a gradient; the degrees are differentiated with it (not priced)")
        if wants_weight
        else ("S(w) @ X", "edge_weight differs at every call: nothing is kept for it (not priced)")
    )  # fmt: skip
    sizes = {"N": graph.num_nodes, "E": graph.num_edges}
    return unpriced(name, _CHOICE, text, why, sizes, mode, machine_in_use())
