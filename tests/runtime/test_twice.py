"""runtime/twice.py: backward passes that are differentiated themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.runtime.buffers import Buffers
from plait.runtime.project import Projector


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def test_an_input_computed_from_another_is_not_counted_twice() -> None:
    x, mixed = drawn(7, 3), drawn(7, 4)
    found = []
    for product in (torch.mm, Projector(Buffers())):
        out = product(x, torch.tanh(x.t() @ mixed))
        first = torch.autograd.grad(out.square().sum(), (x, mixed), create_graph=True)
        second = torch.autograd.grad(sum(part.sin().sum() for part in first), (x, mixed))
        found.append((*(part.detach() for part in first), *second))
    torch.testing.assert_close(found[1], found[0])


def test_each_factor_is_kept_for_the_other_only() -> None:
    x, w, bias = drawn(7, 3), drawn(3, 4), drawn(4)
    out = Projector(Buffers())(x.detach(), w, bias)
    with torch.no_grad():
        w.add_(1.0)
        bias.add_(1.0)
    assert torch.allclose(torch.autograd.grad(out.sum(), w)[0], x.detach().sum(0)[:, None].expand(3, 4))
    out = Projector(Buffers())(x, w, bias)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        torch.autograd.grad(out.sum(), x)
