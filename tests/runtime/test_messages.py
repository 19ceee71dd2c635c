"""runtime/messages against plain indexing: values and gradients, blocks of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.plan.draft import Draft
from plait.plan.ways import Way
from plait.runtime import orders
from plait.runtime.edges import Edges
from plait.runtime.session import Session
from plait.runtime.ways import Programs
from tests.runtime.test_pieces import SHAPES, Case, same


def product(near: Tensor, far: Tensor, attr: Tensor, w: Tensor) -> Tensor:
    return (near * far + attr @ w).tanh()[:, :3] * 2.0


def by_program(
    case: Case, function: Callable[..., Tensor], columns: int, reads: dict[str, Tensor], **options: Any
) -> Tensor:
    """A program of one step, messages of the rows in `reads` by role."""
    inputs = {{"far": "X"}.get(role, role): value for role, value in reads.items()}

    def ways(is_training: bool) -> list[Way]:
        draft = Draft("M")
        rows = {"near": "N", "far": "M", "attr": "E"}
        operands = {
            role: draft.input({"far": "X"}.get(role, role), rows.get(role, value.shape[0]), value.shape[1])
            for role, value in reads.items()
        }
        operands |= {"matrix": draft.matrix(), "function": draft.object("message", "E", columns)}
        return [
            Way("messages", "", draft.program(draft.add("messages", operands, ("N", columns), **options)))
        ]

    edges = Edges(case.orders.graph, ())
    return Programs("layer", (), ways).value(Session(), edges, inputs, {"message": function})


@pytest.mark.parametrize("floats", [1 << 8, 1 << 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_messages(shape: tuple[int, ...], floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_BLOCK_FLOATS", floats)
    c = Case(*shape)
    w = c.draw(c.width, c.heads * c.width)
    rows = product(c.near[c.targets], c.far[c.sources], c.attr, w)
    expected = torch.zeros(c.num_targets, 3).double().index_add(0, c.targets, rows)
    given = {"near": c.near, "far": c.far, "attr": c.attr, "p0": w}
    same(by_program(c, product, 3, given), expected, (c.near, c.far, c.attr, w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_wanted_gradients_of_messages_are_computed(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    w = c.draw(c.width, c.heads * c.width)
    near, attr = c.near.detach(), c.attr.detach()
    rows = product(near[c.targets], c.far[c.sources], attr, w)
    expected = torch.zeros(c.num_targets, 3).double().index_add(0, c.targets, rows)
    same(by_program(c, product, 3, {"near": near, "far": c.far, "attr": attr, "p0": w}), expected, (c.far, w))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_message_and_zero_where_there_is_none(shape: tuple[int, ...]) -> None:
    c = Case(*shape)
    with torch.no_grad():
        result = by_program(
            c, lambda near, far, attr: far, c.far.shape[1], {"far": c.far}, reduce="max", is_fixed=True
        )
    expected = torch.full((c.num_targets, c.far.shape[1]), float("-inf")).double()
    index = c.targets[:, None].expand(-1, c.far.shape[1])
    expected = expected.scatter_reduce(0, index, c.far.detach()[c.sources], "amax")
    torch.testing.assert_close(result, expected.masked_fill(expected == float("-inf"), 0.0))


def test_blocks_cover_every_row_and_edge_once() -> None:
    made = Case(50, 40, 900, 1, 1).orders
    for count in (1, 7, 100, 10_000):
        blocks = made.blocks(count)
        assert [row for block in blocks for row in range(block.rows.start, block.rows.stop)] == list(
            range(50)
        )
        assert [e for block in blocks for e in range(block.edges.start, block.edges.stop)] == list(range(900))
