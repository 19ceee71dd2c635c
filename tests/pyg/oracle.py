"""A runtime without planner or kernels: every form of an expression in dense numpy, all compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.graph import Graph
from plait.ir import Expr, leaves, shape
from plait.ir.evaluate import evaluate
from plait.pyg.lower import Apply, Call, Lowered, lower
from plait.pyg.operators import Propagation, propagate

TOLERANCE = 1e-10


def dense_matrix(propagation: Propagation) -> np.ndarray[Any, Any]:
    """Leaf A as an array [targets, sources]; repeated edges add up."""
    graph = propagation.graph
    weight = propagation.edge_weight
    matrix = np.zeros((graph.num_nodes, graph.num_sources))
    values = np.ones(graph.num_edges) if weight is None else weight.numpy()
    np.add.at(matrix, (graph.edge_rows(), graph.indices), values)
    return matrix


def oracle(propagation: Propagation) -> Apply:
    """An `apply` that evaluates every form and insists that they agree."""
    constants = {name: getattr(propagation, name) for name in "plq"} | propagation.extra
    constants = {name: vector.numpy() for name, vector in constants.items() if vector is not None}
    constants["A"] = dense_matrix(propagation)

    def apply(forms: tuple[Expr, ...], values: Mapping[str, Tensor | None]) -> Tensor:
        given = {name: value.detach().numpy() for name, value in values.items() if value is not None}
        if "e" in given:
            given["e"] = given["e"].reshape(())
        results = []
        for form in forms:
            shape(form)
            wanted = {name for name, leaf in leaves(form).items() if getattr(leaf, "value", None) is None}
            assert wanted <= given.keys() | constants.keys()
            results.append(evaluate(form, {**constants, **given}))
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], rtol=1e-9, atol=1e-9)
        return torch.from_numpy(np.array(results[0]))

    return apply


def run_lowered(
    module: nn.Module,
    x: Tensor | tuple[Tensor, Tensor | None],
    edges: Tensor,
    edge_weight: Tensor | None = None,
    is_sparse: bool = False,
) -> Tensor:
    """The layer's output by its rule; edges is [2, E] in the order PyG reads it."""
    source, root = x if isinstance(x, tuple) else (x, None)
    call = Call(
        isinstance(x, tuple), not isinstance(x, tuple) or root is not None, edge_weight is not None, is_sparse
    )
    answer = lower(module, call)
    assert isinstance(answer, Lowered), answer
    src, dst = edges.numpy() if module.flow == "source_to_target" else edges.numpy()[::-1]
    graph = Graph.from_edge_index(src, dst, *_sizes(x))
    with torch.no_grad():
        return answer.run(
            module, oracle(propagate(answer.operator, graph, edge_weight, source.dtype)), source, root
        )


def _sizes(x: Tensor | tuple[Tensor, Tensor | None]) -> tuple[int, int]:
    """(targets, sources); without root features PyG takes as many targets as sources."""
    source, root = x if isinstance(x, tuple) else (x, x)
    return (source if root is None else root).size(0), source.size(0)
