"""runtime/tall.py: the product and its derivatives are torch's, for every choice of what wants a gradient."""

from __future__ import annotations

import itertools

import pytest
import torch

from plait.runtime import tall
from plait.runtime.tall import linear


@pytest.fixture(autouse=True)
def every_product_is_tall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tall, "TALL", 0)


@pytest.mark.parametrize(("inner", "width"), [(5, 3), (3, 5), (1, 1), (33, 8), (0, 2)])
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("wants", itertools.product([False, True], repeat=4), ids=str)
def test_values_and_gradients(rows: int, inner: int, width: int, wants: tuple[bool, ...]) -> None:
    shapes = ((rows, inner), (width, inner), (width,), (rows, width))
    x, weight, bias, addend = (
        torch.randn(shape, dtype=torch.float64, requires_grad=wanted)
        for shape, wanted in zip(shapes, wants, strict=True)
    )
    for inputs in ((x, weight), (x, weight, bias), (x, weight, None, addend), (x, weight, bias, addend)):
        found, expected = linear(*inputs), x @ weight.t()
        for more in inputs[2:]:
            expected = expected if more is None else expected + more
        torch.testing.assert_close(found, expected)
        by = [value for value in inputs if value is not None and value.requires_grad]
        if by:
            ours = torch.autograd.grad(found.square().sum(), by)
            theirs = torch.autograd.grad(expected.square().sum(), by)
            torch.testing.assert_close(ours, theirs)


def test_second_derivatives() -> None:
    shapes = ((6, 3), (4, 3), (4,), (6, 4))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(linear, inputs)


def test_any_stride_and_a_gradient_of_one_number() -> None:
    x, weight = torch.randn(8, 10)[:, ::2], torch.randn(5, 4).t().requires_grad_()
    found = linear(x, weight)
    torch.testing.assert_close(found, x @ weight.t())
    found.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 5))


def test_other_types_are_torchs() -> None:
    x, weight = torch.randn(8, 4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)
    assert linear(x, weight).dtype is torch.bfloat16
