"""Rows of attributes, whatever holds them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from plait.features.rows import as_rows
from plait.loader import NeighborLoader
from plait.loader.assemble import Assembler, _side_by_side, take_rows
from plait.loader.epochs import Job
from plait.runtime.buffers import Buffers
from tests.loader.batches import small_data, small_hetero

IDS = torch.tensor([3, 3, 0, 7])
TENSORS = {
    "plain": torch.randn(9, 4),
    "flat": torch.arange(9),
    "three": torch.randn(9, 2, 3),
    "strided": torch.randn(4, 9).t(),
    "empty": torch.randn(9, 0),
    "half": torch.randn(9, 3).to(torch.bfloat16),
    "learnable": torch.randn(9, 2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("buffers", [None, Buffers()], ids=["fresh", "pool"])
def test_rows_are_those_torch_selects(name: str, buffers: Buffers | None) -> None:
    assert torch.equal(take_rows(TENSORS[name], IDS, 0, buffers), TENSORS[name][IDS])


def test_gradients_reach_a_learnable_attribute() -> None:
    value = TENSORS["learnable"]
    take_rows(value, IDS).sum().backward()
    assert value.grad is not None
    assert value.grad[3].tolist() == [2, 2]


def test_other_dimensions_and_arrays_are_served() -> None:
    value = torch.randn(2, 9)
    assert torch.equal(take_rows(value, IDS, 1), value[:, IDS])
    array = np.arange(18.0).reshape(9, 2)
    assert np.array_equal(take_rows(array, IDS), array[IDS])


def test_an_assembler_travels() -> None:
    copied = pickle.loads(pickle.dumps(Assembler(small_data(), {(None, "x"): as_rows(np.zeros((60, 2)))})))
    assert copied.features[None, "x"].num_rows == 60


def test_ends_that_lie_side_by_side_are_not_copied() -> None:
    both = torch.arange(10).view(2, 5)
    joined = _side_by_side(both[0], both[1])
    assert joined.data_ptr() == both.data_ptr()
    assert torch.equal(joined, both)
    assert joined._base is None


@pytest.mark.parametrize(
    "ends",
    [
        (torch.arange(4), torch.arange(4)),
        (torch.arange(10)[1:5], torch.arange(4)),
        (torch.arange(10)[5:], torch.arange(10)[:5]),
        (torch.arange(10)[::2], torch.arange(10)[::2]),
        (torch.empty(0), torch.empty(0)),
    ],
)
def test_other_ends_are_joined_as_torch_does(ends: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(_side_by_side(*ends), torch.stack(ends))


def test_a_batch_has_the_edges_its_sampler_wrote() -> None:
    loader = NeighborLoader(small_data(), [3, 2], torch.arange(6), batch_size=6, seed=0)
    drawn = loader.draw(Job(0, 0, torch.arange(6)))
    edge_index = loader.fill(drawn).edge_index
    assert edge_index.data_ptr() == drawn.row.data_ptr()
    assert torch.equal(edge_index, torch.stack([drawn.row, drawn.col]))
    assert edge_index.is_contiguous()
    assert edge_index._base is None


def test_a_typed_batch_has_the_edges_its_sampler_wrote() -> None:
    loader = NeighborLoader(small_hetero(), [3, 2], ("paper", torch.arange(6)), batch_size=6, seed=0)
    drawn = loader.draw(Job(0, 0, torch.arange(6)))
    batch = loader.fill(drawn)
    for kind, row in drawn.row.items():
        assert torch.equal(batch[kind].edge_index, torch.stack([row, drawn.col[kind]]))
        assert row.numel() == 0 or batch[kind].edge_index.data_ptr() == row.data_ptr()
