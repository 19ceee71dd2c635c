"""runtime/pieces against plain indexing: values and gradients on small graphs of every shape."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import softmax

from plait.graph import Graph
from plait.kernels.attention.pieces import padded
from plait.runtime import messages, pieces
from plait.runtime.buffers import Buffers
from plait.runtime.orders import EdgeOrders

SHAPES = [(7, 9, 40, 3, 5), (7, 9, 40, 1, 33), (5, 5, 0, 2, 3), (6, 4, 30, 8, 4), (50, 40, 900, 4, 16)]
BUFFERS = Buffers()


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dots_of_both_ends_and_of_edges(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    near, far = c.by_head(c.near[c.targets]), c.by_head(c.far[c.sources])
    result = pieces.edge_dots(c.orders, BUFFERS, c.heads, c.near, c.far)[:, : c.heads]
    same(result, (near * far).sum(-1), (c.near, c.far))
    result = pieces.edge_dots(c.orders.incidence, BUFFERS, c.heads, c.near, c.attr, is_shared=True)
    same(result[:, : c.heads], (near * c.attr.unsqueeze(1)).sum(-1), (c.near, c.attr))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_rows_and_of_edges_by_weights(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    weight = c.weight[:, : c.heads, None]
    result = pieces.edge_sums(c.orders, BUFFERS, c.heads, c.weight, c.far)
    same(result, c.summed(weight * c.by_head(c.far[c.sources])), (c.weight, c.far))
    result = pieces.edge_sums(c.orders.incidence, BUFFERS, c.heads, c.weight, c.attr, is_shared=True)
    same(result, c.summed(weight * c.attr.unsqueeze(1)), (c.weight, c.attr))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_softmax_over_the_edges_of_a_target(shape: tuple[int, ...], scale: float) -> None:
    c = Case(*shape)
    expected = softmax(c.weight * scale, c.targets, num_nodes=c.num_targets)
    same(pieces.edge_softmax(c.orders, c.weight * scale), expected, (c.weight,))


@pytest.mark.parametrize("floats", [1 << 8, 1 << 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_leaky_scores_in_blocks(shape: tuple[int, ...], floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_BLOCK_FLOATS", floats)
    c = Case(*shape)
    w, spread = c.draw(c.width, c.heads * c.width), c.draw(c.heads * c.width, padded(c.heads))
    rows = c.near[c.targets] + c.far[c.sources] + c.attr @ w
    result = pieces.leaky_scores(c.orders, 0.2, c.near, c.far, spread, c.attr, w)
    expected = torch.nn.functional.leaky_relu(rows, 0.2) @ spread
    same(result, expected, (c.near, c.far, spread, c.attr, w))
