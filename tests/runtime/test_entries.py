"""runtime/entries: matrices whose values are inputs, kernels and meanings against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.graph import Graph
from plait.runtime.buffers import Buffers
from plait.runtime.learned import Products

GRAPHS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "usual": (5, [(0, 1), (1, 2), (2, 0), (3, 1), (4, 3)]),
    "loops and repeats": (3, [(0, 0), (0, 1), (0, 1), (2, 2)]),
    "hub": (6, [(k, 0) for k in range(6)]),
    "no edges": (3, []),
    "one node": (1, [(0, 0)]),
}


def graph_of(name: str) -> Graph:
    nodes, pairs = GRAPHS[name]
    return Graph.from_edge_index([u for u, _ in pairs], [v for _, v in pairs], nodes)


def dense(graph: Graph, entries: Tensor, has_own: bool, identity: float) -> Tensor:
    """The matrix with its zeros."""
    rows, columns = (torch.from_numpy(part).long() for part in (graph.edge_rows(), graph.indices))
    shape = (graph.num_nodes, graph.num_sources)
    values = entries[: graph.num_edges, 0]
    matrix = torch.zeros(shape, dtype=entries.dtype).index_put((rows, columns), values, accumulate=True)
    matrix = matrix + torch.diag(entries[graph.num_edges :, 0]) if has_own else matrix
    return matrix + identity * torch.eye(*shape, dtype=entries.dtype)


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("identity", [0.0, 1.0])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_products_and_their_derivatives(name: str, has_own: bool, identity: float, width: int) -> None:
    graph = graph_of(name)
    count = graph.num_edges + (graph.num_nodes if has_own else 0)
    entries = torch.randn(count, 1, dtype=torch.double, requires_grad=True)
    x = torch.randn(graph.num_nodes, width, dtype=torch.double, requires_grad=True)
    products, found = Products(graph, Buffers()), []
    for value in (
        products.times(entries, x, has_own, identity),
        dense(graph, entries, has_own, identity) @ x,
    ):
        first = torch.autograd.grad(value.pow(3).sum(), [entries, x], create_graph=True)
        second = torch.autograd.grad(
            sum((part.pow(2).sum() for part in first), torch.zeros(())), [entries, x], allow_unused=True
        )
        found.append([value, *first, *second])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("wanted", ["E", "X"])
def test_what_no_gradient_depends_on_may_change_before_the_backward_pass(wanted: str) -> None:
    graph = graph_of("usual")
    entries, x = torch.rand(graph.num_edges, 1), torch.rand(graph.num_nodes, 3)
    given = {"E": entries, "X": x}
    given[wanted].requires_grad_()
    products = Products(graph, Buffers())
    expected = torch.autograd.grad(products.times(entries, x).sum(), given[wanted])
    out = products.times(entries, x)
    with torch.no_grad():
        given[wanted].mul_(2.0)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given[wanted]), expected)
    out = products.times(entries, x)
    with torch.no_grad():
        given["X" if wanted == "E" else "E"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
