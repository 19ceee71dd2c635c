"""Layers whose edge_weight wants a gradient: the weights are an input of the expression, not a constant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.ir import Expr
from plait.plan.fused import FusedPlan
from plait.pyg.layers.base import Lowered, aggregation
from plait.pyg.operators import propagate
from plait.runtime.deferred import whole
from plait.runtime.learned import Learned
from plait.runtime.session import Edges, Session, machine_in_use

__all__ = ["with_learned_weights"]


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
    """The layer with its gradient of edge_weight, ready to run, or why PyG runs it."""
    if is_sparse or lowered.keeps_graph or aggregation(module) not in ("sum", "mean"):
        return "edge_weight wants a gradient, which needs the messages one by one"
    dtype = x.dtype if x.dtype.itemsize > 2 else torch.float32

    def run() -> Tensor:
        # differentiated through the degrees, as PyG's gcn_norm is
        made = propagate(lowered.operator, edges.graph, weight.reshape(-1), dtype)
        values = made.edge_weight
        if values is None:  # an operator that does not read the weights
            values = torch.ones(made.graph.num_edges, dtype=dtype)
        diagonals = {leaf: value for leaf in "plq" if (value := getattr(made, leaf)) is not None}
        learned = Learned(made.graph, values, {**diagonals, **made.extra})

        def apply(forms: tuple[Expr, ...], inputs: Mapping[str, Tensor | None]) -> Tensor:
            given = {leaf: value for leaf, value in whole(dict(inputs)).items() if value is not None}
            return learned.value(forms[0], {leaf: value.to(dtype) for leaf, value in given.items()}).to(
                x.dtype
            )

        session.plans[name] = _plan(name, made.graph.num_nodes, made.graph.num_edges)
        return lowered.run(module, apply, x, root)

    return run


def _plan(name: str, nodes: int, edges: int) -> FusedPlan:
    """What EXPLAIN says of it; nothing is chosen, so nothing is priced."""
    machine = machine_in_use()
    return FusedPlan(
        layer=name, kind="learned weights", choice="edge weights as an input", steps=(), seconds=0.0,
        text="S(w) @ X with a gradient of w: one product of rows on every edge", peak_bytes=0,
        sizes={"N": nodes, "E": edges}, mode="training", machine=machine.name,
        is_default_machine=machine.is_default,
        because="edge_weight wants a gradient; the degrees are differentiated with it (not priced)",
    )  # fmt: skip
