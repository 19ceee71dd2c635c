"""Tensors that were packed arrive as they were, whatever their type, shape and strides."""

from __future__ import annotations

import pytest
import torch

from plait.runtime.staging import Staging

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def values_of(seed: int, rows: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=draw)
    return [
        torch.randint(0, 1 << 40, (rows,), generator=draw),
        torch.randint(0, rows + 1, (2, 3 * rows), generator=draw),
        x,
        x.t(),
        x[:, ::2],
        x.bfloat16(),
        x > 0,
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(5, dtype=torch.int16),
        x.double().requires_grad_(),
    ]


@pytest.mark.parametrize("rows", [0, 1, 7, 100])
def test_values_arrive_as_they_were(rows: int) -> None:
    given = values_of(rows, rows)
    got = Staging(DEVICE).move(given, [False] * len(given))
    for value, moved in zip(given, got, strict=True):
        assert moved.device.type == DEVICE.type
        assert moved.dtype is value.dtype
        assert torch.equal(moved.cpu(), value.detach())


def test_narrow_values_take_half_the_bytes() -> None:
    edges = torch.randint(0, 90, (2, 50))
    for given in (edges, edges.int(), edges.t().contiguous().t()):
        (moved,) = Staging(DEVICE).move([given], [True])
        assert moved.dtype is torch.int32
        assert torch.equal(moved.cpu().long(), edges)


def test_a_call_writes_over_the_last_one_and_grows_where_it_must() -> None:
    staging = Staging(DEVICE)
    for rows in (3, 50, 50, 50, 50, 400, 2):
        given = values_of(rows, rows)
        got = [moved.clone() for moved in staging.move(given, [False] * len(given))]
        assert all(torch.equal(a.cpu(), b.detach()) for a, b in zip(got, given, strict=True))
