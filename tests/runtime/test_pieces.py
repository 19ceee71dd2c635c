"""runtime/pieces against plain indexing: values and gradients on small graphs of every shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import softmax

from plait.graph import Graph
from plait.kernels.attention.pieces import padded
from plait.plan.pieces import Dots, DotSoftmax, Leaky, Piece, Softmax, Sums, ways
from plait.runtime import orders
from plait.runtime.edges import Edges
from plait.runtime.orders import EdgeOrders
from plait.runtime.session import Session
from plait.runtime.ways import Programs

SHAPES = [(7, 9, 40, 3, 5), (7, 9, 40, 1, 33), (5, 5, 0, 2, 3), (6, 4, 30, 8, 4), (50, 40, 900, 4, 16)]


class Case:
    """Edges into all targets but two, and operands of them; float64."""

    def __init__(self, targets: int, sources: int, edges: int, heads: int, width: int) -> None:
        generator = torch.Generator().manual_seed(edges + heads)
        ends = [torch.randint(0, n, (edges,), generator=generator) for n in (sources, targets - 2)]
        self.orders = EdgeOrders(Graph.from_edge_index(ends[0].numpy(), ends[1].numpy(), targets, sources))
        self.targets, self.sources = self.orders.targets.long(), self.orders.sources.long()
        self.heads, self.width, self.num_targets = heads, width, targets
        self.generator = generator
        self.near, self.far = self.draw(targets, heads * width), self.draw(sources, heads * width)
        self.attr, self.weight = self.draw(edges, width), self.draw(edges, padded(heads))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).requires_grad_()

    def by_head(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.heads, self.width)

    def summed(self, rows: Tensor) -> Tensor:
        zero = torch.zeros(self.num_targets, rows[0].numel() if len(rows) else self.heads * self.width)
        return zero.double().index_add(0, self.targets, rows.reshape(len(rows), zero.shape[1]))


def same(result: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> None:
    torch.testing.assert_close(result, expected)
    direction = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(result, inputs, direction)
    wanted = torch.autograd.grad(expected, inputs, direction, retain_graph=True)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def by_program(case: Case, piece: Piece, **inputs: Tensor) -> Tensor:
    """A piece of a layer as the program it is planned as."""
    edges = Edges(case.orders.graph, ())
    return Programs("layer", (piece,), lambda wrt: ways(piece)).value(Session(), edges, inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dots_of_both_ends_and_of_edges(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    lanes, columns = padded(c.heads), c.heads * c.width
    near, far = c.by_head(c.near[c.targets]), c.by_head(c.far[c.sources])
    result = by_program(c, Dots(c.heads, lanes, columns), X=c.far, X1=c.near)[:, : c.heads]
    same(result, (near * far).sum(-1), (c.near, c.far))
    scores = (near * far).sum(-1)
    result = by_program(c, DotSoftmax(c.heads, lanes, columns), X=c.far, X1=c.near)[:, : c.heads]
    same(result, softmax(scores, c.targets, num_nodes=c.num_targets), (c.near, c.far))
    bent = c.draw(*c.near.shape)
    scores = scores + (c.by_head(bent[c.targets]) * c.attr.unsqueeze(1)).sum(-1)
    piece, inputs = DotSoftmax(c.heads, lanes, columns, c.width), (c.near, c.far, bent, c.attr)
    result = by_program(c, piece, X=c.far, X1=c.near, Y=bent, E=c.attr)[:, : c.heads]
    same(result, softmax(scores, c.targets, num_nodes=c.num_targets), inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_rows_and_of_edges_by_weights(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    weight = c.weight[:, : c.heads, None]
    lanes, columns = padded(c.heads), c.heads * c.width
    result = by_program(c, Sums(c.heads, lanes, columns), X=c.far, E=c.weight)
    same(result, c.summed(weight * c.by_head(c.far[c.sources])), (c.weight, c.far))
    result = by_program(c, Sums(c.heads, lanes, columns, of_edges=True), X=c.attr, E=c.weight)
    same(result, c.summed(weight * c.attr.unsqueeze(1)), (c.weight, c.attr))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_softmax_over_the_edges_of_a_target(shape: tuple[int, ...], scale: float) -> None:
    c = Case(*shape)
    expected = softmax(c.weight * scale, c.targets, num_nodes=c.num_targets)
    same(by_program(c, Softmax(c.weight.shape[1]), X=c.weight * scale), expected, (c.weight,))


def leaky(c: Case, *, has_edges: bool = True) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(the softmax of leaky scores by its program, the same by plain indexing, the inputs)."""
    lanes, columns = padded(c.heads), c.heads * c.width
    given = {"X": c.far, "X1": c.near, "a": c.draw(columns, lanes)}
    rows = c.near[c.targets] + c.far[c.sources]
    if has_edges:
        given |= {"E": c.attr, "W": c.draw(c.width, columns)}
        rows = rows + c.attr @ given["W"]
    scores = torch.nn.functional.leaky_relu(rows, 0.2) @ given["a"]
    piece = Leaky(lanes, columns, 0.2, c.width if has_edges else None)
    return by_program(c, piece, **given), softmax(scores, c.targets, num_nodes=c.num_targets), given


@pytest.mark.parametrize("floats", [1 << 8, 1 << 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_edges", [True, False])
def test_leaky_scores_in_blocks(
    shape: tuple[int, ...], floats: int, has_edges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_BLOCK_FLOATS", floats)
    result, expected, given = leaky(Case(*shape), has_edges=has_edges)
    same(result, expected, tuple(given.values()))


@pytest.mark.parametrize("wanted", ["X", "X1", "a", "E", "W"])
def test_only_wanted_gradients_of_leaky_scores_are_computed(wanted: str) -> None:
    c = Case(7, 9, 40, 3, 5)
    names = {"X": "far", "X1": "near", "E": "attr"}
    for name in set(names) - {wanted}:
        setattr(c, names[name], getattr(c, names[name]).detach())
    draw = c.draw
    c.draw = lambda *shape: draw(*shape).detach().requires_grad_(wanted in "aW")  # type: ignore[method-assign]
    result, expected, given = leaky(c)
    same(result, expected, (given[wanted],))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_pieces_have_derivatives_of_derivatives(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    result, expected, given = leaky(c)
    lanes, columns = padded(c.heads), c.heads * c.width
    rows = by_program(c, Sums(c.heads, lanes, columns), X=c.far, E=result)
    plain = c.summed(expected[:, : c.heads, None] * c.by_head(c.far[c.sources]))
    found = []
    for out in (rows, plain):
        first = torch.autograd.grad(out.square().sum(), [*given.values()], create_graph=True)
        second = sum(part.square().sum() for part in first)
        found.append(torch.autograd.grad(second, [c.near, c.far, given["a"]]))
    torch.testing.assert_close(found[0], found[1])


def test_a_softmax_that_the_caller_overwrote_is_computed_again() -> None:
    c = Case(7, 9, 40, 3, 5)
    expected = softmax(c.weight, c.targets, num_nodes=c.num_targets)
    result = by_program(c, Softmax(4), X=c.weight)
    scaled = result * 1.0
    result.detach().zero_()
    direction = torch.ones_like(expected).cumsum(0)
    (found,) = torch.autograd.grad(scaled, c.weight, direction)
    torch.testing.assert_close(found, torch.autograd.grad(expected, c.weight, direction)[0])


@pytest.mark.parametrize("has_bias", [True, False])
def test_rows_of_targets_that_are_projected_with_the_scores(has_bias: bool) -> None:
    c = Case(7, 9, 40, 3, 5)
    lanes, columns = padded(c.heads), c.heads * c.width
    given = {"X": c.far, "X1": c.draw(7, 6), "a": c.draw(columns, lanes), "U": c.draw(6, columns)}
    near = given["X1"] @ given["U"]
    if has_bias:
        given["c"] = c.draw(columns)
        near = near + given["c"]
    rows = torch.nn.functional.leaky_relu(near[c.targets] + c.far[c.sources], 0.2)
    expected = softmax(rows @ given["a"], c.targets, num_nodes=c.num_targets)
    result = by_program(c, Leaky(lanes, columns, 0.2, inner=6, has_bias=has_bias), **given)
    same(result, expected, tuple(given.values()))
