"""runtime/messages against plain indexing: values and gradients, blocks of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.runtime import messages
from tests.runtime.test_pieces import BUFFERS, SHAPES, Case, same


def product(near: Tensor, far: Tensor, attr: Tensor, w: Tensor) -> Tensor:
    return (near * far + attr @ w).tanh()[:, :3] * 2.0


@pytest.mark.parametrize("floats", [1 << 8, 1 << 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_messages(shape: tuple[int, ...], floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_BLOCK_FLOATS", floats)
    c = Case(*shape)
    w = c.draw(c.width, c.heads * c.width)
    rows = product(c.near[c.targets], c.far[c.sources], c.attr, w)
    expected = torch.zeros(c.num_targets, 3).double().index_add(0, c.targets, rows)
    result = messages.message_sums(c.orders, product, c.near, c.far, c.attr, w)
    same(result, expected, (c.near, c.far, c.attr, w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_message_and_zero_where_there_is_none(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    result = messages.message_max(c.orders, lambda near, far, attr: far, None, c.far, None)
    expected = torch.full((c.num_targets, c.far.shape[1]), float("-inf")).double()
    index = c.targets[:, None].expand(-1, c.far.shape[1])
    expected = expected.scatter_reduce(0, index, c.far.detach()[c.sources], "amax")
    torch.testing.assert_close(result, expected.masked_fill(expected == float("-inf"), 0.0))


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_neighbours(shape: tuple[int, ...], is_scaled: bool) -> None:
    c = Case(*shape)
    scale = c.orders.inverse_degrees if is_scaled else None
    expected = torch.zeros(c.num_targets, c.far.shape[1]).double().index_add(0, c.targets, c.far[c.sources])
    expected = expected if scale is None else expected * scale.unsqueeze(1)
    same(messages.neighbour_sums(c.orders, BUFFERS, c.far, scale), expected, (c.far,))


def test_blocks_cover_every_row_and_edge_once() -> None:
    orders = Case(50, 40, 900, 1, 1).orders
    for count in (1, 7, 100, 10_000):
        blocks = orders.blocks(count)
        assert [row for block in blocks for row in range(block.rows.start, block.rows.stop)] == list(
            range(50)
        )
        assert [e for block in blocks for e in range(block.edges.start, block.edges.stop)] == list(range(900))
