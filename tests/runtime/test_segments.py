"""runtime/segments.py: what torch computes over the edges of each target, against loops and PyG."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.utils import scatter, softmax

from plait.runtime.segments import segment_extremum, segment_softmax, segment_sum

INDEX = torch.tensor([0, 0, 2, 2, 2, 4, 0])
COUNT = 6


def rows() -> torch.Tensor:
    """With ties, zeros among them."""
    drawn = torch.randint(-1, 2, (len(INDEX), 5), generator=torch.Generator().manual_seed(0))
    return drawn.double().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_are_those_of_a_loop(dtype: torch.dtype) -> None:
    x = rows()
    made = segment_sum(x, INDEX.to(dtype), COUNT)
    for k in range(COUNT):
        assert torch.equal(made[k], x[k == INDEX].sum(0))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_and_shares_of_ties_are_those_of_pyg(reduce: str) -> None:
    x = rows()
    made, expected = segment_extremum(x, INDEX, COUNT, reduce), scatter(x, INDEX, 0, COUNT, reduce)
    assert torch.equal(made, expected)
    direction = torch.randn(made.shape, dtype=made.dtype)
    theirs, ours = (torch.autograd.grad(out, x, direction)[0] for out in (expected, made))
    torch.testing.assert_close(ours, theirs)


def test_softmax_is_that_of_pyg_and_does_not_overflow() -> None:
    x = rows()
    torch.testing.assert_close(segment_softmax(x, INDEX, COUNT), softmax(x, INDEX, num_nodes=COUNT))
    assert segment_softmax(x * 1e4, INDEX, COUNT).isfinite().all()


def test_second_derivatives_are_what_differences_say() -> None:
    x = torch.randn(len(INDEX), 3, dtype=torch.float64).requires_grad_()
    for function in (
        lambda y: segment_extremum(y * y, INDEX, COUNT, "max"),
        lambda y: segment_softmax(y, INDEX, COUNT),
    ):
        assert torch.autograd.gradgradcheck(function, (x,))
