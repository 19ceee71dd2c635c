"""runtime/adjoint: a linear map is differentiated to any order, and in several directions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.runtime.adjoint import leaf_turned_by, mapped

A = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0]], dtype=torch.double)


def times(x: Tensor) -> Tensor:
    return mapped(x, lambda rows: A @ rows, lambda rows: A.t() @ rows)


def test_derivatives_to_the_third_order_are_those_of_torch() -> None:
    x = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(times, x)
    assert torch.autograd.gradgradcheck(times, x)
    found = []
    for function in (times, lambda rows: A @ rows):
        (first,) = torch.autograd.grad(function(x).pow(4).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(second.sum(), x)[0])
    torch.testing.assert_close(*found)


def test_several_directions_at_once() -> None:
    x = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    directions = torch.randn(5, 2, 2, dtype=torch.double)
    (found,) = torch.autograd.grad(times(x), x, directions, is_grads_batched=True)
    torch.testing.assert_close(found, A.t() @ directions)


def test_nothing_is_recorded_where_no_gradient_is_wanted() -> None:
    x = torch.randn(3, 2, dtype=torch.double)
    assert not times(x).requires_grad
    with torch.no_grad():
        assert not times(x.requires_grad_()).requires_grad


def test_the_leaf_of_a_transpose_is_found_by_its_node() -> None:
    weight = torch.randn(2, 3, requires_grad=True)
    assert leaf_turned_by(weight.t().grad_fn) is weight
    assert all(leaf_turned_by(node) is None for node in (None, (2 * weight).grad_fn, weight.t().t().grad_fn))
